"""Block hashes of one sequence, computed once per fingerprint and extended when it is placed anew."""

from collections.abc import Sequence

from baton.core.hashing import block_hashes, root_hash
from baton.core.ids import BlockHash


class PromptHashes:
    def __init__(self, salt: bytes) -> None:
        self._salt = salt
        self._chains: dict[tuple[str, int], list[BlockHash]] = {}

    def of(self, tokens: Sequence[int], fingerprint: str, block_tokens: int) -> list[BlockHash]:
        """Hashes of the full blocks of `tokens`, which only ever grow from call to call."""
        chain = self._chains.setdefault((fingerprint, block_tokens), [])
        known_tokens = len(chain) * block_tokens
        if len(tokens) - known_tokens >= block_tokens:
            parent = chain[-1] if chain else root_hash(fingerprint, self._salt)
            chain += block_hashes(parent, tokens[known_tokens:], block_tokens)
        return chain
