"""Errors in the shape of the Messages API. Pure."""

from typing import Any

from baton.core.errors import BatonError, ClientError

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def messages_error(error: BatonError) -> dict[str, Any]:
    """Return the body of an error's answer. The message names the field, which has no place of its own."""
    message = str(error)
    if isinstance(error, ClientError) and error.param and error.param not in message:
        message = f"{error.param}: {message}"
    return error_of_status(error.http_status, message)


def error_of_status(status: int, message: str) -> dict[str, Any]:
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}
