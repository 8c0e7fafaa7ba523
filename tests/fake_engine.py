"""An engine of dictionaries. It keeps tokens where a real engine keeps their KV, and chooses the next token
by the content of the plan's blocks, so that a wrong table, position, copy or swap shows as a wrong token."""

import zlib

from baton.core.sampling import finish_after
from baton.core.steps import PENDING_TOKEN, ItemResult, StepResult, TokenLogprobs


def crc_token(tokens):
    return zlib.crc32(",".join(map(str, tokens)).encode()) % 1000


def logprobs_of(token):
    return TokenLogprobs(token, -token / 1000, 1)


class FakeEngine:
    def __init__(self, block_count, block_tokens, next_token=crc_token):
        self.block_tokens = block_tokens
        self.memory = [[None] * block_tokens for _ in range(block_count)]
        self.swapped = {}
        self.next_token = next_token
        self.histories = {}
        self.last_sampled = {}
        self.last_step = 0
        self.computed_tokens = self.draft_tokens = 0

    def run(self, plan, elapsed_s=0.01):
        assert plan.step_number == self.last_step + 1
        assert len({item.key for item in plan.items}) == len(plan.items)
        for block, slot in plan.swap_out:
            self.swapped[slot] = list(self.memory[block])
        for slot, block in plan.swap_in:
            self.memory[block] = list(self.swapped[slot])
        copied = [list(self.memory[source]) for source, _ in plan.copies]
        for (_, block), content in zip(plan.copies, copied, strict=True):
            self.memory[block] = content
        for key in plan.ended:
            self.histories.pop(key, None)
        results = tuple(self._run(item) for item in plan.items)
        self.last_sampled = {
            item.key: result.tokens[-1]
            for item, result in zip(plan.items, results, strict=True)
            if result.tokens
        }
        self.last_step = plan.step_number
        return StepResult(plan.step_number, results, elapsed_s)

    def _run(self, item):
        tokens = item.tokens
        if tokens == (PENDING_TOKEN,):
            tokens = (self.last_sampled[item.key],)
        assert PENDING_TOKEN not in tokens
        self.computed_tokens += len(tokens)
        self.draft_tokens += item.draft_count
        if item.history is not None:
            self.histories[item.key] = list(item.history)
        for position, token in enumerate(tokens, start=item.first_position):
            block = item.block_ids[position // self.block_tokens]
            self.memory[block][position % self.block_tokens] = token
        prompt_end = min(item.first_position + len(tokens) + 1, item.prompt_token_count)
        prompt_logprobs = ()
        if item.sampling.prompt_logprobs is not None:
            known = [*tokens[1:], item.next_prompt_token]
            prompt_logprobs = tuple(map(logprobs_of, known[: max(0, prompt_end - item.first_position - 1)]))
        if item.wants_embedding:
            return ItemResult(embedding=tuple(map(float, self._context(item, prompt_end))))
        if item.sample_index is None:
            return ItemResult(prompt_logprobs=prompt_logprobs)
        sampled = self._sample(item, tokens)
        logprobs = tuple(map(logprobs_of, sampled)) if item.sampling.logprobs is not None else ()
        drafts = self._drafts(item, tokens, sampled)
        return ItemResult(sampled, logprobs, prompt_logprobs, drafts=drafts)

    def _drafts(self, item, tokens, sampled):
        """The draft tokens of a model that is always right."""
        text = self._context(item, item.first_position + len(tokens) - item.draft_count)
        text += sampled
        for _ in range(item.want_drafts):
            text.append(self.next_token(text))
        return tuple(text[len(text) - item.want_drafts :])

    def _context(self, item, end):
        where = [(item.block_ids[p // self.block_tokens], p % self.block_tokens) for p in range(end)]
        return [self.memory[block][place] for block, place in where]

    def _sample(self, item, tokens):
        """Sample after the last token that is not a draft token, and after each accepted draft token."""
        first_draft = len(tokens) - item.draft_count
        sampled = []
        for end in range(first_draft, len(tokens) + 1):
            token = self.next_token(self._context(item, item.first_position + end))
            sampled.append(token)
            if item.sampling.needs_history:
                history = self.histories[item.key]  # KeyError: it was never given, or is forgotten
                assert history == self._context(item, item.first_position + end)
                history.append(token)
            is_over = finish_after(item.sampling, token, item.sample_index + len(sampled)) is not None
            if is_over or end == len(tokens) or tokens[end] != token:
                break
        return tuple(sampled)
