"""Compares the answers of two runs, because greedy decoding of one prompt has only one answer. Pure."""

import hashlib
from collections.abc import Sequence

from baton.core.errors import SetupError
from loadgen.records import RequestOutcome, RequestRecord
from loadgen.report.model import AnswerCheck, RunSettings
from loadgen.sse import Answer

DIGEST_BYTES = 8
PROMPTS_FOLLOW = (
    *("length_scale", "output_scale", "max_input", "max_output", "start_s", "api", "sessions"),
    *("first_token", "vocab_size"),
)
"""Options that decide what the prompts are."""
NAMED_MAX = 20
"""Error texts name at most this many differing requests."""


def digest(answer: Answer) -> str:
    """The digest of the token ids, or of the text if the server sends no ids."""
    content = repr(answer.token_ids) if answer.token_ids else answer.text
    return hashlib.blake2b(content.encode(), digest_size=DIGEST_BYTES).hexdigest()


def check_answers(records: Sequence[RequestRecord], before: Sequence[RequestRecord]) -> AnswerCheck:
    """Compare the completed requests of both runs by their place in the plan. Raises SetupError if there are
    none, or if the prompts differ."""
    earlier = {r.index: r for r in before if _tells(r)}
    pairs = [(r, earlier[r.index]) for r in records if _tells(r) and r.index in earlier]
    if not pairs:
        raise SetupError("no answer can be compared: give --records of a run of these very requests")
    if any(now.prompt_tokens != then.prompt_tokens for now, then in pairs):
        raise SetupError(
            "the earlier run had other prompts: give both the same trace, lengths, --limit and --seed"
        )
    differing = [now.index for now, then in pairs if now.answer != then.answer]
    return AnswerCheck(len(pairs), len(differing), tuple(differing[:NAMED_MAX]))


def check_same_requests(now: RunSettings, before: RunSettings) -> list[str]:
    """Other differences between the runs, which may or may not matter. A setting that one of the runs does
    not record is not compared.

    Raises SetupError if the earlier run had other requests, so that its answers must differ.
    """
    pairs: list[tuple[str, object, object]] = [("seed", now.seed, before.seed)]
    for name in PROMPTS_FOLLOW:
        if name in now.options and name in before.options:
            pairs.append((name, now.options[name], before.options[name]))
    others = [f"{name} {then} there, {here} here" for name, here, then in pairs if here != then]
    if others:
        raise SetupError(f"--same-answers-as: the requests of that run were others: {'; '.join(others)}")
    pairs = [("trace", now.trace, before.trace), ("model", now.model, before.model)]
    return [f"{name} {then} there, {here} here" for name, here, then in pairs if here != then]


def _tells(record: RequestRecord) -> bool:
    return record.outcome is RequestOutcome.COMPLETED and bool(record.answer)
