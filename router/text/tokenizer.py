"""Text to token ids and back, with the model's own tokenizer and chat template."""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jinja2
import msgspec
import transformers

from baton.core.errors import ClientError, PromptTooLong, QueueFull, SetupError
from engine.model_files.resolve import FILES_WITHOUT_WEIGHTS, resolve_model
from router.text.conversation import Template
from router.text.generic_tools import has_calls, with_tools_as_text
from router.text.model_card import ModelCard, prompt_too_long, read_model_card
from router.text.quick_encoder import QuickEncoder
from router.text.remembered_encoders import remembered_encoder
from router.text.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from router.text.template_bounds import THREAD_S, TookTooLong, run_bounded
from router.text.template_sizes import bound_operations
from router.text.text_bound import characters_per_token_max
from router.text.token_bytes import TokenBytes, token_bytes_of
from router.text.tokenizer_files import check_tokenizer_files, largest_id
from router.text.tokenizer_info import tokenizer_info

log = logging.getLogger(__name__)

bound_operations()

R = TypeVar("R")
ChatMessage = dict[str, Any]
"""A message as the chat template gets it: at least `role` and `content`, the latter as text."""


class ChatPrompt(NamedTuple):
    tokens: tuple[int, ...]
    end: str
    """Last characters of the rendered conversation. They show whether the answer begins within reasoning."""


PLAIN_TEMPLATE = Template()
PROMPT_END_CHARACTERS = 64

THREADS = 2
"""Number of threads. The Rust tokenizers release the GIL; a second thread keeps a long prompt from holding up
short ones."""

ON_LOOP_CHARACTERS = 4096
"""Shorter texts are tokenised on the event loop if there is a quick encoder. 2,000 characters take 0.04 ms in
words not seen before and 0.01 ms otherwise; 4,000 that make no words take 0.7 ms. A thread would hold the
loop up longer, since both want the GIL."""

WAITING_MAX = 512
"""Most texts that wait for a thread; one more is refused."""


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _greet(pretrained: Any, template: str) -> None:
    pretrained.apply_chat_template(
        [{"role": "user", "content": "hi"}], chat_template=template, tokenize=False
    )


def _check_templates(pretrained: Any, folder: Path) -> None:
    """Raise SetupError if a chat template is not valid, since every conversation would be refused for it.
    Errors of a valid one in a conversation are errors of that request."""
    templates = pretrained.chat_template or {}
    for source in templates.values() if isinstance(templates, dict) else [templates]:
        try:
            run_bounded(partial(_greet, pretrained, source), seconds=THREAD_S)
        except TookTooLong:
            raise SetupError(
                f"the chat template of {folder} needs more than {THREAD_S:.0f} s for a greeting; mend it in "
                "chat_template.jinja or tokenizer_config.json, or take it out"
            ) from None
        except jinja2.TemplateSyntaxError as error:
            raise SetupError(
                f"the chat template of {folder} does not parse: line {error.lineno}: {first_line(error)}; "
                "mend it in chat_template.jinja or tokenizer_config.json, or take it out"
            ) from error
        except Exception:  # The template is a program of the model, and may not accept this conversation.
            log.debug("the chat template of %s refuses a greeting", folder, exc_info=True)


