"""The life of one request, as a table.

    NEW -> ADMITTED -> DISPATCHED(attempt) -> STREAMING -> DONE | FAILED
                          ^--- RETRY, attempt + 1 ---'

Knows: which moves are legal. Does not know why a move happens (`request_flow.py`) or who is told (`relay.py`).
An absent entry is an illegal transition: `kv_transfer.handoff.advance` raises.
"""

from enum import Enum, unique


@unique
class RequestState(Enum):
    """ADMITTED waits for its first pair. DISPATCHED has no token yet of the current attempt, or waits for another pair."""

    NEW = "new"
    ADMITTED = "admitted"
    DISPATCHED = "dispatched"
    STREAMING = "streaming"
    DONE = "done"
    FAILED = "failed"


@unique
class RequestEvent(Enum):
    """What can happen to a request. FAIL is the world's fault, ABORT the client's wish, EXPIRE the deadline."""

    ADMIT = "admit"
    DISPATCH = "dispatch"
    TOKENS = "tokens"
    RETRY = "retry"
    FINISH = "finish"
    FAIL = "fail"
    ABORT = "abort"
    EXPIRE = "expire"


_ENDS = {
    RequestEvent.FAIL: RequestState.FAILED,
    RequestEvent.ABORT: RequestState.FAILED,
    RequestEvent.EXPIRE: RequestState.FAILED,
}

REQUEST_TRANSITIONS: dict[RequestState, dict[RequestEvent, RequestState]] = {
    RequestState.NEW: {RequestEvent.ADMIT: RequestState.ADMITTED, **_ENDS},
    RequestState.ADMITTED: {RequestEvent.DISPATCH: RequestState.DISPATCHED, **_ENDS},
    RequestState.DISPATCHED: {
        RequestEvent.DISPATCH: RequestState.DISPATCHED,
        RequestEvent.RETRY: RequestState.DISPATCHED,
        RequestEvent.TOKENS: RequestState.STREAMING,
        RequestEvent.FINISH: RequestState.DONE,
        **_ENDS,
    },
    RequestState.STREAMING: {
        RequestEvent.TOKENS: RequestState.STREAMING,
        RequestEvent.RETRY: RequestState.DISPATCHED,
        RequestEvent.FINISH: RequestState.DONE,
        **_ENDS,
    },
    RequestState.DONE: {},
    RequestState.FAILED: {},
}

TERMINAL_STATES = frozenset(state for state, row in REQUEST_TRANSITIONS.items() if not row)
