"""Where the time to a phase's first token goes, as its worker sees it."""

from baton.core.costs import PhaseTimings
from engine.scheduling.sequence import Sequence


class PhaseClock:
    """The clock of one attempt that computes a prompt. After every event it gets whether the attempt waits
    for the store, and with the first step when that began."""

    __slots__ = ("_accepted_s", "_began_s", "_blocked_since_s", "_load_before_s", "_load_s")

    def __init__(self, accepted_s: float) -> None:
        self._accepted_s = accepted_s
        self._began_s: float | None = None
        self._blocked_since_s: float | None = None
        self._load_s = 0.0
        self._load_before_s = 0.0
        """The part of `_load_s` before the attempt's first step."""

    def observe(self, *, is_blocked: bool, now_s: float) -> None:
        """Note whether the attempt waits for blocks of the store from now on."""
        if not is_blocked:
            self._load_s = self._loaded_s(now_s)
            self._blocked_since_s = None
        elif self._blocked_since_s is None:
            self._blocked_since_s = now_s

    def stepped(self, began_s: float) -> None:
        """Note that a step that computed some of the prompt is done."""
        if self._began_s is None:
            self._began_s = max(began_s, self._accepted_s)
            self._load_before_s = self._loaded_s(self._began_s)

    def timings(self, now_s: float) -> PhaseTimings:
        """The parts of the time up to the first token, which is sampled now. They are never negative, and sum
        up to the time since the start message."""
        self.stepped(now_s)
        assert self._began_s is not None
        began_s = self._began_s
        load_s = self._loaded_s(now_s)
        before_s = min(self._load_before_s, load_s)
        return PhaseTimings(
            wait_s=max(0.0, began_s - self._accepted_s - before_s),
            load_s=load_s,
            compute_s=max(0.0, now_s - began_s - (load_s - before_s)),
        )

    def _loaded_s(self, now_s: float) -> float:
        since_s = self._blocked_since_s
        return self._load_s if since_s is None else self._load_s + max(0.0, now_s - since_s)


def waits_for_store(seq: Sequence, now_s: float) -> bool:
    """The sequence could compute, were the blocks there that it asked for. Waiting for the answer where they
    are counts as well."""
    incoming = seq.incoming
    if incoming is None:
        return False
    if not seq.block_ids:
        return incoming.wait_until_s > now_s
    return incoming.is_awaited and seq.runnable_count <= 0 and not seq.steps_open
