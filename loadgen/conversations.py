"""Prompts of conversations that contain the answers which the server really gave. Pure.

A turn continues another if its prompt begins with the other's prompt. It is sent as that prompt, the answer
as it came, and new tokens up to the length in the trace. A server that keeps the KV of what it generated can
thus reuse it, as in production. A turn that does not continue (its history was cut or rewritten, as retrieval
does), or whose earlier turn has no answer, is sent with the trace's own prompt.
"""

from typing import cast

import numpy as np
from numpy.typing import NDArray

from loadgen.lengths import PlannedRequest, ReplayPlan
from loadgen.prompts import PromptMaker
from loadgen.sse import Answer
from loadgen.target import Api


def continues(plan: ReplayPlan, before: PlannedRequest, turn: PlannedRequest) -> bool:
    """True if the turn's prompt begins with the whole earlier prompt, as far as the trace shows."""
    if turn.input_tokens <= before.input_tokens:
        return False
    if not plan.has_prefixes or not before.hash_ids:
        return not turn.hash_ids
    whole = min(int(before.input_tokens // plan.block_tokens), len(before.hash_ids))
    return turn.hash_ids[:whole] == before.hash_ids[:whole]


class Conversations:
    """Makes prompts, and remembers only what later turns need."""

    def __init__(self, plan: ReplayPlan, prompts: PromptMaker, api: Api, *, remembers: bool) -> None:
        self._plan = plan
        self._prompts = prompts
        self._api = api
        self._requests = {r.index: r for r in plan.requests}
        self._turns_left: dict[int, int] = {}
        if remembers:
            for request in plan.requests:
                if request.parent is not None:
                    self._turns_left[request.parent] = self._turns_left.get(request.parent, 0) + 1
        self._sent: dict[int, object] = {}
        self._answers: dict[int, Answer] = {}

    def wants_answer(self, index: int) -> bool:
        return index in self._turns_left

    def prompt(self, request: PlannedRequest) -> object:
        """The prompt as token ids, text or messages, as the API requires."""
        prompt = self._continued(request)
        if prompt is None:
            prompt = self._fresh(request)
        if request.index in self._turns_left:
            self._sent[request.index] = prompt
        return prompt

    def answered(self, index: int, answer: Answer) -> None:
        """Store the answer of a request for which `wants_answer` is true, once it is complete."""
        self._answers[index] = answer

    def _fresh(self, request: PlannedRequest) -> object:
        if self._api is Api.COMPLETIONS:
            return self._prompts.tokens(request)
        text = self._prompts.text(request)
        return text if self._api is Api.COMPLETIONS_TEXT else [_message("user", text)]

    def _continued(self, request: PlannedRequest) -> object | None:
        parent = request.parent
        if parent is None or parent not in self._turns_left:
            return None
        sent, answer = self._sent.get(parent), self._answers.get(parent)
        self._turns_left[parent] -= 1
        if not self._turns_left[parent]:
            for memory in (self._sent, self._answers, self._turns_left):
                memory.pop(parent, None)
        before = self._requests[parent]
        if sent is None or answer is None or not continues(self._plan, before, request):
            return None
        count = max(1, request.input_tokens - before.input_tokens - before.output_tokens)
        new = self._prompts.tokens(request)[-count:]
        if self._api is Api.COMPLETIONS:
            if not answer.token_ids:
                return None
            ids = np.array(answer.token_ids, dtype=np.int64)
            return np.concatenate((cast("NDArray[np.int64]", sent), ids, new))
        words = self._prompts.words(new)
        if self._api is Api.COMPLETIONS_TEXT:
            return f"{sent}{answer.text} {words}"
        messages = cast("list[dict[str, str]]", sent)
        return [*messages, _message("assistant", answer.text), _message("user", words)]


def _message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}