class Tokenizer:
    """The tokenizer of a model, shared by all requests. Encoding runs in threads unless it is short; decoding
    is quick enough for the event loop."""

    def __init__(
        self, pretrained: Any, card: ModelCard, *, may_be_quick: bool = True, is_quick_later: bool = False
    ) -> None:
        """`pretrained` is a transformers tokenizer. `may_be_quick` is the setting `router.quick_tokenizer`.
        `is_quick_later` leaves the quick encoder to `become_quick`."""
        self._pretrained = pretrained
        self.card = card
        rust = getattr(pretrained, "backend_tokenizer", None)
        if rust is not None:
            rust.no_truncation()
            rust.no_padding()
        self._rust = rust
        self._has_strange_ids = largest_id(pretrained) >= card.vocab_size
        """True if the tokenizer knows ids that the model has no embedding for. Its texts are checked."""
        rust_json = "" if rust is None else rust.to_str()
        self._quick: QuickEncoder | None = None
        self.why_not_quick = "it was switched off"
        """Reason why there is no quick encoder; empty: there is one."""
        if may_be_quick:
            self.why_not_quick = "it is written in Python" if rust is None else "it is not built yet"
        self._may_be_quick = may_be_quick
        if not is_quick_later:
            self.become_quick()
        self._characters_per_token = None if rust is None else characters_per_token_max(rust_json)
        added: dict[int, Any] = pretrained.added_tokens_decoder
        self._token_bytes: dict[int, bytes] = {}
        self._text_of_one: dict[int, str] = {}
        self._bytes_of: TokenBytes = (
            (lambda token: self.decode([token]).encode())
            if rust is None
            else token_bytes_of(rust_json, rust.id_to_token)
        )
        self.special_ids = frozenset(
            [*pretrained.all_special_ids, *(i for i, token in added.items() if token.special)]
        )
        # Tokenizers written in Python are not safe to share between threads.
        self._threads = ThreadPoolExecutor(THREADS if rust else 1, thread_name_prefix="tokenizer")
        self._waiting_count = 0

    @classmethod
    def load(
        cls,
        path: str,
        revision: str = "main",
        *,
        may_be_quick: bool = True,
        is_quick_later: bool = False,
        defaults_of: Callable[[Path], SamplingDefaults] = lambda _: NO_DEFAULTS,
    ) -> "Tokenizer":
        """Load a tokenizer. `defaults_of` reads the model's own sampling from its folder. Raises SetupError
        if the folder (or hub model) is missing or has no usable tokenizer."""
        folder = resolve_model(path, revision, files=FILES_WITHOUT_WEIGHTS)
        card = msgspec.structs.replace(read_model_card(folder), sampling=defaults_of(folder))
        check_tokenizer_files(folder)
        try:
            pretrained = transformers.AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
            _check_templates(pretrained, folder)
            return cls(pretrained, card, may_be_quick=may_be_quick, is_quick_later=is_quick_later)
        except (SetupError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # libraries' code on the folder's files, Rust's panics included
            raise SetupError(f"no usable tokenizer in {folder}: {first_line(error)}") from error

    def become_quick(self) -> None:
        """Get the quick encoder, if this tokenizer may have one. It takes a second of a core, and may run in
        any thread while others encode."""
        rust = self._rust
        if rust is None or not self._may_be_quick:
            return
        try:
            self._quick, self.why_not_quick = remembered_encoder(rust, rust.to_str())
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # Panics of either library in Rust.
            self.why_not_quick = f"its test failed: {first_line(error)}"

    def limit_context(self, tokens_max: int) -> None:
        """Limit the context to what the operator allows; 0: the model's own limit."""
        if tokens_max:
            tokens = min(tokens_max, self.card.context_tokens)
            self.card = msgspec.structs.replace(self.card, context_tokens=tokens)

    @property
    def template_text(self) -> str:
        """Source of the chat template, or of all if there are several; empty: there is none."""
        template = self._pretrained.chat_template or ""
        return "\n".join(template.values()) if isinstance(template, dict) else str(template)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token, which may be half a character."""
        if token not in self._token_bytes:
            self._token_bytes[token] = self._bytes_of(token)
        return self._token_bytes[token]

    def names_of(self, ids: Sequence[int]) -> list[str]:
        """Return the tokens as the vocabulary writes them."""
        return [str(name) for name in self._pretrained.convert_ids_to_tokens(list(ids))]

    def info(self) -> dict[str, Any]:
        return tokenizer_info(self._pretrained)

    def ids_of_special(self, contents: Collection[str]) -> frozenset[int]:
        """Return the ids of the special tokens with these texts."""
        return frozenset(i for i in self.special_ids if self.decode([i]) in contents)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._pretrained.chat_template)

    def decode(self, ids: list[int]) -> str:
        """Return exactly the text of the tokens. Spaces are not cleaned up, and ids outside the vocabulary
        have no text."""
        if self._rust is None:
            return self._decode_slowly(ids)
        if len(ids) != 1:
            return self._rust.decode(ids, skip_special_tokens=False)
        # Half of all calls decode a single token, beside which the next one is decoded.
        text = self._text_of_one.get(ids[0])
        if text is None:
            text = self._rust.decode(ids, skip_special_tokens=False)
            if len(self._text_of_one) < self.card.vocab_size:
                self._text_of_one[ids[0]] = text
        return text

    def _decode_slowly(self, ids: list[int]) -> str:
        return self._pretrained.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    async def encode(
        self, text: str, *, field: str = "prompt", with_special: bool = True, may_be_cut: bool = False
    ) -> tuple[int, ...]:
        """Return the ids of a prompt, after those that the model wants before it (usually its
        beginning-of-sequence).

        Raises PromptTooLong if they do not fit into the context, unless the prompt `may_be_cut` later;
        QueueFull when too many texts wait.
        """
        return await self.in_thread(
            lambda: self.text_ids(text, field=field, with_special=with_special, may_be_cut=may_be_cut)
        )

    def encode_now(self, text: str) -> tuple[int, ...]:
        """Return the ids without a thread, whatever the length. Tools use it."""
        return self.text_ids(text, with_special=False, may_be_cut=True)

    def chat_prompt(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[dict[str, Any]] = (),
        tool_parser: str = "",
        template: Template = PLAIN_TEMPLATE,
        with_special: bool = False,
        may_be_cut: bool = False,
    ) -> ChatPrompt:
        """Return the ids of a conversation, up to where the assistant's answer begins. It runs by
        `in_thread`.

        With the tool parser `generic`, and where the template has no place for tools, tools and calls become
        text of the conversation.

        Raises ClientError if the template refuses the messages or does not use what it is given,
        PromptTooLong if they do not fit into the context.
        """
        if not self.has_chat_template:
            raise ClientError("this model has no chat template; use /v1/completions", param="messages")
        has_place = "tools" in self.template_text
        if tool_parser == "generic" or (tool_parser in ("", "hermes") and not has_place):
            if tools or has_calls(messages):
                messages = with_tools_as_text(messages, tools, has_system=self._takes_system)
            tools = ()
        self._check_use(tools, template)
        text = self._render(messages, tools, template)
        ids = self.text_ids(text, field="messages", with_special=with_special, may_be_cut=may_be_cut)
        return ChatPrompt(ids, text[-PROMPT_END_CHARACTERS:])

    async def close(self) -> None:
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    async def in_thread(self, work: Callable[[], R]) -> R:
        """Run work on a long prompt or a large body in a thread, where it does not block the loop. Raises
        QueueFull when too much waits."""
        if self._waiting_count >= WAITING_MAX:
            raise QueueFull(f"{WAITING_MAX} prompts are waiting to be tokenised")
        self._waiting_count += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._waiting_count -= 1

    async def on_loop_or_in_thread(self, characters: float, work: Callable[[], R]) -> R:
        """Run work on a text of so many characters. A short one takes less time than the way to a thread and
        back. Raises QueueFull when too much waits."""
        if self._quick is not None and characters <= ON_LOOP_CHARACTERS:
            return work()
        return await self.in_thread(work)

    def text_ids(
        self, text: str, *, field: str = "prompt", with_special: bool = True, may_be_cut: bool = False
    ) -> tuple[int, ...]:
        """Return the ids as `encode` does, for `in_thread`. A text that cannot fit is refused before it costs
        more."""
        context = self.card.context_tokens
        bound = None if may_be_cut else self._characters_per_token
        if bound is not None and len(text) > context * bound:
            raise PromptTooLong(
                f"This model's maximum context length is {context} tokens, and the {field} has "
                f"{len(text)} characters: more than these tokens can stand for.",
                param=field,
            )
        if self._rust is None:
            ids = tuple(self._pretrained.encode(text, add_special_tokens=with_special))
        else:
            ids = self._ids_of(text, with_special)
        if self._has_strange_ids and ids and max(ids) >= self.card.vocab_size:
            raise ClientError(
                f"the {field} has text whose token {max(ids)} the model does not know, which has "
                f"{self.card.vocab_size}; leave out its special tokens",
                param=field,
            )
        if self._rust is None:
            return ids
        if len(ids) >= context and not may_be_cut:
            raise prompt_too_long(len(ids), context, field)
        return ids

    def _ids_of(self, text: str, with_special: bool) -> tuple[int, ...]:
        assert self._rust is not None
        ids = None if self._quick is None else self._quick.ids(text, with_special=with_special)
        if ids is not None:
            return ids
        # Encoding a batch gives up the GIL; `encode` keeps it.
        (encoding,) = self._rust.encode_batch_fast([text], add_special_tokens=with_special)
        return tuple(encoding.ids)

    def _render(
        self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]], template: Template
    ) -> str:
        try:
            text: str = run_bounded(
                lambda: self._pretrained.apply_chat_template(
                    self._known_roles(messages),
                    tools=list(tools) or None,
                    documents=list(template.documents) or None,
                    tokenize=False,
                    add_generation_prompt=template.add_generation_prompt,
                    continue_final_message=template.continue_final_message,
                    **template.kwargs,
                )
            )
        except Exception as error:  # The template is a program of the model, and may fail in any way.
            raise ClientError(
                f"the model's chat template refused the messages: {first_line(error):.500}", param="messages"
            ) from error
        return text

    def _check_use(self, tools: Sequence[dict[str, Any]], template: Template) -> None:
        """Refuse arguments that the template does not read. It would ignore them silently."""
        source = self.template_text
        for field, is_given, name in (
            ("tools", bool(tools), "tools"),
            ("documents", bool(template.documents), "documents"),
        ):
            if is_given and name not in source:
                raise ClientError(
                    f"this model's chat template has no use for {field}; leave it out",
                    param=field,
                    code="unsupported_parameter",
                )

    @cached_property
    def _takes_system(self) -> bool:
        """Whether the template shows a system message to the model."""
        mark = "sign of a system message"
        messages = [{"role": "system", "content": mark}, {"role": "user", "content": "hi"}]
        try:
            return mark in self._render(messages, (), PLAIN_TEMPLATE)
        except ClientError:
            return False

    def _known_roles(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Return the messages with roles that the template knows. `developer` is OpenAI's newer name for
        `system`; few templates know it."""
        if "developer" in str(self._pretrained.chat_template):
            return list(messages)
        return [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
