"""Settings of this machine that spoil measurements and latency. Nothing is said where there is no `/proc`."""

from pathlib import Path

AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")


def scheduling_note(setting: Path = AUTOGROUP) -> str | None:
    """Return one line on what to change, or None.

    With autogroups every session of processes is a scheduling group of its own. On Linux 6.18 groups beside
    one that computes without pause were seen not to run for up to 4.6 seconds, the kernel's own network
    threads among them, which delays every message between processes of the machine
    (docs/benchmarks/router.md). So workers have sessions that weigh little (`baton.wire.sessions`), and other
    programs do not.
    """
    try:
        is_on = setting.read_text().strip() == "1"
    except OSError:
        return None
    if not is_on:
        return None
    return (
        "kernel.sched_autogroup_enabled is 1: workers leave most of a core to any program that computes "
        "there, and beside one some kernels keep messages waiting for seconds; to share cores evenly, at low "
        "latency: sysctl -w kernel.sched_autogroup_enabled=0"
    )
