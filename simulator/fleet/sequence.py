"""One attempt at a sequence, as a modelled worker knows it: counts instead of tokens."""

from dataclasses import dataclass, field

from baton.core.ids import BlockHash, BlockId, SeqKey, SequenceId
from baton.core.messages import Phase, StartSequence
from engine.scheduling.incoming import Incoming


@dataclass(slots=True, eq=False)
class MacroSequence:
    """A sequence in counts. The engine alone writes to it; it is `Ranked`, for the production order."""

    key: SeqKey
    phase: Phase
    start: StartSequence
    hashes: list[BlockHash]
    """Hashes of the full blocks of the prompt."""
    known_count: int
    """Tokens known: the prompt and all generated ones."""
    end_count: int
    """Tokens known when it ends."""
    prompt_count: int
    priority: int = 0
    fairness_key: str = ""
    tpot_slo_s: float = 0.0
    arrived_s: float = 0.0
    order: int = 0
    generated_here: bool = False
    block_ids: list[BlockId] = field(default_factory=list[BlockId])
    computed_count: int = 0
    """Tokens computed; while the sequence decodes, those of when it entered the batch, see `entered_at`."""
    committed_count: int = 0
    cached_count: int | None = None
    """Prompt tokens found in the cache when first admitted."""
    promised: list[BlockHash] = field(default_factory=list[BlockHash])
    incoming: Incoming | None = None
    """Blocks that the store loads."""
    eligible_step: int = 0
    """The first step that can carry the sequence: the one before was planned when it came."""
    entered_at: int = 0
    """The batch's count of decode steps when it entered."""
    has_second_token: bool = False
    first_step_s: float | None = None
    load_s: float = 0.0
    waiting_since_s: float | None = None
    """The instant since which the sequence waits for blocks to come."""
    prompt_steps_tokens: int = 0
    """Prompt tokens computed here, recomputed ones included."""
    is_running: bool = False
    reported_count: int | None = None
    """Generated tokens that the router heard of, counted from the sequence's first; None when it heard of
    none from here."""

    @property
    def seq_id(self) -> SequenceId:
        return self.key[0]

    @property
    def pending_count(self) -> int:
        return self.known_count - self.computed_count

    def runnable_count(self, block_tokens: int) -> int:
        incoming = self.incoming
        if incoming is None or not incoming.is_awaited:
            return self.known_count - self.computed_count
        return min(
            self.known_count - self.computed_count, incoming.first * block_tokens - self.computed_count
        )
