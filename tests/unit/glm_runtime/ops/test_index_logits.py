"""Index scores: the serving kernel against its reference, on odd shapes over a poisoned pool."""

import pytest
import torch

from glm_runtime.linear import Gemm
from glm_runtime.ops.cache_rows import decode_rows, encode_rows
from glm_runtime.ops.impl import Impl
from glm_runtime.ops.index_logits import KEY_TILE_TOKENS, index_logits
from glm_runtime.row_format import RowKind
from tests.unit.glm_runtime.ops.pools import NATIVE, fill, poisoned_region

CASES = [
    # id, sequences, rows each, heads, width, lengths before the first row
    ("one-row", 1, 1, 4, 16, [0]),
    ("block-boundary", 3, 1, 8, 32, [62, 63, 64]),
    ("tile-boundary", 3, 1, 8, 32, [510, 511, 512]),
    ("prefill-chunk", 1, 37, 5, 16, [101]),
    ("verify-rows", 2, 6, 3, 128, [90, 600]),
    ("many-rows-per-product", 1, 300, 8, 16, [200]),
]
SERVING = ["cpu", NATIVE]
PACKED_KINDS = (RowKind.INDEX_FP8_FP32, RowKind.INDEX_FP8_UE8M0, RowKind.INDEX_MXFP4)


