"""Output files that people name: regular files are replaced, others are written to."""

import errno
import os
import resource
import subprocess
import sys
import threading

import pytest

from baton.core.errors import CannotWrite, SetupError
from baton.files.outputs import check_apart, check_writable, in_turn, write_whole


def mode_of(path):
    return path.stat().st_mode & 0o777


def test_a_file_is_replaced_whole_and_keeps_its_mode(tmp_path):
    path = tmp_path / "x"
    write_whole(path, (b"one",), mode=0o600)
    assert mode_of(path) == 0o600
    path.chmod(0o640)
    before = path.stat().st_ino
    with path.open("rb") as reader:
        write_whole(path, (b"two", b"2"), mode=0o600)
        assert reader.read() == b"one"
    assert (path.read_bytes(), mode_of(path)) == (b"two2", 0o640)
    assert path.stat().st_ino != before
    assert os.listdir(tmp_path) == ["x"]


def test_what_fails_half_way_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def chunks():
        yield b"new"
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CannotWrite, match="x: No space left on device"):
        write_whole(path, chunks())
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_and_its_target_is_written(tmp_path, exists):
    target, link = tmp_path / "target", tmp_path / "link"
    if exists:
        target.write_bytes(b"old")
    link.symlink_to("target")
    check_writable(link)
    write_whole(link, (b"new",))
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


def test_a_pipe_stays_a_pipe_and_its_reader_gets_all(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    check_writable(pipe)
    write_whole(pipe, (b"a" * 100_000, b"b"))
    reader.join(10)
    assert got == [b"a" * 100_000 + b"b"]
    assert pipe.is_fifo()
    assert os.listdir(tmp_path) == ["pipe"]


def test_a_reader_that_left_is_told(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    def chunks():
        os.close(reader)
        yield b"x"

    with pytest.raises(CannotWrite, match="nobody reads it"):
        write_whole(pipe, chunks())


def test_where_standard_output_goes_is_written_to_and_not_replaced(tmp_path):
    """The shell opened the file, and text that was printed there before stays."""
    out = tmp_path / "out"
    for name in ("/dev/stdout", "-", str(out)):
        code = (
            f"from baton.files.outputs import write_whole; print('table'); write_whole({name!r}, (b'json',))"
        )
        with out.open("wb") as file:
            subprocess.run([sys.executable, "-c", code], stdout=file, check=True, timeout=60)
        assert out.read_bytes() == b"table\njson"


def test_dash_is_standard_output(capfdbinary):
    write_whole("-", (b"x\n",))
    assert capfdbinary.readouterr().out == b"x\n"


def test_a_folder_that_is_missing_is_told_through_a_link_too(tmp_path):
    (tmp_path / "link").symlink_to("no/x")
    with pytest.raises(SetupError, match="there is no folder"):
        check_writable(tmp_path / "link")


def test_no_two_outputs_have_one_place(tmp_path):
    x, y, link = tmp_path / "x", tmp_path / "y", tmp_path / "link"
    link.symlink_to("x")
    check_apart({"--json": "-", "--html": x, "--records": y, "--plot": None})
    check_apart({"--json": "/dev/null", "--html": "/dev/null"})
    for first, second in (
        ("-", "/dev/stdout"),
        (x, str(x)),
        (x, link),
        ("-", "-"),
        (x, tmp_path / "." / "x"),
    ):
        with pytest.raises(SetupError, match="--json and --html both write"):
            check_apart({"--json": first, "--html": second})


def test_one_output_that_is_lost_does_not_cost_the_others():
    done = []

    def lose():
        raise CannotWrite("a")

    def leave():
        raise SystemExit(1)

    with pytest.raises(CannotWrite, match="a; a"):
        in_turn((lose, lambda: done.append(1), leave, lose))
    with pytest.raises(SystemExit):
        in_turn((leave, lambda: done.append(2)))
    assert done == [1, 2]
    assert (CannotWrite.exit_status, SetupError.exit_status) == (1, 2)


FULL = 1000


def run_baton(arguments, stdout, cwd):
    """Run with files of at most `FULL` bytes; writing beyond fails, as on a full disk."""
    signal_first = (
        "import signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        f"sys.argv = ['baton', *{arguments!r}]; from baton.__main__ import main; main()"
    )
    return subprocess.run(
        [sys.executable, "-c", signal_first],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (FULL, FULL)),
    )


def test_standard_output_that_is_full_is_one_line(tmp_path):
    with (tmp_path / "out").open("wb") as full:
        full.write(b"x" * FULL)
        full.flush()
        done = run_baton(["config"], full, tmp_path)
    assert done.stderr == "baton: cannot write standard output: File too large\n"
    assert done.returncode == 1


def test_standard_output_that_nobody_reads_is_no_error(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    done = run_baton(["config"], writer, tmp_path)
    os.close(writer)
    assert done.stderr == ""
