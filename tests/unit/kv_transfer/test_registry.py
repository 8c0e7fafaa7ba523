import importlib
from pathlib import Path
from typing import get_args

import kv_transfer.backends
from baton.config import TransferConfig
from baton.core.transfer_backends import BACKENDS, DEFAULT_BACKENDS, BackendName
from control_plane.dashboard import overview
from kv_transfer.registry import BUILDERS, BackendSite, build_backends
from tests.contract.transfer_peer import Pool


def site(**more):
    return BackendSite("w.1", Pool(1).memory, "127.0.0.1", **more)


def test_every_name_has_its_facts_and_its_builder():
    names = get_args(BackendName)
    assert set(names) == BACKENDS.keys() == BUILDERS.keys()
    assert len(names) == len(BACKENDS)


def test_every_backend_of_the_folder_is_in_the_table():
    """A module with a `…Backend` that workers cannot choose would be dead."""
    found = set()
    for path in Path(kv_transfer.backends.__file__).parent.glob("*.py"):
        module = importlib.import_module(f"kv_transfer.backends.{path.stem}")
        kinds = (kind for name, kind in vars(module).items() if name.endswith("Backend"))
        found |= {kind.name for kind in kinds if getattr(kind, "name", None)}
    assert found == BACKENDS.keys()


def test_backends_are_built_in_the_order_asked_for_and_say_their_own_names():
    built = build_backends(("tcp", "nixl", "cma"), site())
    assert [backend.name for backend in built] == ["tcp", "nixl", "cma"]


def test_a_process_in_no_group_is_built_no_backend_that_needs_one():
    assert build_backends(("nccl",), site()) == []


def test_config_takes_and_describes_what_the_table_has():
    assert TransferConfig().backends == DEFAULT_BACKENDS
    assert TransferConfig(backends=tuple(BACKENDS)).backends == tuple(BACKENDS)
    text = TransferConfig.model_fields["backends"].description
    assert all(f"{name}: {facts.summary}" in text for name, facts in BACKENDS.items())


def test_the_dashboard_draws_each_in_a_colour_of_its_own():
    assert overview.BACKEND_COLORS.keys() == BACKENDS.keys()
    assert len(set(overview.BACKEND_COLORS.values())) == len(BACKENDS)
