"""POST /v1/chat/completions and /v1/completions."""

import asyncio
import time
from collections.abc import Callable

from baton.core.errors import DeadlineOver
from router import openai_api
from router.asgi import (
    ABORT,
    EVENTS,
    JSON,
    ClientGone,
    Receive,
    Scope,
    Send,
    read_body,
    respond,
    until_disconnected,
)
from router.beam_answer import BeamAnswer
from router.call import Beam, Call, Limits
from router.gather import Gather, GatherStopped
from router.observe import Outcome, outcome_of
from router.openai_response import AnswerFormat
from router.request import RequestFrame
from router.streaming import DEADLINE_GRACE_S, Exchange


class GenerationRequest(RequestFrame):
    @staticmethod
    def parse(body: bytes, limits: Limits) -> Call:
        raise NotImplementedError

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> Outcome:
        service = self.service
        body = await read_body(scope, receive, bytes_max=service.config.body_bytes_max)
        call = self.parse(body, service.limits)
        if call.beam is not None:
            return await self._serve_beams(call, call.beam, receive, send)
        preparation = self.preparation(call)
        exchange = self._exchange(call)
        exchange.prompt_format = preparation.prompt_form
        watch = asyncio.create_task(_watch(receive, exchange.client_gone))
        try:
            parts = await preparation.parts(await preparation.prompts())
            if not exchange.is_gone:
                exchange.submit(
                    parts, choices_per_prompt=call.sequences_per_prompt, answers_per_prompt=call.n
                )
                await self._answer(call, exchange, scope, send)
        finally:
            exchange.close()
            watch.cancel()
        return self._outcome(exchange)

    async def _serve_beams(self, call: Call, beam: Beam, receive: Receive, send: Send) -> Outcome:
        preparation = self.preparation(call)
        gather = Gather(self.service.driver, call.prompt_field)
        watch = asyncio.create_task(_watch(receive, gather.stop))
        try:
            async with asyncio.timeout_at(self.deadline_s + DEADLINE_GRACE_S):
                prompts = await preparation.prompts()
                answer = BeamAnswer(self.service, call, beam, preparation)
                body = await answer.whole(prompts, self._format(call), gather)
        except TimeoutError:
            raise DeadlineOver("the request's time is over") from None
        except GatherStopped:
            raise ClientGone from None
        finally:
            watch.cancel()
        await respond(send, 200, body, JSON)
        self.service.observer.on_usage(answer.usage, took_s=self.service.driver.now_s() - self.arrived_s)
        return "completed"

    def _format(self, call: Call) -> AnswerFormat:
        return AnswerFormat(
            call.endpoint,
            request_id=self.request_id,
            created=int(time.time()),
            model=call.model,
            system_fingerprint=self.service.system_fingerprint,
            include_usage=call.include_usage,
        )

    def _exchange(self, call: Call) -> Exchange:
        service = self.service
        return Exchange(
            service.driver,
            self._format(call),
            deadline_s=self.deadline_s,
            unsent_tokens_max=service.config.output_buffer_tokens_max,
        )

    async def _answer(self, call: Call, exchange: Exchange, scope: Scope, send: Send) -> None:
        abort: Callable[[], None] = scope.get(ABORT, _no_way_to_hang_up)
        if not call.stream:
            body = await exchange.whole()
            if not exchange.is_gone:
                await exchange.last_words(respond(send, 200, body, JSON), on_drop=abort)
            return
        await exchange.begin()
        if exchange.is_gone:
            return

        async def write(events: bytes) -> None:
            await send({"type": "http.response.body", "body": events, "more_body": True})

        await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        await exchange.stream(write, include_usage=call.include_usage, on_drop=abort)
        if not exchange.is_gone:
            await exchange.last_words(send({"type": "http.response.body", "body": b""}), on_drop=abort)

    def _outcome(self, exchange: Exchange) -> Outcome:
        observer = self.service.observer
        if exchange.is_too_slow:
            observer.on_slow_client()
        if exchange.is_gone:
            return "cancelled"
        if exchange.error is not None:
            return outcome_of(exchange.error)
        observer.on_answered(exchange, arrived_s=self.arrived_s)
        return "completed"


class ChatRequest(GenerationRequest):
    parse = staticmethod(openai_api.parse_chat)


class CompletionRequest(GenerationRequest):
    parse = staticmethod(openai_api.parse_completion)


async def _watch(receive: Receive, on_gone: Callable[[], None]) -> None:
    await until_disconnected(receive)
    on_gone()


def _no_way_to_hang_up() -> None:
    """Under another server than ours: what is written no more will show the client."""
