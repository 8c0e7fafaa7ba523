"""The output of `baton store`, and its errors if there is nothing to show."""

import json
import re

import pytest
from typer.testing import CliRunner

from baton.core.errors import SetupError
from baton.core.ids import NodeId
from baton.core.store import Tier
from baton.core.store_admin import NodeStatus
from commands.app import app
from commands.show_store import show, size
from commands.store_calls import tier_named

ACCOUNTS = {
    "worker_count": 2.0,
    "host.block_count": 7.0,
    "host.bytes": 3 * 2.0**20,
    "host.limit_bytes": 2.0**30,
    "host.hit_blocks": 40.0,
    "loaded_blocks.host": 30.0,
    "host.dropped.evicted": 5.0,
    "miss_blocks": 9.0,
    "miss_bytes": 9 * 4096.0,
    "refused.known": 4.0,
    "ssd_read.block_count": 6.0,
    "ssd_read.bytes": 6 * 2.0**20,
    "ssd_read.second_per_byte": 1 / (512 * 2.0**20),
    "ssd_read.latency_s": 0.0025,
    "ssd_full": 3.0,
}
STATUS = NodeStatus(
    node_id=NodeId("n.1"),
    host="h",
    pid=7,
    address="h:1",
    socket="/run/s",
    metrics_address="h:2",
    uptime_s=12.0,
    policy="serving",
    is_draining=True,
    is_drained=False,
    accounts=ACCOUNTS,
    tenants=(("acme", 2**20, 0),),
    peers=((NodeId("n.2"), "other:1"),),
    notes=("the disk is full",),
)


def test_a_person_finds_what_it_holds_and_how_fast_it_is(capsys):
    show(STATUS, as_json=False)
    text = re.sub(r" +", " ", capsys.readouterr().out)
    for wanted in (
        "store node n.1 on h, pid 7, draining, up 12 s",
        "http://h:2/metrics",
        "host 7 3.0 MiB 1.0 GiB 0 40 0 B 30",
        "SSD read 6 6.0 MiB 512.0 MiB/s 2.50 ms",
        "not found anywhere: 9 blocks, 36.0 KiB",
        "dropped from host memory: 5 evicted",
        "offered but refused: 4 known",
        "SSD: 3 full",
        "tenant acme: 1.0 MiB of host memory",
        "peer n.2 at other:1",
        "note: the disk is full",
    ):
        assert wanted in text, wanted


def test_a_program_finds_all_numbers(capsys):
    show(STATUS, as_json=True)
    assert json.loads(capsys.readouterr().out)["accounts"] == ACCOUNTS


def test_sizes_have_the_largest_unit_that_fits():
    assert [size(n) for n in (0, 1023, 1024, 5 * 2**30, 3 * 2**40)] == [
        *("0 B", "1023 B", "1.0 KiB", "5.0 GiB", "3.0 TiB"),
    ]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("inspect",), "no store node is named"),
        (("inspect", "--socket", "/nowhere/s"), "/nowhere/s: No such file"),
        (("drain", "--node", "127.0.0.1:9"), "cannot reach the store node: 127.0.0.1:9"),
        (("inspect", "--socket", "a", "--node", "b:1"), "not with both"),
        (("clear", "--tier", "peer", "--yes", "--socket", "a"), "choose host or ssd"),
        (("run", "--host-bytes", "1000000"), "name one with --socket"),
        (("run", "--socket", "/nowhere/s"), "/nowhere/s.lock"),
        (("run", "--socket", "/nowhere/s", "--host-bytes", "0"), "store.host_bytes=0"),
    ],
)
def test_what_is_wrong_is_one_line(args, told):
    result = CliRunner().invoke(app, ["store", *args])
    assert isinstance(result.exception, SetupError)
    assert told in str(result.exception)
    assert "\n" not in str(result.exception)


@pytest.mark.parametrize("command", ["run", "inspect", "drain", "clear"])
def test_help_has_an_example(command):
    result = CliRunner().invoke(app, ["store", command, "--help"])
    assert f"Example: baton store {command}" in re.sub(r"\s+", " ", result.output)


def test_tiers_by_name():
    assert (tier_named(None), tier_named("host"), tier_named("ssd")) == (None, Tier.HOST, Tier.SSD)
