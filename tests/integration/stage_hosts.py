"""Workers whose stages are on hosts of their own hand over and take over, and hosts are cut off and lost.

`python -m tests.integration.stage_hosts FOLDER MODEL` prints what it saw as a line of JSON. Every host has
room for one stage.
"""

import sys
from pathlib import Path
from typing import Any

import httpx

from tests.integration.ray_hosts import RayHosts, Streams, accounts, complete, drill_main

PLACES = ("b", "c", "d", "e")
PROMPTS = [[3 + (7 * n + k) % 90 for k in range(20 + 60 * n)] for n in range(3)]
STREAMED = 400
"""Tokens of a stream that a fault meets."""
ONE_WORKER = ("follower", "leader")
HANDED_OVER = {"prefill": ("1xpp2", "1"), "decode": ("1", "1xpp2")}
"""The shapes of the two roles, by the role that has stages on two hosts."""
FAULTS = ("cut follower", "lose follower", "lose leader")
"""A lost host stays away, so that each finds one less."""


async def hand_over(hosts: RayHosts, staged: str) -> dict[str, Any]:
    prefill, decode = HANDED_OVER[staged]
    await hosts.start_cluster("--prefill", prefill, "--decode", decode)
    report: dict[str, Any] = {"placed": await hosts.await_placed([*ONE_WORKER, "leader"])}
    async with httpx.AsyncClient(timeout=240) as client:
        report["tokens"] = [await complete(client, hosts.url, prompt, 24) for prompt in PROMPTS]
        report["accounts"] = await accounts(client, hosts.url)
    report["left"] = await hosts.stop_cluster()
    return report


async def meet(hosts: RayHosts, client: httpx.AsyncClient, fault: str) -> dict[str, Any]:
    """A fault while streams run."""
    how, kind = fault.split()
    before = await hosts.await_placed(ONE_WORKER)
    streams = Streams(client, hosts.url, PROMPTS, STREAMED)
    await streams.begin()
    victim = next(name for name, kinds in before.items() if kind in kinds)
    under_way = streams.under_way
    await (hosts.lose if how == "lose" else hosts.cut)(victim)
    streamed = await streams.tokens()
    if how == "cut":
        await hosts.links.mend_all()
    after = await hosts.await_placed(ONE_WORKER, without=victim if how == "lose" else "")
    return {"placed": before, "placed_again": after, "streamed": streamed, "under_way": under_way}


async def drill(hosts: RayHosts, report: dict[str, Any]) -> None:
    for staged in HANDED_OVER:
        report[staged] = await hand_over(hosts, staged)
        hosts.note(f"handed over, {staged}")
    await hosts.start_cluster("--aggregated", "1xpp2")
    async with httpx.AsyncClient(timeout=240) as client:
        report["tokens"] = [await complete(client, hosts.url, prompt, 24) for prompt in PROMPTS]
        for fault in FAULTS:
            report[fault] = await meet(hosts, client, fault)
            hosts.note(fault)
    report["left"] = await hosts.stop_cluster()


def make(folder: Path, model: str) -> RayHosts:
    return RayHosts(folder, model, PLACES)


if __name__ == "__main__":
    sys.exit(drill_main("tests.integration.stage_hosts", drill, make))
