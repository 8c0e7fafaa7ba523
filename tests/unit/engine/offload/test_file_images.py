"""Images of layers in a file: what is read back, and faults of the disk."""

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.core.errors import SetupError
from engine.offload import file_images
from engine.offload.file_images import FileImages, ReadAt, read_at
from engine.offload.images import OffloadFailed
from engine.offload.streaming import StreamedLayers, StreamedPlace

DEADLINE_S = 30.0


class Weights:
    """A `MovableWeights` of one byte value."""

    def __init__(self, value: int, pages: int) -> None:
        self.byte_count = pages * 4096
        self._own = torch.full((self.byte_count,), value, dtype=torch.uint8)
        self.now = self._own

    def copy_to(self, image: Tensor) -> None:
        image.copy_(self._own)

    def place(self, image: Tensor) -> None:
        self.now = image


class Streamed:
    def __init__(self, folder: Path, *, deadline_s: float = DEADLINE_S, read: ReadAt = read_at) -> None:
        self.images = FileImages(folder, deadline_s=deadline_s, read=read)
        self.layers = StreamedLayers(self.images)
        self.weights = [Weights(value, pages) for value, pages in ((1, 3), (2, 1), (3, 7), (4, 2))]
        self.places: list[StreamedPlace] = [self.layers.add(one) for one in self.weights]

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self) -> None:
        for value, (weights, place) in enumerate(zip(self.weights, self.places, strict=True), start=1):
            place.enter()
            assert len(weights.now) == weights.byte_count
            assert bool((weights.now == value).all())
            place.leave()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(file_images, "PIECE_BYTES", 2 * 4096)
    before = set(os.listdir("/proc/self/fd"))
    yield
    for thread in threading.enumerate():
        if thread.name == "offload":
            thread.join(DEADLINE_S)
    assert set(os.listdir("/proc/self/fd")) <= before, "a file stays open"


def test_every_step_finds_the_layers_weights(tmp_path: Path) -> None:
    streamed = Streamed(tmp_path)
    cost = streamed.layers.start()
    for _ in range(5):
        streamed.step()
    streamed.layers.close()
    assert (cost.layer_count, cost.byte_count) == (4, 13 * 4096)
    assert streamed.layers.bytes_read >= 5 * 13 * 4096
    assert list(tmp_path.iterdir()) == [], "the file has a name"


def test_layers_that_a_step_leaves_out_disturb_nothing(tmp_path: Path) -> None:
    streamed = Streamed(tmp_path)
    streamed.layers.start()
    streamed.step()
    streamed.places[2].enter()  # and the step fails
    streamed.step()
    streamed.layers.close()


def test_a_file_that_was_shortened_is_an_error(tmp_path: Path) -> None:
    streamed = Streamed(tmp_path)
    streamed.layers.start()
    os.ftruncate(streamed.images._file, 3 * 4096)
    with pytest.raises(OffloadFailed, match=r"streamed layer .*the file ends at byte \d+ of 53248"):
        streamed.steps(3)
    streamed.layers.close()


def test_a_read_error_is_told_and_stays(tmp_path: Path) -> None:
    reads = 0

    def breaks(file: int, memory: memoryview, offset: int) -> int:
        nonlocal reads
        reads += 1
        if reads > 20:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read_at(file, memory, offset)

    streamed = Streamed(tmp_path, read=breaks)
    streamed.layers.start()
    with pytest.raises(OffloadFailed, match="cannot be read: Input/output error"):
        streamed.steps(20)
    with pytest.raises(OffloadFailed, match="cannot be read"):
        streamed.step()
    streamed.layers.close()


def test_a_read_that_does_not_end_fails_at_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`close` leaves the thread behind, which closes the file if the read ever ends."""
    monkeypatch.setattr(file_images, "CLOSE_S", 0.01)
    released, hangs = threading.Event(), threading.Event()

    def waits(file: int, memory: memoryview, offset: int) -> int:
        if hangs.is_set():
            released.wait(DEADLINE_S)
        return read_at(file, memory, offset)

    streamed = Streamed(tmp_path, deadline_s=0.2, read=waits)
    streamed.layers.start()
    hangs.set()
    began_s = time.monotonic()
    with pytest.raises(OffloadFailed, match=r"reading 0 MiB has not ended in 0.2 s"):
        streamed.steps(3)
    streamed.layers.close()
    assert time.monotonic() - began_s < DEADLINE_S
    released.set()


def test_short_reads_are_continued(tmp_path: Path) -> None:
    streamed = Streamed(tmp_path, read=lambda file, memory, offset: read_at(file, memory[:4096], offset))
    streamed.layers.start()
    streamed.step()
    streamed.layers.close()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match=r"cannot keep streamed layers in .*model.offload_folder"):
        FileImages(tmp_path / "file", deadline_s=1.0)
    with pytest.raises(SetupError, match=r"No such file or directory \(set model.offload_folder\)"):
        FileImages(tmp_path / "mistyped" / "layers", deadline_s=1.0)
    assert not (tmp_path / "mistyped").exists()


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = FileImages(tmp_path, deadline_s=1.0)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(SetupError, match=r"cannot write 4 MiB.*No space left"):
        images.keep(Weights(1, 1024))
    images.close()


def test_a_file_system_without_unnamed_files_has_none_that_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def without_tmpfile(path: object, flags: int, *rest: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return opened(path, flags, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", without_tmpfile)
    streamed = Streamed(tmp_path)
    assert list(tmp_path.iterdir()) == []
    streamed.layers.start()
    streamed.step()
    streamed.layers.close()
