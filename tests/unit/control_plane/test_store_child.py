"""This host's store node under supervision: its checks, and the configuration of the workers."""

import asyncio
import os
import stat
import sys

import pytest

from baton.config import Config, StoreConfig
from baton.core.errors import SetupError
from control_plane.runtime_folder import RuntimeFolder, is_in_use
from control_plane.store_child import LocalStore, check_store

READY = "print('ready {socket} h:1 127.0.0.1:9', flush=True); import signal; signal.pause()"


def config(**store):
    return Config(store=store, cluster={"router_silence_s": 60.0, "drain_timeout_s": 5.0})


def command(script):
    return lambda control, socket: [sys.executable, "-c", script.format(control=control, socket=socket)]


def test_memory_and_folders_that_are_not_to_be_had_are_named(tmp_path):
    with pytest.raises(SetupError, match=r"store\.host_bytes=\d+ exceeds"):
        check_store(StoreConfig(host_bytes=2**60))
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match=r"store\.ssd_dir: .*file/below"):
        check_store(StoreConfig(ssd_dir=str(tmp_path / "file" / "below")))
    check_store(StoreConfig(ssd_dir=str(tmp_path / "new")))
    assert (tmp_path / "new").is_dir()


@pytest.fixture
def folder():
    folder = RuntimeFolder()
    yield folder
    folder.remove()


def test_workers_are_told_of_another_node_or_of_none(folder):
    elsewhere = LocalStore(config(socket="/run/s"), command(READY), folder)
    assert elsewhere.start("h:1") is None
    assert elsewhere.config.store.socket == "/run/s"
    assert elsewhere.text() == "KV store at /run/s"
    without = LocalStore(config(host_bytes=0), command(READY), folder)
    assert without.start("h:1") is None
    assert without.text() == "no KV store"


async def test_a_node_of_its_own_has_a_folder_that_goes_with_the_cluster(folder):
    store = LocalStore(config(host_bytes=2**30), command(READY), folder)
    socket = store.config.store.socket
    assert os.path.dirname(socket) == str(folder.path)
    assert stat.S_IMODE(os.stat(folder.path).st_mode) == 0o700
    assert is_in_use(folder.path)
    assert len(socket) < 100
    child = store.start("h:1")
    running = asyncio.create_task(child.run())
    assert store.text() == "KV store not ready yet"
    async with asyncio.timeout(30):
        await store.until_ready()
    assert child.ready.result().split()[0] == socket
    assert store.text() == "KV store of 1.0 GiB"
    await store.stop(5.0)
    await running
    store.close()
    folder.remove()
    assert not folder.path.exists()


async def test_what_the_node_cannot_start_for_ends_the_start_of_the_cluster(folder):
    store = LocalStore(config(), command("print('setup error no memfd here'); raise SystemExit(2)"), folder)
    await asyncio.wait_for(store.start("h:1").run(), 20)
    with pytest.raises(SetupError, match=r"^no memfd here$"):
        await store.until_ready()
    store.close()


def test_a_folder_whose_cluster_was_killed_is_not_in_use(folder):
    os.close(folder._lock)
    assert not is_in_use(folder.path)


def test_what_a_killed_run_left_goes_when_the_next_one_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    killed, alive = RuntimeFolder(), RuntimeFolder()
    killed.dashboard_token.write_text("secret")
    os.close(killed._lock)
    for other in ("baton-bench-12345678", "baton-my_files", "baton-ssd"):
        (tmp_path / other).mkdir()
        (tmp_path / other / "lock").touch()
    after = RuntimeFolder()
    assert not killed.path.exists()
    assert {path.name for path in tmp_path.iterdir()} == {
        *(alive.path.name, after.path.name),
        *("baton-bench-12345678", "baton-my_files", "baton-ssd"),
    }
    for folder in (alive, after):
        folder.remove()
