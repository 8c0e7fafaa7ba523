"""When a router builds the quick encoders of its tokenizers."""

import asyncio
import logging

import pytest

from baton.core.ids import WorkerId
from baton.core.messages import Member, MembershipView, Role
from router.live import quick_tokenizers
from router.live.quick_tokenizers import QuickTokenizers
from router.text import tokenizer as tokenizer_module
from router.text.tokenizer import Tokenizer
from tests.unit.router.http_fakes import make_folder


def view(workers: int) -> MembershipView:
    members = [Member(WorkerId(f"w-{i}.1"), Role.DECODE, "127.0.0.1:1", "m", "f") for i in range(workers)]
    return MembershipView("life", workers, tuple(members))


@pytest.fixture
def late(tmp_path) -> Tokenizer:
    return Tokenizer.load(str(make_folder(tmp_path / "tiny")), is_quick_later=True)


async def test_it_waits_for_the_workers_that_the_cluster_starts_with(late, caplog, monkeypatch):
    monkeypatch.setattr(quick_tokenizers, "FIRST_ANSWER_S", 0.0)
    quick = QuickTokenizers({"tiny": late}, workers=2)
    running = asyncio.create_task(quick.run())
    quick.on_view(view(1))
    await asyncio.sleep(0)
    assert (late._quick, late.why_not_quick) == (None, "it is not built yet")
    before = late.text_ids("the same text")
    with caplog.at_level(logging.INFO, logger="router.live.quick_tokenizers"):
        quick.on_view(view(2))
        await running
    assert late._quick is not None
    assert caplog.messages == ["prompts for tiny are tokenised by fastokens"]
    assert late.text_ids("the same text") == before


async def test_it_waits_for_nobody_where_their_number_is_not_known(late):
    await QuickTokenizers({"tiny": late}, workers=0).run()
    assert late._quick is not None


async def test_workers_that_never_come_do_not_keep_it_slow(late, monkeypatch):
    monkeypatch.setattr(quick_tokenizers, "WAIT_S", 0.0)
    await QuickTokenizers({"tiny": late}, workers=2).run()
    assert late._quick is not None


async def test_a_library_that_breaks_leaves_the_router_without_it(late, monkeypatch, caplog):
    class Panic(BaseException):
        """Rust's, which are no Exceptions."""

    def breaks(*_):
        raise Panic("index out of range")

    monkeypatch.setattr(tokenizer_module, "remembered_encoder", breaks)
    with caplog.at_level(logging.INFO, logger="router.live.quick_tokenizers"):
        await QuickTokenizers({"tiny": late}, workers=0).run()
    assert caplog.messages == [
        "prompts for tiny are tokenised by the tokenizers library: no quick tokeniser, "
        "its test failed: index out of range"
    ]
    assert late.text_ids("the same text")
