"""The error tree. Each class knows its public code, HTTP status and whether another attempt may help.

    ServingError                      code, http_status, retryable; the message says what happened, the numbers, what to do
    |- InvalidRequest                 400, the caller's fault; never retried
    |   |- PromptTooLong
    |   |- UnsupportedParameter
    |   |- ModelNotFound              404
    |   `- BodyTooLarge               413
    |- Overloaded                     503, with retry_after_s
    |   |- QueueFull
    |   |- NoCapacity                 no worker can take the request now
    |   `- Draining
    |- TransferError                  ours; internal until mapped
    |   |- LayoutMismatch             not retryable: a deployment mistake
    |   |- AuthenticationFailed       not retryable: the peers do not share the cluster secret
    |   |- ProtocolMismatch           not retryable: unknown message or version
    |   |- PeerLost                   retryable on another worker
    |   |- TransferTimeout            retryable
    |   `- BlockCorrupted             retryable once, always reported
    |- PoolExhausted                  no free block; the caller preempts or answers BUSY
    |- WorkerError
    |   |- WorkerLost                 retryable; the stream resumes at the next token index
    |   `- EngineFault                the worker stops itself
    |- DeadlineExceeded               504
    `- ConfigError                    start-up only: a config file, a checkpoint, the machine

Bugs are not in the tree: AssertionError and RuntimeError stop the process that has them.
"""

from typing import ClassVar


class ServingError(Exception):
    """Root of every error that the world, not a bug, can cause. `fields` are for logs; the message is for people."""

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **fields: object) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields


class InvalidRequest(ServingError):
    """The caller's fault. `param` names the request field, if one is to blame."""

    code: ClassVar[str] = "invalid_request"
    http_status: ClassVar[int] = 400

    def __init__(self, message: str, *, param: str | None = None, **fields: object) -> None:
        super().__init__(message, **fields)
        self.param = param


class PromptTooLong(InvalidRequest):
    code: ClassVar[str] = "context_length_exceeded"


class UnsupportedParameter(InvalidRequest):
    code: ClassVar[str] = "unsupported_parameter"


class ModelNotFound(InvalidRequest):
    code: ClassVar[str] = "model_not_found"
    http_status: ClassVar[int] = 404


class BodyTooLarge(InvalidRequest):
    code: ClassVar[str] = "request_too_large"
    http_status: ClassVar[int] = 413


class Overloaded(ServingError):
    """Try again after `retry_after_s` seconds."""

    code: ClassVar[str] = "overloaded"
    http_status: ClassVar[int] = 503
    retryable: ClassVar[bool] = True

    def __init__(self, message: str, *, retry_after_s: float = 1.0, **fields: object) -> None:
        super().__init__(message, **fields)
        self.retry_after_s = retry_after_s


class QueueFull(Overloaded):
    code: ClassVar[str] = "queue_full"


class NoCapacity(Overloaded):
    code: ClassVar[str] = "no_capacity"


class Draining(Overloaded):
    code: ClassVar[str] = "draining"


class TransferError(ServingError):
    code: ClassVar[str] = "transfer_error"


class LayoutMismatch(TransferError):
    code: ClassVar[str] = "layout_mismatch"


class AuthenticationFailed(TransferError):
    code: ClassVar[str] = "authentication_failed"


class ProtocolMismatch(TransferError):
    code: ClassVar[str] = "protocol_mismatch"


class PeerLost(TransferError):
    code: ClassVar[str] = "peer_lost"
    retryable: ClassVar[bool] = True


class TransferTimeout(TransferError):
    code: ClassVar[str] = "transfer_timeout"
    retryable: ClassVar[bool] = True


class BlockCorrupted(TransferError):
    code: ClassVar[str] = "block_corrupted"
    retryable: ClassVar[bool] = True


class PoolExhausted(ServingError):
    code: ClassVar[str] = "pool_exhausted"
    http_status: ClassVar[int] = 503
    retryable: ClassVar[bool] = True


class WorkerError(ServingError):
    code: ClassVar[str] = "worker_error"


class WorkerLost(WorkerError):
    code: ClassVar[str] = "worker_lost"
    retryable: ClassVar[bool] = True


class EngineFault(WorkerError):
    code: ClassVar[str] = "engine_fault"
    retryable: ClassVar[bool] = True


class DeadlineExceeded(ServingError):
    code: ClassVar[str] = "deadline_exceeded"
    http_status: ClassVar[int] = 504


class ConfigError(ServingError):
    """A mistake found before anything starts. `path` names the file and, after a colon, the field; `reason` is the message without it."""

    code: ClassVar[str] = "config_error"

    def __init__(self, message: str, *, path: str = "", **fields: object) -> None:
        super().__init__(f"{path}: {message}" if path else message, **fields)
        self.path = path
        self.reason = message
