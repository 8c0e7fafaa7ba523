"""What can go wrong, as a tree.

BatonError
├── ClientError               the request can never work           -> 400, do not retry
│   ├── PromptTooLong
│   ├── ModelNotFound         -> 404
│   ├── AdapterNotFound       -> 404
│   └── BodyTooLarge          -> 413
├── Overloaded                it would work later                  -> 503 + Retry-After
│   ├── QueueFull
│   └── NoCapacity            a pool is empty or full
├── DeadlineOver              the request's time is up             -> 504
├── PeerFailure               another process failed us            -> retry elsewhere, then 503
│   ├── TransferFailed
│   └── IncompatiblePeer      fingerprints differ
├── PlatformLost              what all processes here stand on is gone -> exit status 1, to be restarted
└── SetupError                the operator must change something   -> one line, exit status 2

Programming errors are plain AssertionError / IllegalTransition: they crash the worker, on purpose.
"""

from typing import ClassVar


class BatonError(Exception):
    http_status: ClassVar[int] = 500
    openai_type: ClassVar[str] = "server_error"
    retry_elsewhere: ClassVar[bool] = False


class ClientError(BatonError):
    """The request can never work. `param` names the field, `code` is OpenAI's error code."""

    http_status = 400
    openai_type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


class PromptTooLong(ClientError):
    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


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


class QueueFull(Overloaded):
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
    """What all processes of the cluster stand on has died; only a fresh start of everything helps."""


class SetupError(BatonError):
    """Something the operator must change; the command prints it as one line and exits with 2."""
