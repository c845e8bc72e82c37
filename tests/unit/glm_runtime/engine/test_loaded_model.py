"""What a start that takes minutes writes to the log."""

import logging
from pathlib import Path

import pytest

import glm_runtime
from glm_runtime.engine.loaded_model import WORTH_LOGGING_BYTES, LoggedLoading, load_model
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan
from glm_runtime.numerics import NumericsMode
from glm_runtime.runtime_config import RuntimeConfig
from kv_transfer.identity import BlockId, Incarnation, SequenceId
from kv_transfer.request_values import SamplingParameters

TINY = Path(glm_runtime.__file__).parent / "tiny"


def test_a_long_load_logs_every_tenth_once(caplog: pytest.LogCaptureFixture) -> None:
    loading = LoggedLoading()
    with caplog.at_level(logging.INFO):
        for read in range(1001):
            loading.report(read * WORTH_LOGGING_BYTES // 1000, WORTH_LOGGING_BYTES)
    assert [record.getMessage().split()[2] for record in caplog.records] == [f"percent={percent}" for percent in range(10, 101, 10)]


def test_a_short_load_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        LoggedLoading().report(1000, 1000)
    assert not caplog.records


@pytest.mark.parametrize("drafts_here", [False, True])
def test_drafts_are_measured_where_they_are_made(drafts_here: bool) -> None:
    config = RuntimeConfig(checkpoint=TINY, cache_bytes=4 << 20, num_threads=1)
    model = load_model(config, Incarnation(1), drafts_here=drafts_here)
    assert model.max_drafts > 0, "both sides store the layer's keys"
    assert bool(model.measured_costs.target) is drafts_here


@pytest.mark.parametrize("numerics", ["deterministic", "fast"])
def test_a_hidden_state_has_the_bytes_that_are_said(numerics: NumericsMode) -> None:
    config = RuntimeConfig(checkpoint=TINY, cache_bytes=4 << 20, num_threads=1, numerics=numerics)
    model = load_model(config, Incarnation(1), drafts_here=False)
    sampling = SamplingParameters(max_tokens=2, seed=0)
    name = SequenceId("a")
    piece = SequenceSlice(sequence_id=name, tokens=(5, 6), start=0, block_table=(BlockId(0),), sampling=sampling, keeps_hidden=True)
    result = model.runner.run(StepPlan(step_number=0, slices=(piece,)))
    assert len(result.hidden_states[name]) == model.hidden_state_bytes
    assert model.numerics == numerics
    assert model.kernels in ("native", "torch")
