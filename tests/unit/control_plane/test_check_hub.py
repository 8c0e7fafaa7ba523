"""A model of the hub that cannot be had is said before anything is started."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from baton.config import Config
from baton.core.errors import SetupError
from control_plane.launch import check_hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """It has the models whose name begins with "here"."""

    asked: list[str]

    def do_GET(self):
        self.asked.append(self.path)
        is_here = self.path.startswith("/api/models/org/here")
        body = json.dumps({"id": "org/here", "sha": COMMIT} if is_here else {"error": "no such model"})
        self.send_response(200 if is_here else 404)
        if not is_here:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format, *args):
        pass


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return tmp_path


@pytest.fixture
def hub(cache, monkeypatch):
    handler = type("Asked", (Hub,), {"asked": []})
    server = HTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    yield handler
    server.shutdown()
    server.server_close()


def config_of(path, **sections):
    return Config.model_validate({"model": {"path": path}, **sections})


def test_a_model_that_the_hub_has_passes_and_another_does_not(hub):
    check_hub(config_of("org/here"), with_router=True)
    with pytest.raises(SetupError, match="org/gone is no folder here and cannot be downloaded") as caught:
        check_hub(config_of("org/gone"), with_router=True)
    assert "\n" not in str(caught.value)
    asked = [path for path in hub.asked if path.startswith("/api/models/")]
    assert len(asked) == 2


def test_a_hub_that_cannot_be_reached_is_said(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(SetupError, match="the Hugging Face hub cannot be reached to download it"):
        check_hub(config_of("org/here"), with_router=False)


def test_only_who_downloads_here_asks(hub, cache, tmp_path_factory):
    elsewhere = {"cluster": {"ray_address": "h:1"}}
    check_hub(config_of("org/gone", **elsewhere), with_router=False)
    check_hub(config_of(str(tmp_path_factory.mktemp("folder"))), with_router=True)
    folder = cache / "models--org--gone"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "snapshots" / COMMIT).mkdir(parents=True)
    check_hub(config_of("org/gone"), with_router=True)
    assert hub.asked == []


def test_each_of_several_models_is_named(hub):
    models = {"a": {"model": {"path": "org/here"}}, "b": {"model": {"path": "org/gone"}}}
    with pytest.raises(SetupError, match=r"b.*org/gone"):
        check_hub(Config.model_validate({"models": models}), with_router=True)
