"""Draw the router's life-cycles beside those of a hand-off: `python -m router.state_diagrams [FOLDER]`, default docs/states."""

import sys

from kv_transfer.messages import WorkerState
from kv_transfer.state_diagrams import Diagram, write
from router.lifecycle import REQUEST_TRANSITIONS, RequestState
from router.registry import WORKER_TRANSITIONS

MODULE = "router.state_diagrams"
DIAGRAMS = (
    Diagram("request.md", "A request in the router", REQUEST_TRANSITIONS, RequestState.NEW, MODULE, "router/lifecycle.py"),  # type: ignore[arg-type]
    Diagram("worker.md", "A worker", WORKER_TRANSITIONS, WorkerState.PENDING, MODULE, "router/registry.py"),  # type: ignore[arg-type]
)

if __name__ == "__main__":
    write(DIAGRAMS, *sys.argv[1:])
