"""Prompt tokens that a step may carry beside what decodes."""

from collections.abc import Sequence as Ordered

from baton.config import EngineConfig
from baton.core.costs import chunk_beside
from engine.scheduling.items import Work, work_of
from engine.scheduling.step_time import StepTimeModel


def prompt_budget(engine: EngineConfig, times: StepTimeModel, work: Ordered[Work]) -> int:
    """Number of prompt tokens for which the objectives (seconds per token) of the sequences in `work` leave
    room."""
    budget = engine.step_tokens_max - sum(one.token_count for one in work)
    objectives = [one.sequence.tpot_slo_s or engine.tpot_slo_s for one in work]
    limit_s = min((slo_s for slo_s in objectives if slo_s > 0), default=0.0)
    if not limit_s:
        return budget
    least = engine.chunk_tokens_min
    if not times.has_seen_prompt:
        return min(budget, least)
    found = chunk_beside(
        limit_s,
        times.compute_s(work_of(work)),
        times.prompt_token_s,
        floor_s=times.floor_s,
        chunk_tokens_min=least,
    )
    return min(budget, found)
