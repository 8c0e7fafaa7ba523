"""Sessions that give way, as the kernel has them."""

import subprocess
import sys

import pytest

from baton.wire.sessions import AUTOGROUP, CORE_WEIGHT_MAX, WEIGHTS, niceness_of

SAY = """
import os
from pathlib import Path
from baton.wire.sessions import begin_session, give_way
before = give_way()
print(before, begin_session(), begin_session(), os.getsid(0) == os.getpid(), give_way())
print(Path("/proc/self/autogroup").read_text().split()[-1], len(os.sched_getaffinity(0)))
"""

needs_autogroups = pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel has no autogroups")


@pytest.mark.parametrize("core_count", range(1, 65))
def test_a_session_is_as_light_on_each_core_as_it_must_be_and_no_lighter(core_count):
    niceness = niceness_of(core_count)
    assert WEIGHTS[niceness] / core_count <= CORE_WEIGHT_MAX
    assert niceness == 0 or WEIGHTS[niceness - 1] / core_count > CORE_WEIGHT_MAX


@needs_autogroups
@pytest.mark.parametrize("group", [None, 0], ids=["of-the-parents-group", "leads-a-group"])
def test_a_process_leaves_its_parents_session_and_is_lighter_than_that(group):
    before = AUTOGROUP.read_text()
    ran = subprocess.run(
        [sys.executable, "-c", SAY], capture_output=True, text=True, process_group=group, check=True
    )
    answers, standing = ran.stdout.splitlines()
    assert answers == "False True True True True"
    niceness, core_count = map(int, standing.split())
    assert niceness == niceness_of(core_count)
    assert AUTOGROUP.read_text() == before
