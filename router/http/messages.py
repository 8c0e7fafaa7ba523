"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from collections.abc import Sequence

from baton.core.errors import ClientError
from router.http.asgi import Receive, Scope, Send
from router.http.client import AuthenticatedClient
from router.http.generation import GenerationRequest
from router.http.observe import RequestOutcome
from router.http.quick import tokens_of
from router.http.service import Service
from router.http.written_stream import WrittenStream
from router.messages.body import UNSUPPORTED, CountedBody, MessagesBody
from router.messages.conversation import NAMES, MessagesChat, chat_of
from router.messages.writer import MessagesWriter
from router.openai.bodies import parse_body
from router.openai.call import Call, RequestLimits
from router.openai.choice_stream import ChoiceStream
from router.openai.requests import chat_call
from router.openai.turns import SourcePlace


def _chat_of(body: CountedBody, service: Service) -> MessagesChat:
    return chat_of(body, reads_effort="reasoning_effort" in service.tokenizer.template_text)


class MessagesRequest(GenerationRequest):
    _places: tuple[SourcePlace, ...] = ()

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> RequestOutcome:
        try:
            return await super().serve(scope, receive, send)
        except ClientError as error:
            # Often it is the same error, which would be its own cause, and left to the garbage collector.
            raise self._renamed(error) from None

    def _renamed(self, error: ClientError) -> ClientError:
        return NAMES.renamed(error, self._places)

    async def read_call(self, body: bytes) -> Call:
        def parse(body: bytes, limits: RequestLimits) -> Call:
            chat = _chat_of(parse_body(body, MessagesBody, UNSUPPORTED), self.service)
            self._places = tuple(chat.places)
            return chat_call(chat.body, limits)

        return await self.parsed(body, parse)

    def response_stream(self, call: Call) -> WrittenStream:
        def writer(choices: Sequence[ChoiceStream]) -> MessagesWriter:
            new_call_id = choices[0].options.new_call_id if choices else str
            return MessagesWriter(message_id=self.request_id, model=call.model, new_call_id=new_call_id)

        return WrittenStream(
            self.service.driver,
            self.answer_format(call),
            deadline_s=self.deadline_s,
            unsent_tokens_max=self.service.config.output_buffer_tokens_max,
            writer=writer,
            renamed=self._renamed,
        )


async def count_tokens(service: Service, client: AuthenticatedClient, body: bytes) -> object:
    """Return the number of prompt tokens that a request has. Raises BatonError."""
    places: tuple[SourcePlace, ...] = ()

    def parse(body: bytes, limits: RequestLimits) -> Call:
        nonlocal places
        chat = _chat_of(parse_body(body, CountedBody, UNSUPPORTED), service)
        places = tuple(chat.places)
        return chat_call(chat.body, limits)

    try:
        tokens = await tokens_of(service, client, body, parse)
    except ClientError as error:
        raise NAMES.renamed(error, places) from None
    return {"input_tokens": len(tokens)}
