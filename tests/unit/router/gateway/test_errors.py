"""The tree as OpenAI error objects."""

import json

import pytest

from kv_transfer import errors
from router.gateway.errors import MethodNotAllowed, NotFound, UnsupportedMediaType, error_body, error_reply


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (errors.InvalidRequest("m", param="p"), 400, "invalid_request_error", "invalid_request"),
        (errors.PromptTooLong("m"), 400, "invalid_request_error", "context_length_exceeded"),
        (errors.UnsupportedParameter("m"), 400, "invalid_request_error", "unsupported_parameter"),
        (errors.ModelNotFound("m"), 404, "not_found_error", "model_not_found"),
        (NotFound("m"), 404, "not_found_error", "not_found"),
        (MethodNotAllowed("m"), 405, "invalid_request_error", "method_not_allowed"),
        (errors.BodyTooLarge("m"), 413, "invalid_request_error", "request_too_large"),
        (UnsupportedMediaType("m"), 415, "invalid_request_error", "unsupported_media_type"),
        (errors.QueueFull("m"), 503, "overloaded_error", "queue_full"),
        (errors.NoCapacity("m"), 503, "overloaded_error", "no_capacity"),
        (errors.Draining("m"), 503, "overloaded_error", "draining"),
        (errors.DeadlineExceeded("m"), 504, "server_error", "deadline_exceeded"),
    ],
)
def test_public_errors_keep_their_words(error: errors.ServingError, status: int, kind: str, code: str) -> None:
    reply = error_reply(error)
    described = json.loads(reply.body)["error"]
    assert reply.status == status
    assert described == {"message": "m", "type": kind, "param": getattr(error, "param", None), "code": code}
    assert ("retry-after" in dict(reply.headers)) == isinstance(error, errors.Overloaded)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("secret"),
        errors.WorkerLost("secret"),
        errors.EngineFault("secret"),
        errors.PeerLost("secret"),
        errors.ConfigError("secret"),
    ],
)
def test_internal_words_never_reach_a_client(error: Exception) -> None:
    assert error_reply(error).status == 500
    assert b"secret" not in error_body(error)


def test_retry_after_is_whole_seconds_and_never_zero() -> None:
    assert dict(error_reply(errors.QueueFull("m", retry_after_s=0.01)).headers) == {"retry-after": "1"}
    assert dict(error_reply(errors.QueueFull("m", retry_after_s=2.5)).headers) == {"retry-after": "3"}
