"""Sparse and dense MLA: serving kernels against references, and the two forms against each other."""

import pytest
import torch
from torch import Tensor

from glm_runtime.ops.cache_rows import decode_rows
from glm_runtime.ops.dense_mla import dense_mla
from glm_runtime.ops.impl import Impl
from glm_runtime.ops.sparse_mla import sparse_mla
from glm_runtime.paged_cache import CacheRegion
from glm_runtime.row_format import RowKind
from tests.unit.glm_runtime.ops.pools import NATIVE, fill, poisoned_region, relative_rms

SERVING = ["cpu", NATIVE]
ALL = ["reference", "cpu", NATIVE]
BF16_RELATIVE_RMS = 4e-3
"""Queries and softmax weights of bf16 are 2^-9 apart from fp32 ones at most; the worst case here was measured at 2.6e-3."""

SPARSE_CASES = [
    # id, rows, heads, latent, rope, list width
    ("one", 1, 1, 8, 8, 1),
    ("tiny", 20, 4, 512, 64, 64),
    ("odd", 7, 3, 40, 24, 33),
    ("many-heads", 2, 64, 64, 16, 100),
]


def sparse_inputs(
    rows: int, heads: int, width: int, listed: int, seed: int, kind: RowKind = RowKind.BF16
) -> tuple[Tensor, CacheRegion, Tensor]:
    """Queries, region and addresses; lists are of every length from full to empty, over 300 cached tokens."""
    generator = torch.Generator().manual_seed(seed)
    region = poisoned_region(width, encoding=kind.value)
    table = torch.randperm(40, generator=generator)[:5]
    fill(region, table, torch.randn(300, width, generator=generator))
    lists = torch.full((rows, listed), -1)
    for row in range(rows):
        count = max(0, listed - row * (listed // 2)) if row < rows - 1 else listed
        lists[row, :count] = torch.randperm(300, generator=generator)[:count].sort().values
    slots = torch.where(lists < 0, -1, table[lists.clamp_min(0) // 64] * 64 + lists.clamp_min(0) % 64)
    return torch.randn(rows, heads, width, generator=generator), region, region.addresses(slots)


@pytest.mark.parametrize("impl", SERVING)
@pytest.mark.parametrize("scratch_bytes", [1, 1 << 20])
@pytest.mark.parametrize(
    ("rows", "heads", "latent", "rope", "listed"), [case[1:] for case in SPARSE_CASES], ids=[case[0] for case in SPARSE_CASES]
)
def test_sparse_mla_equals_reference(rows: int, heads: int, latent: int, rope: int, listed: int, scratch_bytes: int, impl: Impl) -> None:
    queries, cached, addresses = sparse_inputs(rows, heads, latent + rope, listed, seed=rows)
    options = {"latent_dim": latent, "scale": 0.3, "scratch_bytes": scratch_bytes}
    expected, expected_lse = sparse_mla(queries, cached, addresses, **options, impl="reference")
    actual, lse = sparse_mla(queries, cached, addresses, **options, impl=impl)
    assert actual.isfinite().all(), "poison at unlisted addresses must not leak"
    assert relative_rms(actual, expected) < 1e-6
    assert torch.allclose(lse, expected_lse, atol=1e-5)


@pytest.mark.parametrize("impl", SERVING)
@pytest.mark.parametrize("kind", [RowKind.FP32, RowKind.FP8_E4M3, RowKind.FP8_DS_MLA, RowKind.NVFP4_DS_MLA])
def test_rows_of_every_format_are_attended_as_the_numbers_they_stand_for(kind: RowKind, impl: Impl) -> None:
    queries, cached, addresses = sparse_inputs(5, 4, 576, 70, seed=6, kind=kind)
    options = {"latent_dim": 512, "scale": 0.05, "scratch_bytes": 1 << 18}
    actual, lse = sparse_mla(queries, cached, addresses, **options, impl=impl)
    expected, expected_lse = sparse_mla(queries, cached, addresses, **options, impl="reference")
    assert relative_rms(actual, expected) < 1e-6
    assert torch.allclose(lse, expected_lse, atol=1e-5)
    listed = addresses[0][addresses[0] >= 0]
    numbers, _ = decode_rows((cached.rows[listed],), cached.row_format)
    weights = torch.softmax(queries[0] @ numbers.T * 0.05, dim=-1)
    assert relative_rms(actual[0], weights @ numbers[:, :512]) < 1e-6


@pytest.mark.parametrize("impl", [NATIVE])
def test_scales_of_others_need_not_be_powers_of_two(impl: Impl) -> None:
    queries, cached, addresses = sparse_inputs(2, 3, 576, 9, seed=6, kind=RowKind.FP8_DS_MLA)
    cached.planes[0][..., 512:528] = torch.tensor([0.3, 0.7, 1.1, 0.013]).view(torch.uint8)
    options = {"latent_dim": 512, "scale": 0.001, "scratch_bytes": 1 << 18}
    expected, _ = sparse_mla(queries, cached, addresses, **options, impl="reference")
    assert relative_rms(sparse_mla(queries, cached, addresses, **options, impl=impl)[0], expected) < 1e-6


@pytest.mark.parametrize("kind", [RowKind.BF16, RowKind.FP32, RowKind.FP8_E4M3, RowKind.FP8_DS_MLA, RowKind.NVFP4_DS_MLA])
@pytest.mark.parametrize("impl", [NATIVE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_bf16_numbers_stay_within_their_margin(kind: RowKind, impl: Impl, dtype: torch.dtype) -> None:
    queries, cached, addresses = sparse_inputs(6, 5, 576, 131, seed=8, kind=kind)
    options = {"latent_dim": 512, "scale": 0.05, "scratch_bytes": 1 << 18}
    expected, expected_lse = sparse_mla(queries, cached, addresses, **options, impl="reference")
    actual, lse = sparse_mla(queries.to(dtype), cached, addresses, **options, uses_bf16=True, impl=impl)
    assert relative_rms(actual, expected) < BF16_RELATIVE_RMS
    assert torch.allclose(lse, expected_lse, atol=1e-2)


@pytest.mark.parametrize("kind", [RowKind.BF16, RowKind.FP32, RowKind.FP8_E4M3, RowKind.FP8_DS_MLA, RowKind.NVFP4_DS_MLA])
@pytest.mark.parametrize("uses_bf16", [False, True])
@pytest.mark.parametrize("impl", [NATIVE])
def test_a_rows_bits_depend_on_its_own_list_alone(kind: RowKind, uses_bf16: bool, impl: Impl) -> None:
    """Alone, in a batch, elsewhere in it, with one thread and two, with padding behind and inside the list."""
    generator = torch.Generator().manual_seed(2)
    region = poisoned_region(576, encoding=kind.value)
    fill(region, torch.arange(20), torch.randn(1280, 576, generator=generator))
    queries = torch.randn(9, 6, 576, generator=generator)
    lists = torch.stack([torch.randperm(1280, generator=generator)[:700].sort().values for _ in range(9)])
    addresses = region.addresses(lists)
    addresses[3, 257:] = -1
    addresses[4, 64:] = -1

    def attend(rows: Tensor, listed: Tensor, threads: int) -> tuple[Tensor, Tensor]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return sparse_mla(rows, region, listed, latent_dim=512, scale=0.05, scratch_bytes=1, uses_bf16=uses_bf16, impl=impl)
        finally:
            torch.set_num_threads(before)

    expected, expected_lse = attend(queries, addresses, 2)
    for threads in (1, 2):
        for row in range(9):
            alone, lse = attend(queries[row : row + 1], addresses[row : row + 1], threads)
            assert torch.equal(alone[0], expected[row]), f"row {row} alone, {threads} threads"
            assert torch.equal(lse[0], expected_lse[row])
        rolled, _ = attend(queries.roll(4, 0), addresses.roll(4, 0), threads)
        assert torch.equal(rolled.roll(-4, 0), expected)
        few, _ = attend(queries[3:5], addresses[3:5], threads)
        assert torch.equal(few, expected[3:5])
    shorter, _ = attend(queries[3:4], addresses[3:4, :257], 2)
    assert torch.equal(shorter[0], expected[3])
    scattered = torch.full((1, 900), -1)
    scattered[0, torch.randperm(900, generator=generator)[:700].sort().values] = addresses[0]
    assert torch.equal(attend(queries[:1], scattered, 2)[0][0], expected[0])


@pytest.mark.parametrize("impl", ALL)
def test_an_empty_list_gives_zero_and_minus_infinity(impl: Impl) -> None:
    queries, cached, _ = sparse_inputs(2, 3, 32, 4, seed=0)
    attended, lse = sparse_mla(queries, cached, torch.full((2, 4), -1), latent_dim=24, scale=1.0, scratch_bytes=1 << 20, impl=impl)
    assert not attended.any()
    assert lse.isneginf().all()


@pytest.mark.parametrize("impl", ALL)
def test_lse_combines_two_halves_into_the_whole(impl: Impl) -> None:
    queries, cached, addresses = sparse_inputs(1, 2, 32, 50, seed=4)
    options = {"latent_dim": 24, "scale": 0.5, "scratch_bytes": 1 << 20, "impl": impl}
    whole, whole_lse = sparse_mla(queries, cached, addresses, **options)
    halves = [sparse_mla(queries, cached, part.contiguous(), **options) for part in addresses.split([20, 30], dim=1)]
    lse = torch.logaddexp(halves[0][1], halves[1][1])
    combined = sum(out * (part - lse).exp()[..., None] for out, part in halves)
    assert torch.allclose(lse, whole_lse, atol=1e-5)
    assert torch.allclose(combined, whole, atol=1e-5)


DENSE_CASES = [
    # id, rows, start, heads, nope, rope, value, list width (0: all earlier tokens), scratch bytes
    ("one", 1, 0, 1, 8, 8, 8, 0, 1 << 20),
    ("odd", 5, 0, 3, 24, 16, 20, 0, 1),
    ("chunk", 9, 64, 2, 24, 16, 20, 0, 1 << 10),
    ("tiles", 130, 7, 4, 40, 24, 70, 0, 1 << 16),
    ("block-edge", 25, 39, 2, 64, 64, 128, 0, 1 << 16),
    ("masked", 130, 7, 4, 24, 16, 70, 12, 1 << 16),
    ("masked-chunk", 33, 200, 2, 64, 64, 128, 40, 1 << 12),
]


def dense_inputs(
    rows: int, start: int, heads: int, nope: int, rope: int, value: int, listed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Queries, rebuilt keys and values, shared keys, lists. A row's list ends with its own token."""
    generator = torch.Generator().manual_seed(rows)
    context = start + rows
    queries = torch.randn(rows, heads, nope + rope, generator=generator)
    rebuilt, shared = torch.randn(context, heads, nope + value, generator=generator), torch.randn(context, rope, generator=generator)
    if not listed:
        return queries, rebuilt, shared, None
    lists = torch.full((rows, listed), -1)
    for row in range(rows):
        seen = start + row
        count = min(listed - 1, seen)
        lists[row, :count] = torch.randperm(seen, generator=generator)[:count].sort().values
        lists[row, count] = seen
    return queries, rebuilt, shared, lists


@pytest.mark.parametrize("impl", SERVING)
@pytest.mark.parametrize(
    ("rows", "start", "heads", "nope", "rope", "value", "listed", "scratch_bytes"),
    [case[1:] for case in DENSE_CASES],
    ids=[case[0] for case in DENSE_CASES],
)
def test_dense_mla_equals_reference(
    rows: int, start: int, heads: int, nope: int, rope: int, value: int, listed: int, scratch_bytes: int, impl: Impl
) -> None:
    inputs = dense_inputs(rows, start, heads, nope, rope, value, listed)
    options = {"start": start, "scale": 0.2, "scratch_bytes": scratch_bytes}
    expected = dense_mla(*inputs, **options, impl="reference")
    assert relative_rms(dense_mla(*inputs, **options, impl=impl), expected) < 1e-6
    *numbers, lists = inputs
    narrow = tuple(tensor.bfloat16() for tensor in numbers)
    expected = dense_mla(*narrow, lists, **options, impl="reference").float()
    actual = dense_mla(*narrow, lists, **options, impl=impl)
    assert actual.dtype == torch.bfloat16
    assert relative_rms(actual.float(), expected) < BF16_RELATIVE_RMS


@pytest.mark.parametrize("impl", ALL)
def test_what_no_list_names_has_no_effect(impl: Impl) -> None:
    queries, rebuilt, shared, lists = dense_inputs(40, 90, 2, 16, 8, 12, 9)
    assert lists is not None
    expected = dense_mla(queries, rebuilt, shared, lists, start=90, scale=0.2, scratch_bytes=1 << 16, impl=impl)
    listed = torch.zeros(130, dtype=torch.bool)
    listed[lists[lists >= 0]] = True
    changed = torch.where(listed[:, None, None], rebuilt, 1e3)
    assert torch.equal(dense_mla(queries, changed, shared, lists, start=90, scale=0.2, scratch_bytes=1 << 16, impl=impl), expected)


def test_absorbed_equals_expanded() -> None:
    generator = torch.Generator().manual_seed(9)
    heads, nope, rope, latent, value, context = 4, 24, 16, 64, 20, 100
    region = poisoned_region(latent + rope, encoding="fp32")
    table = torch.arange(2)
    cached = torch.randn(context, latent + rope, generator=generator)
    fill(region, table, cached)
    key_up, value_up = torch.randn(heads, nope, latent, generator=generator), torch.randn(heads, latent, value, generator=generator)
    query_nope, query_rope = (torch.randn(1, heads, width, generator=generator) for width in (nope, rope))
    absorbed = torch.cat((torch.einsum("thn,hnc->thc", query_nope, key_up), query_rope), dim=-1)
    attended, _ = sparse_mla(
        absorbed, region, region.addresses(torch.arange(context)[None]), latent_dim=latent, scale=0.05, scratch_bytes=1
    )
    keys = torch.einsum("sc,hnc->shn", cached[:, :latent], key_up)
    values = torch.einsum("sc,hcv->shv", cached[:, :latent], value_up)
    queries, rebuilt = torch.cat((query_nope, query_rope), dim=-1), torch.cat((keys, values), dim=-1)
    expanded = dense_mla(queries, rebuilt, cached[:, latent:], start=context - 1, scale=0.05, scratch_bytes=1 << 20)
    assert relative_rms(torch.einsum("thc,hcv->thv", attended, value_up), expanded) < 2e-6


def test_refuses_shapes_that_do_not_fit() -> None:
    queries, cached, addresses = sparse_inputs(2, 3, 32, 4, seed=0)
    with pytest.raises(ValueError, match="sparse_mla: mla has rows of 32 numbers; expected 5"):
        sparse_mla(queries[..., :5], cached, addresses, latent_dim=4, scale=1.0, scratch_bytes=1)
    with pytest.raises(ValueError, match="latent_dim is 33"):
        sparse_mla(queries, cached, addresses, latent_dim=33, scale=1.0, scratch_bytes=1)
    with pytest.raises(ValueError, match=r"dense_mla: shared_key has shape \[4, 2\]; expected \[5, -1\]"):
        dense_mla(torch.zeros(2, 2, 8), torch.zeros(5, 2, 8), torch.zeros(4, 2), start=3, scale=1.0, scratch_bytes=1)
    with pytest.raises(ValueError, match="dense_mla: queries are 8 wide, 8 of it shared"):
        dense_mla(torch.zeros(2, 2, 8), torch.zeros(5, 2, 8), torch.zeros(5, 8), start=3, scale=1.0, scratch_bytes=1)
