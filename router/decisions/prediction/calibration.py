"""How often objectives held that were said to hold with some probability, and what that probability means.

Predicted probabilities come from a model of errors, and placement chooses by them. Both make them wrong in a
systematic way: a worker that keeps an objective of its own cuts off the errors' tail, for example. A map from
what was said to what was seen puts that right without changing which of two probabilities is the greater
(isotonic calibration: Zadrozny and Elkan, KDD 2002).
"""

from bisect import bisect_right

_EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.94, 0.97, 0.985, 0.995)
"""Probabilities that divide the range into bins."""
_CENTRES = tuple((a + b) / 2 for a, b in zip((0.0, *_EDGES), (*_EDGES, 1.0), strict=True))
PRIOR_COUNT = 1.0
"""What was said counts as so many sequences of a bin, of which it was true."""
FORGET = 0.995
"""Weight of what a bin has seen, relative to the next sequence: about 200 sequences are remembered."""
MAPPED_EVERY = 8
CLASSES_MAX = 64
CLASS_COUNT_MIN = 100


_Block = tuple[float, float, float]
"""Weight, mean probability that was said, and share that was seen, of adjacent bins."""


class AttainmentRecord:
    """What was said and what was seen of the sequences of one class."""

    __slots__ = ("_counts", "_held", "_means", "_said", "_unseen", "count")

    def __init__(self) -> None:
        self.count = 0
        self._counts = [0.0] * len(_CENTRES)
        self._said = [0.0] * len(_CENTRES)
        self._held = [0.0] * len(_CENTRES)
        self._means = (_CENTRES, _CENTRES)
        """Points (said, seen) of the map, neither of which falls."""
        self._unseen = 0

    def observe(self, said: float, *, has_held: bool) -> None:
        """`said`: the probability before it was mapped."""
        i = bisect_right(_EDGES, said)
        self._counts[i] = FORGET * self._counts[i] + 1.0
        self._said[i] = FORGET * self._said[i] + said
        self._held[i] = FORGET * self._held[i] + has_held
        self.count += 1
        self._unseen += 1
        if self._unseen >= MAPPED_EVERY:
            self._unseen = 0
            self._means = self._isotonic()

    def _isotonic(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the map's points: means of bins, joined where they would fall (pool adjacent violators)."""
        blocks: list[_Block] = []
        for centre, count, said, held in zip(_CENTRES, self._counts, self._said, self._held, strict=True):
            weight = PRIOR_COUNT + count
            at = (PRIOR_COUNT * centre + said) / weight
            block = (weight, at, (PRIOR_COUNT * centre + held) / weight)
            while blocks and blocks[-1][2] > block[2]:
                block = _joined(blocks.pop(), block)
            blocks.append(block)
        return tuple(b[1] for b in blocks), tuple(b[2] for b in blocks)

    def mapped(self, said: float) -> float:
        """Return the probability that `said` turned out to mean."""
        at, seen = self._means
        i = bisect_right(at, said)
        left, low = (at[i - 1], seen[i - 1]) if i else (0.0, 0.0)
        right, high = (at[i], seen[i]) if i < len(at) else (1.0, max(seen[-1], said))
        share = (said - left) / (right - left) if right > left else 1.0
        return min(1.0, max(0.0, low + share * (high - low)))


def _joined(a: _Block, b: _Block) -> _Block:
    weight = a[0] + b[0]
    return weight, (a[0] * a[1] + b[0] * b[1]) / weight, (a[0] * a[2] + b[0] * b[2]) / weight


class AttainmentRecords:
    """The records of all sequences and of each service class."""

    def __init__(self) -> None:
        self._all = AttainmentRecord()
        self._classes: dict[str, AttainmentRecord] = {}

    def observe(self, slo_class: str, said: float, *, has_held: bool) -> None:
        self._all.observe(said, has_held=has_held)
        found = self._classes.get(slo_class)
        if found is None:
            if len(self._classes) >= CLASSES_MAX:
                return
            found = self._classes[slo_class] = AttainmentRecord()
        found.observe(said, has_held=has_held)

    def mapped(self, slo_class: str, said: float) -> float:
        found = self._classes.get(slo_class)
        return (found if found is not None and found.count >= CLASS_COUNT_MIN else self._all).mapped(said)
