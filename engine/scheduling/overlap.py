"""This module decides which steps are under way at the same time.

Where one device has the whole model, the next step is planned while one runs, so that the device does not
wait for the plan. Where stages divide the layers, each stage has a step of its own to compute: chunks of
prompts follow one another, and sequences that decode take turns in as many groups as there are stages,
because the next token of a sequence needs the one before (GPipe, Huang et al., 2019, for the chunks of a
batch; vLLM schedules its pipelines in the same way).
"""

from collections.abc import Sequence as Ordered
from dataclasses import replace

from baton.config import EngineConfig
from baton.core.shape import Shape
from engine.scheduling.items import OpenStep, Work
from engine.scheduling.sequence import Sequence
from engine.scheduling.speculation import Speculator
from engine.scheduling.step_time import StepTimeModel, StepWork

OVERLAP_STEP_S_MAX = 0.1
"""Longest predicted step beside which the next one is planned ahead. Beside a longer one the gap of two steps
is negligible, and a request that arrives meanwhile should not wait for one more."""


class StepOverlap:
    """Decides how many steps may be under way, and which decodes the next one takes."""

    def __init__(self, engine: EngineConfig) -> None:
        self.stages = Shape.parse(engine.shape).pipeline
        self.steps_max = self.stages + engine.overlap_steps
        """Steps under way at most: one per stage, and one that is planned ahead."""

    def should_plan(
        self,
        steps: Ordered[OpenStep],
        running: Ordered[Sequence],
        speculator: Speculator,
        times: StepTimeModel,
    ) -> bool:
        """Return whether another step should be planned beside those under way.

        It should not beside a long step, if every stage has one, nor where the result is worth waiting for:
        verified draft tokens say how far a sequence is, and a new token may be the start of something that
        repeats. Between stages nothing is planned from such results.
        """
        if len(steps) < self.stages:
            return True
        if steps[-1].predicted_s > OVERLAP_STEP_S_MAX:
            return False
        if self.stages > 1:
            return True
        return not any(s.is_drafting for s in running) and not speculator.is_worth_waiting(running, times)

    def decodes(
        self, running: Ordered[Sequence], newest_step: int, speculator: Speculator, times: StepTimeModel
    ) -> list[Sequence]:
        """Return the sequences whose next token the next step may compute.

        Between stages these are the ones that have waited longest, at most a stage's share of all that
        decode, and none whose token is still being sampled, except one that decodes alone and is not worth
        speculating on: its next step may wait for the token at the first stage.
        """
        able = [seq for seq in running if seq.is_decoding]
        if self.stages == 1:
            return able
        idle = [seq for seq in able if not seq.steps_open]
        if not idle:
            is_next = len(able) == 1 and able[0].last_step == newest_step and able[0].steps_open == 1
            return able if is_next and not speculator.is_worth_waiting(running, times) else []
        idle.sort(key=lambda seq: (seq.last_step, seq.order))
        return idle[: -(-(len(idle) + len(_under_way(running))) // self.stages)]

    def may_draft(self, steps: Ordered[OpenStep], decodes: Ordered[Sequence]) -> bool:
        """Return whether all tokens of the sequences are known, so that drafts can follow them."""
        if self.stages == 1:
            return not steps
        return not any(seq.steps_open for seq in decodes)

    def prompt_tokens_max(self, waiting_tokens: int, times: StepTimeModel) -> int:
        """Return the most prompt tokens for one step, so that those that wait pass all stages soonest."""
        return times.costs.chunk_tokens(waiting_tokens)

    def accounted(self, work: StepWork, chosen: Ordered[Work], running: Ordered[Sequence]) -> StepWork:
        """Return what the step's time is explained by. Between stages a sequence that decodes waits for
        the groups of all others, so its time is that of a step of all of them."""
        if self.stages == 1 or not work.decodes:
            return work
        here = {one.sequence.key for one in chosen}
        others = [seq for seq in _under_way(running) if seq.key not in here]
        return replace(
            work,
            decodes=work.decodes + len(others),
            context_tokens=work.context_tokens + sum(seq.planned_count for seq in others),
        )


def _under_way(running: Ordered[Sequence]) -> list[Sequence]:
    """Sequences that decode in steps under way."""
    return [seq for seq in running if seq.steps_open and (seq.sampling_count or seq.is_drafting)]
