"""POST /v1/embeddings: the final hidden state of the last token, of length one."""

import asyncio
import base64
import math
from array import array
from collections.abc import Sequence

import orjson

from baton.core.errors import BatonError, ClientError, DeadlineOver, PeerFailure
from baton.core.messages import Task
from baton.core.sampling import SamplingParams
from router.http.asgi import (
    JSON,
    ClientDisconnected,
    Receive,
    Scope,
    Send,
    read_body,
    respond,
    until_disconnected,
)
from router.http.observe import RequestOutcome
from router.http.prepare import RequestPreparation, TokenizedPrompt, part_of
from router.http.request import RequestHandler
from router.http.sequence_group import GroupCancelled, SequenceGroup
from router.http.streaming import DEADLINE_GRACE_S
from router.openai.call import Call
from router.openai.requests import parse_embedding
from router.openai.responses import Usage
from router.text.model_card import prompt_too_long

IN_FLIGHT_MAX = 64
"""Most inputs of one request that workers compute at once."""


class EmbeddingRequest(RequestHandler):
    async def serve(self, scope: Scope, receive: Receive, send: Send) -> RequestOutcome:
        """Answer the request. Raises BatonError and ClientDisconnected before anything is sent."""
        service = self.service
        body = await read_body(scope, receive, bytes_max=service.config.body_bytes_max)
        call = await self.parsed(body, parse_embedding)
        preparation = self.preparation(call, scope, body)
        group = SequenceGroup(service.driver, call.prompt_field)
        watch = asyncio.create_task(_watch(receive, group))
        try:
            prompts = await preparation.prompts()
            await self.reserve(scope, sum(len(prompt.tokens) for prompt in prompts))
            async with asyncio.timeout_at(self.deadline_s + DEADLINE_GRACE_S):
                vectors, cached_tokens = await self._vectors(call, preparation, prompts, group)
            answer = await asyncio.to_thread(_answer, call, vectors, prompts, cached_tokens)
        except TimeoutError:
            raise DeadlineOver("the request's time is over") from None
        except GroupCancelled:
            raise ClientDisconnected from None
        finally:
            watch.cancel()
            self.first_token_s, self.used_tokens = group.first_token_s, group.computed_tokens
        await respond(send, 200, answer, JSON)
        usage = Usage(sum(len(prompt.tokens) for prompt in prompts), 0, cached_tokens)
        self.group_answered(usage, first_token_s=group.first_token_s)
        return "completed"

    async def _vectors(
        self,
        call: Call,
        preparation: RequestPreparation,
        prompts: list[TokenizedPrompt],
        group: SequenceGroup,
    ) -> tuple[list[tuple[float, ...]], int]:
        context = self.service.limits.card.context_tokens
        sampling = SamplingParams(max_tokens=1)
        for prompt in prompts:
            if not prompt.tokens:
                raise ClientError("input must not be empty", param="input")
            if len(prompt.tokens) >= context:
                raise prompt_too_long(len(prompt.tokens), context, "input")
        submits = (
            preparation.submit(f"{index}", prompt.tokens, sampling, task=Task.EMBED, part=part_of(index))
            for index, prompt in enumerate(prompts)
        )
        ended = await group.all(submits, in_flight_max=IN_FLIGHT_MAX)
        vectors = [finished.embedding for _, finished in ended]
        if not all(vectors):
            raise PeerFailure("a worker answered without the embedding")
        return vectors, sum(collector.cached_token_count for collector, _ in ended)


async def _watch(receive: Receive, group: SequenceGroup) -> None:
    await until_disconnected(receive)
    group.stop()


def normalised(vector: Sequence[float], dimensions: int | None) -> list[float]:
    """Return the first `dimensions` numbers (Matryoshka embeddings, arXiv 2205.13147), scaled to length one.

    Raises BatonError if the float32 numbers are not all finite.
    """
    kept = vector[:dimensions]
    length = math.sqrt(math.fsum(x * x for x in kept))
    if not math.isfinite(length):
        raise BatonError(
            "the embedding has numbers that are not finite (NaN or infinity): the model, or the adapter, "
            "overflows on this input"
        )
    return [x / length for x in kept] if length > 0 else list(kept)


def _answer(
    call: Call, vectors: Sequence[Sequence[float]], prompts: Sequence[TokenizedPrompt], cached_tokens: int
) -> bytes:
    data: list[dict[str, object]] = []
    for index, vector in enumerate(vectors):
        numbers = normalised(vector, call.dimensions)
        written: object = numbers
        if call.encoding_format == "base64":
            packed = array("f", numbers)
            written = base64.b64encode(packed.tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": written})
    count = sum(len(prompt.tokens) for prompt in prompts)
    usage = {"prompt_tokens": count, "total_tokens": count}
    usage_details = {"prompt_tokens_details": {"cached_tokens": cached_tokens}}
    return orjson.dumps({"object": "list", "data": data, "model": call.model, "usage": usage | usage_details})
