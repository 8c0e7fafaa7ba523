"""OpenAI requests, parsed from the body's bytes into a checked `Call`. Pure.

A body is parsed once. Every error in it raises ClientError, which names the field.
"""

import math

import msgspec

from baton.core.errors import ClientError
from router.openai.bodies import (
    AnyBody,
    BatonOptions,
    Body,
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    parse_body,
)
from router.openai.call import Beam, Call, Endpoint, RequestLimits, SloOptions
from router.openai.checks import (
    LOGPROBS_MAX,
    Prompt,
    between,
    check_max_tokens,
    check_prompts,
    check_stops,
    check_user,
)
from router.openai.response_format import Structured, grammar_of
from router.openai.sampling import BOUNDED, DEFAULTS, allowed_beside, checked_sampling
from router.openai.unsupported import CHAT, COMPLETION, EMBEDDING
from router.text.conversation import Template, ToolMode, check_messages, check_tool_use
from router.text.model_card import ModelCard

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions."""
PRIORITY_MAX = 2**31 - 1
EMBEDDING_INPUTS_MAX = 2048
"""OpenAI's bound."""
BEAM_IDLE = {
    "temperature": (0, 1),
    "top_p": (1,),
    "top_k": (0, -1),
} | {name: (DEFAULTS[name],) for name in BOUNDED}
"""Values that change nothing, for fields that a beam search does not have."""
TEMPLATE_OPTIONS_MAX = 256
"""Most entries of `chat_template_kwargs`. A template is called with each of them."""
TEMPLATE_RESERVED = frozenset(
    {"messages", "tools", "documents", "conversation", "chat_template", "tokenize", "add_generation_prompt"}
    | {"continue_final_message", "return_dict", "return_tensors", "padding", "truncation", "max_length"}
    | {"tokenizer_kwargs", "return_assistant_tokens_mask", "load_audio_from_video", "processor_kwargs"}
)
"""Names that `chat_template_kwargs` must not have: they have fields of their own, or are not the client's
business."""


def parse_chat(body: bytes, limits: RequestLimits) -> Call:
    return chat_call(parse_body(body, ChatBody, CHAT), limits)


def chat_call(parsed: ChatBody, limits: RequestLimits) -> Call:
    """Return the checked call of a chat's fields, whichever API they came from. Raises ClientError that names
    the field of a chat."""
    max_tokens, field = parsed.max_tokens, "max_tokens"
    if parsed.max_completion_tokens is not None:
        max_tokens, field = parsed.max_completion_tokens, "max_completion_tokens"
    tools = check_tool_use(parsed.tools, parsed.tool_choice, is_parallel=parsed.parallel_tool_calls)
    structured = grammar_of(parsed)
    is_forced = tools.mode in (ToolMode.REQUIRED, ToolMode.NAMED)
    if is_forced and parsed.allowed_token_ids is not None:
        raise allowed_beside("a tool_choice that forces a call")
    if structured is not None and is_forced:
        raise ClientError(
            f"{structured.field} and a tool_choice that forces a call exclude each other", param="tool_choice"
        )
    call = _call(parsed, limits, Endpoint.CHAT, max_tokens, field, structured, _chat_logprobs(parsed))
    return msgspec.structs.replace(
        call,
        messages=check_messages(parsed.messages),
        tools=tools,
        template=_check_template(parsed),
        include_reasoning=parsed.include_reasoning is not False,
    )


def parse_completion(body: bytes, limits: RequestLimits) -> Call:
    parsed = parse_body(body, CompletionBody, COMPLETION)
    prompts = check_prompts(
        parsed.prompt,
        limits.card,
        prompts_max=limits.choices_max,
        may_be_cut=parsed.truncate_prompt_tokens is not None,
    )
    max_tokens = COMPLETION_MAX_TOKENS if parsed.max_tokens is None else parsed.max_tokens
    echo = bool(parsed.echo)
    prompt_only = echo and max_tokens == 0
    logprobs = None
    if parsed.logprobs is not None:
        logprobs = between("logprobs", parsed.logprobs, 0, LOGPROBS_MAX, default=0)
    call = _call(
        parsed, limits, Endpoint.COMPLETION, 1 if prompt_only else max_tokens, "max_tokens",
        grammar_of(parsed), logprobs, prompts,
    )  # fmt: skip
    if echo and logprobs is not None and call.sampling.prompt_logprobs is None:
        sampling = msgspec.structs.replace(call.sampling, prompt_logprobs=logprobs)
        call = msgspec.structs.replace(call, sampling=sampling)
    return msgspec.structs.replace(
        call, echo=echo, prompt_only=prompt_only, best_of=_check_best_of(parsed, call, limits)
    )


