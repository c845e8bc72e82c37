"""Sparse and dense MLA: serving kernels against references, and the two forms against each other."""

import pytest
import torch
from torch import Tensor

from glm_runtime.ops.cache_rows import decode_rows
from glm_runtime.ops.dense_mla import dense_mla
from glm_runtime.ops.sparse_mla import sparse_mla
from glm_runtime.paged_cache import CacheRegion
from glm_runtime.row_format import RowKind
from tests.unit.glm_runtime.ops.pools import fill, poisoned_region, relative_rms

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


@pytest.mark.parametrize("scratch_bytes", [1, 1 << 20])
@pytest.mark.parametrize(
    ("rows", "heads", "latent", "rope", "listed"), [case[1:] for case in SPARSE_CASES], ids=[case[0] for case in SPARSE_CASES]
)
def test_sparse_mla_equals_reference(rows: int, heads: int, latent: int, rope: int, listed: int, scratch_bytes: int) -> None:
    queries, cached, addresses = sparse_inputs(rows, heads, latent + rope, listed, seed=rows)
    options = {"latent_dim": latent, "scale": 0.3, "scratch_bytes": scratch_bytes}
    expected, expected_lse = sparse_mla(queries, cached, addresses, **options, impl="reference")
    actual, lse = sparse_mla(queries, cached, addresses, **options)
    assert actual.isfinite().all(), "poison at unlisted addresses must not leak"
    assert relative_rms(actual, expected) < 1e-6
    assert torch.allclose(lse, expected_lse, atol=1e-5)


@pytest.mark.parametrize("kind", [RowKind.FP8_E4M3, RowKind.FP8_DS_MLA, RowKind.NVFP4_DS_MLA])
def test_packed_rows_are_attended_as_the_numbers_they_stand_for(kind: RowKind) -> None:
    queries, cached, addresses = sparse_inputs(5, 4, 576, 70, seed=6, kind=kind)
    options = {"latent_dim": 512, "scale": 0.05, "scratch_bytes": 1 << 18}
    actual, lse = sparse_mla(queries, cached, addresses, **options)
    expected, expected_lse = sparse_mla(queries, cached, addresses, **options, impl="reference")
    assert relative_rms(actual, expected) < 1e-6
    assert torch.allclose(lse, expected_lse, atol=1e-5)
    listed = addresses[0][addresses[0] >= 0]
    numbers, _ = decode_rows((cached.rows[listed],), cached.row_format)
    weights = torch.softmax(queries[0] @ numbers.T * 0.05, dim=-1)
    assert relative_rms(actual[0], weights @ numbers[:, :512]) < 1e-6


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_an_empty_list_gives_zero_and_minus_infinity(impl: str) -> None:
    queries, cached, _ = sparse_inputs(2, 3, 32, 4, seed=0)
    attended, lse = sparse_mla(queries, cached, torch.full((2, 4), -1), latent_dim=24, scale=1.0, scratch_bytes=1 << 20, impl=impl)
    assert not attended.any()
    assert lse.isneginf().all()


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_lse_combines_two_halves_into_the_whole(impl: str) -> None:
    queries, cached, addresses = sparse_inputs(1, 2, 32, 50, seed=4)
    options = {"latent_dim": 24, "scale": 0.5, "scratch_bytes": 1 << 20, "impl": impl}
    whole, whole_lse = sparse_mla(queries, cached, addresses, **options)
    halves = [sparse_mla(queries, cached, part.contiguous(), **options) for part in addresses.split([20, 30], dim=1)]
    lse = torch.logaddexp(halves[0][1], halves[1][1])
    combined = sum(out * (part - lse).exp()[..., None] for out, part in halves)
    assert torch.allclose(lse, whole_lse, atol=1e-5)
    assert torch.allclose(combined, whole, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "start", "heads", "scratch_bytes"), [(1, 0, 1, 1 << 20), (5, 0, 3, 1), (9, 64, 2, 1 << 10), (130, 7, 4, 1 << 16)]
)
def test_dense_mla_equals_reference(rows: int, start: int, heads: int, scratch_bytes: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    queries = torch.randn(rows, heads, 40, generator=generator)
    keys, values = (torch.randn(start + rows, heads, width, generator=generator) for width in (40, 20))
    expected = dense_mla(queries, keys, values, start=start, scale=0.2, scratch_bytes=1, impl="reference")
    actual = dense_mla(queries, keys, values, start=start, scale=0.2, scratch_bytes=scratch_bytes)
    assert relative_rms(actual, expected) < 1e-6


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
    keys = torch.cat((torch.einsum("sc,hnc->shn", cached[:, :latent], key_up), cached[:, None, latent:].expand(-1, heads, -1)), dim=-1)
    values = torch.einsum("sc,hcv->shv", cached[:, :latent], value_up)
    queries = torch.cat((query_nope, query_rope), dim=-1)
    expanded = dense_mla(queries, keys, values, start=context - 1, scale=0.05, scratch_bytes=1 << 20)
    assert relative_rms(torch.einsum("thc,hcv->thv", attended, value_up), expanded) < 2e-6


def test_refuses_shapes_that_do_not_fit() -> None:
    queries, cached, addresses = sparse_inputs(2, 3, 32, 4, seed=0)
    with pytest.raises(ValueError, match="sparse_mla: mla has rows of 32 numbers; expected 5"):
        sparse_mla(queries[..., :5], cached, addresses, latent_dim=4, scale=1.0, scratch_bytes=1)
    with pytest.raises(ValueError, match="latent_dim is 33"):
        sparse_mla(queries, cached, addresses, latent_dim=33, scale=1.0, scratch_bytes=1)
    with pytest.raises(ValueError, match=r"dense_mla: keys has shape \[4, 2, 8\]; expected \[5, 2, 8\]"):
        dense_mla(torch.zeros(2, 2, 8), torch.zeros(4, 2, 8), torch.zeros(4, 2, 8), start=3, scale=1.0, scratch_bytes=1)
