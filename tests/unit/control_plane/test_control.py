"""Parts of the control plane's process that need no Ray: its record, its supervision, its nodes."""

import asyncio
import sys

import pytest

from baton.config import ClusterConfig, Config
from baton.core.errors import SetupError
from baton.core.messages import Role
from baton.core.operate import NodeState, Pool, Version
from control_plane.control import check_reach, nodes_of, room_notes
from control_plane.control_child import ControlChild
from control_plane.orders import ControlRecord
from control_plane.reconcile_events import RestartPolicy
from control_plane.record_file import RecordFile

POLICY = RestartPolicy(0.01, 0.01, 60.0, 10.0, 30.0)
RECORD = ControlRecord((Pool("m", {Role.DECODE: 2}, Version("2", ("engine.threads=1",))),), ("node",))


def test_what_is_written_is_read_and_gone_after_an_orderly_end(tmp_path):
    file = RecordFile(tmp_path / "record.json")
    assert file.read() is None
    file.write(RECORD)
    assert RecordFile(tmp_path / "record.json").read() == RECORD
    assert [p.name for p in tmp_path.iterdir()] == ["record.json"]
    file.remove()
    file.remove()
    assert file.read() is None


def test_a_record_that_is_damaged_or_cannot_be_written_is_told_and_does_no_harm(tmp_path, caplog):
    (tmp_path / "record.json").write_text("{")
    assert RecordFile(tmp_path / "record.json").read() is None
    RecordFile(tmp_path / "no" / "such" / "folder").write(RECORD)
    assert len(caplog.records) == 2
    RecordFile(None).write(RECORD)
    assert RecordFile(None).read() is None


def child(script):
    return ControlChild([sys.executable, "-c", script], environment={}, policy=POLICY, silence_s=60.0)


async def running(control):
    return asyncio.create_task(control.run())


async def test_what_the_operator_must_change_is_told_also_after_it_could_be_asked():
    script = (
        "print('ready h:1 127.0.0.1:1', flush=True); print('setup error no weights', flush=True); input()"
    )
    control = child(script)
    task = await running(control)
    error = await asyncio.wait_for(control.failed, 20)
    assert isinstance(error, SetupError)
    assert str(error) == "no weights"
    await control.stop(5)
    await task


async def test_where_the_dashboard_is_is_heard_whenever_it_is_said():
    script = "print('ready h:1 127.0.0.1:1', flush=True); print('dashboard http://d', flush=True); input()"
    control = child(script)
    task = await running(control)
    await asyncio.wait_for(control.has_dashboard.wait(), 20)
    assert control.dashboard == "http://d"
    await control.stop(5)
    await task


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("print('setup error port taken'); raise SystemExit(2)", "port taken"),
        ("raise SystemExit(1)", "above"),
    ],
)
async def test_one_that_never_serves_ends_the_start(script, words):
    control = child(script)
    task = await running(control)
    assert words in str(await asyncio.wait_for(control.failed, 20))
    await control.stop(5)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_it_says_when_all_workers_are_there():
    control = child("print('ready h:1 127.0.0.1:1\\nsettled', flush=True); import signal; signal.pause()")
    task = await running(control)
    await asyncio.wait_for(control.settled.wait(), 20)
    assert control.ready.result() == "h:1 127.0.0.1:1"
    await control.stop(5)
    await task


async def test_every_life_is_told_where_ray_is():
    control = child("print('ready h:1 127.0.0.1:1', flush=True); print('dashboard', input(), flush=True)")
    task = await running(control)
    await asyncio.wait_for(asyncio.shield(control.ready), 20)
    assert not control.has_dashboard.is_set()
    control.tell_ray("10.0.0.1:6379")
    for _ in range(2):
        await asyncio.wait_for(control.has_dashboard.wait(), 20)
        assert control.dashboard == "10.0.0.1:6379"
        control.dashboard = ""
        control.has_dashboard.clear()
    await control.stop(5)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_nodes_are_told_with_those_that_live_first():
    listed = [
        {"NodeID": "b", "Alive": False, "NodeManagerHostname": "hb", "Resources": {}},
        {"NodeID": "c", "Alive": True, "NodeManagerHostname": "hc", "Resources": {"CPU": 4.0, "GPU": 1.0}},
    ]
    assert nodes_of(listed) == [NodeState("c", "hc", True, False, 4.0, 1.0), NodeState("b", "hb", False)]


