"""Outputs that wait for a round: nothing is lost, doubled or reordered, whatever the cuts."""

from hypothesis import given
from hypothesis import strategies as st

from baton.core.ids import SequenceId, WorkerId
from baton.core.messages import SequenceOutput
from baton.core.sampling import FinishReason
from baton.core.steps import TokenLogprobs
from router.live.step_buffer import StepBuffer, merged

W, S = WorkerId("w"), SequenceId("s")


def output(first, *tokens, seq=S, epoch=0, finish=None, **more):
    return SequenceOutput(seq, epoch, first, tokens, finish, **more)


def test_first_tokens_do_not_wait():
    buffer = StepBuffer()
    urgent = buffer.add(W, [output(0, 7), output(3, 8, seq=SequenceId("t"))])
    assert urgent == (output(0, 7),)
    assert buffer.take_some(9) == (W, (output(3, 8, seq=SequenceId("t")),))
    assert not buffer


def test_steps_of_one_sequence_become_one_output():
    buffer = StepBuffer()
    for index in range(1, 5):
        assert buffer.add(W, [output(index, 10 + index)]) == ()
    buffer.add(W, [output(5, 15, finish=FinishReason.LENGTH)])
    assert buffer.take_some(9) == (W, (output(1, 11, 12, 13, 14, 15, finish=FinishReason.LENGTH),))


def test_what_is_taken_of_one_is_not_taken_of_others():
    buffer, other = StepBuffer(), WorkerId("v")
    buffer.add(W, [output(1, 1), output(1, 2, seq=SequenceId("t"))])
    buffer.add(other, [output(1, 3)])
    assert buffer.take_sequence(W, S) == (output(1, 1),)
    assert buffer.take_sequence(W, S) == ()
    assert buffer.take_worker(other) == (output(1, 3),)
    assert buffer.take_some(9) == (W, (output(1, 2, seq=SequenceId("t")),))
    assert buffer.take_some(9) is None


def test_some_are_taken_in_the_order_in_which_they_wait_and_the_others_stay():
    buffer, other = StepBuffer(), WorkerId("v")
    seqs = [SequenceId(name) for name in "abcde"]
    buffer.add(W, [output(1, i, seq=seq) for i, seq in enumerate(seqs)])
    buffer.add(other, [output(1, 9)])
    buffer.add(W, [output(2, 7, seq=seqs[4])])
    assert buffer.take_some(2) == (W, (output(1, 0, seq=seqs[0]), output(1, 1, seq=seqs[1])))
    assert buffer.take_sequence(W, seqs[2]) == (output(1, 2, seq=seqs[2]),)
    assert buffer.take_some(2) == (W, (output(1, 3, seq=seqs[3]), output(1, 4, 7, seq=seqs[4])))
    assert buffer.take_some(2) == (other, (output(1, 9),))
    assert not buffer


def test_attempts_gaps_and_what_belongs_to_the_beginning_stay_apart():
    apart = [
        output(1, 5),
        output(1, 5, epoch=1),  # This is another attempt.
        output(4, 6, epoch=1),  # Tokens between them are missing.
        output(5, 7, epoch=1, cached_token_count=3),
        output(6, 8, epoch=1, logprobs=(TokenLogprobs(8, -1.0, 1),)),  # The one before has none.
    ]
    assert merged(apart) == apart


@given(st.lists(st.integers(1, 3), min_size=1, max_size=12), st.booleans(), st.booleans())
def test_tokens_and_logprobs_stay_in_order(sizes, with_logprobs, is_finished):
    outputs, first = [], 1
    for size in sizes:
        tokens = tuple(range(first, first + size))
        logprobs = tuple(TokenLogprobs(t, -float(t), 1) for t in tokens) if with_logprobs else ()
        outputs.append(output(first, *tokens, logprobs=logprobs))
        first += size
    if is_finished:
        outputs.append(output(first, finish=FinishReason.STOP))
    (one,) = merged(outputs)
    assert one.tokens == tuple(range(1, first))
    assert [entry.token for entry in one.logprobs] == (list(one.tokens) if with_logprobs else [])
    assert one.finish == (FinishReason.STOP if is_finished else None)
