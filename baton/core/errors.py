"""Errors that are expected, as a tree.

BatonError
├── ClientError               the request can never work           -> 400, do not retry
│   ├── PromptTooLong
│   ├── Unauthorized          no API key, or nobody's -> 401
│   ├── Forbidden             -> 403
│   ├── ModelNotFound         -> 404
│   ├── AdapterNotFound       -> 404
│   └── BodyTooLarge          -> 413
├── Overloaded                it would work later                  -> 503 + Retry-After
│   ├── RateLimited           the tenant's own budget is spent   -> 429
│   ├── QueueFull
│   ├── ObjectivesUnmet       it would come too late to be of use
│   └── NoCapacity            a pool is empty or full
├── DeadlineOver              the request's time is up             -> 504
├── PeerFailure               another process failed us            -> retry elsewhere, then 503
│   ├── TransferFailed
│   └── IncompatiblePeer      fingerprints differ
├── PlatformLost              what all processes here stand on is gone -> exit status 1, to be restarted
└── SetupError                the operator must change something   -> one line, exit status 2
    └── CannotWrite           what was made has no place to go     -> one line, exit status 1

Programming errors are plain AssertionError / IllegalTransition: they crash the worker, on purpose.
"""

from typing import ClassVar


def cut(text: str, chars_max: int) -> str:
    return text if len(text) <= chars_max else text[: chars_max - 2] + " …"


class BatonError(Exception):
    http_status: ClassVar[int] = 500
    openai_type: ClassVar[str] = "server_error"
    retry_elsewhere: ClassVar[bool] = False


MESSAGE_CHARS_MAX, PARAM_CHARS_MAX = 4000, 400


class ClientError(BatonError):
    """The request can never work. `param` names the field, `code` is OpenAI's error code. Both texts are cut,
    since they may quote the request, and are sent, logged and remembered."""

    http_status = 400
    openai_type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(cut(message, MESSAGE_CHARS_MAX))
        self.param, self.code = None if param is None else cut(param, PARAM_CHARS_MAX), code


class PromptTooLong(ClientError):
    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class Unauthorized(ClientError):
    http_status = 401

    def __init__(self, message: str) -> None:
        super().__init__(message, code="invalid_api_key")


class Forbidden(ClientError):
    http_status = 403

    def __init__(self, message: str) -> None:
        super().__init__(message, code="permission_denied")


class ModelNotFound(ClientError):
    http_status = 404

    def __init__(self, message: str) -> None:
        super().__init__(message, param="model", code="model_not_found")


class AdapterNotFound(ClientError):
    http_status = 404


class BodyTooLarge(ClientError):
    http_status = 413


class Overloaded(BatonError):
    http_status = 503
    openai_type = "overloaded_error"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded):
    """`kind`: requests or tokens, which OpenAI tells as the error's type. `retry_after_s` None: never."""

    http_status = 429
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, kind: str, retry_after_s: float | None) -> None:
        super().__init__(message, retry_after_s=retry_after_s or 0.0)
        self.kind, self.is_final = kind, retry_after_s is None


class QueueFull(Overloaded):
    pass


class ObjectivesUnmet(Overloaded):
    pass


class NoCapacity(Overloaded):
    pass


class DeadlineOver(BatonError):
    http_status = 504
    openai_type = "timeout_error"


class PeerFailure(BatonError):
    http_status = 503
    retry_elsewhere = True


class TransferFailed(PeerFailure):
    """A read did not complete. `may_still_land`: bytes may yet arrive in the target blocks, which
    must stay out of use until the backend says that the read is settled."""

    def __init__(self, message: str, *, may_still_land: bool = False) -> None:
        super().__init__(message)
        self.may_still_land = may_still_land


class IncompatiblePeer(PeerFailure):
    pass


class PlatformLost(BatonError):
    """A process that the whole cluster stands on has died. Only a fresh start of everything helps."""


class SetupError(BatonError):
    """Something the operator must change; the command prints it as one line and exits with `exit_status`.

    It may quote files that come from anybody, so it is cut, and control characters, which could begin a new
    line or steer a terminal, become spaces.
    """

    exit_status: ClassVar[int] = 2

    def __init__(self, message: str = "", *, log: str = "") -> None:
        """`log` has the last lines of a process that failed. They follow the message as they are."""
        line = cut("".join(char if char.isprintable() else " " for char in message), MESSAGE_CHARS_MAX)
        super().__init__(f"{line}\n{log}" if log else line)


class OtherMemory(SetupError):
    """A transfer backend for pools in host memory was given one on a GPU, or the reverse. No news: the list
    of backends has some for either."""


class CannotWrite(SetupError):
    """The work was done, and its result is lost: a full disk, mostly."""

    exit_status = 1
