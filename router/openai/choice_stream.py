"""One generated text of a request. Its tokens become text, and messages and logprobs where the client asks
for them."""

import math
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from baton.core.errors import (
    BatonError,
    ClientError,
    DeadlineOver,
    NoCapacity,
    ObjectivesUnmet,
    PeerFailure,
    PromptTooLong,
    QueueFull,
)
from baton.core.ids import SequenceId
from baton.core.sampling import FinishReason
from baton.core.steps import TokenLogprobs
from router.decisions.events import Failed, FailureKind, Finished, LatencyBreakdown, Served, Submit
from router.openai.logprobs import Entry, LogprobFormat, Track, UnwrittenLogprobs
from router.text.detokenizer import Detokenizer
from router.text.parsers.deltas import (
    CallArguments,
    CallStart,
    Content,
    Delta,
    Message,
    Reasoning,
    merged,
)
from router.text.parsers.select import ParserChain


def error_for(failed: Failed, prompt_field: str, grammar_field: str | None = None) -> BatonError:
    """Return the error of a failed sequence. `prompt_field` is named if the prompt is too long.
    `grammar_field` is named if nothing else of the request can be unsupported."""
    match failed.kind:
        case FailureKind.QUEUE_FULL:
            return QueueFull(failed.message, retry_after_s=failed.retry_after_s)
        case FailureKind.NO_CAPACITY | FailureKind.RETRIES_SPENT:
            return NoCapacity(failed.message, retry_after_s=failed.retry_after_s)
        case FailureKind.UNMET:
            return ObjectivesUnmet(failed.message, retry_after_s=failed.retry_after_s)
        case FailureKind.TOO_LONG:
            return PromptTooLong(failed.message, param=prompt_field)
        case FailureKind.UNSUPPORTED:
            code = "unsupported_grammar" if grammar_field else "unsupported_parameter"
            return ClientError(failed.message, param=grammar_field, code=code)
        case FailureKind.DEADLINE:
            return DeadlineOver(failed.message)
        case FailureKind.ATTEMPTS:
            return PeerFailure(failed.message)
        case FailureKind.INTERNAL:
            return BatonError(failed.message)


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """Return an id of nine letters and digits. Mistral's templates accept no other ids."""
    return secrets.token_hex(5)[:9]


class Echo(msgspec.Struct, frozen=True):
    """The prompt as the answer repeats it."""

    text: str
    tokens: tuple[int, ...]
    starts: tuple[int, ...]
    """Position in `text` at which each token begins; only with logprobs."""


class ChoiceOptions(msgspec.Struct, frozen=True):
    """Options of a choice that the client asks for beside its text."""

    token_ids: bool = False
    logprobs: LogprobFormat | None = None
    parser: ParserChain | None = None
    new_call_id: Callable[[], str] = call_id
    echo: Echo | None = None
    prompt_only: bool = False
    is_ranked: bool = False
    """True if its log probability decides whether it is part of the answer."""
    grammar_field: str | None = None
    """Field of the request that the grammar came from. None: there is no grammar, or a worker may refuse the
    adapter instead."""


PLAIN = ChoiceOptions()


class ChoiceOwner(Protocol):
    """The response stream, as its choices see it."""

    @property
    def prompt_field(self) -> str: ...

    def now_s(self) -> float: ...
    def answered(self, choice: "ChoiceStream") -> None: ...
    def fail(self, error: BatonError, *, is_defect: bool = False) -> None: ...
    def on_progress(self, choice: "ChoiceStream") -> None: ...
    def progress_of(self, choice: "ChoiceStream") -> tuple[LatencyBreakdown | None, Served | None]: ...


