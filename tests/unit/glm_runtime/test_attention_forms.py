"""Which form of attention a run of rows takes, and that both forms say the same in fast mode."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from glm_runtime.attention import is_expanding_cheaper
from glm_runtime.config import GlmConfig
from glm_runtime.runtime import GlmRuntime
from glm_runtime.runtime_config import KernelsChoice, RuntimeConfig
from glm_runtime.step_batch import RowSpan
from tests.conformance.glm_schedules import ScheduledRuntime, chunked
from tests.conformance.tolerances import LOGITS_OF_LARGEST
from tests.glm_checkpoints import GLM53_FIELDS, write_checkpoint, write_config


@pytest.fixture
def glm53(tmp_path: Path) -> GlmConfig:
    write_config(tmp_path, GLM53_FIELDS)
    return GlmConfig.from_checkpoint(tmp_path)


def span(start: int, rows: int) -> RowSpan:
    return RowSpan(0, 0, rows, start)


@pytest.mark.parametrize(
    ("start", "rows", "is_expanded"),
    [
        (0, 2048, True),
        (0, 4096, True),  # beyond index_topk, masked
        (0, 20000, False),  # most scores would be masked away again
        (0, 64, True),
        (2040, 6, False),  # rebuilding 2,046 tokens for 6 rows
        (1500, 512, True),
        (100000, 512, False),
    ],
)
def test_the_form_that_takes_fewer_multiplications_is_chosen(glm53: GlmConfig, start: int, rows: int, is_expanded: bool) -> None:
    assert is_expanding_cheaper(glm53, span(start, rows)) == is_expanded


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_expanded_and_absorbed_prefill_agree_in_fast_mode(kernels: KernelsChoice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32, on a prompt far beyond index_topk, so that the expanded form is masked by the selection."""
    checkpoint = write_checkpoint(tmp_path)
    runtime = GlmRuntime.load(RuntimeConfig(checkpoint=checkpoint, numerics="fast", kernels=kernels, num_threads=1))
    prompt = torch.randint(0, 193, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    taken: list[bool] = []

    def logits(is_expanded: bool) -> Tensor:
        def choose(_config: GlmConfig, _span: RowSpan) -> bool:
            taken.append(is_expanded)
            return is_expanded

        monkeypatch.setattr("glm_runtime.attention.is_expanding_cheaper", choose)
        return ScheduledRuntime(runtime).logits([prompt], chunked(150, 80))[0]

    expanded, absorbed = logits(True), logits(False)
    assert len(set(taken)) == 2
    assert not torch.equal(expanded, absorbed), "two forms add in different orders"
    off = (expanded - absorbed).abs().amax(-1) / absorbed.abs().amax(-1)
    # Two scores a rounding apart may be chosen the other way round; then that row and those that read it differ.
    assert (off < LOGITS_OF_LARGEST).float().mean() > 0.9
