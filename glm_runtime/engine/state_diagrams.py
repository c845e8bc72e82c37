"""Draw the life-cycles of the engine: `python -m glm_runtime.engine.state_diagrams [FOLDER]`, default docs/states."""

import sys

from glm_runtime.engine.waves import WAVE_TRANSITIONS, WaveState
from kv_transfer.state_diagrams import Diagram, write

MODULE = "glm_runtime.engine.state_diagrams"
TITLE = "A worker among those that share its experts"
DIAGRAMS = (
    Diagram("wave.md", TITLE, WAVE_TRANSITIONS, WaveState.ASLEEP, MODULE, "glm_runtime/engine/waves.py"),  # type: ignore[arg-type]
)

if __name__ == "__main__":
    write(DIAGRAMS, *sys.argv[1:])