def test_a_version_is_the_configuration_with_some_settings_changed():
    from commands.settings import overlay

    config = Config(engine={"threads": 3}, model={"path": "m", "adapters": ("a=b",)})
    changed = overlay(config, ["engine.block_tokens=16", "model.adapters=c=d"])
    assert (changed.engine.threads, changed.engine.block_tokens) == (3, 16)
    assert changed.model.adapters == ("c=d",)
    assert overlay(config, []) == config
    with pytest.raises(SetupError, match=r"engine\.walrus"):
        overlay(config, ["engine.walrus=1"])


def node_at(address, *, is_alive=True):
    return {"NodeID": address, "NodeManagerAddress": address, "Alive": is_alive}


HOME, OTHER, GONE = node_at("10.0.0.1"), node_at("10.0.0.2"), node_at("10.0.0.3", is_alive=False)


def test_addresses_of_one_machine_are_refused_where_ray_has_several():
    with pytest.raises(SetupError) as caught:
        check_reach(ClusterConfig(), [HOME, OTHER, GONE], here="10.0.0.1")
    assert "other hosts (10.0.0.2)" in str(caught.value)
    assert "cluster.control_host=127.0.0.1 and cluster.worker_host=127.0.0.1" in str(caught.value)
    half = ClusterConfig(control_host="10.0.0.1", worker_host="localhost")
    with pytest.raises(SetupError, match=r"cluster\.worker_host=localhost works on one machine only"):
        check_reach(half, [HOME, OTHER], here="10.0.0.1")


@pytest.mark.parametrize(
    ("settings", "nodes", "here"),
    [
        ({"control_host": "10.0.0.1", "worker_host": "0.0.0.0"}, [HOME, OTHER], "10.0.0.1"),
        ({}, [HOME, GONE], "10.0.0.1"),
        ({}, [node_at("127.0.0.1"), node_at("127.0.0.1")], "127.0.0.1"),
        ({"node_labels": {"aggregated": {"rack": "a"}}}, [HOME, OTHER], "10.0.0.1"),
    ],
)
def test_where_all_workers_can_be_reached_nothing_is_refused(settings, nodes, here):
    check_reach(ClusterConfig(**settings), nodes, here=here)


def test_a_cluster_without_room_for_a_shape_is_told_with_the_numbers():
    config = Config.model_validate(
        {
            "model": {"path": "a/m", "device": "cuda"},
            "cluster": {"prefill_workers": "2xtp4", "decode_workers": "tp2"},
        }
    )
    nodes = [NodeState("a", "h1", gpus=2.0), NodeState("b", "h2", gpus=1.0)]
    (note,) = room_notes(config, [*nodes, NodeState("c", "h3", is_alive=False, gpus=8.0)])
    assert note.startswith("prefill workers of m wait for a node: one of shape tp4 needs 4 GPUs of one node")
    assert note.endswith("the nodes of Ray have 2, 1")
    assert room_notes(config, [*nodes, NodeState("c", "h3", gpus=8.0)]) == []
    cpu = Config.model_validate(
        {"model": {"path": "a/m"}, "engine": {"threads": 2}, "cluster": {"decode_workers": "tp2"}}
    )
    (note,) = room_notes(cpu, [NodeState("a", "h1", cpus=3.0)])
    assert "needs 4 CPUs of one node, and the nodes of Ray have 3" in note


def test_stages_find_room_on_several_nodes():
    config = Config.model_validate(
        {
            "model": {"path": "a/m"},
            "engine": {"threads": 1},
            "cluster": {"prefill_workers": 0, "decode_workers": "tp2pp2"},
        }
    )
    one = NodeState("a", "h1", cpus=3.0)
    (note,) = room_notes(config, [one, NodeState("b", "h2", cpus=1.0)])
    assert "needs 2 CPUs of one node for each of 2 stages, and the nodes of Ray have 3, 1" in note
    assert room_notes(config, [one, NodeState("b", "h2", cpus=2.0)]) == []
    assert room_notes(config, [NodeState("a", "h1", cpus=4.0)]) == []
