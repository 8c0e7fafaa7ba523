"""The shape of an error's answer, which depends on the API that the path belongs to. Pure."""

from baton.core.errors import BatonError
from router.messages.errors import error_of_status, messages_error
from router.openai.responses import encoded, error_body, error_of

MESSAGES_PATH = "/v1/messages"


def is_of_messages(path: str) -> bool:
    return path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/")


def error_answer(path: str, error: BatonError) -> bytes:
    """Return the body of the answer to a request that ended with an error."""
    return encoded(messages_error(error)) if is_of_messages(path) else error_of(error)


def status_answer(path: str, status: int, message: str) -> bytes:
    """Return the body for an error that has a status and a message only."""
    if is_of_messages(path):
        return encoded(error_of_status(status, message))
    return error_body(message, "invalid_request_error" if status < 500 else "server_error")
