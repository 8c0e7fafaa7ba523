"""Files that people name: replaced in one step where they are files, written to where they are anything else.

A report that is written over an earlier one is seen whole or not at all, by way of a file beside it. Symbolic
links are followed first. A pipe, a device or a socket is opened and written: replacing it would take it away
from whoever reads it. `-`, and whatever this process has as standard output, is written to where it stands.
"""

import errno
import os
import secrets
import stat
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from baton.core.errors import CannotWrite, SetupError

STDOUT = "-"
_STDOUT_NAMES = (STDOUT, "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")
_NAME_CHARS_MAX = 100


def is_stdout(to: Path | str | None) -> bool:
    """By any of its names."""
    return to is not None and str(to) in _STDOUT_NAMES


def check_writable(*places: Path | str | None) -> None:
    """Before a long run, not after it. None, empty and standard output are left out. Raises SetupError."""
    for path in (Path(to) for to in places if to is not None and str(to) and not is_stdout(to)):
        if path.is_dir():
            raise SetupError(f"cannot write {path}: it is a folder; name a file")
        if not _is_replaced(path):
            if not os.access(path, os.W_OK):
                raise SetupError(f"cannot write {path}: {os.strerror(errno.EACCES)}")
            continue
        folder = Path(os.path.realpath(path)).parent
        if not folder.is_dir():
            raise SetupError(f"cannot write {path}: there is no folder {folder}; make it first")
        try:  # what os.access says of root, or of /proc, is not what happens
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise SetupError(f"cannot write {path}: the folder {folder}: {error.strerror}") from None


def check_apart(places: Mapping[str, Path | str | None]) -> None:
    """No two options may name one place; None and empty name none. Raises SetupError."""
    taken: dict[str, str] = {}
    for option, to in places.items():
        if to is None or not str(to) or _swallows(to):
            continue
        place = STDOUT if is_stdout(to) else os.path.realpath(to)
        if place in taken:
            raise SetupError(f"{taken[place]} and {option} both write {to}: give each a place of its own")
        taken[place] = option


def _swallows(to: Path | str) -> bool:
    """/dev/null and its like take any number of outputs."""
    try:
        return stat.S_ISCHR(os.stat(to).st_mode)
    except OSError:
        return False


def write_whole(to: Path | str, chunks: Iterable[bytes], *, mode: int | None = None) -> None:
    """As `opened`. Raises CannotWrite."""
    with opened(to, mode=mode) as file:
        file.writelines(chunks)


@contextmanager
def opened(to: Path | str, *, mode: int | None = None, keeps_mode: bool = True) -> Generator[IO[bytes]]:
    """To be written; a file is there, whole, when the block ends, and as before if it raises.

    `mode`: of a new file; None: as the umask says. One that is replaced keeps its own, with `keeps_mode`.
    Raises CannotWrite, from the block too for any OSError there.
    """
    try:
        if is_stdout(to):
            sys.stdout.flush()
            yield sys.stdout.buffer
            sys.stdout.flush()
            return
        path = Path(to)
        if (own := _own_handle(path)) is not None:
            sys.stdout.flush()
            with os.fdopen(os.dup(own), "wb") as file:
                yield file
        elif _is_replaced(path):
            with _replacing(path, mode, keeps_mode=keeps_mode) as file:
                yield file
        else:
            with path.open("wb") as file:
                yield file
    except BrokenPipeError:
        if is_stdout(to):
            raise  # whoever read it has seen enough, which is no error
        raise CannotWrite(f"cannot write {to}: nobody reads it any more") from None
    except OSError as error:
        raise CannotWrite(f"cannot write {to}: {error.strerror or error}") from None


@contextmanager
def _replacing(path: Path, mode: int | None, *, keeps_mode: bool) -> Generator[IO[bytes]]:
    target = Path(os.path.realpath(path))
    with suppress(OSError):
        mode = stat.S_IMODE(target.stat().st_mode) if keeps_mode else mode
    handle, beside = _made(target, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(beside)
        raise


def _made(target: Path, mode: int | None) -> tuple[int, Path]:
    """A new file beside the target. Nobody may read it before it has its mode."""
    beside = target.with_name(f".{target.name[:_NAME_CHARS_MAX]}.{secrets.token_hex(4)}")
    handle = os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666 if mode is None else 0o600)
    if mode is not None:
        os.fchmod(handle, mode)
    return handle, beside


def _is_replaced(path: Path) -> bool:
    """A file, or nothing as yet."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode) and _own_handle(path) is None
    except OSError:
        return True


def _own_handle(path: Path) -> int | None:
    """/dev/stdout, say, and the file behind it: what was printed there before must stay."""
    for handle in (1, 2):
        with suppress(OSError):
            if os.path.samestat(os.stat(path), os.fstat(handle)):
                return handle
    return None


def in_turn(steps: Sequence[Callable[[], None]]) -> None:
    """Each of them, whatever becomes of the others: one output that is lost does not cost the rest.

    Raises CannotWrite, of all that were lost.
    """
    lost: list[str] = []
    left: SystemExit | None = None
    for step in steps:
        try:
            step()
        except CannotWrite as error:
            lost.append(str(error))
        except SystemExit as error:  # a console's word for a standard output that nobody reads any more
            left = error
    if lost:
        raise CannotWrite("; ".join(lost))
    if left is not None:
        raise left
