"""A recorded computation is made again with the numbers that lie there now, and what cannot be is refused."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from glm_runtime.native.build import are_kernels_expected
from glm_runtime.native.library import library
from glm_runtime.native.recording import Recording, record
from glm_runtime.ops.add_rms_norm import add_rms_norm

pytestmark = pytest.mark.skipif(not are_kernels_expected("auto"), reason="no compiler or no AVX-512: compiled kernels cannot be had here")

PLENTY = 1 << 20


class Computation:
    """A norm by a compiled kernel after a sum by torch, over one buffer of rows."""

    def __init__(self) -> None:
        self.rows = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
        self.weight = torch.full((40,), 2.0)
        self.result = torch.empty(0)

    def compute(self) -> tuple[Tensor]:
        self.result = add_rms_norm(self.rows[:2] + self.rows[2], (), self.weight, 1e-5, impl="native")[1]
        return (self.result,)

    def record(self, compute: Callable[[], tuple[Tensor, ...]] | None = None, most_bytes: int = PLENTY) -> Recording | None:
        with torch.inference_mode():
            return record(library(), compute or self.compute, most_bytes)


def test_a_replay_computes_with_the_numbers_that_are_there_now() -> None:
    recorded, plain = Computation(), Computation()
    recording = recorded.record()
    assert recording is not None
    assert torch.equal(recorded.result, plain.compute()[0])
    assert torch.equal(recorded.rows, plain.rows), "what is read is left alone"
    for seed in (2, 3):
        plain.rows = torch.randn(3, 40, generator=torch.Generator().manual_seed(seed))
        recorded.rows.copy_(plain.rows)
        with torch.inference_mode():
            recording.replay()
        assert torch.equal(recorded.result, plain.compute()[0])


def test_checks_are_made_once() -> None:
    recorded = Computation()

    def checked() -> tuple[Tensor]:
        least, largest = torch.aminmax(recorded.rows)
        assert float(least) < float(largest)
        return recorded.compute()

    recording = recorded.record(checked)
    assert recording is not None
    recorded.rows.zero_()
    with torch.inference_mode():
        recording.replay()
    assert not recorded.result.any()


def test_results_that_do_not_come_from_calls_are_refused() -> None:
    recorded = Computation()
    assert recorded.record(lambda: (torch.from_numpy(recorded.compute()[0].numpy() * 2),)) is None


def test_more_than_the_bytes_that_are_allowed_is_refused() -> None:
    assert Computation().record(most_bytes=600) is None


def test_calls_of_other_threads_are_not_noted() -> None:
    recorded, other = Computation(), Computation()

    def compute() -> tuple[Tensor]:
        thread = threading.Thread(target=other.compute)
        thread.start()
        thread.join()
        return recorded.compute()

    recording = recorded.record(compute)
    assert recording is not None
    expected = recorded.result.clone()
    other.rows.fill_(torch.nan)
    with torch.inference_mode():
        recording.replay()
    assert torch.equal(recorded.result, expected)
    assert len(recording.calls) == 2
    assert not torch.isnan(other.result).any()
