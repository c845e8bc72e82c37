"""What lands in the caches, byte for byte, which program kinds run where a slot is negative, and all implementations alike."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from glm_runtime.norm import rms_norm
from glm_runtime.ops.cache_rows import encode_rows, store_rows
from glm_runtime.ops.fused_norm_rope import (
    IndexKeyNorm,
    IndexKeys,
    LatentNorms,
    MaterialisedKeys,
    fused_norm_rope,
)
from glm_runtime.paged_cache import CacheRegion
from glm_runtime.rope import RopeTable, rotate_interleaved
from glm_runtime.row_format import RowKind
from tests.unit.glm_runtime.ops.pools import NATIVE, poisoned_region, relative_rms

IMPLS = ("reference", "cpu", NATIVE)
SLOTS = [
    ("one-row", [5]),
    ("block-boundary", [63, 64, 65]),
    ("with-padding", [128, -1, 3, -1]),
    ("only-padding", [-1, -1]),
    ("last-slot", [4 * 64 - 1]),
    ("many", [*range(60, 130), -1, *range(7)]),
    ("empty", []),
]
BY_SLOTS = {"argvalues": [case[1] for case in SLOTS], "ids": [case[0] for case in SLOTS]}
SMALL = (12, 24, 8, 16)
REAL = (20, 512, 64, 128)
FORMATS = [
    # main, index, ranks and dims
    (RowKind.BF16, RowKind.BF16, SMALL),
    (RowKind.FP32, RowKind.FP32, SMALL),
    (RowKind.BF16, RowKind.INDEX_FP8_FP32, REAL),
    (RowKind.FP8_E4M3, RowKind.INDEX_FP8_FP32, REAL),
    (RowKind.FP8_DS_MLA, RowKind.INDEX_FP8_UE8M0, REAL),
    (RowKind.NVFP4_DS_MLA, RowKind.INDEX_MXFP4, REAL),
]


@dataclass(frozen=True)
class Step:
    """Projections of some rows, and both caches, poisoned."""

    projected: Tensor
    raw: Tensor
    norms: LatentNorms
    key_norm: IndexKeyNorm
    cos: Tensor
    sin: Tensor
    slots: Tensor
    mla: CacheRegion
    index: CacheRegion

    @classmethod
    def made(
        cls,
        slots: list[int],
        dims: tuple[int, int, int, int] = SMALL,
        dtype: torch.dtype = torch.float32,
        kinds: tuple[RowKind, RowKind] = (RowKind.BF16, RowKind.BF16),
    ) -> "Step":
        q, c, r, d = dims
        generator = torch.Generator().manual_seed(len(slots))

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        cos, sin = RopeTable.build(900, r, 1e4).at(torch.arange(len(slots)) + 700)
        return cls(
            projected=random(len(slots), q + c + r),
            raw=random(len(slots), d + 5)[:, :d],  # a view of a wider product, as in the model
            norms=LatentNorms(random(q), random(c), 1e-5),
            key_norm=IndexKeyNorm(random(d), random(d), 1e-6),
            cos=cos,
            sin=sin,
            slots=torch.tensor(slots, dtype=torch.int64),
            mla=poisoned_region(c + r, encoding=kinds[0].value, num_blocks=4),
            index=poisoned_region(d, encoding=kinds[1].value, num_blocks=4),
        )

    def run(self, impl: str, *, stores: bool = True, lists: Tensor | None = None) -> tuple[Tensor, MaterialisedKeys]:
        """Every kind at once, with materialised keys."""
        buffers = MaterialisedKeys(torch.full((len(self.slots), self.mla.row_format.width), torch.nan, dtype=self.projected.dtype))
        buffers = MaterialisedKeys(buffers.rows, torch.full(self.raw.shape, torch.nan, dtype=self.projected.dtype))
        keys = IndexKeys(self.raw, self.key_norm, self.index if stores else None)
        mla = self.mla if stores else None
        query_latent = fused_norm_rope(
            self.projected, self.norms, self.cos, self.sin, self.slots, mla, index=keys, lists=lists, materialised=buffers, impl=impl
        )
        return query_latent, buffers


def assert_region_holds(region: CacheRegion, slots: Tensor, rows: Tensor) -> None:
    """Exactly the reference's bytes of `rows` at the slots that are not negative; poison everywhere else."""
    for plane, wanted in zip(region.planes, encode_rows(rows, region.row_format, impl="reference"), strict=True):
        actual = plane.flatten(0, 1).contiguous().view(torch.uint8)
        expected = torch.full_like(actual, 0xFF)
        expected[slots[slots >= 0]] = wanted[slots >= 0].contiguous().view(torch.uint8)
        differing = (actual != expected).nonzero()
        assert not len(differing), f"differs first at slot and byte {differing[0].tolist()}"


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("main", "index", "dims"), FORMATS, ids=[f"{main.name}-{index.name}".lower() for main, index, _ in FORMATS])
@pytest.mark.parametrize("slots", **BY_SLOTS)
def test_both_caches_hold_what_was_materialised(
    slots: list[int], main: RowKind, index: RowKind, dims: tuple[int, int, int, int], dtype: torch.dtype, impl: str
) -> None:
    """Materialised keys are near what norm and rotation give in fp64; the caches hold the format's bytes of them, and nothing else."""
    step = Step.made(slots, dims, dtype, (main, index))
    q, c, r, _ = dims
    query_latent, made = step.run(impl)
    assert made.index_keys is not None
    limit = 3e-7 if dtype is torch.float32 else 6e-3
    valid = step.slots >= 0
    assert_near(query_latent, exact_rms(step.projected[:, :q], step.norms.q_weight), limit)
    assert_near(made.rows[:, :c], exact_rms(step.projected[:, q : q + c], step.norms.kv_weight), limit)
    assert_near(made.rows[:, c:], exact_rotation(step.projected[:, q + c :], step), limit)
    keys = exact_layer_norm(step.raw, step.key_norm)
    assert_near(made.index_keys[valid], torch.cat((exact_rotation(keys[:, :r], step), keys[:, r:]), dim=1)[valid], 2 * limit)
    assert not made.index_keys[~valid].any(), "kind 0 does not run where the slot is negative"
    assert_region_holds(step.mla, step.slots, made.rows)
    assert_region_holds(step.index, step.slots, made.index_keys)


