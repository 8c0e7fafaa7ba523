"""JSON is counted before it is decoded, exactly and in pieces."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import ClientError
from router.text import json_bounds
from router.text.json_bounds import NODES_MAX, VALUES_MAX, JsonBudget, count_slice, field_at

TEXTS = st.text(st.sampled_from('a"\\[]{},:/\né\U0001f600'), max_size=8)
VALUES = st.recursive(
    st.none() | st.integers(-10, 10) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def nodes_of(value):
    match value:
        case list():
            return 1 + sum(map(nodes_of, value))
        case dict():
            return 1 + len(value) + sum(map(nodes_of, value.values()))
        case str():
            return 1
        case _:
            return 0


def count_all(text):
    nodes = values = at = 0
    in_string = False
    while at < len(text):
        size, in_string, at = count_slice(text, at, in_string=in_string)
        nodes, values = nodes + size.nodes, values + size.values
    assert not in_string
    return nodes, values


@given(
    value=VALUES, ascii_only=st.booleans(), indent=st.sampled_from([None, 1]), slice_bytes=st.integers(1, 9)
)
def test_every_node_is_counted_once_wherever_slices_end(value, ascii_only, indent, slice_bytes):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_bounds, "SLICE_BYTES", slice_bytes)
        assert count_all(text)[0] == nodes_of(value)


@given(numbers=st.lists(st.integers(0, 9), min_size=1))
def test_values_are_counted(numbers):
    assert count_all(json.dumps(numbers).encode()) == (1, len(numbers))


@given(fields=st.dictionaries(TEXTS, VALUES, min_size=1, max_size=4), data=st.data())
def test_the_field_at_a_position_is_found(fields, data):
    body = json.dumps(fields).encode()
    name = data.draw(st.sampled_from(sorted(fields)))
    upto = list(fields)[: list(fields).index(name) + 1]
    end = len(json.dumps({field: fields[field] for field in upto}).encode()) - 1  # without the last brace
    found = field_at(body, end)
    assert json.loads(f'"{found}"') == name


def test_a_name_that_ends_like_another_one_is_not_taken_for_it():
    body = b'{"\\"": null, "": null}'
    assert [field_at(body, body.index(b"null") + 4), field_at(body, len(body) - 1)] == ['\\"', ""]


def test_names_within_a_field_are_none_of_the_body():
    assert field_at(b'{"model": "m", "x": [[{"y": "', 29) == "x"


def test_what_is_within_the_bounds_passes():
    JsonBudget().take_body(b'{"x":[' + b",".join([b"[]"] * (NODES_MAX - 3)) + b"]}")
    JsonBudget().take_body(b'{"prompt":[' + b",".join([b"1"] * (VALUES_MAX - 2)) + b"]}")
    JsonBudget().take_body(b'{"x":"' + b'[{\\",' * NODES_MAX + b'"}')


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"model":"m","stop":[' + b",".join([b'""'] * NODES_MAX) + b"]}", "stop"),
        (b'{"model":"m","logit_bias":{' + b",".join([b'"":0'] * NODES_MAX) + b"}}", "logit_bias"),
        (b'{"model":"m","prompt":[' + b",".join([b"1"] * (VALUES_MAX + 1)) + b"]}", "prompt"),
        (b'{"model":"' + b'a\\"' * 100_000 + b'","x":' + b"[" * (NODES_MAX + 1), "x"),
    ],
    ids=["stop", "logit_bias", "prompt", "x"],
)
def test_the_field_that_is_too_large_is_named(body, field):
    with pytest.raises(ClientError, match=f"^{field} is too large: a request may have at most") as error:
        JsonBudget().take_body(body)
    assert error.value.param == field


def test_texts_of_one_request_are_counted_together():
    budget = JsonBudget()
    half = b"[" + b",".join([b"[]"] * (NODES_MAX // 2)) + b"]"
    budget.take(half, "a")
    with pytest.raises(ClientError, match=r"^b is too large"):
        budget.take(half, "b")


def test_a_body_with_errors_is_counted_too():
    with pytest.raises(ClientError):
        JsonBudget().take_body(b'{"x":[' + b"[}" * NODES_MAX)
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(b'{"x":[' + b"[}" * 4)
