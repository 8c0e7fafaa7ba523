"""Room for prompts that a step has beside what decodes."""

from collections.abc import Sequence as Ordered

from baton.config import EngineConfig
from baton.core.chunks import PromptRoom, room_s
from engine.scheduling.items import Work, work_of
from engine.scheduling.step_time import StepTimeModel


def prompt_room(engine: EngineConfig, times: StepTimeModel, work: Ordered[Work]) -> PromptRoom:
    """Return the room that the objectives (seconds per token) of the sequences in `work` leave prompts."""
    tokens = engine.step_tokens_max - sum(one.token_count for one in work)
    objectives = [one.sequence.tpot_slo_s or engine.tpot_slo_s for one in work]
    slo_s = min((slo_s for slo_s in objectives if slo_s > 0), default=0.0)
    costs, least = times.costs, engine.chunk_tokens_min
    if slo_s and not times.has_seen_prompt:
        tokens = min(tokens, least)
    seconds = room_s(slo_s, times.compute_s(work_of(work)), floor_s=costs.floor_s)
    return PromptRoom(tokens, costs, seconds=seconds, least=least)
