import stat
from datetime import UTC, datetime, timedelta

import pytest
from typer.testing import CliRunner

from baton.core.errors import SetupError
from baton.wire.identity import read_credentials
from baton.wire.parties import Party
from commands.app import app
from tests.certificates import make_folder, tls_of

pytest.importorskip("cryptography")
NOW = datetime.now(UTC)


def run(*args, status=0):
    result = CliRunner().invoke(app, ["certs", *map(str, args)])
    if isinstance(result.exception, Exception):
        raise result.exception
    assert result.exit_code == status, result.output
    return result.output


def credentials(folder, name="node", *, now=NOW, ca=None):
    return read_credentials(tls_of(folder, name, ca=ca), now=now)


@pytest.fixture
def folder(tmp_path):
    run("init", tmp_path / "c")
    return tmp_path / "c"


def test_a_new_folder_serves_a_cluster_and_its_operators(folder):
    assert credentials(folder).parties == set(Party) - {Party.OPERATOR}
    assert credentials(folder, "operator").parties == {Party.OPERATOR}
    ends = credentials(folder).ends
    assert timedelta(days=89) < ends - NOW < timedelta(days=91)


def test_keys_are_for_their_owner_only(folder):
    run("issue", folder, "w", "--role", "worker")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert {name: mode for name, mode in modes.items() if name.endswith(".key")} == {
        "ca.key": 0o600,
        "node.key": 0o600,
        "operator.key": 0o600,
        "w.key": 0o600,
    }
    assert modes["ca.pem"] == 0o644
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_an_authority_is_never_overwritten(folder):
    before = (folder / "ca.key").read_bytes()
    with pytest.raises(SetupError, match="has an authority already"):
        run("init", folder)
    assert (folder / "ca.key").read_bytes() == before


def test_a_certificate_is_for_the_roles_it_was_issued_for(folder):
    run("issue", folder, "gpu", "--role", "worker", "--role", "store", "--host", "10.0.0.7", "--host", "gpu7")
    assert credentials(folder, "gpu").parties == {Party.WORKER, Party.STORE}
    assert "10.0.0.7" in run("list", folder)


def test_renewing_keeps_roles_and_hosts_and_changes_the_key(folder):
    run("issue", folder, "gpu", "--role", "worker", "--host", "10.0.0.7", "--days", "1")
    before, key = credentials(folder, "gpu"), (folder / "gpu.key").read_bytes()
    said = run("renew", folder, "--within-days", "30", "--days", "60")
    assert "gpu.pem" in said
    assert "node.pem" not in said  # it ends later than that
    after = credentials(folder, "gpu")
    assert after.parties == before.parties
    assert after.ends - before.ends > timedelta(days=50)
    assert (folder / "gpu.key").read_bytes() != key
    assert "10.0.0.7" in run("list", folder)


def test_what_has_ended_is_told_by_the_exit_status(folder):
    run("list", folder)
    run("issue", folder, "old", "--role", "worker", "--days", "0.01")
    path = folder / "old.pem"
    from commands.certificates import Authority

    Authority(folder).issue("old", [Party.WORKER], domain="baton.internal", days=-0.1, now=NOW)
    assert path.exists()
    assert "ended" in run("list", folder, status=1)


def test_the_authority_changes_without_a_moment_of_distrust(folder):
    old = credentials(folder)
    run("rotate-ca", folder)
    assert credentials(folder).cert == old.cert  # the former authority's is still valid
    with pytest.raises(SetupError, match="former authority"):
        run("rotate-ca", folder, "--finish")
    run("renew", folder, "--within-days", "99999")
    run("rotate-ca", folder, "--finish")
    assert credentials(folder).ca.count(b"BEGIN CERTIFICATE") == 1
    with pytest.raises(SetupError, match="nothing to finish"):
        run("rotate-ca", folder, "--finish")
    (folder / "node.pem").write_bytes(old.cert)
    (folder / "node.key").write_bytes(old.key)
    with pytest.raises(SetupError, match="not of the authority"):
        credentials(folder)


def test_what_is_wrong_with_the_files_is_said(folder, tmp_path):
    other = make_folder(tmp_path / "other")
    with pytest.raises(SetupError, match="not of the authority"):
        credentials(other, ca=folder)
    with pytest.raises(SetupError, match="expired on"):
        credentials(folder, now=NOW + timedelta(days=91))
    with pytest.raises(SetupError, match="clock"):
        credentials(folder, now=NOW - timedelta(days=1))
    with pytest.raises(SetupError, match="cannot read"):
        credentials(folder, "nobody")
    (folder / "node.key").write_bytes((folder / "operator.key").read_bytes())
    with pytest.raises(SetupError, match="is not the key of"):
        credentials(folder)
    (folder / "node.pem").write_text("nonsense")
    with pytest.raises(SetupError, match="no certificate"):
        credentials(folder)


def test_a_certificate_of_another_clusters_domain_is_not_ours(folder):
    run("issue", folder, "blue", "--domain", "blue.example")
    with pytest.raises(SetupError, match=r"tls\.domain"):
        credentials(folder, "blue")


@pytest.mark.parametrize("name", ["ca", "../x", "", "a b"])
def test_names_that_are_no_names_of_files_are_refused(folder, name):
    with pytest.raises(SetupError, match="name"):
        run("issue", folder, name, "--role", "worker")


def test_every_command_shows_an_example():
    for command in ("init", "issue", "renew", "list", "rotate-ca"):
        assert "Example: baton certs" in " ".join(run(command, "--help").split())
