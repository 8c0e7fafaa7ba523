"""What workers say after each engine step, to protobuf and back: the messages of which there are most."""

from itertools import accumulate

import msgspec

from baton.core import messages as m
from baton.core.costs import PhaseTimings
from baton.core.ids import SequenceId
from baton.core.sampling import FinishReason
from baton.wire import vocabulary as v
from baton.wire.proto import baton_pb2 as pb
from baton.wire.vocabulary import WireError

_FINISH = v.numbers(FinishReason)


def _output_to_pb(o: m.SequenceOutput) -> pb.SequenceOutput:
    return pb.SequenceOutput(
        seq_id=o.seq_id,
        epoch=o.epoch,
        first_index=o.first_index,
        tokens=o.tokens,
        finish=v.number(_FINISH, o.finish) if o.finish else None,
        cached_token_count=o.cached_token_count,
        logprobs=[v.logprobs_to_pb(x) for x in o.logprobs],
        prompt_logprobs=v.prompt_logprobs_to_pb(o.prompt_logprobs),
        embedding=o.embedding,
        timings=None if o.timings is None else pb.PhaseTimings(**msgspec.structs.asdict(o.timings)),
    )


def _output_from_pb(o: pb.SequenceOutput) -> m.SequenceOutput:
    return m.SequenceOutput(
        seq_id=SequenceId(o.seq_id),
        epoch=o.epoch,
        first_index=o.first_index,
        tokens=tuple(o.tokens),
        finish=v.member(_FINISH, o.finish) if o.finish else None,
        cached_token_count=o.cached_token_count if o.HasField("cached_token_count") else None,
        logprobs=tuple(map(v.logprobs_from_pb, o.logprobs)),
        prompt_logprobs=v.prompt_logprobs_from_pb(o.prompt_logprobs)
        if o.HasField("prompt_logprobs")
        else None,
        embedding=tuple(o.embedding),
        timings=_timings_from_pb(o.timings) if o.HasField("timings") else None,
    )


def _is_plain(o: m.SequenceOutput) -> bool:
    return (
        o.finish is None
        and o.cached_token_count is None
        and not o.logprobs
        and o.prompt_logprobs is None
        and not o.embedding
        and o.timings is None
    )


def step_to_pb(outputs: tuple[m.SequenceOutput, ...]) -> pb.StepOutput:
    plain = [o for o in outputs if _is_plain(o)]
    return pb.StepOutput(
        outputs=[_output_to_pb(o) for o in outputs if not _is_plain(o)],
        plain=pb.PlainOutputs(
            seq_ids=[o.seq_id for o in plain],
            epochs=[o.epoch for o in plain],
            first_indices=[o.first_index for o in plain],
            token_counts=[len(o.tokens) for o in plain],
            tokens=[token for o in plain for token in o.tokens],
        ),
    )


def step_from_pb(step: pb.StepOutput) -> m.StepOutput:
    """The plain ones first: of a sequence that has both, the other one may be its end."""
    plain = step.plain
    counts, tokens = list(plain.token_counts), list(plain.tokens)
    columns = (plain.seq_ids, plain.epochs, plain.first_indices)
    if any(len(column) != len(counts) for column in columns) or sum(counts) != len(tokens):
        raise WireError("the columns of a step's outputs do not have the same length")
    rows = zip(*map(list, columns), counts, accumulate(counts), strict=True)
    outputs = [
        m.SequenceOutput(SequenceId(seq_id), epoch, first_index, tuple(tokens[end - count : end]))
        for seq_id, epoch, first_index, count, end in rows
    ]
    return m.StepOutput((*outputs, *map(_output_from_pb, step.outputs)))


def _timings_from_pb(t: pb.PhaseTimings) -> PhaseTimings:
    return PhaseTimings(t.wait_s, t.load_s, t.compute_s)