def assert_near(actual: Tensor, expected: Tensor, limit: float) -> None:
    assert actual.shape == expected.shape
    assert not actual.numel() or relative_rms(actual.double(), expected) < limit


def exact_rms(x: Tensor, weight: Tensor) -> Tensor:
    return x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()


def exact_layer_norm(x: Tensor, norm: IndexKeyNorm) -> Tensor:
    return torch.nn.functional.layer_norm(x.double(), x.shape[-1:], norm.weight.double(), norm.bias.double(), 1e-6)


def exact_rotation(x: Tensor, step: Step) -> Tensor:
    pairs = torch.view_as_complex(x.double().reshape(len(x), x.shape[1] // 2, 2).contiguous())
    return torch.view_as_real(pairs * torch.complex(step.cos.double(), step.sin.double())).flatten(1)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("slots", **BY_SLOTS)
def test_without_materialised_keys_the_caches_are_the_same(slots: list[int], impl: str) -> None:
    with_buffers, without = Step.made(slots), Step.made(slots)
    query_latent, _ = with_buffers.run(impl)
    keys = IndexKeys(without.raw, without.key_norm, without.index)
    plain = fused_norm_rope(without.projected, without.norms, without.cos, without.sin, without.slots, without.mla, index=keys, impl=impl)
    assert torch.equal(plain, query_latent)
    for one, other in ((with_buffers.mla, without.mla), (with_buffers.index, without.index)):
        assert torch.equal(one.planes[0].view(torch.int16), other.planes[0].view(torch.int16))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_lists_are_cleared_in_every_row(dtype: torch.dtype, impl: str) -> None:
    """Kind 3, negative slots included; rows may be part of a wider buffer, which is left alone."""
    step = Step.made([5, -1, 7])
    buffer = torch.full((4, 9), 77, dtype=dtype)
    step.run(impl, lists=buffer[:3, :6])
    assert buffer[:3, :6].eq(-1).all()
    assert buffer[3].eq(77).all()
    assert buffer[:, 6:].eq(77).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_keys_can_be_made_by_one_rank_and_stored_by_all(impl: str) -> None:
    """No region: nothing is stored. What was materialised then lands by `store_rows`, with the slots of the gathered rows."""
    whole, parts = Step.made([3, 64, 200]), Step.made([3, 64, 200])
    whole.run(impl)
    _, made = parts.run(impl, stores=False)
    assert made.index_keys is not None
    for region in (parts.mla, parts.index):
        assert region.planes[0].isnan().all()
    gathered, index_keys = torch.cat((made.rows, made.rows[:1])), torch.cat((made.index_keys, made.index_keys[:1]))
    slots = torch.tensor([3, 64, 200, -1])
    store_rows(parts.mla, slots, gathered, impl=impl)
    store_rows(parts.index, slots, index_keys, impl=impl)
    for one, other in ((whole.mla, parts.mla), (whole.index, parts.index)):
        assert torch.equal(one.planes[0].view(torch.int16), other.planes[0].view(torch.int16))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_layer_without_indexer_stores_its_latents_alone(impl: str) -> None:
    step = Step.made([5, 66])
    fused_norm_rope(step.projected, step.norms, step.cos, step.sin, step.slots, step.mla, impl=impl)
    assert step.index.planes[0].isnan().all()
    assert int(step.mla.planes[0].isnan().all(-1).sum()) == 4 * 64 - 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("impl", [NATIVE])
def test_compiled_rows_do_not_see_the_others(impl: str, dtype: torch.dtype) -> None:
    step = Step.made(list(range(130)), REAL, dtype)
    query_latent, made = step.run(impl)
    assert made.index_keys is not None
    for row in (0, 1, 77, 129):
        at = slice(row, row + 1)
        one = Step(
            step.projected[at], step.raw[at], step.norms, step.key_norm, step.cos[at], step.sin[at], step.slots[at], step.mla, step.index
        )
        alone, keys = one.run(impl)
        assert keys.index_keys is not None
        assert torch.equal(alone, query_latent[at])
        assert torch.equal(keys.rows, made.rows[at])
        assert torch.equal(keys.index_keys, made.index_keys[at])


def test_the_reference_is_made_of_the_models_norms_and_rotation() -> None:
    step = Step.made([5, 6, 7])
    query_latent, made = step.run("reference")
    assert torch.equal(query_latent, rms_norm(step.projected[:, :12], step.norms.q_weight, 1e-5))
    latent = rms_norm(step.projected[:, 12:36], step.norms.kv_weight, 1e-5)
    assert torch.equal(made.rows, torch.cat((latent, rotate_interleaved(step.projected[:, 36:], step.cos, step.sin)), dim=1))


@pytest.mark.parametrize("impl", IMPLS)
def test_refuses_shapes_that_do_not_fit(impl: str) -> None:
    step = Step.made([0])
    arguments = (step.projected, step.norms, step.cos, step.sin, step.slots, step.mla)
    with pytest.raises(ValueError, match=r"fused_norm_rope: projected has shape \[1, 5\]"):
        fused_norm_rope(torch.zeros(1, 5), *arguments[1:], impl=impl)
    with pytest.raises(ValueError, match=r"fused_norm_rope: slots"):
        fused_norm_rope(*arguments[:4], torch.tensor([0, 1]), step.mla, impl=impl)
    with pytest.raises(ValueError, match=r"fused_norm_rope: mla has rows of 16"):
        fused_norm_rope(*arguments[:5], step.index, impl=impl)
    with pytest.raises(ValueError, match=r"fused_norm_rope: index.region has rows of 32"):
        fused_norm_rope(*arguments, index=IndexKeys(step.raw, step.key_norm, step.mla), impl=impl)
    with pytest.raises(ValueError, match=r"fused_norm_rope: lists has shape \[2, 4\]"):
        fused_norm_rope(*arguments, lists=torch.zeros(2, 4, dtype=torch.int64), impl=impl)
    with pytest.raises(ValueError, match=r"fused_norm_rope: materialised buffers"):
        fused_norm_rope(*arguments, materialised=MaterialisedKeys(torch.zeros(1, 32).bfloat16()), impl=impl)
