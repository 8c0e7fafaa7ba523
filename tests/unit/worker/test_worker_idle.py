from types import SimpleNamespace

import pytest

from baton.config import Config
from baton.core.ids import WorkerId
from baton.core.messages import Role
from worker.process import WorkerProcess


@pytest.mark.parametrize("is_idle", [False, True])
def test_what_waits_for_an_idle_worker_follows_the_core(is_idle):
    process = WorkerProcess(WorkerId("w.1"), Role.PREFILL, Config())
    process._core = SimpleNamespace(is_idle=is_idle)
    (process._idle.clear if is_idle else process._idle.set)()
    process._note_idle()
    assert process._idle.is_set() is is_idle
