"""The generated files are what the generator writes, and numbers of fields stay what they were."""

import typing
from enum import StrEnum, auto
from typing import Annotated

import msgspec
import pytest

from baton.core.ids import BlockHash
from baton.core.wire_types import Columns, OneFor
from baton.wire.generate.__main__ import COMMITTED, generated
from baton.wire.generate.declared import sections
from baton.wire.generate.fields import plan
from baton.wire.generate.kinds import DeclarationError
from baton.wire.generate.numbers import numbered, read_blocks
from baton.wire.generate.proto_file import proto_file
from baton.wire.proto import baton_pb2 as pb
from baton.wire.services import SERVICES, Empty, Rpc, RpcService


class Colour(StrEnum):
    RED = auto()
    GREEN = auto()


class Sample(msgspec.Struct, frozen=True):
    """A message of this test."""

    name: str
    """Its name."""
    colour: Colour | None = None


@pytest.mark.parametrize("name", ["baton.proto", "mapping.py"])
def test_the_committed_file_is_what_the_generator_writes(name):
    written = generated(COMMITTED.read_text())[name]
    assert (COMMITTED.parent / name).read_text() == written, "run 'make proto'"


def test_the_stubs_are_of_the_committed_file():
    blocks = read_blocks(COMMITTED.read_text())
    messages = pb.DESCRIPTOR.message_types_by_name
    for name, message in messages.items():
        assert {f.name: f.number for f in message.fields} == blocks[name].numbers
    assert set(blocks) == set(messages) | set(pb.DESCRIPTOR.enum_types_by_name)


def test_every_service_has_a_stub():
    served = {name: set(s.methods_by_name) for name, s in pb.DESCRIPTOR.services_by_name.items()}
    assert served == {service.name: {rpc.name for rpc in service.calls} for service in SERVICES}


def proto_of(struct, committed=""):
    service = RpcService("Sampling", "A service of this test.", (Rpc("Take", struct, Empty),))
    return proto_file(sections((service,)), committed)


def test_documentation_goes_along():
    proto = proto_of(Sample)
    assert "// A message of this test.\nmessage Sample {\n  // Its name.\n  string name = 1;" in proto


def changed(**fields):
    """The fields of `Sample` in another release: type and name of each, as in the .proto file."""
    protos = [proto for name, hint in fields.items() for proto in plan("Sample", name, hint).protos]
    return [(proto.text.rpartition(" ")[0], proto.name) for proto in protos]


def test_a_new_field_gets_the_next_number_wherever_it_stands():
    before = read_blocks(proto_of(Sample))["Sample"]
    now = numbered("Sample", changed(first=int, name=str, colour=Colour), before)
    assert now.numbers == {"first": 3, "name": 1, "colour": 2}
    assert now.reserved == {}


def test_the_number_of_a_field_that_is_gone_is_never_used_again():
    before = read_blocks(proto_of(Sample))["Sample"]
    without = numbered("Sample", changed(name=str), before)
    assert without.reserved == {2: "colour"}
    text = "message Sample {\n  reserved 2;  // was colour\n  string name = 1;\n}\n"
    again = numbered("Sample", changed(name=str, other=int), read_blocks(text)["Sample"])
    assert again.numbers == {"name": 1, "other": 3}
    assert again.reserved == {2: "colour"}


def test_a_field_that_changes_its_type_is_refused():
    before = read_blocks(proto_of(Sample))["Sample"]
    with pytest.raises(DeclarationError, match=r"Sample\.name was string and is uint32 now"):
        numbered("Sample", changed(name=int), before)


@pytest.mark.parametrize(
    "hint",
    [
        complex,
        tuple[tuple[int, float], ...],
        Annotated[tuple[int, ...], Columns("a", "b")],
        tuple[int | None, ...],
        dict[bytes, int],
        Annotated[tuple[int, ...] | None, OneFor("name")],
        tuple[tuple[BlockHash, ...], ...],
        typing.Any,
    ],
    ids=str,
)
def test_what_protobuf_cannot_say_names_its_field(hint):
    with pytest.raises(DeclarationError, match=r"^Sample\.odd: "):
        plan("Sample", "odd", hint)
