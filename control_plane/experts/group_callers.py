"""The callers of one group, and which epochs of its map they may still use. Pure.

A caller counts from its hello until some time after its stream has ended: a process whose stream broke may
still wait for rows by the map that it knows.
"""

from dataclasses import dataclass

from control_plane.experts.group_values import ExpertGroupPolicy


@dataclass(slots=True)
class _CallerEntry:
    stream: int
    epoch: int
    """The lowest epoch that it may use."""
    told: int = 0
    """The last epoch that it was sent."""
    behind_since_s: float | None = None
    """Since when it uses an older one than it was sent."""
    is_ignored: bool = False
    """It was behind for too long to be waited for."""
    ended_s: float | None = None


class ExpertCallerBook:
    def __init__(self, policy: ExpertGroupPolicy) -> None:
        self._policy = policy
        self._callers: dict[str, _CallerEntry] = {}
        self.highest = 0
        """The highest epoch that any caller said it used."""

    def __len__(self) -> int:
        """Callers whose stream is open."""
        return sum(one.ended_s is None for one in self._callers.values())

    def hello(self, caller: str, stream: int, epoch: int) -> bool:
        """Return whether it knows `epoch` from this control plane, or knows none."""
        before = self._callers.get(caller)
        self._callers[caller] = _CallerEntry(stream, epoch)
        self.highest = max(self.highest, epoch)
        return epoch == 0 or (before is not None and epoch <= before.told)

    def is_open(self, caller: str, stream: int) -> bool:
        one = self._callers.get(caller)
        return one is not None and one.stream == stream and one.ended_s is None

    def used(self, caller: str, epoch: int) -> None:
        one = self._callers[caller]
        if epoch > one.told:
            return  # it was never sent such a map
        one.epoch = max(one.epoch, epoch)
        if one.epoch == one.told:
            one.behind_since_s, one.is_ignored = None, False

    def sent(self, epoch: int, *, now_s: float, caller: str | None = None) -> None:
        """A map was sent to a caller, or to all."""
        ones = self._callers.values() if caller is None else (self._callers[caller],)
        for one in ones:
            if one.ended_s is not None:
                continue
            one.told = epoch
            one.epoch = one.epoch or epoch
            if one.epoch < epoch and one.behind_since_s is None:
                one.behind_since_s = now_s

    def hung_up(self, caller: str, stream: int, *, now_s: float) -> None:
        one = self._callers.get(caller)
        if one is not None and one.stream == stream and one.ended_s is None:
            one.ended_s = now_s

    def forget(self, *, now_s: float) -> None:
        """Forget callers that are gone, and wait no more for those that are behind for too long."""
        policy = self._policy
        self._callers = {
            name: one
            for name, one in self._callers.items()
            if one.ended_s is None or now_s < one.ended_s + policy.caller_gone_s
        }
        for one in self._callers.values():
            since_s = one.behind_since_s
            one.is_ignored |= since_s is not None and now_s >= since_s + policy.caller_behind_s

    @property
    def lowest(self) -> int | None:
        """The lowest epoch that somebody may use; None: nobody uses any."""
        used = (one.epoch for one in self._callers.values() if one.epoch and not one.is_ignored)
        return min(used, default=None)

    @property
    def next_tick_s(self) -> float | None:
        policy, callers = self._policy, self._callers.values()
        dues = [one.ended_s + policy.caller_gone_s for one in callers if one.ended_s is not None]
        dues += [
            one.behind_since_s + policy.caller_behind_s
            for one in callers
            if one.behind_since_s is not None and not one.is_ignored
        ]
        return min(dues, default=None)
