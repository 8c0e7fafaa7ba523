"""The tokens of a prompt, made from hash_ids. Pure.

The tokens of a hash_id depend on (seed, hash_id, vocabulary range) alone. The first few spell the hash_id in
the base of the range, so that two hash_ids never have the same block. The rest is a hash of (seed, hash_id,
position). A request without hash_ids gets a prompt that starts with its own number instead, and so shares
nothing with any other. The same holds for tokens of a prompt that no hash_id covers.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.core.errors import SetupError
from loadgen.lengths import PlannedRequest, ReplayPlan

_ID_BITS = 32
"""Bits of a hash_id that a long enough block can spell."""

_OWN = np.uint64(0x6F776E5F746F6B73)
"""Another seed for tokens that belong to one request, so that they differ from those of hash_ids."""

_SYLLABLES = tuple(c + v for c in "bdfgklmnprstvz" for v in "aeiou")


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Token ids that may be sent, [first, end). Low ids are often special or bytes."""

    first: int = 1000
    end: int = 2000

    def __post_init__(self) -> None:
        if self.first < 0 or self.end - self.first < 2:
            raise SetupError(
                f"no token ids to send: the range {self.first} to {self.end} holds less than two; "
                "lower --first-token or raise --vocab-size"
            )

    @property
    def count(self) -> int:
        return self.end - self.first


class PromptMaker:
    """Makes prompts. Raises SetupError if the plan's blocks are too short to tell its hash_ids apart."""

    def __init__(self, plan: ReplayPlan, tokens: TokenRange, *, seed: int) -> None:
        self._plan = plan
        self._range = tokens
        self._seed = np.uint64(seed & 0xFFFF_FFFF_FFFF_FFFF)
        self._digits = -(-_ID_BITS // (tokens.count.bit_length() - 1))
        largest = max((i for r in plan.requests for i in r.hash_ids), default=0)
        shortest = math.floor(plan.block_tokens)
        if plan.has_prefixes and tokens.count ** min(self._digits, shortest) <= largest:
            raise SetupError(
                f"blocks of {shortest} tokens out of {tokens.count} cannot tell hash_id {largest} "
                "from all others: raise --length-scale or --vocab-size"
            )

    def tokens(self, request: PlannedRequest) -> NDArray[np.int64]:
        """[input_tokens] token ids."""
        plan = self._plan
        if not plan.has_prefixes:
            return self._stream(np.array([request.index]), request.input_tokens, self._seed)[0]
        widest = math.ceil(plan.block_tokens)
        blocks = self._stream(np.array(request.hash_ids, dtype=np.int64), widest, self._seed)
        if plan.block_tokens.denominator == 1:
            shared = blocks.reshape(-1)[: request.input_tokens]
        else:
            edges = np.array([plan.edge(k) for k in range(len(request.hash_ids) + 1)])
            shared = blocks[np.arange(widest) < np.diff(edges)[:, None]][: request.input_tokens]
        own = request.input_tokens - len(shared)
        return np.concatenate((shared, self.own_tokens(request, own))) if own else shared

    def own_tokens(self, request: PlannedRequest, count: int) -> NDArray[np.int64]:
        """[count] token ids that no other request has."""
        return self._stream(np.array([request.index]), count, self._seed ^ _OWN)[0]

    def text(self, request: PlannedRequest) -> str:
        """One made-up word per token. Prefixes are shared as in `tokens`, but the server's tokenizer decides
        how many tokens a word is."""
        return self.words(self.tokens(request))

    def words(self, tokens: NDArray[np.int64]) -> str:
        """One made-up word per token."""
        return " ".join(_word(int(t) - self._range.first) for t in tokens)

    def _stream(self, ids: NDArray[np.int64], length: int, seed: np.uint64) -> NDArray[np.int64]:
        """[ids, length]: the first `length` tokens of each id."""
        position = np.arange(length, dtype=np.uint64)
        base = _mix(ids.astype(np.uint64)[:, None] ^ _mix(np.array([[seed]], dtype=np.uint64)))
        numbers = (_mix(base + position[None, :]) % np.uint64(self._range.count)).astype(np.int64)
        rest = ids.astype(np.int64)
        for place in range(min(self._digits, length)):
            # The shift by the seed makes prompts of another seed differ from the first token on.
            shift = int(_mix(np.array([seed + np.uint64(place)], dtype=np.uint64))[0] % np.uint64(1 << 31))
            numbers[:, place] = (rest + shift) % self._range.count
            rest = rest // self._range.count
        return numbers + self._range.first


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele et al., OOPSLA 2014), a bijection that looks random."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _word(number: int) -> str:
    """A distinct, pronounceable word for every number."""
    word = _SYLLABLES[number % len(_SYLLABLES)]
    while number := number // len(_SYLLABLES):
        word += _SYLLABLES[number % len(_SYLLABLES)]
    return word
