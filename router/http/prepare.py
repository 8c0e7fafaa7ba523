"""Preparation of a checked call: its prompts as tokens, its grammar, and how its text is read."""

import asyncio
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from baton.core.errors import DeadlineOver
from baton.core.ids import RequestId, SequenceId, fairness_key
from baton.core.messages import AdapterRef, Task
from baton.core.sampling import Grammar, SamplingParams
from router.decisions.events import SequencePart, Submit
from router.decisions.prompt_hashes import PromptHashes
from router.decisions.stored_prefix import StoredPrefix
from router.http.client import ANYBODY, AuthenticatedClient
from router.http.service import Service
from router.live.store_lookup import StoreLookup
from router.openai.call import Call, Endpoint
from router.openai.checks import Prompt
from router.openai.choice_stream import ChoiceOptions, Echo, call_id, short_call_id
from router.openai.logprobs import LogprobFormat
from router.openai.sampling import sampling_params
from router.openai.tool_grammar import tool_grammar
from router.tenants.service_classes import NO_OBJECTIVES, RequestObjectives
from router.text.conversation import ToolMode
from router.text.detokenizer import Detokenizer
from router.text.parsers.select import ParserChain, ReasoningStart, make_parser, reasoning_start

HASHED_ON_LOOP_TOKENS = 1024
"""Prompts of fewer tokens that need no tokeniser are hashed when they are placed. That takes 35 us at 16
tokens a block, less than the way to a thread and back."""

BATCH_CHARACTERS = 65_536
"""Characters of several prompts that go to a thread together."""

TEMPLATE_CHARACTERS = 64
"""Characters that a chat template's work on a message counts as."""

LOOKED_UP_TOKENS = 1024
"""Shortest prompt for which the stores are asked. Shorter ones are computed before the answer is here."""

CONTEXT_TOKENS = 5
"""Number of last prompt tokens that decide how the first generated ones are spaced."""

Part = tuple[Submit, Detokenizer, ChoiceOptions]

_NO_REASONING = ReasoningStart(is_open=False, is_closed=True)


class TokenizedPrompt(NamedTuple):
    tokens: tuple[int, ...]
    text: str | None
    """Text as the client wrote it. None if the client wrote tokens, or the prompt was cut."""
    start: ReasoningStart
    hashes: PromptHashes | None = None
    """Block hashes that the tokenising thread has computed already."""
    stored: StoredPrefix | None = None


def part_of(index: int, index_in_prompt: int = 0) -> SequencePart:
    """Return what a sequence is within its request, by its place among all and among those of its prompt."""
    if index_in_prompt:
        return SequencePart.ANSWER
    return SequencePart.PROMPT if index else SequencePart.REQUEST


def _characters(call: Call) -> float:
    """Estimate how many characters the template makes of a conversation. Infinite: it may be any number."""
    if call.tools.tools or call.template.documents or any("tool_calls" in m for m in call.messages):
        return math.inf
    return sum(len(m.get("content") or "") + TEMPLATE_CHARACTERS for m in call.messages)


def _batches(prompts: Sequence[Prompt]) -> Iterator[list[Prompt]]:
    """Return the prompts in order, in groups of at most `BATCH_CHARACTERS` if that is more than one."""
    batch: list[Prompt] = []
    size = 0
    for prompt in prompts:
        if batch and size + len(prompt) > BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
        batch.append(prompt)
        size += len(prompt)
    yield batch


