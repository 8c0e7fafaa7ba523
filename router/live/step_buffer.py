"""Outputs of workers' steps until the next round of the router's streams takes them in. Pure.

A step's tokens cost the router about as much whether each sequence has one or five of them. With many streams
several steps come between two rounds (see `router.live.flusher`), and each sequence's outputs are then taken
in as one. First tokens do not wait.
"""

from collections.abc import Iterable, Sequence
from itertools import islice

from baton.core.ids import SequenceId, WorkerId
from baton.core.messages import SequenceOutput


class StepBuffer:
    def __init__(self) -> None:
        self._of: dict[WorkerId, dict[SequenceId, list[SequenceOutput]]] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def add(self, worker_id: WorkerId, outputs: Iterable[SequenceOutput]) -> tuple[SequenceOutput, ...]:
        """Keep the outputs that may wait, and return those that do not."""
        urgent: list[SequenceOutput] = []
        waiting = self._of.get(worker_id)
        if waiting is None:
            waiting = {}
        for output in outputs:
            if output.first_index == 0:
                urgent.append(output)
            elif (earlier := waiting.get(output.seq_id)) is None:
                waiting[output.seq_id] = [output]
            else:
                earlier.append(output)
        if waiting:
            self._of[worker_id] = waiting
        return tuple(urgent)

    def take_some(self, sequences_max: int) -> tuple[WorkerId, tuple[SequenceOutput, ...]] | None:
        """Take the waiting outputs of so many sequences of one worker, those that waited longest first. None:
        nothing waits."""
        if not self._of:
            return None
        worker_id, waiting = next(iter(self._of.items()))
        if len(waiting) <= sequences_max:
            return worker_id, self.take_worker(worker_id)
        return worker_id, _joined([waiting.pop(seq_id) for seq_id in list(islice(waiting, sequences_max))])

    def take_worker(self, worker_id: WorkerId) -> tuple[SequenceOutput, ...]:
        """Take all waiting outputs of one worker. Its next message comes after them."""
        return _joined(self._of.pop(worker_id, {}).values())

    def take_sequence(self, worker_id: WorkerId, seq_id: SequenceId) -> tuple[SequenceOutput, ...]:
        waiting = self._of.get(worker_id)
        if waiting is None or (outputs := waiting.pop(seq_id, None)) is None:
            return ()
        if not waiting:
            del self._of[worker_id]
        return _joined([outputs])


def _joined(of: Iterable[Sequence[SequenceOutput]]) -> tuple[SequenceOutput, ...]:
    found: list[SequenceOutput] = []
    for outputs in of:
        found += outputs if len(outputs) == 1 else merged(outputs)
    return tuple(found)


def merged(outputs: Sequence[SequenceOutput]) -> list[SequenceOutput]:
    """Return the outputs of one sequence in their order, with each run of tokens without a gap as one."""
    found: list[SequenceOutput] = []
    run: list[SequenceOutput] = []
    for output in outputs:
        if run and not _follows(output, run[-1]):
            found.append(_as_one(run))
            run = []
        run.append(output)
    found.append(_as_one(run))
    return found


def _follows(output: SequenceOutput, last: SequenceOutput) -> bool:
    """Return whether one output may be merged with the one before. An attempt's first output alone has its
    beginning, and the last one its end."""
    is_bare_end = output.finish is not None and not output.tokens
    return (
        output.first_index == last.first_index + len(last.tokens)
        and output.epoch == last.epoch
        and last.finish is None
        and (is_bare_end or bool(output.logprobs) == bool(last.logprobs))
        and output.cached_token_count is None
        and output.prompt_logprobs is None
        and output.timings is None
        and not output.embedding
        and not last.embedding
    )


def _as_one(run: Sequence[SequenceOutput]) -> SequenceOutput:
    if len(run) == 1:
        return run[0]
    first = run[0]
    return SequenceOutput(
        first.seq_id,
        first.epoch,
        first.first_index,
        tuple([token for output in run for token in output.tokens]),
        run[-1].finish,
        first.cached_token_count,
        tuple([entry for output in run for entry in output.logprobs]),
        first.prompt_logprobs,
        timings=first.timings,
    )
