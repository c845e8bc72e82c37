"""What lands in the caches, bit for bit."""

import pytest
import torch

from glm_runtime.norm import layer_norm, rms_norm
from glm_runtime.ops.cache_rows import encode_rows
from glm_runtime.ops.fused_norm_rope import IndexKeyNorm, LatentNorms, fused_norm_rope, store_index_keys
from glm_runtime.rope import RopeTable, rotate_interleaved
from glm_runtime.row_format import RowKind
from tests.unit.glm_runtime.ops.pools import poisoned_region

Q, C, R, D = 12, 24, 8, 16
CASES = [
    ("one-row", [5]),
    ("block-boundary", [63, 64, 65]),
    ("with-padding", [700, -1, 3, -1]),
    ("only-padding", [-1, -1]),
    ("last-slot", [40 * 64 - 1]),
    ("empty", []),
]


@pytest.mark.parametrize("encoding", ["bf16", "fp32"])
@pytest.mark.parametrize("slots", [case[1] for case in CASES], ids=[case[0] for case in CASES])
def test_stores_normalised_latent_and_rotated_key(slots: list[int], encoding: str) -> None:
    region = poisoned_region(C + R, encoding=encoding)
    projected = torch.randn(len(slots), Q + C + R)
    norms = LatentNorms(torch.rand(Q) + 0.5, torch.rand(C) + 0.5, 1e-5)
    cos, sin = RopeTable.build(900, R, 1e4).at(torch.arange(len(slots)) + 800)
    query_latent = fused_norm_rope(projected, norms, cos, sin, torch.tensor(slots, dtype=torch.int64), region)
    assert torch.equal(query_latent, rms_norm(projected[:, :Q], norms.q_weight, 1e-5))
    for row, slot in enumerate(slots):
        if slot >= 0:
            latent = rms_norm(projected[row, Q : Q + C], norms.kv_weight, 1e-5)
            key = rotate_interleaved(projected[row, Q + C :], cos[row], sin[row])
            assert torch.equal(region.planes[0][slot // 64, slot % 64], torch.cat((latent, key)).to(region.planes[0].dtype))
    assert int(region.planes[0].isnan().all(-1).sum()) == 40 * 64 - sum(slot >= 0 for slot in slots), "no other row may be written"


def test_index_keys_rotate_their_first_dims() -> None:
    region = poisoned_region(D)
    raw = torch.randn(3, D)
    norm = IndexKeyNorm(torch.rand(D), torch.randn(D), 1e-6)
    cos, sin = RopeTable.build(50, R, 1e4).at(torch.tensor([0, 7, 41]))
    store_index_keys(raw, norm, cos, sin, torch.tensor([2, -1, 130]), region)
    keys = layer_norm(raw, norm.weight, norm.bias, 1e-6)
    expected = torch.cat((rotate_interleaved(keys[:, :R], cos, sin), keys[:, R:]), dim=1).bfloat16()
    assert torch.equal(region.planes[0][0, 2], expected[0])
    assert torch.equal(region.planes[0][2, 2], expected[2])
    assert int(region.planes[0].isnan().all(-1).sum()) == 40 * 64 - 2


PACKED = [
    (RowKind.FP8_E4M3, RowKind.INDEX_FP8_FP32),
    (RowKind.FP8_DS_MLA, RowKind.INDEX_FP8_UE8M0),
    (RowKind.NVFP4_DS_MLA, RowKind.INDEX_MXFP4),
]


@pytest.mark.parametrize(("main", "index"), PACKED, ids=[main.name.lower() for main, _ in PACKED])
@pytest.mark.parametrize("slots", [[5], [63, -1, 64, 127]], ids=["one-row", "block-boundary"])
def test_packed_rows_are_what_the_reference_makes_of_normalised_and_rotated_numbers(
    slots: list[int], main: RowKind, index: RowKind
) -> None:
    """Bytes, of both caches; rows of padding slots and all other rows keep their poison."""
    generator = torch.Generator().manual_seed(len(slots))
    projected, raw_keys = torch.randn(len(slots), Q + 576, generator=generator), torch.randn(len(slots), 128, generator=generator)
    norms, key_norm = LatentNorms(torch.rand(Q), torch.rand(512) + 0.5, 1e-5), IndexKeyNorm(torch.rand(128), torch.randn(128), 1e-6)
    cos, sin = RopeTable.build(900, 64, 1e4).at(torch.arange(len(slots)) + 800)
    mla = poisoned_region(576, encoding=main.value, num_blocks=3)
    keys = poisoned_region(128, encoding=index.value, num_blocks=3)
    fused_norm_rope(projected, norms, cos, sin, torch.tensor(slots), mla)
    store_index_keys(raw_keys, key_norm, cos, sin, torch.tensor(slots), keys)
    latents = rms_norm(projected[:, Q : Q + 512], norms.kv_weight, 1e-5)
    rows = torch.cat((latents, rotate_interleaved(projected[:, Q + 512 :], cos, sin)), dim=1)
    normed = layer_norm(raw_keys, key_norm.weight, key_norm.bias, 1e-6)
    key_rows = torch.cat((rotate_interleaved(normed[:, :64], cos, sin), normed[:, 64:]), dim=1)
    for region, numbers in ((mla, rows), (keys, key_rows)):
        for plane, wanted in zip(region.planes, encode_rows(numbers, region.row_format, impl="reference"), strict=True):
            expected = torch.full((3 * 64, plane.shape[2]), 0xFF, dtype=torch.uint8)
            for row, slot in enumerate(slots):
                if slot >= 0:
                    expected[slot] = wanted[row]
            assert torch.equal(plane.flatten(0, 1), expected)


def test_refuses_shapes_that_do_not_fit() -> None:
    region = poisoned_region(C + R)
    cos, sin = RopeTable.build(50, R, 1e4).at(torch.tensor([0]))
    norms = LatentNorms(torch.ones(Q), torch.ones(C), 1e-5)
    with pytest.raises(ValueError, match=r"fused_norm_rope: projected has shape \[1, 5\]"):
        fused_norm_rope(torch.zeros(1, 5), norms, cos, sin, torch.tensor([0]), region)
    with pytest.raises(ValueError, match=r"fused_norm_rope: slots"):
        fused_norm_rope(torch.zeros(1, Q + C + R), norms, cos, sin, torch.tensor([0, 1]), region)
    with pytest.raises(ValueError, match=r"store_index_keys: index"):
        store_index_keys(torch.zeros(1, D), IndexKeyNorm(torch.ones(D), torch.ones(D), 1e-6), cos, sin, torch.tensor([0]), region)
