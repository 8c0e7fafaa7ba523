"""A session of its own for a process that computes without end, so that others beside it need not wait.

With `kernel.sched_autogroup_enabled`, Linux schedules the processes of a session as one group. A core is
shared out between groups first, each with the weight of its autogroup's niceness, and then within them.
Groups that wake now and then were seen to wait for a second beside one that never sleeps, and the kernel's
own network threads with them, but for milliseconds at most beside one that is light; figures are in decision
0061. No privilege is needed to be lighter. See "The autogroup feature" of sched(7). Where a process is in a
control group, as in a container, and where autogroups are off, nothing of this has an effect.
"""

import os
from pathlib import Path

WEIGHTS = (1024, 820, 655, 526, 423, 335, 272)
"""Weights that the kernel gives to niceness 0, 1, 2 and so on (`sched_prio_to_weight`)."""

CORE_WEIGHT_MAX = 272
"""Largest weight on each core beside which others were found to run soon. A group divides its weight among
the cores where it computes."""

AUTOGROUP = Path("/proc/self/autogroup")


def begin_session() -> bool:
    """Give this process, and those that it starts, a session of their own. Returns whether they have one.

    The process must not be started by a person's shell: what is typed at the terminal no longer reaches it.
    """
    try:
        if os.getpgid(0) == os.getpid():  # Who leads a group of processes cannot begin a session.
            os.setpgid(0, os.getpgid(os.getppid()))
        os.setsid()
    except (PermissionError, ProcessLookupError):  # The parent is in another session, or has ended.
        return os.getsid(0) == os.getpid()
    return True


def give_way() -> bool:
    """Make this process's session light on each of the cores that it may run on, so that whatever talks
    there runs soon. Returns whether the system took it. A session that others began is left as it is."""
    if os.getsid(0) != os.getpid():
        return False
    try:
        AUTOGROUP.write_text(f"{niceness_of(len(os.sched_getaffinity(0)))}")
    except OSError:  # A kernel without autogroups.
        return False
    return True


def niceness_of(core_count: int) -> int:
    """Return the least niceness with which a group that computes on so many cores is light enough on each."""
    return next(nice for nice, weight in enumerate(WEIGHTS) if weight <= CORE_WEIGHT_MAX * core_count)