def parse_embedding(body: bytes, limits: RequestLimits) -> Call:
    parsed = parse_body(body, EmbeddingBody, EMBEDDING)
    if parsed.encoding_format not in (None, "float", "base64"):
        raise ClientError("encoding_format must be float or base64", param="encoding_format")
    return Call(
        endpoint=Endpoint.EMBEDDING,
        model=parsed.model,
        prompts=check_prompts(
            parsed.input,
            limits.card,
            prompts_max=EMBEDDING_INPUTS_MAX,
            param="input",
            may_be_cut=parsed.truncate_prompt_tokens is not None,
        ),
        add_special_tokens=parsed.add_special_tokens,
        truncate_prompt_tokens=_check_truncation(parsed, limits.card.context_tokens),
        priority=_check_priority(parsed),
        slo=_check_slo(parsed),
        fairness_key=check_user(parsed.user or parsed.safety_identifier),
        encoding_format=parsed.encoding_format or "float",
        dimensions=_check_dimensions(parsed.dimensions, limits.card),
    )


def _call(
    body: Body,
    limits: RequestLimits,
    endpoint: Endpoint,
    max_tokens: int | None,
    max_tokens_field: str,
    structured: Structured | None,
    logprobs: int | None,
    prompts: tuple[Prompt, ...] = (),
) -> Call:
    card = limits.card
    n = between("n", body.n, 1, limits.choices_max, default=1)
    if len(prompts) * n > limits.choices_max:
        raise ClientError(
            f"{len(prompts)} prompts with n={n} are {len(prompts) * n} choices, at most "
            f"{limits.choices_max} are allowed",
            param="prompt",
        )
    beam = _check_beam(body, n, structured)
    if structured is not None and body.allowed_token_ids is not None:
        raise allowed_beside(structured.field)
    sampling = checked_sampling(body, card, logprobs)
    return Call(
        endpoint=endpoint,
        model=body.model,
        prompts=prompts,
        n=n,
        beam=beam,
        stream=bool(body.stream),
        include_usage=_include_usage(body),
        max_tokens=check_max_tokens(max_tokens, max_tokens_field, card.context_tokens),
        max_tokens_field=max_tokens_field,
        sampling=sampling,
        stops=check_stops(body.stop),
        with_stop=bool(body.include_stop_str_in_output),
        skip_special=body.skip_special_tokens is not False,
        with_logprobs=logprobs is not None,
        with_prompt_logprobs=body.prompt_logprobs is not None,
        with_token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        structured=structured,
        add_special_tokens=body.add_special_tokens,
        truncate_prompt_tokens=_check_truncation(body, card.context_tokens),
        priority=_check_priority(body),
        slo=_check_slo(body),
        with_timings=body.baton is not None and bool(body.baton.timings),
        fairness_key=check_user(body.user or body.safety_identifier),
    )


# --- fields that hang together --------------------------------------------------------------------


def _chat_logprobs(body: ChatBody) -> int | None:
    top = body.top_logprobs
    if not body.logprobs:
        if top:
            raise ClientError("top_logprobs is only allowed with logprobs: true", param="top_logprobs")
        return None
    return between("top_logprobs", top, 0, LOGPROBS_MAX, default=0)


def _check_best_of(body: CompletionBody, call: Call, limits: RequestLimits) -> int:
    if body.best_of is None:
        return call.n
    if body.best_of < call.n:
        raise ClientError(f"best_of must be at least n, which is {call.n}", param="best_of")
    if body.best_of * len(call.prompts) > limits.choices_max:
        raise ClientError(
            f"best_of={body.best_of} of {len(call.prompts)} prompts is more than the {limits.choices_max} "
            "sequences that are allowed",
            param="best_of",
        )
    if body.best_of > call.n and call.stream:
        raise ClientError("best_of is not available with stream: true", param="best_of")
    if body.best_of > call.n and call.beam is not None:
        raise ClientError("best_of and use_beam_search exclude each other", param="best_of")
    return body.best_of


