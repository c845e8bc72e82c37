"""Rows of a sequence as numbers: whatever bytes lie there, every form reads what the reference reads."""

import pytest
import torch

from glm_runtime.ops.cache_rows import load_blocks, load_sequence
from glm_runtime.ops.impl import Impl
from glm_runtime.row_format import RowKind
from tests.unit.glm_runtime.ops.pools import NATIVE, fill, poisoned_region

KINDS = [RowKind.BF16, RowKind.FP32, RowKind.FP8_E4M3, RowKind.FP8_DS_MLA, RowKind.NVFP4_DS_MLA]
SERVING = ["cpu", NATIVE]


def same_numbers(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(actual.isnan(), expected.isnan())
    differing = (actual.nan_to_num(0.0) != expected.nan_to_num(0.0)).nonzero()
    assert not len(differing), f"differs first at {differing[0].tolist()}"


@pytest.mark.parametrize("impl", SERVING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name.lower())
def test_any_bytes_are_read_as_the_reference_reads_them(kind: RowKind, dtype: torch.dtype, impl: Impl) -> None:
    region = poisoned_region(576, num_blocks=6, encoding=kind.value)
    plane = region.planes[0]
    noise = torch.randint(0, 256, (4, 64, plane.shape[2] * plane.element_size()), generator=torch.Generator().manual_seed(3))
    plane[1:5] = noise.to(torch.uint8).view(plane.dtype)
    blocks = torch.tensor([4, 1, 2])
    expected = load_blocks(region, blocks, impl="reference")[0][:150].to(dtype)
    actual = load_sequence(region, blocks, 150, dtype, impl=impl)
    assert actual.dtype == dtype
    same_numbers(actual.float(), expected.float())


@pytest.mark.parametrize("impl", SERVING)
@pytest.mark.parametrize("width", [4, 16, 36, 96, 100])
@pytest.mark.parametrize("kind", [RowKind.BF16, RowKind.FP32, RowKind.FP8_E4M3], ids=lambda kind: kind.name.lower())
def test_rows_of_any_width_end_where_they_end(kind: RowKind, width: int, impl: Impl) -> None:
    region = poisoned_region(width, num_blocks=3, block_size=16, encoding=kind.value)
    fill(region, torch.tensor([2, 0]), torch.randn(20, width, generator=torch.Generator().manual_seed(width)))
    expected = load_blocks(region, torch.tensor([2, 0]), impl="reference")[0][:20]
    same_numbers(load_sequence(region, torch.tensor([2, 0]), 20, torch.float32, impl=impl), expected)


def test_refuses_formats_of_several_planes_and_more_tokens_than_the_blocks_hold() -> None:
    with pytest.raises(ValueError, match="load_sequence: 65 tokens of 1 blocks"):
        load_sequence(poisoned_region(576), torch.tensor([0]), 65, torch.float32)
    with pytest.raises(ValueError, match="of 1 blocks of fp8 fp32-scaled"):
        load_sequence(poisoned_region(128, encoding="fp8 fp32-scaled"), torch.tensor([0]), 6, torch.float32)


@pytest.mark.parametrize("impl", [NATIVE])
def test_compiled_loads_refuse_rows_that_their_buffer_does_not_hold(impl: Impl) -> None:
    def run(width: int) -> torch.Tensor:
        region = poisoned_region(width, num_blocks=1, block_size=16, encoding=RowKind.FP32.value)
        fill(region, torch.tensor([0]), torch.ones(1, width))
        return load_sequence(region, torch.tensor([0]), 1, torch.float32, impl=impl)

    assert torch.equal(run(4064), torch.ones(1, 4064))
    with pytest.raises(ValueError, match="load_sequence: rows are 4065 numbers wide; the compiled kernel takes at most 4064"):
        run(4065)
