"""The form in which outputs and log-sums travel: nothing is lost, and each rank finds its own heads."""

import pytest
import torch

from glm_runtime.parallel.decode_exchange import ShardOutputs, lse_lanes

DTYPES = [torch.float32, torch.bfloat16]


def test_an_fp32_fills_one_lane_or_two() -> None:
    assert [lse_lanes(dtype) for dtype in DTYPES] == [1, 2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_sums_keep_their_bits(dtype: torch.dtype) -> None:
    """Every kind of fp32, NaN with a payload and subnormals included; their halves as bf16 are any number, too."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (50, 8), generator=generator).int()
    bits[0] = torch.tensor([0x7FC00000, 0x7F800001, -0x7FFFFF, 0x7F800000, -0x800000, 1, -(2**31), 0])
    lse = bits.view(torch.float32)
    outputs = ShardOutputs(50, 8, 6, dtype, num_ranks=4)
    attended = torch.randn(50, 8, 6, generator=generator).to(dtype).float()
    outputs.put(slice(0, 30), attended[:30], lse[:30])
    outputs.put(slice(30, 50), attended[30:], lse[30:])
    assert outputs.wire.shape == (4, 50, 2, 6 + 4 // dtype.itemsize)
    for rank in range(4):
        own = slice(2 * rank, 2 * rank + 2)
        found, logs = outputs.split(outputs.wire[rank : rank + 1])
        assert torch.equal(found[0].float(), attended[:, own])
        assert torch.equal(logs[0].view(torch.int32), bits[:, own])
