"""The one way in which structured output is refused: a client error that names keyword and path."""

from baton.core.errors import ClientError


def refuse(path: str, keyword: str, reason: str) -> ClientError:
    """Return the error to raise. An empty `keyword` names the schema at `path` itself."""
    where = f"{path}.{keyword}" if keyword else path
    return ClientError(f"{where}: {reason}", param=where, code="unsupported_grammar")
