"""Fields of OpenAI's API, and of its common extensions, that this server knows and does not support yet.

A request that needs one of them is refused: an answer that silently ignores a field is worse than none.
Values that change nothing pass, and null always does. Fields found neither here nor in the request types are
unknown and ignored, as are those that only inform the server or ask it for a manner (`metadata`, `store`,
`prompt_cache_key`, `prediction`, `verbosity` …).
"""

from typing import Any

from baton.core.errors import ClientError

Harmless = tuple[Any, ...]

_AGGREGATED: dict[str, Harmless] = {
    "logit_processors": ([],),
    "logits_processors": ([],),
    "typical_p": (1,),
    "bad_words": ([],),
    "vllm_xargs": ({},),
    "kv_transfer_params": (),
    "early_stopping": (False,),
}

CHAT: dict[str, Harmless] = _AGGREGATED | {
    "best_of": (1,),
    "echo": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "chat_template": (),
    "mm_processor_kwargs": (),
}

COMPLETION: dict[str, Harmless] = _AGGREGATED | {"suffix": ("",), "prompt_embeds": ()}

EMBEDDING: dict[str, Harmless] = {"messages": (), "prompt_embeds": (), "normalize": (True,)}


def refuse_unsupported(fields: dict[str, Any], table: dict[str, Harmless]) -> None:
    """Raise ClientError for the first field that asks for something this server does not do."""
    for name in fields.keys() & table.keys():
        value, harmless = fields[name], table[name]
        if value is None or any(_same(value, other) for other in harmless):
            continue
        but = " or ".join(["null", *map(repr, harmless)])
        raise ClientError(
            f"{name} is not supported by this server; leave it out (or {but})",
            param=name,
            code="unsupported_parameter",
        )


def _same(value: Any, other: Any) -> bool:
    """Return whether two values are equal and of one kind: 0 is not False."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
