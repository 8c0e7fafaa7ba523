"""Room for prompts that a step has beside what decodes."""

from collections.abc import Sequence as Ordered

from baton.config import EngineConfig
from baton.core.chunks import PromptRoom, prompts_s
from engine.scheduling.items import Work, work_of
from engine.scheduling.step_time import StepTimeModel


def prompt_room(engine: EngineConfig, times: StepTimeModel, work: Ordered[Work]) -> PromptRoom:
    """Return the room that the objectives (seconds per token) of the sequences in `work` leave prompts."""
    tokens = engine.step_tokens_max - sum(one.token_count for one in work)
    objectives = [one.sequence.tpot_slo_s or engine.tpot_slo_s for one in work]
    limit_s = min((slo_s for slo_s in objectives if slo_s > 0), default=0.0)
    if not limit_s:
        return PromptRoom(tokens)
    least = engine.chunk_tokens_min
    if not times.has_seen_prompt:
        return PromptRoom(min(tokens, least))
    return PromptRoom(
        tokens,
        seconds=prompts_s(limit_s, times.compute_s(work_of(work)), floor_s=times.floor_s),
        token_s=times.prompt_token_s,
        pair_s=times.pair_s,
        least=least,
    )
