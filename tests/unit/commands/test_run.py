"""An error in a command line is one plain line."""

import pytest
import typer

from baton.core.errors import SetupError
from commands.app import app
from commands.run import run_app


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--nope"], "no such option: --nope; see `baton --help`"),
        (["serve", "--port", "x"], "invalid value for '--port': Input should be a valid integer"),
        (["drain"], "missing argument 'WORKER|NODE'; see `baton drain --help`"),
        (["certs", "nope"], "no such command 'nope'; see `baton certs --help`"),
        (["replay", "x", "--rate", "y"], "invalid value for '--rate'"),
        (
            ["scale", "decode", "-1"],
            "-1 is read as an option: arguments here cannot be negative; see `baton scale",
        ),
        (["replay"], "missing argument 'trace'; see `baton replay --help`"),
    ],
)
def test_wrong_options_are_one_line(args, said):
    with pytest.raises(SetupError) as caught:
        run_app(app, name="baton", args=args)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def status_of(*args, error=None):
    one = typer.Typer()

    @one.command()
    def act(wish: str = "") -> None:
        if error is not None:
            raise error

    with pytest.raises(SystemExit) as caught:
        run_app(one, name="one", args=args)
    return caught.value.code


def test_the_status_is_the_commands():
    assert status_of() == 0
    assert status_of(error=typer.Exit(3)) == 3
    assert status_of(error=KeyboardInterrupt()) == 130
    assert status_of(error=typer.Abort()) == 130


def test_help_is_help(capsys):
    assert status_of("--help") == 0
    assert "--wish" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        run_app(app, name="baton", args=[])
    assert caught.value.code == 2
    assert "replay" in "".join(capsys.readouterr())
