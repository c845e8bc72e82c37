"""Weight bytes: block-FP8 and NVFP4, read exactly and written to the nearest value."""

import pytest
import torch

from glm_runtime.quantisation import dequantise_block_fp8, dequantise_nvfp4, quantise_block_fp8, quantise_nvfp4

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


@pytest.mark.parametrize("shape", [(128, 128), (448, 300), (1, 1), (130, 257)])
def test_dequantise_multiplies_each_block_by_its_scale(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    quantised, scales = quantise_block_fp8(weight)
    wide = dequantise_block_fp8(quantised, scales)
    for row, column in ((0, 0), (shape[0] - 1, shape[1] - 1), (shape[0] // 2, shape[1] // 3)):
        assert wide[row, column] == quantised[row, column].float() * scales[row // 128, column // 128]
    assert (wide - weight).norm() / weight.norm() < 0.04


def test_a_block_of_zeros_stays_zero() -> None:
    weight = torch.zeros(200, 200)
    weight[150, 150] = 3.0
    quantised, scales = quantise_block_fp8(weight)
    assert torch.equal(dequantise_block_fp8(quantised, scales), weight)
    assert torch.equal(scales, torch.tensor([[1.0, 1.0], [1.0, 3.0 / 448]]))


def test_nvfp4_bytes_by_hand() -> None:
    """One row of 32: every code once in the first group's low and high nibbles, then the second group's scale."""
    packed = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] + [0x07] * 8], dtype=torch.uint8)
    scale = torch.tensor([[1.5, 0.001953125]]).to(torch.float8_e4m3fn)
    wide = dequantise_nvfp4(packed, scale, torch.tensor(0.25))
    assert wide.shape == (1, 32)
    assert wide[0, :16].tolist() == [value * 1.5 * 0.25 for value in E2M1]
    assert wide[0, 16:].tolist() == [6.0 * 2**-9 * 0.25, 0.0] * 8, "the smallest e4m3 scale, and the even column in the low nibble"


def test_nvfp4_rounds_once() -> None:
    """value * scale is exact, so the product with the global scale is the nearest fp32 to the exact one."""
    generator = torch.Generator().manual_seed(1)
    packed = torch.randint(0, 256, (64, 32), generator=generator, dtype=torch.uint8)
    scale = torch.rand(64, 4, generator=generator).mul(448).to(torch.float8_e4m3fn)
    global_scale = torch.rand((), generator=generator)
    codes = torch.stack((packed & 15, packed >> 4), -1).view(64, 64).long()
    exact = torch.tensor(E2M1, dtype=torch.float64)[codes] * scale.double().repeat_interleave(16, 1) * global_scale.double()
    assert torch.equal(dequantise_nvfp4(packed, scale, global_scale), exact.float())


def test_quantising_nvfp4_values_again_changes_nothing() -> None:
    weight = torch.randn(48, 96, generator=torch.Generator().manual_seed(2))
    first = dequantise_nvfp4(*quantise_nvfp4(weight))
    assert torch.equal(dequantise_nvfp4(*quantise_nvfp4(first)), first)
    assert (first - weight).norm() / weight.norm() < 0.12


def test_e2m1_ties_go_to_the_even_code() -> None:
    ties = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] + [0.0] * 7 + [-2.5], [448.0 * 6] * 16])
    packed, scale, global_scale = quantise_nvfp4(ties)
    assert (global_scale.item(), scale.float().tolist()) == (1.0, [[1.0], [448.0]])
    wide = dequantise_nvfp4(packed, scale, global_scale)
    assert wide[0].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0] + [0.0] * 7 + [-2.0]


def test_nvfp4_zeros() -> None:
    assert not dequantise_nvfp4(*quantise_nvfp4(torch.zeros(3, 32))).any()
