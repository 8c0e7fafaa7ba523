"""The values that several messages are made of, to protobuf and back. See `baton.wire.codec`."""

from enum import StrEnum
from typing import Any, TypeVar

from baton.core.hashing import HASH_BYTES
from baton.core.ids import BlockHash
from baton.core.messages import AdapterRef
from baton.core.sampling import Grammar, GrammarKind, SamplingParams
from baton.core.steps import TokenLogprobs
from baton.wire.proto import baton_pb2 as pb


class WireError(Exception):
    """The peer sent something that no version of the protocol allows."""


# Protobuf's enums count from 1 in the order of ours; 0 is "unspecified".
E = TypeVar("E", bound=StrEnum)


def numbers(enum: type[E]) -> dict[E, int]:
    return {member: number for number, member in enumerate(enum, start=1)}


def number(known: dict[E, int], member: E) -> Any:
    # Any: the generated stubs ask for their own enum classes, at run time an int is what they take.
    return known[member]


def member(known: dict[E, int], number: int) -> E:
    for found, its_number in known.items():
        if its_number == number:
            return found
    raise WireError(f"enum value {number} is not one of {[str(e) for e in known]}")


def block_hash(raw: bytes) -> BlockHash:
    if len(raw) != HASH_BYTES:
        raise WireError(f"a block hash has {HASH_BYTES} bytes, this one {len(raw)}")
    return BlockHash(raw)


def _pairs(ids: Any, values: Any, what: str) -> tuple[tuple[int, float], ...]:
    if len(ids) != len(values):
        raise WireError(f"{what}: {len(ids)} ids and {len(values)} values")
    return tuple(zip(ids, values, strict=True))


_GRAMMAR_KIND = numbers(GrammarKind)


def _grammar_to_pb(g: Grammar | None) -> pb.Grammar | None:
    if g is None:
        return None
    kind = number(_GRAMMAR_KIND, g.kind)
    return pb.Grammar(kind=kind, text=g.text, after_token_ids=g.after_token_ids)


def _grammar_from_pb(g: pb.Grammar) -> Grammar:
    return Grammar(member(_GRAMMAR_KIND, g.kind), g.text, tuple(g.after_token_ids))


def sampling_to_pb(s: SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(
        max_tokens=s.max_tokens,
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        seed=s.seed,
        stop_token_ids=s.stop_token_ids,
        ignore_eos=s.ignore_eos,
        min_p=s.min_p,
        repetition_penalty=s.repetition_penalty,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        logit_bias_ids=[token for token, _ in s.logit_bias],
        logit_bias_values=[bias for _, bias in s.logit_bias],
        allowed_token_ids=s.allowed_token_ids,
        min_tokens=s.min_tokens,
        logprobs=s.logprobs,
        prompt_logprobs=s.prompt_logprobs,
        grammar=_grammar_to_pb(s.grammar),
    )


def sampling_from_pb(s: pb.SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=s.max_tokens,
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        seed=s.seed,
        stop_token_ids=tuple(s.stop_token_ids),
        ignore_eos=s.ignore_eos,
        min_p=s.min_p,
        repetition_penalty=s.repetition_penalty,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        logit_bias=_pairs(s.logit_bias_ids, s.logit_bias_values, "logit_bias"),
        allowed_token_ids=tuple(s.allowed_token_ids),
        min_tokens=s.min_tokens,
        logprobs=s.logprobs if s.HasField("logprobs") else None,
        prompt_logprobs=s.prompt_logprobs if s.HasField("prompt_logprobs") else None,
        grammar=_grammar_from_pb(s.grammar) if s.HasField("grammar") else None,
    )


def adapter_to_pb(a: AdapterRef | None) -> pb.AdapterRef | None:
    return pb.AdapterRef(name=a.name, path=a.path, digest=a.digest) if a is not None else None


def adapter_from_pb(a: pb.AdapterRef) -> AdapterRef:
    return AdapterRef(a.name, a.path, a.digest)


def logprobs_to_pb(x: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        token=x.token,
        logprob=x.logprob,
        rank=x.rank,
        top_ids=[token for token, _ in x.top],
        top_logprobs=[logprob for _, logprob in x.top],
    )


def logprobs_from_pb(x: pb.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(x.token, x.logprob, x.rank, _pairs(x.top_ids, x.top_logprobs, "logprobs"))


def prompt_logprobs_to_pb(positions: tuple[TokenLogprobs, ...] | None) -> pb.PromptLogprobs | None:
    if positions is None:
        return None
    return pb.PromptLogprobs(positions=[logprobs_to_pb(x) for x in positions])


def prompt_logprobs_from_pb(x: pb.PromptLogprobs) -> tuple[TokenLogprobs, ...]:
    return tuple(map(logprobs_from_pb, x.positions))
