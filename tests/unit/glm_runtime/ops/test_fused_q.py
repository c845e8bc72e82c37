"""Queries of attention and of the indexer: every form gives the reference's bits."""

import math

import pytest
import torch
from torch import Tensor

from glm_runtime.ops.fused_q import fused_q, index_queries
from glm_runtime.ops.impl import Impl
from glm_runtime.row_format import RowKind, make_row_format
from tests.unit.glm_runtime.ops.pools import NATIVE

SERVING = ["cpu", NATIVE]
INDEX_KINDS = [RowKind.FP32, RowKind.BF16, RowKind.INDEX_FP8_FP32, RowKind.INDEX_FP8_UE8M0, RowKind.INDEX_MXFP4]


def angles(rows: int, rope: int) -> tuple[Tensor, Tensor]:
    angle = torch.rand(rows, rope // 2, generator=torch.Generator().manual_seed(rows)) * 6.0
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("impl", SERVING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "heads", "nope", "rope", "latent"), [(1, 1, 1, 2, 1), (5, 3, 24, 16, 33), (70, 16, 128, 64, 512)])
def test_fused_q_equals_reference(rows: int, heads: int, nope: int, rope: int, latent: int, dtype: torch.dtype, impl: Impl) -> None:
    generator = torch.Generator().manual_seed(rows)
    projected = torch.randn(rows, heads, nope + rope, generator=generator).to(dtype)
    by_head = torch.randn(heads, rows, latent, generator=generator).to(dtype).transpose(0, 1)
    expected = fused_q(projected, by_head, *angles(rows, rope), impl="reference")
    actual = fused_q(projected, by_head, *angles(rows, rope), impl=impl)
    assert actual.dtype == dtype
    assert torch.equal(actual, expected)
    strided = torch.cat((projected, projected), dim=1)[:, heads:]
    assert torch.equal(fused_q(strided, by_head, *angles(rows, rope), impl=impl), expected)


def hostile_queries(rows: int, heads: int) -> Tensor:
    """From subnormal to large, with zeros, ties, and numbers that are not finite."""
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(rows, heads, 128, generator=generator) * torch.logspace(-8, 5, rows)[:, None, None]
    queries[0], queries[1] = 0.0, -0.0
    queries[2] = torch.randint(-14, 15, (heads, 128), generator=generator) * 0.25
    queries[3] = torch.randint(-(2**9), 2**9, (heads, 128), generator=generator) / 2**6
    queries[4, 0, 70], queries[5, 0, 127], queries[6, 0, 100] = math.nan, math.inf, -math.inf
    return queries


@pytest.mark.parametrize("impl", SERVING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", INDEX_KINDS, ids=lambda kind: kind.name.lower())
def test_index_queries_equal_reference(kind: RowKind, dtype: torch.dtype, impl: Impl) -> None:
    flat, weights = hostile_queries(12, 3).to(dtype), torch.randn(12, 3, generator=torch.Generator().manual_seed(2))
    row_format = make_row_format(kind, 128)
    expected = index_queries(flat, weights, *angles(12, 64), row_format, impl="reference")
    actual = index_queries(flat, weights, *angles(12, 64), row_format, impl=impl)
    for have, want in zip(actual, expected, strict=True):
        assert have.dtype == want.dtype
        assert torch.equal(have.isnan(), want.isnan())
        assert torch.equal(have.nan_to_num(0.0), want.nan_to_num(0.0))
    assert actual[0].dtype == (dtype if kind in (RowKind.FP32, RowKind.BF16) else torch.bfloat16)


@pytest.mark.parametrize("impl", ["reference", *SERVING])
def test_the_first_numbers_of_an_index_query_are_rotated_and_the_last_of_a_head(impl: Impl) -> None:
    quarter = torch.zeros(1, 1), torch.ones(1, 1)  # a turn by 90 degrees: (e, o) -> (-o, e)
    counted, row_format = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), make_row_format(RowKind.FP32, 4)
    queries, _ = index_queries(counted, torch.ones(1, 1), *quarter, row_format, impl=impl)
    assert queries.tolist() == [[[-2.0, 1.0, 3.0, 4.0]]]
    joined = fused_q(counted, torch.tensor([[[7.0]]]), *quarter, impl=impl)
    assert joined.tolist() == [[[7.0, -4.0, 3.0]]]


def test_refuses_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"fused_q: absorbed has shape \[2, 4, 8\]; expected \[2, 3, -1\]"):
        fused_q(torch.zeros(2, 3, 8), torch.zeros(2, 4, 8), *angles(2, 4))
    with pytest.raises(ValueError, match="fused_q: cos rotates 10 numbers; heads are 8 wide"):
        fused_q(torch.zeros(2, 3, 8), torch.zeros(2, 3, 8), *angles(2, 10))
    with pytest.raises(ValueError, match="index_queries: flat has shape"):
        index_queries(torch.zeros(2, 3, 9), torch.zeros(2, 3), *angles(2, 4), make_row_format(RowKind.FP32, 8))


@pytest.mark.parametrize("impl", [NATIVE])
def test_compiled_index_queries_refuse_what_their_buffer_does_not_hold(impl: Impl) -> None:
    def run(width: int) -> Tensor:
        row_format = make_row_format(RowKind.FP32, width)
        return index_queries(torch.ones(2, 1, width), torch.ones(2, 1), *angles(2, 4), row_format, impl=impl)[0]

    assert torch.equal(run(1024)[:, :, 4:], torch.ones(2, 1, 1020))
    with pytest.raises(ValueError, match="index_queries: queries are 1025 wide; the compiled kernel takes at most 1024"):
        run(1025)
