"""Block hashes of one sequence, computed once per fingerprint and extended when it is placed anew."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from baton.core.hashing import block_hashes, root_hash
from baton.core.ids import BlockHash


class HashSource(Protocol):
    """Says the block hashes of a sequence. What it is asked for grows only: the prompt, then the prompt
    with the tokens generated since."""

    def of(self, tokens: Sequence[int], fingerprint: str, block_tokens: int) -> Sequence[BlockHash]:
        """Hashes of the full blocks of `tokens`, first block first."""
        ...


class ChainKind(NamedTuple):
    """What decides the hashes of given tokens, besides the tenant: workers differ in it."""

    fingerprint: str
    block_tokens: int


class PromptHashes:
    """The same values as workers compute, see `baton.core.hashing`."""

    def __init__(self, salt: bytes) -> None:
        self._salt = salt
        self._chains: dict[ChainKind, list[BlockHash]] = {}

    @classmethod
    def computed(cls, salt: bytes, tokens: Sequence[int], kinds: Iterable[ChainKind]) -> "PromptHashes":
        """Compute what a placement will ask for. Call it off the event loop."""
        hashes = cls(salt)
        for kind in kinds:
            hashes.of(tokens, kind.fingerprint, kind.block_tokens)
        return hashes

    def fork(self) -> "PromptHashes":
        """A copy for another sequence with the same prompt: what is known is shared, what follows is not."""
        other = PromptHashes(self._salt)
        other._chains.update(self._chains)
        return other

    def of(self, tokens: Sequence[int], fingerprint: str, block_tokens: int) -> list[BlockHash]:
        """Hashes of the full blocks of `tokens`, which only ever grow from call to call."""
        kind = ChainKind(fingerprint, block_tokens)
        chain = self._chains.get(kind, [])
        known_tokens = len(chain) * block_tokens
        if len(tokens) - known_tokens >= block_tokens:
            parent = chain[-1] if chain else root_hash(fingerprint, self._salt)
            chain = self._chains[kind] = [*chain, *block_hashes(parent, tokens[known_tokens:], block_tokens)]
        return chain
