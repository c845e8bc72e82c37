"""For whom drafts are made."""

from pathlib import Path

import glm_runtime
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan
from glm_runtime.runtime import GlmRuntime
from glm_runtime.runtime_config import RuntimeConfig
from kv_transfer.identity import BlockId, SequenceId
from kv_transfer.messages import SamplingParameters
from kv_transfer.pool_memory import PoolMemory

NAME = SequenceId("a")
TINY = Path(glm_runtime.__file__).parent / "tiny"


def test_no_drafts_are_made_for_a_request_that_has_ended() -> None:
    runtime = GlmRuntime.load(RuntimeConfig(checkpoint=TINY, cache_bytes=4 << 20, num_threads=1))
    runner = runtime.attach(PoolMemory(2, runtime.layout.block_bytes))

    def run(**sampling: object) -> tuple[int, int]:
        """The token drawn after a prompt, and how many drafts follow it."""
        parameters = SamplingParameters(seed=0, temperature=0.0, **sampling)  # type: ignore[arg-type]
        piece = SequenceSlice(
            sequence_id=NAME, tokens=(5, 6, 7, 8), start=0, block_table=(BlockId(0),), sampling=parameters, num_next_drafts=3
        )
        result = runner.run(StepPlan(step_number=0, slices=(piece,)))
        return result.samples[NAME][0], len(result.drafts.get(NAME, ()))

    token, num_drafts = run(max_tokens=9)
    assert num_drafts == 3
    assert run(max_tokens=9, stop_token_ids=(token + 1,)) == (token, 3)
    assert run(max_tokens=9, stop_token_ids=(token,)) == (token, 0)
    assert run(max_tokens=1) == (token, 0)
