"""Long files come first, so that none of them runs alone at the end when two run at a time. The others follow
by name; any order passes."""

from pathlib import Path

HERE = Path(__file__).parent
LONG = (
    "test_loss",
    "test_chaos",
    "test_faults",
    "test_dashboard",
    "test_autoscale",
    "test_tokens",
    "test_requests",
    "test_operate",
    "test_serve",
    "test_replay",
    "test_nodes",
    "test_resume_matrix",
    "test_models",
    "test_ray_dies",
    "test_prometheus",
)


def pytest_collection_modifyitems(items):
    rank = {HERE / f"{name}.py": number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.path, len(LONG)))
