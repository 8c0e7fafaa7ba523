"""Fields of OpenAI's API, and of its common extensions, that this server knows and does not do yet.

A request that needs one of them is refused: an answer that silently lacks what was asked for is worse
than none. Values that change nothing pass, null always. Fields found neither here nor in the request
types are unknown and ignored, as are those that only inform the server (`user`, `metadata`,
`service_tier`, `safety_identifier`, `prompt_cache_key`, `prediction`, `parallel_tool_calls` …).
"""

from typing import Any

from baton.core.errors import ClientError

Harmless = tuple[Any, ...]

_BOTH: dict[str, Harmless] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logit_processors": ([],),
    "logits_processors": ([],),
    "min_p": (0,),
    "min_tokens": (0,),
    "typical_p": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "add_special_tokens": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "response_format": ({"type": "text"},),
    "echo": (False,),
}

CHAT: dict[str, Harmless] = _BOTH | {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "store": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "documents": ([],),
}

COMPLETION: dict[str, Harmless] = _BOTH | {"logprobs": (), "suffix": ("",)}


def refuse_unsupported(fields: dict[str, Any], table: dict[str, Harmless]) -> None:
    """Raises ClientError naming the first field that asks for something this server does not do."""
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
    """Equal, and not merely 0 for False or the other way round."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
