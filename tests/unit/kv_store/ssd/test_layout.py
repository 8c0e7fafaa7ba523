import pytest

from kv_store.ssd.layout import (
    FACTS_BYTES_MAX,
    PAGE_BYTES,
    Label,
    Title,
    decode_label,
    decode_title,
    encode_label,
    encode_title,
)
from tests.unit.kv_store.ssd.block_files import facts_of

FILE_ID = bytes(range(16))
LABEL = Label(7, 123, 524_288, 2**64 - 1, facts_of(3))


def test_a_label_says_what_was_written_and_only_for_its_file_and_slot():
    page = encode_label(LABEL, FILE_ID)
    assert len(page) == PAGE_BYTES
    assert decode_label(page, file_id=FILE_ID, slot=7) == LABEL
    assert decode_label(page, file_id=FILE_ID, slot=8) is None
    assert decode_label(page, file_id=bytes(16), slot=7) is None
    assert decode_label(page[:-1], file_id=FILE_ID, slot=7) is None


def test_no_byte_of_label_or_title_can_change_unnoticed():
    label, title = encode_label(LABEL, FILE_ID), encode_title(Title(FILE_ID, 524_288, 524_288))
    assert decode_title(title) == Title(FILE_ID, 524_288, 524_288)
    for at in range(PAGE_BYTES):
        for page, decode in (
            (label, lambda page: decode_label(page, file_id=FILE_ID, slot=7)),
            (title, decode_title),
        ):
            assert decode(page[:at] + bytes([page[at] ^ 1]) + page[at + 1 :]) is None


def test_facts_fill_a_page_and_no_more():
    room = FACTS_BYTES_MAX - len(encode_label(LABEL, FILE_ID).rstrip(b"\0"))
    page = encode_label(Label(7, 1, 1, 1, facts_of(3, tenant="t" * room)), FILE_ID)
    assert decode_label(page, file_id=FILE_ID, slot=7).facts.tenant == "t" * room
    with pytest.raises(ValueError, match="at most"):
        encode_label(Label(7, 1, 1, 1, facts_of(3, tenant="t" * FACTS_BYTES_MAX)), FILE_ID)
