"""The chat page as a client sees it; `tests/integration/test_chat_page.py` opens it in a browser."""

import re

import pytest

from router.http.chat_page import FILES
from router.tenants.key_files import write_file
from router.tenants.keys import KeyBook, KeyRecord, Tenant, digest_of, new_key
from tests.unit.router.http_fakes import FakeWorker, cluster, make_folder

MARKUP_SINKS = (
    "innerHTML",
    "outerHTML",
    "insertAdjacentHTML",
    "document.write",
    "DOMParser",
    "eval(",
    "Function(",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model") / "tiny")


async def test_the_page_and_its_parts_come_from_here_alone(folder):
    async with cluster(folder, FakeWorker()) as c, c.http() as http:
        for path, (_, kind) in FILES.items():
            answer = await http.get(path)
            assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
            assert "http://" not in answer.text
            assert "https://" not in answer.text
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            again = await http.get(path, headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
            head = await http.head(path)
            assert (head.status_code, head.content) == (200, b"")
            assert (await http.post(path)).status_code == 405


async def test_the_page_names_its_parts_and_nothing_of_it_becomes_markup(folder):
    async with cluster(folder, FakeWorker()) as c, c.http() as http:
        page, code = (await http.get("/")).text, (await http.get("/chat.js")).text
    assert set(re.findall(r'(?:src|href)="(?!data:)([^"]*)"', page)) == {"chat.css", "chat.js"}
    assert not re.search(r"<script>|<style>|\son\w+=|\sstyle=", page)
    assert not [sink for sink in MARKUP_SINKS if sink in code]


async def test_it_can_be_switched_off(folder):
    async with cluster(folder, FakeWorker(), chat_page=False) as c, c.http() as http:
        for path in FILES:
            answer = await http.get(path)
            assert answer.status_code == 404
            assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_the_page_is_open_and_the_api_stays_shut(folder, tmp_path):
    key = new_key()
    write_file(tmp_path / "keys.json", KeyBook({"a": Tenant()}, (KeyRecord(digest_of(key), "a"),)))
    keys = str(tmp_path / "keys.json")
    async with cluster(folder, FakeWorker(), keys=keys) as c, c.http() as http:
        assert (await http.get("/")).status_code == 200
        assert (await http.get("/v1/models")).status_code == 401
        assert (await http.get("//v1/models")).status_code == 404
        known = await http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
        assert known.status_code == 200
