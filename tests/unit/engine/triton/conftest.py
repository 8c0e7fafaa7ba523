"""Triton decides when it is imported whether its kernels are interpreted: the tests that need that run in a
process of their own, see `test_interpreted.py`."""

import os

import pytest

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted/*"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "compile" in config.option.markexpr:
        return
    items[:] = [item for item in items if item.get_closest_marker("compile") is None]