class ChoiceStream:
    """A sink of the driver for one choice's tokens."""

    def __init__(
        self,
        owner: ChoiceOwner,
        index: int,
        submit: Submit,
        detokenizer: Detokenizer,
        options: ChoiceOptions = PLAIN,
    ) -> None:
        self._owner, self._detokenizer = owner, detokenizer
        self.index = index
        self.submit = submit
        self.options = options
        self.unsent_text: list[str] = []
        """Text that is not sent yet."""
        self.unsent_deltas: list[Delta] = []
        """Deltas that are not sent yet, of a choice with a parser."""
        self.track = Track() if options.logprobs is not None or options.is_ranked else None
        self.prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self.unsent_ids: list[int] | None = [] if options.token_ids else None
        """Token ids that are not sent yet; None: the client does not want any."""
        self.unsent_tokens = 0
        self.is_plain = options.parser is None and options.logprobs is None and options.echo is None
        self.is_opened = False
        """True if the client got the beginning of this choice."""
        self.is_closed = False
        """True if the client got its end."""
        self.finish: FinishReason | None = None
        self.token_count = 0
        self.is_cut_off = False
        """True if workers were computing it when its client left or its time was over."""
        self.cached_token_count = 0
        self.latency_breakdown: LatencyBreakdown | None = None
        self.served: Served | None = None
        self.first_token_s = 0.0
        self.last_token_s = 0.0
        self.reasoning_token_count = 0
        """Number of tokens in the reasoning. Tokens that came together are divided by their text."""
        self._reasoning_share = 0.0
        self._is_reasoning = False
        self._sent_characters = 0

    @property
    def seq_id(self) -> SequenceId:
        return self.submit.seq_id

    @property
    def prompt_ids(self) -> Sequence[int] | None:
        """Token ids of the prompt; None: the client does not want any."""
        return list(self.submit.prompt) if self.options.token_ids else None

    @property
    def finish_reason(self) -> str:
        parser = self.options.parser
        if parser is not None and parser.has_calls and self.finish is FinishReason.STOP:
            return "tool_calls"
        return str(self.finish)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._detokenizer.stop_string

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None: there was no second one."""
        if self.token_count < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.token_count - 1)

    @property
    def mean_logprob(self) -> float:
        """Log probability per token, by which OpenAI ranks `best_of`."""
        return (self.track.total if self.track is not None else 0.0) / max(1, self.token_count)

    # --- what the driver says ---------------------------------------------------------------------

    def on_logprobs(
        self, logprobs: tuple[TokenLogprobs, ...], prompt_logprobs: tuple[TokenLogprobs, ...] | None
    ) -> None:
        if self.track is not None:
            self.track.arrived(logprobs)
        if prompt_logprobs is not None:
            self.prompt_logprobs = prompt_logprobs

    def on_tokens(self, tokens: tuple[int, ...], *, cached_token_count: int = 0) -> None:
        if self.finish is not None:
            return
        self.cached_token_count = cached_token_count
        now_s = self._owner.now_s()
        self.first_token_s = self.first_token_s or now_s
        self.last_token_s = now_s
        self.token_count += len(tokens)
        self.unsent_tokens += len(tokens)
        if self.unsent_ids is not None:
            self.unsent_ids += tokens
        detokenizer = self._detokenizer
        if text := detokenizer.push(tokens) if self.track is None else self._push_tracked(tokens, self.track):
            self._add_text(text)
        if self._reasoning_share:
            self._count_reasoning(len(tokens))
        if detokenizer.found_stop_string:
            self._forget_ids_after(detokenizer.token_count)
            self.token_count = detokenizer.token_count
            self._end_early()
        self._owner.on_progress(self)

    def _forget_ids_after(self, token_count: int) -> None:
        """Drop the ids of tokens after a stop string, which several tokens of one step may reach past."""
        excess = self.token_count - token_count
        if self.unsent_ids and excess > 0:
            del self.unsent_ids[-excess:]

    def on_finished(self, finished: Finished) -> None:
        if self.finish is not None:
            return
        self.token_count = finished.generated_count
        self.cached_token_count = finished.cached_token_count
        self.latency_breakdown, self.served = finished.latency_breakdown, finished.served
        if text := self._detokenizer.finish():
            self._sent_characters += len(text)
            self._add_text(text)
        found_stop = self._detokenizer.found_stop_string
        self._close(FinishReason.STOP if found_stop else finished.reason)
        self._owner.on_progress(self)

    def on_failed(self, failed: Failed) -> None:
        self.is_cut_off = failed.was_computing and failed.kind is FailureKind.DEADLINE
        error = error_for(failed, self._owner.prompt_field, self.options.grammar_field)
        self._owner.fail(error, is_defect=failed.kind is FailureKind.INTERNAL)

    def _push_tracked(self, tokens: Sequence[int], track: Track) -> str:
        """Push tokens into the detokeniser, and note where in the text each begins."""
        detokenizer, parts = self._detokenizer, list[str]()
        for token in tokens:
            if detokenizer.stopped:
                break
            start = self._sent_characters + detokenizer.held_characters
            text = detokenizer.push((token,))
            self._sent_characters += len(text)
            is_end = detokenizer.stopped and not detokenizer.found_stop_string and not text
            track.pushed(start, is_text=not is_end)
            parts.append(text)
        track.sent(self._sent_characters)
        return "".join(parts)

    def _add_text(self, text: str) -> None:
        parser = self.options.parser
        if parser is None:
            self.unsent_text.append(text)
            return
        deltas = parser.feed(text)
        if deltas:
            said = sum(len(delta.text) for delta in deltas if isinstance(delta, Reasoning))
            is_all = isinstance(deltas[0], Reasoning) and len(deltas) == 1
            self._reasoning_share = 1.0 if is_all else min(1.0, said / len(text))
            self._is_reasoning = isinstance(deltas[-1], Reasoning)
            self.unsent_deltas += deltas
        if parser.is_done and self.finish is None:
            self._end_early()

    def _count_reasoning(self, token_count: int) -> None:
        """Count tokens that came together. What comes next is like the end of their text."""
        self.reasoning_token_count += math.ceil(token_count * self._reasoning_share)
        self._reasoning_share = float(self._is_reasoning)

    def _end_early(self) -> None:
        """End the choice, since its text has ended, and cancel the rest of its generation."""
        self._close(FinishReason.STOP)
        self.latency_breakdown, self.served = self._owner.progress_of(self)
        self._owner.answered(self)

    def _close(self, reason: FinishReason) -> None:
        if self.finish is not None:
            return
        self.finish = reason
        if self.options.parser is not None:
            self.unsent_deltas += self.options.parser.finish()
        if self.track is not None:
            self.track.sent(self._sent_characters)
            self.track.ended(is_cut=self._detokenizer.found_stop_string)

    # --- what the client gets ---------------------------------------------------------------------

    def take(self) -> tuple[str, list[int] | None]:
        """Return text and, if wanted, token ids that are not sent yet; they then count as sent."""
        text, ids = "".join(self.unsent_text), self.unsent_ids
        self.unsent_text.clear()
        self.unsent_tokens = 0
        if ids is not None:
            self.unsent_ids = []
        return ("" if self.options.prompt_only else text), ids

    def take_deltas(self) -> list[Delta]:
        unsent_deltas, self.unsent_deltas = self.unsent_deltas, []
        return merged(unsent_deltas)

    @property
    def logprob_count(self) -> int:
        """Number of tokens that wait to be sent with logprobs, those of an echoed prompt included."""
        if self.options.logprobs is None or self.track is None:
            return 0
        echo = None if self.is_opened else self.options.echo
        return len(self.track.ready) + (0 if echo is None else len(echo.starts))

    def take_logprobs(self) -> UnwrittenLogprobs | None:
        """Return the logprobs of the tokens whose text is taken now. None: the client does not want any, or
        there are none."""
        form = self.options.logprobs
        if form is None or self.track is None:
            return None
        entries: list[Entry] = self.track.take()
        if not entries or self.options.prompt_only:
            return None
        offset = len(self.options.echo.text) if self.options.echo is not None else 0
        return UnwrittenLogprobs(len(entries), lambda: form.of(entries, offset=offset))

    def echo_logprobs(self, of_prompt: tuple[TokenLogprobs, ...] | None) -> UnwrittenLogprobs | None:
        echo, form = self.options.echo, self.options.logprobs
        if echo is None or form is None or of_prompt is None:
            return None
        return UnwrittenLogprobs(len(of_prompt), lambda: form.of_echo(echo.tokens, echo.starts, of_prompt))

    def delta_bodies(self) -> list[dict[str, Any]]:
        """Return the unsent deltas as OpenAI's chunks write them."""
        return [self._delta_body(delta) for delta in self.take_deltas()]

    def _delta_body(self, delta: Delta) -> dict[str, Any]:
        match delta:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text, "reasoning": text}
            case CallStart(call, name):
                function = {"name": name, "arguments": ""}
                body = {"index": call, "id": self.options.new_call_id(), "type": "function"}
                return {"tool_calls": [body | {"function": function}]}
            case CallArguments(call, text):
                return {"tool_calls": [{"index": call, "function": {"arguments": text}}]}

    def message_body(self) -> dict[str, Any]:
        """Return the whole answer as one message."""
        if self.options.parser is None:
            return {"role": "assistant", "content": "".join(self.unsent_text)}
        return message_body(self.take_deltas(), self.options.new_call_id)


def message_body(deltas: Sequence[Delta], new_call_id: Callable[[], str]) -> dict[str, Any]:
    """Return OpenAI's message. Its content is null if it is empty and there is something else."""
    message = Message()
    message.add(deltas)
    body: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.reasoning:
        body |= {"reasoning_content": message.reasoning, "reasoning": message.reasoning}
    if message.calls:
        body["tool_calls"] = [
            {"id": new_call_id(), "type": "function"}
            | {"function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
    if not message.content and (message.calls or message.reasoning):
        body["content"] = None
    return body
