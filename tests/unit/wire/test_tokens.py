import logging
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from baton.core.errors import SetupError
from baton.core.tokens import (
    Scope,
    TokenBook,
    TokenRecord,
    bearer_in,
    digest_of,
    read_book,
    write_book,
)
from baton.files.token_places import LiveTokens, new_token, token_at
from commands.app import app


def book(**scopes):
    return TokenBook(
        TokenRecord(name, scope, digest_of(f"secret of {name}")) for name, scope in scopes.items()
    )


def test_a_token_is_its_holders_for_what_its_scope_covers():
    tokens = book(ada=Scope.OPERATE, bob=Scope.VIEW)
    assert tokens.holder_of("secret of ada", scope=Scope.OPERATE) == "ada"
    assert tokens.holder_of("secret of ada", scope=Scope.VIEW) == "ada"
    assert tokens.holder_of("secret of bob", scope=Scope.VIEW) == "bob"
    assert tokens.holder_of("secret of bob", scope=Scope.OPERATE) is None


@given(st.text(max_size=600))
def test_whatever_else_is_shown_is_nobodys(text):
    assert book(ada=Scope.OPERATE).holder_of(text, scope=Scope.VIEW) is None


def test_a_digest_is_no_token():
    assert book(ada=Scope.OPERATE).holder_of(digest_of("secret of ada"), scope=Scope.VIEW) is None


def test_new_tokens_differ_and_a_book_survives_its_file():
    assert len({new_token() for _ in range(100)}) == 100
    tokens = book(ada=Scope.OPERATE, bob=Scope.VIEW)
    assert read_book(write_book(tokens), "x").records == tokens.records


@pytest.mark.parametrize("line", ["ada", "ada operate", "ada rule " + "0" * 64, "ada operate bt-notadigest"])
def test_a_line_that_makes_no_sense_is_named_and_not_shown(line):
    with pytest.raises(SetupError, match="line 2") as caught:
        read_book(f"# tokens\n{line}", "tokens.txt")
    assert "bt-notadigest" not in str(caught.value)


def test_the_token_of_a_header():
    assert bearer_in({"authorization": "Bearer abc"}) == "abc"
    assert bearer_in({"authorization": b"bearer abc"}) == "abc"
    assert bearer_in({"authorization": "Basic abc"}) == ""
    assert bearer_in({}) == ""


def test_a_revoked_token_is_refused_without_a_restart(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(write_book(book(ada=Scope.OPERATE, bob=Scope.OPERATE)))
    tokens = LiveTokens(str(path))
    assert tokens.holder_of("secret of ada", scope=Scope.OPERATE) == "ada"
    path.write_text(write_book(book(bob=Scope.OPERATE)))
    os.utime(path, ns=(1, 1))
    assert tokens.holder_of("secret of ada", scope=Scope.OPERATE) is None
    assert tokens.holder_of("secret of bob", scope=Scope.OPERATE) == "bob"


def test_a_file_that_becomes_nonsense_leaves_the_tokens_before(tmp_path, caplog):
    path = tmp_path / "tokens"
    path.write_text(write_book(book(ada=Scope.OPERATE)))
    tokens = LiveTokens(str(path))
    path.write_text("bt-pasted-by-mistake")
    with caplog.at_level(logging.WARNING):
        assert tokens.holder_of("secret of ada", scope=Scope.OPERATE) == "ada"
        assert tokens.holder_of("secret of ada", scope=Scope.OPERATE) == "ada"
    assert len(caplog.records) == 1
    assert "bt-pasted-by-mistake" not in caplog.text


def test_tokens_come_from_the_environment_too(monkeypatch):
    monkeypatch.setenv("OPERATORS", write_book(book(ada=Scope.OPERATE)))
    monkeypatch.setenv("MINE", "secret\n")
    assert LiveTokens("env:OPERATORS").holder_of("secret of ada", scope=Scope.OPERATE) == "ada"
    assert token_at("env:MINE") == "secret"
    with pytest.raises(SetupError, match="NOBODY"):
        LiveTokens("env:NOBODY")
    monkeypatch.setenv("MINE", "two words")
    with pytest.raises(SetupError, match="holds no token") as caught:
        token_at("env:MINE")
    assert "two words" not in str(caught.value)


def test_the_commands_make_list_and_revoke(tmp_path):
    def run(*args):
        result = CliRunner().invoke(app, ["tokens", *args, "--tokens", str(path)])
        assert result.exit_code == 0, result.output
        return result.output

    path = tmp_path / "tokens.txt"
    token = run("create", "ada", "--scope", "operate").strip()
    run("create", "bob", "--scope", "view")
    assert token not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert LiveTokens(str(path)).holder_of(token, scope=Scope.OPERATE) == "ada"
    assert "bob" in run("list")
    run("revoke", "ada")
    assert LiveTokens(str(path)).holder_of(token, scope=Scope.VIEW) is None
