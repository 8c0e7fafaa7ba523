"""Output files that users name. Regular files are replaced in one step, everything else is written to in
place.

A report that overwrites an earlier one is written to a temporary file beside it, so that readers see either
version whole. Symbolic links are followed first. A pipe, a device or a socket is opened and written, because
replacing it would take it away from its reader. `-`, and the file that is this process's standard output, are
written at their current position.
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
    """True for every name of standard output."""
    return to is not None and str(to) in _STDOUT_NAMES


def check_writable(*places: Path | str | None) -> None:
    """Check that the outputs can be written, before a long run starts. None, empty names and standard output
    are skipped. Raises SetupError."""
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
        try:  # os.access is not reliable for root or for /proc, so the check opens a file
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise SetupError(f"cannot write {path}: the folder {folder}: {error.strerror}") from None


def check_apart(places: Mapping[str, Path | str | None]) -> None:
    """Check that no two options name the same place. None and empty names are ignored. Raises SetupError."""
    taken: dict[str, str] = {}
    for option, to in places.items():
        if to is None or not str(to) or _swallows(to):
            continue
        place = STDOUT if is_stdout(to) else os.path.realpath(to)
        if place in taken:
            raise SetupError(f"{taken[place]} and {option} both write {to}: give each a place of its own")
        taken[place] = option


def _swallows(to: Path | str) -> bool:
    """/dev/null and similar devices may be named by any number of outputs."""
    try:
        return stat.S_ISCHR(os.stat(to).st_mode)
    except OSError:
        return False


def write_whole(to: Path | str, chunks: Iterable[bytes], *, mode: int | None = None) -> None:
    """Write a whole file through `opened`. Raises CannotWrite."""
    with opened(to, mode=mode) as file:
        file.writelines(chunks)


@contextmanager
def opened(to: Path | str, *, mode: int | None = None, keeps_mode: bool = True) -> Generator[IO[bytes]]:
    """Open an output for writing. A regular file is complete when the block ends, and unchanged if it raises.

    `mode` is the mode of a new file; None follows the umask. A file that is replaced keeps its own mode if
    `keeps_mode` is set. Raises CannotWrite, also for any OSError inside the block.
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
            raise  # the reader has closed the pipe because it has seen enough, which is no error
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
    """Make a new file beside the target. Nobody may read it before its mode is set."""
    beside = target.with_name(f".{target.name[:_NAME_CHARS_MAX]}.{secrets.token_hex(4)}")
    handle = os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666 if mode is None else 0o600)
    if mode is not None:
        os.fchmod(handle, mode)
    return handle, beside


def _is_replaced(path: Path) -> bool:
    """True if the target is a regular file or does not exist yet, so that it can be replaced."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode) and _own_handle(path) is None
    except OSError:
        return True


def _own_handle(path: Path) -> int | None:
    """The handle of this process that refers to the target, such as /dev/stdout or the file behind it. Text
    that was printed there before must stay."""
    for handle in (1, 2):
        with suppress(OSError):
            if os.path.samestat(os.stat(path), os.fstat(handle)):
                return handle
    return None


def in_turn(steps: Sequence[Callable[[], None]]) -> None:
    """Run every step even if another one fails, so that one failed output does not cost the others.

    Raises CannotWrite that names every failed output.
    """
    lost: list[str] = []
    left: SystemExit | None = None
    for step in steps:
        try:
            step()
        except CannotWrite as error:
            lost.append(str(error))
        except SystemExit as error:  # rich raises SystemExit when nobody reads standard output any more
            left = error
    if lost:
        raise CannotWrite("; ".join(lost))
    if left is not None:
        raise left
