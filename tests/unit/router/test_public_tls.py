"""The public API over HTTPS."""

import asyncio
import logging
import os
import ssl

import httpx
import pytest

from baton.config.router import RouterConfig
from baton.core.errors import SetupError
from router.http.tls import PublicTls
from tests.certificates import make_folder
from tests.unit.router.http_fakes import BOUND_S, MODEL
from tests.unit.router.http_fakes import make_folder as make_model
from tests.unit.router.test_http_wire import BODY, WireWorker, routing, served

pytest.importorskip("cryptography")


def issue(folder, name="public", days=1.0):
    from datetime import UTC, datetime

    from baton.wire.parties import Party
    from commands.certificates import Authority

    Authority(folder).issue(
        name, [Party.ROUTER], domain="x", hosts=["127.0.0.1"], days=days, now=datetime.now(UTC)
    )


@pytest.fixture
def folder(tmp_path):
    made = make_folder(tmp_path / "c")
    issue(made)
    return made


def files(folder, name="public"):
    return {"tls_cert": str(folder / f"{name}.pem"), "tls_key": str(folder / f"{name}.key")}


def serial(url, folder):
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    with (
        httpx.Client(verify=context, timeout=BOUND_S) as client,
        client.stream("GET", f"{url}/health/live") as answer,
    ):
        line = answer.extensions["network_stream"].get_extra_info("ssl_object")
        return line.getpeercert()["serialNumber"]


async def test_https_and_a_new_certificate_without_a_restart(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("router.http.tls.LOOK_S", 0.01)
    model = make_model(tmp_path / MODEL)
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    async with (
        served(WireWorker(reply=[5, 6, 7])) as addresses,
        routing(model, settings=files(folder), workers=addresses) as plain,
        httpx.AsyncClient(verify=context, timeout=BOUND_S, base_url=plain.base_url) as http,
    ):
        assert plain.base_url.scheme == "https"
        answer = await http.post("/v1/chat/completions", json=BODY)
        assert answer.status_code == 200
        async with http.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as stream:
            lines = [line async for line in stream.aiter_lines()]
        assert "data: [DONE]" in lines
        before = await asyncio.to_thread(serial, str(plain.base_url), folder)
        issue(folder)
        async with asyncio.timeout(BOUND_S):
            while await asyncio.to_thread(serial, str(plain.base_url), folder) == before:
                pass  # The answer takes some time.
        with pytest.raises(httpx.HTTPError):
            await plain.get("/health/live")  # This client does not know the authority.


def test_files_that_are_of_no_use_are_named(folder, tmp_path):
    with pytest.raises(SetupError, match=r"router\.tls_cert"):
        PublicTls(str(tmp_path / "none.pem"), str(tmp_path / "none.key"))
    with pytest.raises(SetupError, match="MISMATCH"):
        PublicTls(str(folder / "public.pem"), str(folder / "node.key"))
    with pytest.raises(ValueError, match=r"router\.tls_key is missing"):
        RouterConfig(tls_cert="x")
    assert PublicTls.of(RouterConfig()) is None


def test_half_a_rotation_leaves_the_certificate_before(folder, caplog):
    tls = PublicTls(**{k.removeprefix("tls_"): v for k, v in files(folder).items()})
    (folder / "public.key").write_bytes((folder / "node.key").read_bytes())
    os.utime(folder / "public.key", ns=(1, 1))
    with caplog.at_level(logging.WARNING):
        tls.look()
        tls.look()
    assert len(caplog.records) == 1
    assert "as before" in caplog.text
