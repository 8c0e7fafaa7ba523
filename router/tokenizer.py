"""Text to token ids and back, with the model's own tokenizer and chat template."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
import transformers

from baton.core.errors import ClientError, PromptTooLong, QueueFull, SetupError
from baton.engine.model_files import FILES_WITHOUT_WEIGHTS, resolve_model
from router.model_card import ModelCard, prompt_too_long, read_model_card
from router.text_bound import characters_per_token_max

R = TypeVar("R")
ChatMessage = dict[str, Any]
"""What the chat template sees: at least `role` and `content`, the latter as text."""

THREADS = 2
"""The Rust tokenizers release the GIL; two threads keep a long prompt from holding up short ones."""

WAITING_MAX = 512
"""Texts waiting for a thread; one more is refused."""


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class Tokenizer:
    """Shared by all requests. Encoding runs in threads, decoding is quick enough for the event loop."""

    def __init__(self, pretrained: Any, card: ModelCard) -> None:
        """`pretrained`: a transformers tokenizer."""
        self._pretrained = pretrained
        self.card = card
        rust = getattr(pretrained, "backend_tokenizer", None)
        if rust is not None:
            rust.no_truncation()
            rust.no_padding()
        self._rust = rust
        self._characters_per_token = None if rust is None else characters_per_token_max(rust.to_str())
        added: dict[int, Any] = pretrained.added_tokens_decoder
        self.special_ids = frozenset(
            [*pretrained.all_special_ids, *(i for i, token in added.items() if token.special)]
        )
        # Tokenizers written in Python are not safe to share between threads.
        self._threads = ThreadPoolExecutor(THREADS if rust else 1, thread_name_prefix="tokenizer")
        self._waiting_count = 0

    @classmethod
    def load(cls, path: str, revision: str = "main") -> "Tokenizer":
        """Raises SetupError if the folder (or hub model) is missing or has no usable tokenizer."""
        folder = resolve_model(path, revision, files=FILES_WITHOUT_WEIGHTS)
        card = read_model_card(folder)
        try:
            pretrained = transformers.AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        except (OSError, ValueError, KeyError, ImportError, TypeError) as error:
            raise SetupError(f"no usable tokenizer in {folder}: {first_line(error)}") from error
        return cls(pretrained, card)

    def limit_context(self, tokens_max: int) -> None:
        """To what the operator allows; 0: what the model allows."""
        if tokens_max:
            tokens = min(tokens_max, self.card.context_tokens)
            self.card = msgspec.structs.replace(self.card, context_tokens=tokens)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._pretrained.chat_template)

    def decode(self, ids: list[int]) -> str:
        """Exactly what the tokens say: no clean-up of spaces, ids outside the vocabulary are nothing."""
        if self._rust is not None:
            return self._rust.decode(ids, skip_special_tokens=False)
        return self._pretrained.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    async def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a prompt, with what the model wants before it (usually its beginning-of-sequence).

        Raises PromptTooLong if they do not fit into the context, QueueFull when too many texts wait.
        """
        return await self._in_thread(lambda: self._encode(text, "prompt", with_special=True))

    async def encode_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Ids of a conversation, up to where the assistant's answer begins.

        Raises ClientError if the template refuses the messages, PromptTooLong if they do not fit into the
        context, QueueFull when too many texts wait.
        """
        if not self.has_chat_template:
            raise ClientError("this model has no chat template; use /v1/completions", param="messages")
        return await self._in_thread(lambda: self._encode_chat(messages))

    async def close(self) -> None:
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    async def _in_thread(self, work: Callable[[], R]) -> R:
        if self._waiting_count >= WAITING_MAX:
            raise QueueFull(f"{WAITING_MAX} prompts are waiting to be tokenised")
        self._waiting_count += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._waiting_count -= 1

    def _encode(self, text: str, field: str, *, with_special: bool) -> tuple[int, ...]:
        """What can't fit is refused before it costs anything more. Raises PromptTooLong for `field`."""
        context = self.card.context_tokens
        if self._characters_per_token is not None and len(text) > context * self._characters_per_token:
            raise PromptTooLong(
                f"This model's maximum context length is {context} tokens, and the {field} has "
                f"{len(text)} characters: more than these tokens can stand for.",
                param=field,
            )
        if self._rust is None:
            return tuple(self._pretrained.encode(text, add_special_tokens=with_special))
        # Of a batch, since that gives up the GIL; `encode` keeps it.
        (encoding,) = self._rust.encode_batch_fast([text], add_special_tokens=with_special)
        if len(encoding) >= context:
            raise prompt_too_long(len(encoding), context, field)
        return tuple(encoding.ids)

    def _encode_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        try:
            text: str = self._pretrained.apply_chat_template(
                self._known_roles(messages), tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a program that came with the model: it may fail in any way
            raise ClientError(
                f"the model's chat template refused the messages: {first_line(error):.500}", param="messages"
            ) from error
        # The template writes the special tokens itself.
        return self._encode(text, "messages", with_special=False)

    def _known_roles(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """`developer` is OpenAI's newer name for `system`; few templates know it."""
        if "developer" in str(self._pretrained.chat_template):
            return list(messages)
        return [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
