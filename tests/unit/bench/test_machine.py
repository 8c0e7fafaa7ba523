import pytest

from baton.bench.machine import scheduling_note


@pytest.mark.parametrize(("setting", "is_told"), [("1\n", True), ("0\n", False)])
def test_autogroups_are_told_with_what_to_do(tmp_path, setting, is_told):
    path = tmp_path / "sched_autogroup_enabled"
    path.write_text(setting)
    note = scheduling_note(path)
    assert (note is not None) == is_told
    assert note is None or "sysctl -w kernel.sched_autogroup_enabled=0" in note


def test_a_kernel_without_autogroups_is_no_matter(tmp_path):
    assert scheduling_note(tmp_path / "nothing") is None
