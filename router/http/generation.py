"""POST /v1/chat/completions and /v1/completions."""

import asyncio
import time
from collections.abc import Callable, Sequence

from baton.core.errors import BatonError, DeadlineOver
from router.http.asgi import (
    ABORT,
    EVENTS,
    HANG_UP,
    JSON,
    WRITE_NOW,
    ClientDisconnected,
    Receive,
    Scope,
    Send,
    read_body,
    respond,
    watch,
)
from router.http.beam_answer import BeamAnswer
from router.http.observe import RequestOutcome, outcome_of
from router.http.prepare import RequestPreparation, TokenizedPrompt
from router.http.request import RequestHandler
from router.http.sequence_group import GroupCancelled, SequenceGroup
from router.http.streaming import DEADLINE_GRACE_S, ResponseStream
from router.openai import requests as openai_api
from router.openai.call import Beam, Call, RequestLimits
from router.openai.responses import AnswerFormat
from router.openai.timings import EdgeTimes
from router.tenants.service_classes import verdict_of_error


class GenerationRequest(RequestHandler):
    @staticmethod
    def parse(body: bytes, limits: RequestLimits) -> Call:
        raise NotImplementedError

    async def read_call(self, body: bytes) -> Call:
        """Return the checked call of a body. Raises ClientError, QueueFull, DeadlineOver."""
        return await self.parsed(body, self.parse)

    async def before_end(self, response: ResponseStream) -> None:
        """Do what must be done before the client has the end of a complete answer."""

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> RequestOutcome:
        service = self.service
        body = await read_body(scope, receive, bytes_max=service.config.body_bytes_max)
        call = await self.read_call(body)
        if call.beam is not None:
            return await self._serve_beams(call, call.beam, body, scope, receive, send)
        preparation = self.preparation(call, scope, body)
        response = self.response_stream(call)
        response.prompt_format = preparation.prompt_form
        response.with_timings = call.with_timings
        unwatch = watch(scope, receive, response.client_gone)
        try:
            try:
                await self._submit_and_answer(call, preparation, response, scope, send)
            finally:
                response.close()
                unwatch()
                self.used_tokens = response.computed_tokens()
            return self._outcome(response)
        finally:
            response.release()

    async def _submit_and_answer(
        self, call: Call, preparation: RequestPreparation, response: ResponseStream, scope: Scope, send: Send
    ) -> None:
        prompts, tokenize_s = await preparation.timed_prompts()
        parts = await preparation.parts(prompts)
        await self.reserve(
            scope, _most_tokens(prompts, [submit.sampling.max_tokens for submit, _, _ in parts])
        )
        if not response.is_gone:
            route_s = response.now_s() - self.arrived_s - tokenize_s
            response.edge = EdgeTimes(max(0.0, route_s), tokenize_s)
            response.submit(parts, choices_per_prompt=call.sequences_per_prompt, answers_per_prompt=call.n)
            await self._answer(call, response, scope, send)

    async def _serve_beams(
        self, call: Call, beam: Beam, body: bytes, scope: Scope, receive: Receive, send: Send
    ) -> RequestOutcome:
        preparation = self.preparation(call, scope, body)
        group = SequenceGroup(self.service.driver, call.prompt_field)
        unwatch = watch(scope, receive, group.stop)
        try:
            async with asyncio.timeout_at(self.deadline_s + DEADLINE_GRACE_S):
                prompts = await preparation.prompts()
                most = call.max_tokens or self.service.limits.default_max_tokens
                await self.reserve(scope, _most_tokens(prompts, [most] * beam.width * len(prompts)))
                answer = BeamAnswer(self.service, call, beam, preparation)
                whole = await answer.whole(prompts, self.answer_format(call), group)
        except TimeoutError:
            raise DeadlineOver("the request's time is over") from None
        except GroupCancelled:
            raise ClientDisconnected from None
        finally:
            unwatch()
            self.first_token_s, self.used_tokens = group.first_token_s, group.computed_tokens
        self.used_tokens = answer.usage.total_tokens
        await respond(send, 200, whole, JSON)
        self.group_answered(answer.usage, first_token_s=group.first_token_s)
        return "completed"

    def answer_format(self, call: Call) -> AnswerFormat:
        service = self.service
        return AnswerFormat(
            call.endpoint,
            request_id=self.request_id,
            created=int(time.time()),
            model=call.model,
            system_fingerprint=lambda: service.system_fingerprint,
            include_usage=call.include_usage,
        )

    def response_stream(self, call: Call) -> ResponseStream:
        service = self.service
        return ResponseStream(
            service.driver,
            self.answer_format(call),
            deadline_s=self.deadline_s,
            unsent_tokens_max=service.config.output_buffer_tokens_max,
        )

    async def _answer(self, call: Call, response: ResponseStream, scope: Scope, send: Send) -> None:
        abort: Callable[[], None] = scope.get(ABORT, _no_way_to_hang_up)

        def hang_up(error: BatonError) -> None:
            end: Callable[[bytes], None] | None = scope.get(HANG_UP)
            abort() if end is None else end(response.error_event(error))

        if not call.stream:
            body = await response.whole()
            if not response.is_gone:
                await self.before_end(response)
                await response.write_end(respond(send, 200, body, JSON), on_drop=abort)
            return
        await response.begin()
        if response.is_gone:
            return

        async def write(events: bytes) -> None:
            await send({"type": "http.response.body", "body": events, "more_body": True})

        await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        last = await response.stream(
            write,
            include_usage=call.include_usage,
            on_drop=hang_up,
            write_now=scope.get(WRITE_NOW, _not_now),
        )
        if not response.is_gone and response.error is None:
            await self.before_end(response)
        if not response.is_gone:
            await response.write_end(send({"type": "http.response.body", "body": last}), on_drop=abort)

    def _outcome(self, response: ResponseStream) -> RequestOutcome:
        observer = self.service.observer
        if response.dropped_reason:
            observer.on_slow_client()
            self.message = response.dropped_reason
        if response.is_gone:
            self.cancelled(response.first_token_s)
            return "cancelled"
        if response.error is not None:
            self.verdict = verdict_of_error(response.error)
            return outcome_of(response.error)
        observer.on_answered(response, arrived_s=self.arrived_s)
        tpots_s = [choice.tpot_s for choice in response.choices if choice.tpot_s is not None]
        self.answered(first_token_s=response.first_token_s, tpot_s=max(tpots_s, default=0.0))
        return "completed"


class ChatRequest(GenerationRequest):
    parse = staticmethod(openai_api.parse_chat)


class CompletionRequest(GenerationRequest):
    parse = staticmethod(openai_api.parse_completion)


def _most_tokens(prompts: Sequence[TokenizedPrompt], answers: Sequence[int]) -> int:
    """Return the most tokens that the request can use. A prompt counts once, as in its usage."""
    return sum(len(prompt.tokens) for prompt in prompts) + sum(answers)


def _not_now(_: bytes) -> bool:
    return False


def _no_way_to_hang_up() -> None:
    """Do nothing. Other servers than ours offer no way to hang up; the client sees that no more is
    written."""
