"""A router's hashes are the workers', however and where they were computed."""

from array import array
from hashlib import blake2b

from hypothesis import given
from hypothesis import strategies as st

from baton.core.hashing import block_hashes, root_hash
from router.decisions.prompt_hashes import ChainKind, PromptHashes

tokens_of = st.lists(st.integers(0, 2**32 - 1), max_size=40)
KINDS = (ChainKind("f", 4), ChainKind("g", 4), ChainKind("f", 3))


def test_the_definition():
    root = root_hash("f", b"salt")
    first = blake2b(root + array("I", [1, 2, 3, 4]).tobytes(), digest_size=16).digest()
    second = blake2b(first + array("I", [5, 6, 7, 8]).tobytes(), digest_size=16).digest()
    assert block_hashes(root, range(1, 12), 4) == [first, second]


@given(tokens_of, tokens_of, st.sampled_from(KINDS))
def test_a_chain_that_grew_is_the_chain_of_all(prompt, more, kind):
    fingerprint, block_tokens = kind
    hashes = PromptHashes.computed(b"salt", prompt, KINDS)
    everything = block_hashes(root_hash(fingerprint, b"salt"), (*prompt, *more), block_tokens)
    before = hashes.of(prompt, fingerprint, block_tokens)
    assert before == everything[: len(prompt) // block_tokens]
    assert hashes.of([*prompt, *more], fingerprint, block_tokens) == everything


@given(tokens_of, tokens_of, tokens_of)
def test_siblings_share_the_prompt_only(prompt, mine, others):
    shared = PromptHashes.computed(b"salt", prompt, KINDS)
    one, other = shared.fork(), shared.fork()
    for kind in KINDS:
        one.of([*prompt, *mine], kind.fingerprint, kind.block_tokens)
        root = root_hash(kind.fingerprint, b"salt")
        expected = block_hashes(root, [*prompt, *others], kind.block_tokens)
        assert other.of([*prompt, *others], kind.fingerprint, kind.block_tokens) == expected
