"""The error tree as OpenAI error objects: `{"error": {"message", "type", "param", "code"}}`, always nested.

Knows: which HTTP status, headers and public words an error has. Does not know where it came from. Text of internal errors never
reaches a client.
"""

import math
from dataclasses import dataclass

import msgspec

from kv_transfer.errors import InvalidRequest, Overloaded, ServingError, TransferError, WorkerError

INTERNAL_MESSAGE = "The server had an error while it processed the request; it was logged. Try again."
WORKERS_LOST_MESSAGE = "The workers that ran the request were lost or failed, and no attempt is left. Try again."


class NotFound(InvalidRequest):
    """No such path."""

    code = "not_found"
    http_status = 404


class MethodNotAllowed(InvalidRequest):
    """The path exists, the method does not."""

    code = "method_not_allowed"
    http_status = 405


class UnsupportedMediaType(InvalidRequest):
    """The body is not JSON."""

    code = "unsupported_media_type"
    http_status = 415


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """What the client gets."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


def error_body(error: BaseException) -> bytes:
    """The JSON of the error object, for a reply or for an event of a stream that has begun."""
    return msgspec.json.encode({"error": _describe(error)})


def error_reply(error: BaseException) -> ErrorReply:
    """Status, headers and body of an error. Anything outside the tree is a bug and becomes a plain 500."""
    status = error.http_status if isinstance(error, ServingError) else 500
    headers: tuple[tuple[str, str], ...] = ()
    if isinstance(error, Overloaded):
        headers = (("retry-after", str(max(math.ceil(error.retry_after_s), 1))),)
    return ErrorReply(status, headers, error_body(error))


def _describe(error: BaseException) -> dict[str, str | None]:
    if isinstance(error, InvalidRequest):
        kind = "not_found_error" if error.http_status == 404 else "invalid_request_error"
        return {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    if isinstance(error, Overloaded):
        return {"message": error.message, "type": "overloaded_error", "param": None, "code": error.code}
    if isinstance(error, ServingError) and error.http_status != 500:
        return {"message": error.message, "type": "server_error", "param": None, "code": error.code}
    message = WORKERS_LOST_MESSAGE if isinstance(error, WorkerError | TransferError) else INTERNAL_MESSAGE
    code = error.code if isinstance(error, ServingError) else "internal_error"
    return {"message": message, "type": "server_error", "param": None, "code": code}