@pytest.mark.parametrize("encoding", ["bf16", "fp32"])
@pytest.mark.parametrize("gemm", [Gemm(), Gemm(16)], ids=["plain", "tiled"])
@pytest.mark.parametrize("impl", SERVING)
@pytest.mark.parametrize(("sequences", "rows", "heads", "width", "starts"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_equals_reference(
    sequences: int, rows: int, heads: int, width: int, starts: list[int], gemm: Gemm, impl: Impl, encoding: str
) -> None:
    generator = torch.Generator().manual_seed(sequences * 1000 + rows)
    region = poisoned_region(width, encoding=encoding)
    longest = max(starts) + rows
    blocks_each = -(-longest // KEY_TILE_TOKENS) * KEY_TILE_TOKENS // 64
    tables = torch.zeros(sequences, blocks_each, dtype=torch.int64)
    order = torch.randperm(39, generator=generator) + 1
    for sequence, start in enumerate(starts):
        needed = -(-(start + rows) // 64)
        tables[sequence, :needed], order = order[:needed], order[needed:]
        fill(region, tables[sequence], torch.randn(start + rows, width, generator=generator))
    queries = torch.randn(sequences, rows, heads, width, generator=generator)
    weights = torch.randn(sequences, rows, heads, generator=generator)
    positions = torch.tensor(starts)[:, None] + torch.arange(rows)
    arguments = (queries, weights, region, tables, positions)
    expected = index_logits(*arguments, gemm=gemm, impl="reference")
    actual = index_logits(*arguments, gemm=gemm, impl=impl)
    assert torch.equal(actual.isneginf(), expected.isneginf()), "exactly the tokens up to a row's own position are visible"
    visible = ~expected.isneginf()
    assert torch.allclose(actual[visible], expected[visible], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("impl", SERVING)
@pytest.mark.parametrize("kind", PACKED_KINDS)
def test_packed_keys_are_scored_as_the_numbers_they_stand_for(kind: RowKind, impl: Impl) -> None:
    """Keys of very different size, so that a lost, shifted or doubled scale shows; poison behind the last key."""
    generator = torch.Generator().manual_seed(7)
    region = poisoned_region(128, encoding=kind.value)
    tables = torch.zeros(2, 16, dtype=torch.int64)
    tables[0, :10], tables[1, :2] = torch.randperm(40, generator=generator)[:12].split([10, 2])
    keys = [
        torch.randn(length, 128, generator=generator) * 2.0 ** torch.randint(-6, 7, (length, 1), generator=generator)
        for length in (600, 100)
    ]
    for sequence in range(2):
        fill(region, tables[sequence], keys[sequence])
    queries, weights = torch.randn(2, 3, 4, 128, generator=generator), torch.randn(2, 3, 4, generator=generator)
    positions = torch.tensor([[597, 598, 599], [97, 98, 99]])
    actual = index_logits(queries, weights, region, tables, positions, gemm=Gemm(), impl=impl)
    expected = index_logits(queries, weights, region, tables, positions, gemm=Gemm(), impl="reference")
    assert torch.equal(actual.isneginf(), expected.isneginf())
    for sequence, row in ((0, 0), (0, 2), (1, 1)):
        seen = keys[sequence][: positions[sequence, row] + 1]
        numbers, scales = decode_rows(encode_rows(seen, region.row_format), region.row_format)
        stored = numbers if scales is None else numbers * scales[:, None]
        written_out = torch.einsum("h,hs->s", weights[sequence, row], (queries[sequence, row] @ stored.T).relu())
        for scores in (actual, expected):
            assert torch.allclose(scores[sequence, row, : len(seen)], written_out, rtol=1e-5, atol=1e-4 * written_out.abs().max())


@pytest.mark.parametrize("impl", ["reference", *SERVING])
def test_the_relu_is_inside_the_sum_over_signed_heads(impl: Impl) -> None:
    region = poisoned_region(16)
    key = torch.zeros(1, 16)
    key[0, 0] = 1.0
    table = torch.zeros(1, KEY_TILE_TOKENS // 64, dtype=torch.int64)
    fill(region, table[0], key)
    queries = torch.zeros(1, 1, 2, 16)
    queries[0, 0, :, 0] = torch.tensor([-3.0, 2.0])
    weights = torch.tensor([[[5.0, -1.0]]])
    scores = index_logits(queries, weights, region, table, torch.tensor([[0]]), gemm=Gemm(), impl=impl)
    assert scores[0, 0, 0] == -2.0


@pytest.mark.parametrize("impl", ["reference", *SERVING])
def test_a_key_that_is_not_a_number_stays_visible(impl: Impl) -> None:
    """The ReLU must not turn NaN into 0: a damaged key would then be passed over in silence."""
    region = poisoned_region(16)
    fill(region, torch.tensor([3]), torch.full((2, 16), torch.nan))
    table = torch.full((1, KEY_TILE_TOKENS // 64), 3)
    scores = index_logits(torch.ones(1, 1, 2, 16), torch.ones(1, 1, 2), region, table, torch.tensor([[1]]), gemm=Gemm(), impl=impl)
    assert scores[0, 0, :2].isnan().all()


@pytest.mark.parametrize("kind", [RowKind.FP32, RowKind.BF16, *PACKED_KINDS])
@pytest.mark.parametrize("impl", [NATIVE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scores_bits_depend_on_its_row_and_key_alone(kind: RowKind, dtype: torch.dtype, impl: Impl) -> None:
    """Alone, among the rows of its sequence, among other sequences, with one thread and two."""
    generator = torch.Generator().manual_seed(3)
    region = poisoned_region(128, encoding=kind.value)
    tables = torch.randperm(40, generator=generator)[:32].view(4, 8)
    for table in tables:
        fill(region, table, torch.randn(512, 128, generator=generator))
    queries, weights = torch.randn(4, 21, 5, 128, generator=generator).to(dtype), torch.randn(4, 21, 5, generator=generator)
    positions = torch.randint(0, 512, (4, 21), generator=generator)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            together = index_logits(queries, weights, region, tables, positions, gemm=Gemm(), impl=impl)
            for sequence, row in ((0, 0), (1, 16), (3, 20)):
                where = slice(sequence, sequence + 1), slice(row, row + 1)
                alone = index_logits(queries[where], weights[where], region, tables[where[0]], positions[where], gemm=Gemm(), impl=impl)
                assert torch.equal(alone[0, 0], together[sequence, row])
    finally:
        torch.set_num_threads(before)


def test_refuses_tables_that_are_not_whole_tiles() -> None:
    region = poisoned_region(16)
    with pytest.raises(ValueError, match="multiple of 512"):
        index_logits(
            torch.zeros(1, 1, 2, 16),
            torch.zeros(1, 1, 2),
            region,
            torch.zeros(1, 1, dtype=torch.int64),
            torch.zeros(1, 1),
            gemm=Gemm(),
        )
