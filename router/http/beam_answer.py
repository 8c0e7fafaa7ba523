"""Beam search as a request. Every step asks for one more token of every beam, on prefixes that are cached."""

from typing import Any

from baton.core.sampling import SamplingParams
from router.decisions.events import SequencePart
from router.http.prepare import RequestPreparation, TokenizedPrompt, part_of
from router.http.sequence_group import SequenceGroup
from router.http.service import Service
from router.openai.beam import BeamSearch, Hypothesis
from router.openai.call import Beam, Call
from router.openai.choice_stream import ChoiceOptions, call_id, message_body
from router.openai.responses import AnswerFormat, Usage
from router.openai.sampling import sampling_params


class BeamAnswer:
    def __init__(self, service: Service, call: Call, beam: Beam, preparation: RequestPreparation) -> None:
        self._service, self._call, self._beam, self._preparation = service, call, beam, preparation
        self._cached_tokens: int | None = None
        self.usage = Usage()

    async def whole(
        self, prompts: list[TokenizedPrompt], answer: AnswerFormat, group: SequenceGroup
    ) -> bytes:
        """Return the complete answer. Raises BatonError."""
        found: list[tuple[TokenizedPrompt, Hypothesis]] = []
        for at, prompt in enumerate(prompts):
            found += [(prompt, one) for one in await self._search(at, prompt, group)]
        bodies = [self._choice(answer, i, prompt, one) for i, (prompt, one) in enumerate(found)]
        extra: dict[str, Any] = {}
        if answer.is_chat and self._call.with_token_ids:
            extra = {"prompt_token_ids": prompts[0].tokens}
        return answer.whole(bodies, self.usage, extra)

    async def _search(self, at: int, prompt: TokenizedPrompt, group: SequenceGroup) -> list[Hypothesis]:
        call, service = self._call, self._service
        wanted = sampling_params(
            call, choice_index=0, prompt_tokens=len(prompt.tokens), limits=service.limits
        )
        vocab = service.limits.card.vocab_size
        search = BeamSearch(
            width=self._beam.width,
            length_penalty=self._beam.length_penalty,
            eos_token_ids=() if wanted.ignore_eos else wanted.stop_token_ids,
            max_tokens=wanted.max_tokens,
        )
        sampling = SamplingParams(max_tokens=1, logprobs=min(search.alternatives, vocab))
        self.usage.prompt_tokens += len(prompt.tokens)
        cached: int | None = None
        while not search.is_over:
            step = len(search.running[0].tokens)
            part = SequencePart.STEP if step else part_of(at)
            submits = [
                self._preparation.submit(
                    f"{at}.{step}.{i}", (*prompt.tokens, *beam.tokens), sampling, part=part
                )
                for i, beam in enumerate(search.running)
            ]
            ended = await group.all(submits, in_flight_max=len(submits))
            if cached is None:
                cached = ended[0][0].cached_token_count
                self.usage.cached_tokens += cached
            search.step([collector.logprobs[0].top for collector, _ in ended])
        self.usage.completion_tokens += sum(len(one.tokens) for one in search.ended)
        return search.ended

    def _choice(
        self, answer: AnswerFormat, index: int, prompt: TokenizedPrompt, one: Hypothesis
    ) -> dict[str, Any]:
        sampling = SamplingParams(
            max_tokens=max(1, len(one.tokens)),
            stop_token_ids=(*self._service.limits.card.eos_token_ids, *self._call.sampling.stop_token_ids),
            ignore_eos=self._call.sampling.ignore_eos,
        )
        submit = self._preparation.submit("text", prompt.tokens, sampling)
        parser = self._preparation.parser(prompt.start) if answer.is_chat else None
        detokenizer = self._preparation.detokenizer(submit, ChoiceOptions(parser=parser))
        text = detokenizer.push(one.tokens) + detokenizer.finish()
        said: dict[str, Any] = {"text": text}
        if self._call.with_token_ids and not answer.is_chat:
            said["prompt_token_ids"] = prompt.tokens
        if answer.is_chat:
            said = {"message": {"role": "assistant", "content": text}}
        is_end = bool(one.tokens) and one.tokens[-1] in sampling.stop_token_ids and not sampling.ignore_eos
        ids = list(one.tokens) if self._call.with_token_ids else None
        if parser is not None:
            said = {"message": message_body(parser.feed(text) + parser.finish(), call_id)}
        return answer.choice(index, said, "stop" if is_end else "length", None, ids)
