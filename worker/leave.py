"""Before a pod ends, its worker takes nothing new, and what it holds finishes or goes on elsewhere.

`python -m worker.leave 127.0.0.1:7100 --timeout-s 30` returns when the worker holds nothing, does not answer
any more, or the time is up. It ends with status 0 in any case: the pod ends, whatever it says.
"""

import argparse
import asyncio
import logging
from collections.abc import Mapping

from baton.config import Config
from baton.wire.client import drain_worker, worker_status
from baton.wire.link import LinkBroken
from baton.wire.transport import secure

log = logging.getLogger(__name__)

LOOK_S = 0.25
"""The time between two looks."""

HELD = ("running_count", "waiting_count", "lease_count", "receiver_count", "reads_in_flight")
"""Accounts that are 0 once nobody needs the worker."""


def still_held(accounts: Mapping[str, float]) -> dict[str, float]:
    """The accounts in HELD that are not 0. Pure."""
    return {name: accounts[name] for name in HELD if accounts.get(name)}


async def leave(address: str, *, timeout_s: float) -> str:
    """Ask the worker to leave, and return in words how it went."""
    held: dict[str, float] = {}
    try:
        async with asyncio.timeout(timeout_s):
            await drain_worker(address)
            while held := still_held((await worker_status(address)).accounts):  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        return f"not empty after {timeout_s:g} s: {held}"
    except LinkBroken as error:
        return f"no worker: {error}"
    return "empty"


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m worker.leave", description=__doc__)
    parser.add_argument("address", help="HOST:PORT of the worker's gRPC.")
    parser.add_argument("--timeout-s", type=float, default=30.0, help="At most this long.")
    return parser


def main() -> None:
    asked = arguments().parse_args()
    config = Config()  # certificate and token come from the environment
    secure(config.tls, config.access)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    log.info("worker %s: %s", asked.address, asyncio.run(leave(asked.address, timeout_s=asked.timeout_s)))


if __name__ == "__main__":
    main()
