"""Long files come first, so that none of them runs alone at the end when two run at a time. The others follow
by name; any order passes."""

from pathlib import Path

HERE = Path(__file__).parent
LONG = (
    "test_loss",
    "test_chaos",
    "test_shapes",
    "test_faults",
    "test_autoscale",
    "test_stage_hosts",
    "test_tokens",
    "test_dashboard",
    "test_serve",
    "test_operate",
    "test_far_parts",
    "test_requests",
    "test_chat_page",
    "test_expert_ranks",
    "test_nodes",
    "test_models",
    "test_expert_hosts",
    "test_worker_shapes",
    "test_replay",
    "test_ray_dies",
    "test_prometheus",
    "test_compilers",
    "test_resume_matrix",
    "test_api_clients",
)


def pytest_collection_modifyitems(items):
    rank = {HERE / f"{name}.py": number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.path, len(LONG)))