def _check_beam(body: Body, width: int, structured: Structured | None) -> Beam | None:
    """Return the beam search. Beams are scored by the model alone, and nothing is drawn; so fields that would
    change its probabilities or the drawing are refused."""
    penalty = body.length_penalty
    if penalty is not None and not (math.isfinite(penalty) and abs(penalty) <= 10):
        raise ClientError(f"length_penalty must be from -10 to 10, not {penalty}", param="length_penalty")
    if not body.use_beam_search:
        if penalty not in (None, 1):
            raise ClientError("length_penalty needs use_beam_search: true", param="length_penalty")
        return None
    fields = ("min_tokens", "logit_bias", "stop")
    wanted = [name for name in fields if getattr(body, name)]
    fields = ("top_logprobs", "allowed_token_ids", "prompt_logprobs", "logprobs", "tools", "echo")
    wanted += [name for name in fields if getattr(body, name, None) not in (None, False, [])]
    wanted += [name for name, idle in BEAM_IDLE.items() if getattr(body, name) not in (None, *idle)]
    if structured is not None:
        wanted.append(structured.field)
    if body.baton is not None and body.baton.timings:
        wanted.append("baton.timings")
    if body.stream:
        wanted.append("stream")
    if wanted:
        raise ClientError(f"{wanted[0]} is not available with use_beam_search", param=wanted[0])
    return Beam(width, 1.0 if penalty is None else penalty)


def _check_truncation(body: AnyBody, context_tokens: int) -> int | None:
    value = body.truncate_prompt_tokens
    if value is None or value == -1:
        return value
    return between("truncate_prompt_tokens", value, 1, context_tokens - 1, default=-1)


def _check_priority(body: AnyBody) -> int | None:
    value = body.priority
    return None if value is None else between("priority", value, -PRIORITY_MAX, PRIORITY_MAX, default=0)


def _check_slo(body: AnyBody) -> SloOptions:
    options = body.baton or BatonOptions()
    return SloOptions(
        slo_class=options.slo_class,
        service_tier=body.service_tier,
        ttft_s=_check_objective_s("baton.ttft_ms", options.ttft_ms, 3_600_000),
        tpot_s=_check_objective_s("baton.tpot_ms", options.tpot_ms, 60_000),
    )


def _check_objective_s(field: str, value_ms: float | None, most_ms: int) -> float | None:
    if value_ms is None:
        return None
    if not 0 < value_ms <= most_ms:
        raise ClientError(f"{field} must be above 0 and at most {most_ms}, not {value_ms}", param=field)
    return value_ms / 1000


def _check_dimensions(dimensions: int | None, card: ModelCard) -> int | None:
    if dimensions is None or dimensions == card.hidden_size:
        return None
    if card.matryoshka_dimensions is None:
        raise ClientError(
            "this model's embeddings cannot be shortened: leave dimensions out", param="dimensions"
        )
    if card.matryoshka_dimensions and dimensions not in card.matryoshka_dimensions:
        raise ClientError(
            f"dimensions must be one of {sorted(card.matryoshka_dimensions)}, not {dimensions}",
            param="dimensions",
        )
    return between("dimensions", dimensions, 1, card.hidden_size or 1, default=1)


def _check_template(body: ChatBody) -> Template:
    kwargs = dict(body.chat_template_kwargs or {})
    if len(kwargs) > TEMPLATE_OPTIONS_MAX:
        raise ClientError(
            f"chat_template_kwargs may have at most {TEMPLATE_OPTIONS_MAX} entries, not {len(kwargs)}",
            param="chat_template_kwargs",
        )
    for name in kwargs:
        if name in TEMPLATE_RESERVED or not name.isidentifier():
            raise ClientError(
                f"chat_template_kwargs must not have {name!r:.60}", param="chat_template_kwargs"
            )
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    continues = bool(body.continue_final_message)
    adds = body.add_generation_prompt
    if continues and adds:
        raise ClientError(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    if continues and body.messages and body.messages[-1].get("role") != "assistant":
        raise ClientError(
            "continue_final_message needs an assistant's message at the end", param="continue_final_message"
        )
    return Template(tuple(body.documents or ()), kwargs, not continues and adds is not False, continues)


def _include_usage(body: Body) -> bool:
    if body.stream_options is None:
        return False
    if not body.stream:
        raise ClientError("stream_options is only allowed with stream: true", param="stream_options")
    return bool(body.stream_options.include_usage)