class RequestPreparation:
    """Preparation of one request."""

    def __init__(
        self,
        service: Service,
        call: Call,
        *,
        request_id: RequestId,
        traceparent: str,
        deadline_s: float,
        adapter: AdapterRef | None,
        arrived_s: float | None = None,
        objectives: RequestObjectives = NO_OBJECTIVES,
        client: AuthenticatedClient = ANYBODY,
        request_digest: str = "",
        may_block: bool = True,
    ) -> None:
        """`request_digest` is the same when a client sends its request again. `may_block` says that the body
        is so small that work on it may be done on the event loop."""
        self._service, self._call = service, call
        self._arrived_s, self._objectives = arrived_s, objectives
        self._client, self._request_digest = client, request_digest
        self._may_block = may_block
        self._salt = service.salt(adapter, client.salt)
        self._request_id, self._traceparent = request_id, traceparent
        self._deadline_s = deadline_s
        self._adapter = adapter
        self._tokenizer = service.tokenizer
        form = LogprobFormat(
            self._tokenizer.token_bytes,
            tokens_as_ids=call.tokens_as_ids,
            is_chat=call.endpoint is Endpoint.CHAT,
        )
        self._form = form if call.with_logprobs else None
        self.prompt_form = form if call.with_prompt_logprobs else None

    async def timed_prompts(self) -> tuple[list[TokenizedPrompt], float]:
        """Return the prompts and the seconds that tokenising took. Raises as `prompts` does."""
        now_s = self._service.driver.now_s
        began_s = now_s()
        prompts = await self.prompts()
        return prompts, now_s() - began_s

    async def prompts(self) -> list[TokenizedPrompt]:
        """Return the tokenised prompts. Raises ClientError, QueueFull, DeadlineOver."""
        try:
            async with asyncio.timeout_at(self._deadline_s):
                if self._call.endpoint is Endpoint.CHAT:
                    size = _characters(self._call) if self._may_block else math.inf
                    found = [await self._tokenizer.on_loop_or_in_thread(size, self._conversation)]
                else:
                    found = await self._of_all(self._call.prompts)
                if self._service.store_lookup is None:
                    return found
                return [await self._looked_up(prompt, self._service.store_lookup) for prompt in found]
        except TimeoutError:
            raise DeadlineOver("the request's time was over before its prompt was tokenised") from None

    async def _of_all(self, prompts: Sequence[Prompt]) -> list[TokenizedPrompt]:
        """Tokenise prompts, on the loop only if all of them are short together."""
        if all(isinstance(prompt, tuple) and len(prompt) < HASHED_ON_LOOP_TOKENS for prompt in prompts):
            return [self._of(prompt) for prompt in prompts]
        whole = sum(map(len, prompts))
        found: list[TokenizedPrompt] = []
        for batch in _batches(prompts):
            work = partial(list, map(self._of, batch))
            found += await self._tokenizer.on_loop_or_in_thread(whole, work)
        return found

    async def _looked_up(self, prompt: TokenizedPrompt, lookup: StoreLookup) -> TokenizedPrompt:
        kinds = self._service.driver.chain_kinds
        if prompt.hashes is None or len(prompt.tokens) < LOOKED_UP_TOKENS or len(kinds) != 1:
            return prompt
        (kind,) = kinds
        return prompt._replace(stored=await lookup.of(prompt.hashes.of(prompt.tokens, *kind)))

    # --- in a thread, or on the loop if short ----------------------------------------------------

    def _of(self, prompt: Prompt) -> TokenizedPrompt:
        if isinstance(prompt, str):
            return self._text(prompt)
        found = TokenizedPrompt(self._cut(prompt), None, _NO_REASONING)
        return found if len(prompt) < HASHED_ON_LOOP_TOKENS else self._hashed(found)

    def _hashed(self, prompt: TokenizedPrompt) -> TokenizedPrompt:
        kinds = self._service.driver.chain_kinds
        if not kinds:
            return prompt
        return prompt._replace(hashes=PromptHashes.computed(self._salt, prompt.tokens, kinds))

    def _conversation(self) -> TokenizedPrompt:
        call = self._call
        # A prompt for a model that may not call anything does not mention tools.
        tools = [] if call.tools.mode is ToolMode.NONE else [tool.declared for tool in call.tools.tools]
        tokens, end = self._tokenizer.chat_prompt(
            call.messages,
            tools=tools,
            tool_parser=self._service.parsers.tool,
            template=call.template,
            with_special=bool(call.add_special_tokens),
            may_be_cut=call.truncate_prompt_tokens is not None,
        )
        start = reasoning_start(self._service.parsers.reasoning, end)
        return self._hashed(TokenizedPrompt(self._cut(tokens), None, start))

    def _text(self, text: str) -> TokenizedPrompt:
        call = self._call
        tokens = self._tokenizer.text_ids(
            text,
            field=call.prompt_field,
            with_special=call.add_special_tokens is not False,
            may_be_cut=call.truncate_prompt_tokens is not None,
        )
        cut = self._cut(tokens)
        return self._hashed(TokenizedPrompt(cut, text if cut is tokens else None, _NO_REASONING))

    def _cut(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Keep the last tokens that `truncate_prompt_tokens` allows."""
        most = self._call.truncate_prompt_tokens
        if most is None:
            return tokens
        if most == -1:
            limits = self._service.limits
            context = limits.card.context_tokens
            answer = 1 if self._call.endpoint is Endpoint.EMBEDDING else limits.default_max_tokens
            most = context - (self._call.max_tokens or min(answer, context // 2))
        return tokens if len(tokens) <= most else tokens[len(tokens) - max(1, most) :]

    async def parts(self, prompts: list[TokenizedPrompt]) -> list[Part]:
        """Return one part per sequence; those of one prompt are adjacent."""
        call, parts = self._call, list[Part]()
        for prompt in prompts:
            grammar, is_late = await self._grammar(prompt)
            echo = await self._echo(prompt) if call.echo else None
            for i in range(call.sequences_per_prompt):
                parts.append(self._part(prompt, len(parts), i, grammar, echo, is_late=is_late))
        return parts

    async def _grammar(self, prompt: TokenizedPrompt) -> tuple[Grammar | None, bool]:
        """Return the grammar, and whether it begins only after the reasoning."""
        call, parsers = self._call, self._service.parsers
        grammar = call.structured.grammar if call.structured is not None else None
        grammar = grammar or await self._tool_grammar()
        if grammar is None or call.endpoint is not Endpoint.CHAT or prompt.start.is_closed:
            return grammar, False
        harmony = "<|channel|>final<|message|>"
        marker = harmony if parsers.reasoning == "harmony" else "</think>"
        ids = await self._tokenizer.encode(marker, with_special=False)
        if len(ids) > 3:  # Other tokens could spell the marker, and would not be noticed.
            return grammar, False
        return msgspec.structs.replace(grammar, after_token_ids=ids), True

    async def _tool_grammar(self) -> Grammar | None:
        tools, parser = self._call.tools, self._service.parsers.tool
        if self._may_block or tools.mode is ToolMode.NONE:
            return tool_grammar(tools, parser)
        return await self._tokenizer.in_thread(lambda: tool_grammar(tools, parser))

    async def _echo(self, prompt: TokenizedPrompt) -> Echo:
        call, tokenizer = self._call, self._tokenizer
        if not call.with_logprobs and prompt.text is not None:
            return Echo(prompt.text, prompt.tokens, ())

        def spell() -> Echo:
            detokenizer = Detokenizer(tokenizer.decode, special_ids=tokenizer.special_ids)
            starts: list[int] = []
            pieces: list[str] = []
            length = 0
            for token in prompt.tokens:
                starts.append(length)
                pieces.append(detokenizer.push((token,)))
                length += len(pieces[-1])
            return Echo("".join(pieces) + detokenizer.finish(), prompt.tokens, tuple(starts))

        return await asyncio.to_thread(spell)

    def _part(
        self, prompt: TokenizedPrompt, index: int, index_in_prompt: int, grammar: Grammar | None,
        echo: Echo | None, *, is_late: bool,
    ) -> Part:  # fmt: skip
        call, service = self._call, self._service
        sampling = sampling_params(
            call,
            choice_index=index,
            prompt_tokens=len(prompt.tokens),
            limits=service.limits,
            grammar=grammar,
        )
        is_ranked = call.best_of > call.n
        if is_ranked and sampling.logprobs is None:
            sampling = msgspec.structs.replace(sampling, logprobs=0)
        if index_in_prompt and not call.stream and sampling.prompt_logprobs is not None:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        first = index - index_in_prompt
        group = f"{self._request_id}/{first}" if call.sequences_per_prompt > 1 else ""
        submit = self.submit(
            f"{index}", prompt.tokens, sampling, group=group, part=part_of(index, index_in_prompt),
            hashes=prompt.hashes, stored=prompt.stored,
        )  # fmt: skip
        options = ChoiceOptions(
            token_ids=call.with_token_ids,
            logprobs=self._form,
            parser=self.parser(prompt.start, is_late=is_late, is_constrained=grammar is not None),
            new_call_id=short_call_id if service.parsers.tool == "mistral" else call_id,
            echo=echo,
            prompt_only=call.prompt_only,
            is_ranked=is_ranked,
            grammar_field=self._grammar_field() if grammar is not None else None,
        )
        return submit, self.detokenizer(submit, options), options

    def _grammar_field(self) -> str | None:
        if self._adapter is not None:
            return None
        return self._call.structured.field if self._call.structured is not None else "tools"

    def submit(
        self,
        name: str,
        tokens: tuple[int, ...],
        sampling: SamplingParams,
        *,
        group: str = "",
        task: Task = Task.GENERATE,
        part: SequencePart = SequencePart.REQUEST,
        hashes: PromptHashes | None = None,
        stored: StoredPrefix | None = None,
    ) -> Submit:
        """Make one sequence of this request, called `name` within it. `hashes` are the hashes of the prompt's
        blocks, and `stored` says which of them stores have.

        The first sequence is judged by the request's TTFT objective, from the request's arrival. Later ones
        wait from when they are submitted, and have no TTFT objective."""
        call, client, objectives = self._call, self._client, self._objectives
        is_first = part is SequencePart.REQUEST
        has_tpot = task is Task.GENERATE and sampling.max_tokens > 1
        return Submit(
            seq_id=SequenceId(f"{self._request_id}/{name}"),
            request_id=self._request_id,
            prompt=tokens,
            sampling=sampling,
            salt=self._salt,
            deadline_s=self._deadline_s,
            traceparent=self._traceparent,
            adapter=self._adapter,
            priority=objectives.priority if call.priority is None else call.priority,
            ttft_slo_s=objectives.ttft_s if is_first else 0.0,
            tpot_slo_s=objectives.tpot_s if has_tpot else 0.0,
            slo_class=objectives.slo_class,
            refuse_late=objectives.refuse_late and is_first,
            arrived_s=self._arrived_s if is_first else None,
            tenant=client.name,
            weight=client.tenant.weight,
            request_digest=self._request_digest,
            fairness_key=fairness_key(client.name if client.salt else "", call.fairness_key),
            part=part,
            group=group,
            task=task,
            hashes=None if hashes is None else hashes.fork(),
            stored=stored,
        )

    def parser(
        self, start: ReasoningStart, *, is_late: bool = False, is_constrained: bool = False
    ) -> ParserChain | None:
        call, parsers = self._call, self._service.parsers
        if call.endpoint is not Endpoint.CHAT:
            return None
        if is_constrained and not is_late and parsers.reasoning != "harmony":
            start = _NO_REASONING
        return make_parser(
            parsers, call.tools, start, is_constrained=is_late, with_reasoning=call.include_reasoning
        )

    def detokenizer(self, submit: Submit, options: ChoiceOptions) -> Detokenizer:
        call, service, sampling = self._call, self._service, submit.sampling
        special = self._tokenizer.special_ids if call.skip_special else frozenset[int]()
        if options.parser is not None:
            special -= service.marker_ids
        return Detokenizer(
            self._tokenizer.decode,
            special_ids=special,
            stop_ids=frozenset() if sampling.ignore_eos else frozenset(sampling.stop_token_ids),
            stops=call.stops,
            context=submit.prompt[-CONTEXT_TOKENS:],
            keeps_stop=call.with_stop,
            min_tokens=sampling.min_tokens,
        )
