"""The one way in which structured output is refused: a client error that names keyword and path."""

from baton.core.errors import ClientError


def refuse(path: str, keyword: str, reason: str) -> ClientError:
    """Return the error to raise. An empty `keyword` names the schema at `path` itself."""
    where = f"{path}.{keyword}" if keyword else path
    return ClientError(f"{where}: {reason}", param=where, code="unsupported_grammar")


def is_half_of_pair(code: int) -> bool:
    """Whether a code point is one half of a surrogate pair. It has no UTF-8, and a compiled grammar that asks
    for it makes the model write bytes that are no text."""
    return 0xD800 <= code <= 0xDFFF
