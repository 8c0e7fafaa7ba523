"""Schemas of answers in the OpenAPI document. Pure."""

from typing import Any

Json = dict[str, Any]

TEXT: Json = {"type": "string"}
WHOLE: Json = {"type": "integer"}
ANY_OBJECT: Json = {"type": "object"}
NULLABLE_TEXT: Json = {"type": ["string", "null"]}


def an_object(required: Json, **optional: Json) -> Json:
    """Return the schema of an object."""
    return {"type": "object", "required": list(required), "properties": required | optional}


def a_list(of: Json) -> Json:
    return {"type": "array", "items": of}


ERROR = an_object(
    {
        "error": {
            **an_object(
                {"message": TEXT, "type": TEXT, "param": NULLABLE_TEXT, "code": NULLABLE_TEXT},
            ),
            "additionalProperties": False,
        }
    }
)
MESSAGES_ERROR = an_object(
    {"type": {"const": "error"}, "error": an_object({"type": TEXT, "message": TEXT})},
)

USAGE: Json = {
    "type": "object",
    "required": ["prompt_tokens", "total_tokens"],
    "properties": dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), WHOLE),
}


def listed(kind: str, item: Json, *, list_field: str = "data", **more: Json) -> Json:
    """Return the schema of an answer of the given kind, with a list of items."""
    return an_object({"object": {"const": kind}, list_field: a_list(item), **more})


def _choice(content: str, kind: Json) -> Json:
    return an_object({"index": WHOLE, content: kind, "finish_reason": TEXT})


_GENERATED: Json = {"id": TEXT, "model": TEXT, "usage": USAGE}
CHAT = listed("chat.completion", _choice("message", ANY_OBJECT), list_field="choices", **_GENERATED)
COMPLETION = listed("text_completion", _choice("text", TEXT), list_field="choices", **_GENERATED)
_VECTOR = an_object(
    {
        "object": {"const": "embedding"},
        "index": WHOLE,
        "embedding": {"type": ["array", "string"], "items": {"type": "number"}},
    }
)
EMBEDDINGS = listed("list", _VECTOR, model=TEXT, usage=USAGE)
MODEL = an_object({"id": TEXT, "object": {"const": "model"}})

RESPONSE = an_object(
    {
        "id": TEXT,
        "object": {"const": "response"},
        "created_at": WHOLE,
        "status": {"enum": ["completed", "incomplete", "failed"]},
        "model": TEXT,
        "output": a_list(an_object({"type": {"enum": ["message", "function_call", "reasoning"]}})),
        "usage": {
            **an_object({"input_tokens": WHOLE, "output_tokens": WHOLE, "total_tokens": WHOLE}),
            "type": ["object", "null"],
        },
    }
)
DELETED = an_object({"id": TEXT, "object": TEXT, "deleted": {"const": True}})
MESSAGE = an_object(
    {
        "id": TEXT,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "content": a_list(an_object({"type": {"enum": ["text", "thinking", "tool_use"]}})),
        "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
        "usage": an_object({"input_tokens": WHOLE, "output_tokens": WHOLE}),
    }
)
COUNT = an_object({"input_tokens": WHOLE})
TOKENS = an_object({"count": WHOLE, "max_model_len": WHOLE, "tokens": a_list(WHOLE)})
FILE = an_object(
    {
        "id": TEXT,
        "object": {"const": "file"},
        "bytes": WHOLE,
        "created_at": WHOLE,
        "filename": TEXT,
        "purpose": TEXT,
        "status": TEXT,
    }
)
BATCH = an_object(
    {
        "id": TEXT,
        "object": {"const": "batch"},
        "endpoint": TEXT,
        "input_file_id": TEXT,
        "completion_window": TEXT,
        "status": TEXT,
        "created_at": WHOLE,
        "request_counts": an_object({"total": WHOLE, "completed": WHOLE, "failed": WHOLE}),
    }
)
