import resource

from loadgen import open_files


def limits_after(monkeypatch, soft, hard, count):
    """Return what the limits are set to; None: they stay."""
    made = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: made.append(limits))
    open_files.allow_connections(count)
    return made[0] if made else None


def test_the_limit_is_raised_as_far_as_needed_and_allowed(monkeypatch):
    needed = 2000 + open_files.OTHER_FILES
    assert limits_after(monkeypatch, 1024, 1_000_000, 2000) == (needed, 1_000_000)
    assert limits_after(monkeypatch, 1024, resource.RLIM_INFINITY, 2000) == (needed, resource.RLIM_INFINITY)
    assert limits_after(monkeypatch, 1024, 1500, 2000) == (1500, 1500)
    assert limits_after(monkeypatch, needed, 1_000_000, 2000) is None
    assert limits_after(monkeypatch, resource.RLIM_INFINITY, resource.RLIM_INFINITY, 2000) is None
