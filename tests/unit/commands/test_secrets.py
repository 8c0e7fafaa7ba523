"""Secrets of the configuration are never shown."""

import logging

import pytest
from typer.testing import CliRunner

from baton.config import AccessConfig, TlsConfig, sections
from baton.config.base import secret_fields
from baton.core.errors import SetupError
from commands.app import app
from commands.settings import load_config

PASSWORD = "hunter2-of-the-test"
SETS = [
    f"store.directory=redis://me:{PASSWORD}@10.0.0.1:6379/0",
    f"router.keys=redis://:{PASSWORD}@10.0.0.1:6379/0",
    f"router.budgets_url=rediss://:{PASSWORD}@10.0.0.1:6379/0",
    f"router.state_url=redis://:{PASSWORD}@10.0.0.1:6379/1",
    f"router.tenant_salt={PASSWORD}",
]


def secrets():
    return {f"{section}.{name}" for section, kind in sections().items() for name in secret_fields(kind)}


def test_every_secret_is_tried_here():
    assert secrets() == {text.partition("=")[0] for text in SETS}


def test_baton_config_shows_none():
    options = [part for text in SETS for part in ("--set", text)]
    shown = CliRunner(env={"COLUMNS": "250"}).invoke(app, ["config", *options])
    assert shown.exit_code == 0
    assert PASSWORD not in shown.output
    assert "***" in shown.output


def test_a_configuration_in_a_log_or_an_error_shows_none(caplog):
    config = load_config(SETS)
    with caplog.at_level(logging.INFO):
        logging.getLogger("test").info("%s %r %s", config, config.router, [config.store])
    assert "10.0.0.1" not in caplog.text
    assert PASSWORD not in caplog.text + repr(ValueError(config)) + f"{config}"
    assert config.router.tenant_salt == PASSWORD


def test_a_wrong_setting_beside_a_secret_does_not_show_it():
    with pytest.raises(SetupError) as caught:
        load_config([*SETS, "router.port=-1", "store.host_bytes=x", "router.nonsense=1"])
    assert PASSWORD not in str(caught.value)


def test_keys_and_tokens_are_named_by_place():
    """A value that is a path needs no mask. The test notices if a new setting holds a secret itself."""
    for section in (TlsConfig, AccessConfig):
        for name, info in section.model_fields.items():
            said = (info.description or "").lower()
            assert "file" in said or "name" in said, name


def test_half_of_mutual_tls_is_refused_in_words():
    with pytest.raises(SetupError, match=r"tls: mutual TLS needs ca, cert and key: tls\.cert, tls\.key"):
        load_config(["tls.ca=ca.pem", "tls.cert=", "tls.key="])
