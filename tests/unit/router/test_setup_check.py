"""Settings that a router would refuse are refused before anything is started."""

import pytest

from baton.config import Config
from baton.core.errors import SetupError
from router.setup_check import check_router_setup


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"router": {"keys": "/nowhere/keys.yaml"}}, "keys: cannot read /nowhere/keys.yaml"),
        ({"router": {"keys": "rediss://h:x/0"}}, "rediss"),
        ({"router": {"budgets_url": "redis+sentinel://h"}}, "redis"),
        (
            {"model": {"path": "m", "tool_parser": "hermse"}},
            "model.tool_parser: 'hermse' is not one of hermes",
        ),
        ({"model": {"path": "m", "reasoning_parser": "r2"}}, "model.reasoning_parser: 'r2' is not one of"),
        (
            {"router": {"tls_cert": "/nowhere/c.pem", "tls_key": "/nowhere/k.pem"}},
            "router.tls_cert /nowhere/c.pem",
        ),
        (
            {"models": {"a": {"model": {"path": "m"}}, "b": {"model": {"path": "m", "tool_parser": "no"}}}},
            r"models\.b.*tool_parser: 'no'",
        ),
    ],
)
def test_settings_that_a_router_would_refuse(config, error):
    with pytest.raises(SetupError, match=error):
        check_router_setup(Config.model_validate(config))


def test_keys_of_a_wrong_form(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text("keys: [{tenant: nobody}]\n")
    with pytest.raises(SetupError, match="keys"):
        check_router_setup(Config(router={"keys": str(path)}))


def test_what_is_right_is_let_through(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text("tenants: {}\nkeys: []\n")
    model = {"path": "m", "tool_parser": "openai", "reasoning_parser": "none"}
    check_router_setup(Config(model=model, router={"keys": str(path)}))
    check_router_setup(Config(router={"keys": "redis://h:1/0", "budgets_url": "redis://h:1/0"}))
