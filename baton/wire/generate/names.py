"""Names in generated code, each derived from the name of a message, an enum or a member."""

import re

_WORD_STARTS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def function_prefix(name: str) -> str:
    """The name in snake case: "KVGrant" becomes "kv_grant"."""
    return _WORD_STARTS.sub("_", name).lower()


def oneof_field(message: str) -> str:
    return function_prefix(message)


def enum_value(enum: str, member: str) -> str:
    """Names of protobuf's enum values share one namespace, so each begins with its enum's name."""
    return f"{function_prefix(enum).upper()}_{member}"


def numbers_name(enum: str) -> str:
    return f"_{function_prefix(enum).upper()}_NUMBERS"


def members_name(enum: str) -> str:
    return f"_{function_prefix(enum).upper()}_MEMBERS"
