"""Cache formats: golden bytes, exhaustive rounding, and the serving form against the reference, bit for bit."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from glm_runtime.ops.cache_rows import decode_rows, encode_rows, load_blocks, round_queries, store_rows
from glm_runtime.row_format import RowFormat, RowKind, make_row_format
from tests.unit.glm_runtime.ops.pools import NATIVE, poisoned_region, relative_rms

SERVING_IMPLS = ("cpu", NATIVE)
IMPLS = ("reference", *SERVING_IMPLS)
MLA_KINDS = (RowKind.FP8_E4M3, RowKind.FP8_DS_MLA, RowKind.NVFP4_DS_MLA)
INDEX_KINDS = (RowKind.INDEX_FP8_FP32, RowKind.INDEX_FP8_UE8M0, RowKind.INDEX_MXFP4)
FORMATS = [make_row_format(kind, 576) for kind in (RowKind.BF16, RowKind.FP32, *MLA_KINDS)]
FORMATS += [make_row_format(kind, 128) for kind in INDEX_KINDS]
BY_NAME = {"ids": lambda row_format: row_format.kind.name.lower()}

E4M3_NUMBERS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
E2M1_NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def same_bytes(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for number, (plane, wanted) in enumerate(zip(actual, expected, strict=True)):
        if plane.dtype.is_floating_point:  # which NaN a NaN becomes is not promised
            assert torch.equal(plane.isnan(), wanted.isnan())
            plane, wanted = plane.nan_to_num(0.0), wanted.nan_to_num(0.0)
        differing = (plane.contiguous().view(torch.uint8) != wanted.contiguous().view(torch.uint8)).nonzero()
        assert not len(differing), f"plane {number} differs first at {differing[0].tolist()}"


def hex_of(plane: Tensor) -> str:
    return bytes(plane.contiguous().view(torch.uint8).flatten().tolist()).hex()


def rows_of_every_size(width: int) -> Tensor:
    """Rows from subnormal to beyond every format's range, with zeros of both signs, ties, and numbers that are not finite."""
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(24, width, generator=generator) * torch.logspace(-9, 6, 24)[:, None]
    rows[0] = 0.0
    rows[1] = -0.0
    rows[2, : width // 2] = 0.0
    rows[3] = torch.randint(-14, 15, (width,), generator=generator) * 0.25  # ties of e2m1 once divided
    rows[4] = torch.randint(-(2**9), 2**9, (width,), generator=generator) / 2**6
    rows[20, 5], rows[21, 70], rows[22, -1], rows[23, 17] = math.nan, -math.inf, math.inf, -math.nan
    return rows


# -- golden bytes --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLS)
def test_ones_everywhere_in_every_format(impl: str) -> None:
    ones = torch.ones(1, 576)
    golden = {
        RowKind.FP8_E4M3: ["38" * 576],
        RowKind.FP8_DS_MLA: ["78" * 512 + "0000803b" * 4 + "803f" * 64],
        RowKind.NVFP4_DS_MLA: ["77" * 256 + "38" * 64 + "23" * 32],
        RowKind.INDEX_FP8_FP32: ["78" * 128, "0000803b"],
        RowKind.INDEX_FP8_UE8M0: ["78" * 128, "77777777"],
        RowKind.INDEX_MXFP4: ["66" * 64, "7d" * 4],
    }
    for kind, planes in golden.items():
        row_format = make_row_format(kind, 128 if kind in INDEX_KINDS else 576)
        assert [hex_of(plane) for plane in encode_rows(ones[:, : row_format.width], row_format, impl=impl)] == planes, kind


@pytest.mark.parametrize("impl", IMPLS)
def test_each_part_lies_at_its_offset(impl: str) -> None:
    row = torch.zeros(1, 576)
    row[0, 0], row[0, 128], row[0, 511], row[0, 512], row[0, 575] = 448.0, 896.0, -7.0, 1.0, -2.0
    (packed,) = encode_rows(row, make_row_format(RowKind.FP8_DS_MLA, 576), impl=impl)
    assert packed[0, [0, 128, 511]].tolist() == [0x7E, 0x7E, 0xFE]
    scales = packed[0, 512:528].view(torch.float32)
    assert scales.tolist() == [1.0, 2.0, 2.0**-13, 2.0**-6]
    assert packed[0, 528:].view(torch.bfloat16)[[0, 63]].tolist() == [1.0, -2.0]


@pytest.mark.parametrize("impl", IMPLS)
def test_nvfp4_scales_are_permuted_and_the_even_index_is_the_low_nibble(impl: str) -> None:
    row = torch.zeros(1, 576)
    sizes = 2.0 ** torch.arange(-4, 4).repeat(4)  # tile j is 6 * sizes[j] at most: its scale is sizes[j]
    for j, size in enumerate(sizes.tolist()):
        row[0, 16 * j], row[0, 16 * j + 1] = 6.0 * size, -0.5 * size
    row_format = make_row_format(RowKind.NVFP4_DS_MLA, 576)
    (packed,) = encode_rows(row, row_format, impl=impl)
    assert packed[0, 0:256:8].tolist() == [0x97] * 32
    for j, size in enumerate(sizes.tolist()):
        assert E4M3_NUMBERS[packed[0, 320 + 8 * (j % 4) + j // 4].item()] == size
    assert torch.equal(decode_rows((packed,), row_format, impl=impl)[0], row)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_floor_is_on_the_scale_of_mla_tiles_and_on_amax_of_index_keys(impl: str) -> None:
    zeros = torch.zeros(1, 576)
    (packed,) = encode_rows(zeros, make_row_format(RowKind.FP8_DS_MLA, 576), impl=impl)
    assert packed[0, 512:528].view(torch.float32).tolist() == [2.0**-13] * 4  # above 1e-4
    _, scale = encode_rows(zeros[:, :128], make_row_format(RowKind.INDEX_FP8_FP32, 128), impl=impl)
    assert scale.view(torch.float32).item() == 2.0**-22  # above 1e-4 / 448
    _, codes = encode_rows(zeros[:, :128], make_row_format(RowKind.INDEX_FP8_UE8M0, 128), impl=impl)
    assert codes.tolist() == [[127 - 22] * 4]
    _, codes = encode_rows(zeros[:, :128], make_row_format(RowKind.INDEX_MXFP4, 128), impl=impl)
    assert codes.tolist() == [[127 - 126] * 4]
    (packed,) = encode_rows(zeros, make_row_format(RowKind.NVFP4_DS_MLA, 576), impl=impl)
    assert packed[0, 320:].tolist() == [1] * 32  # 2^-9, the least e4m3


# -- rounding ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLS)
def test_e4m3_rounds_to_nearest_even_and_saturates(impl: str) -> None:
    """Every number, every midpoint, and both neighbours of each."""
    numbers = E4M3_NUMBERS[:127].double()
    middles = (numbers[1:] + numbers[:-1]) / 2
    values = torch.cat((numbers, middles, torch.tensor([464.0, 480.0, 1e30, math.inf]))).float()
    values = torch.cat((values, values.nextafter(torch.tensor(0.0)), values.nextafter(torch.tensor(math.inf))))
    codes = [nearest_even(Fraction(value), numbers.tolist()) if math.isfinite(value) else 126 for value in values.tolist()]
    padded = torch.nn.functional.pad(values, (0, -len(values) % 576)).view(-1, 576)
    (packed,) = encode_rows(padded, make_row_format(RowKind.FP8_E4M3, 576), impl=impl)
    assert packed.flatten()[: len(codes)].tolist() == codes
    (negative,) = encode_rows(-padded, make_row_format(RowKind.FP8_E4M3, 576), impl=impl)
    assert negative.flatten()[: len(codes)].tolist() == [code | 128 for code in codes]


@pytest.mark.parametrize("impl", IMPLS)
def test_e2m1_rounds_to_nearest_even_and_saturates(impl: str) -> None:
    values = torch.tensor([0.25, 0.26, 0.75, 1.25, 1.26, 1.75, 2.5, 2.51, 3.5, 5.0, 5.01, 6.0])
    codes = [0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 7]
    row = torch.zeros(1, 128)
    row[0, :12], row[0, 12], row[0, 16:28] = values, 6.0, -values  # one scale of 1.0 for all 32
    packed, _ = encode_rows(row, make_row_format(RowKind.INDEX_MXFP4, 128), impl=impl)
    nibbles = [code for byte in packed[0].tolist() for code in (byte & 15, byte >> 4)]
    assert nibbles[:12] == codes
    assert nibbles[16:28] == [code | 8 for code in codes]


@pytest.mark.parametrize("impl", IMPLS)
def test_nvfp4_divides_by_the_rounded_scale_and_saturates(impl: str) -> None:
    """amax / 6 = 0.17 rounds down to 0.171875 or up; with 1.05 / 6 = 0.175 it rounds down, and 1.05 / 0.171875 = 6.1 saturates."""
    row = torch.full((1, 576), 1.05)
    row[0, 1] = 0.43  # 2.50 over the rounded scale, just above a tie; 2.46 over the exact one, below it
    row_format = make_row_format(RowKind.NVFP4_DS_MLA, 576)
    (packed,) = encode_rows(row, row_format, impl=impl)
    assert packed[0, 320].item() == 0x23
    assert packed[0, 0].item() == 0x57
    assert decode_rows((packed,), row_format, impl=impl)[0][0, 0].item() == 6 * 0.171875


def nearest_even(value: Fraction, numbers: list[float]) -> int:
    """The code of the nearest number in exact arithmetic, ties to even."""
    return min(range(len(numbers)), key=lambda code: (abs(Fraction(numbers[code]) - value), code % 2))


@pytest.mark.parametrize("impl", SERVING_IMPLS)
def test_powers_of_two_are_exact_around_every_boundary(impl: str) -> None:
    """amax just at, below and above 448 * 2^e: where a logarithm in fp32 rounds the wrong way."""
    row_format = make_row_format(RowKind.INDEX_FP8_UE8M0, 128)
    amaxes = torch.tensor([448.0 * 2.0**e for e in range(-22, 60)])
    amaxes = torch.cat((amaxes, amaxes.nextafter(torch.tensor(0.0)), amaxes.nextafter(torch.tensor(math.inf))))
    packed, scales = encode_rows(amaxes[:, None].expand(-1, 128), row_format, impl=impl)
    expected = [max(-22, math.ceil(math.log2(Fraction(amax) / 448))) for amax in amaxes.tolist()]
    exact = [e if Fraction(a) <= 448 * Fraction(2) ** e else e + 1 for e, a in zip(expected, amaxes.tolist(), strict=True)]
    exact = [e - 1 if e > -22 and Fraction(a) <= 448 * Fraction(2) ** (e - 1) else e for e, a in zip(exact, amaxes.tolist(), strict=True)]
    assert scales[:, 0].tolist() == [e + 127 for e in exact]
    assert int(packed.max()) <= 0x7E, "nothing may round to NaN"


@pytest.mark.parametrize("impl", SERVING_IMPLS)
@pytest.mark.parametrize("row_format", FORMATS, **BY_NAME)
def test_the_serving_forms_write_the_references_bytes(row_format: RowFormat, impl: str) -> None:
    rows = rows_of_every_size(row_format.width)
    for dtype, count in itertools.product((torch.float32, torch.bfloat16), (0, 1, 24)):
        values = rows[:count].to(dtype)
        same_bytes(encode_rows(values, row_format, impl=impl), encode_rows(values, row_format, impl="reference"))
    same_bytes(encode_rows(rows.t().contiguous().t(), row_format, impl=impl), encode_rows(rows, row_format, impl="reference"))


@pytest.mark.parametrize("row_format", FORMATS, **BY_NAME)
def test_the_serving_form_reads_any_bytes_as_the_reference_does(row_format: RowFormat) -> None:
    """Also scales that are no powers of two, subnormal ones, and NaN codes."""
    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 256, (40, row_format.bytes_per_token), generator=generator, dtype=torch.uint8)
    stored = tuple(plane.contiguous() for plane in raw.split(list(row_format.plane_bytes), dim=1))
    if row_format.kind in (RowKind.BF16, RowKind.FP32):
        stored = (stored[0].view(torch.bfloat16 if row_format.kind is RowKind.BF16 else torch.float32),)
    for actual, expected in zip(decode_rows(stored, row_format), decode_rows(stored, row_format, impl="reference"), strict=True):
        assert (actual is None) == (expected is None)
        if actual is not None and expected is not None:
            assert torch.equal(actual.isnan(), expected.isnan())
            assert torch.equal(actual.nan_to_num(0.0), expected.nan_to_num(0.0))


def test_a_reader_of_fp8_ds_mla_takes_any_scale() -> None:
    packed = torch.zeros(1, 656, dtype=torch.uint8)
    packed[0, :512] = 0x38
    packed[0, 512:528] = torch.tensor([0.3, 1.7, 1e-6, 3e4]).view(torch.uint8)
    numbers, _ = decode_rows((packed,), make_row_format(RowKind.FP8_DS_MLA, 576))
    assert torch.equal(numbers[0, [0, 128, 256, 384]], torch.tensor([0.3, 1.7, 1e-6, 3e4]))


@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        (RowKind.BF16, 0.002),
        (RowKind.FP8_E4M3, 0.028),
        (RowKind.FP8_DS_MLA, 0.027),
        (RowKind.NVFP4_DS_MLA, 0.10),
        (RowKind.INDEX_FP8_FP32, 0.028),
        (RowKind.INDEX_MXFP4, 0.13),
    ],
)
def test_a_round_trip_loses_what_the_format_must(kind: RowKind, limit: float) -> None:
    row_format = make_row_format(kind, 128 if kind in INDEX_KINDS else 576)
    rows = torch.randn(200, row_format.width, generator=torch.Generator().manual_seed(2))
    numbers, scales = decode_rows(encode_rows(rows, row_format), row_format)
    error = relative_rms(numbers if scales is None else numbers * scales[:, None], rows)
    assert limit / 2 < error < limit


@pytest.mark.parametrize("row_format", FORMATS, **BY_NAME)
def test_what_is_not_finite_stays_visible(row_format: RowFormat) -> None:
    rows = torch.ones(2, row_format.width)
    rows[0, 3] = math.nan
    numbers, scales = decode_rows(encode_rows(rows, row_format), row_format)
    values = numbers if scales is None else numbers * scales[:, None]
    assert values[0, 3].isnan()
    assert values[1].isfinite().all()


def test_both_scale_encodings_of_fp8_index_keys_stand_for_the_same_numbers() -> None:
    rows = rows_of_every_size(128)[:20]
    formats = [make_row_format(kind, 128) for kind in (RowKind.INDEX_FP8_FP32, RowKind.INDEX_FP8_UE8M0)]
    (numbers, scales), (others, other_scales) = (decode_rows(encode_rows(rows, row_format), row_format) for row_format in formats)
    assert scales is not None
    assert other_scales is not None
    assert torch.equal(numbers, others)
    assert torch.equal(scales, other_scales)


# -- in the pool ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("row_format", FORMATS, **BY_NAME)
def test_rows_land_at_their_slots_and_nowhere_else(row_format: RowFormat, impl: str) -> None:
    region = poisoned_region(row_format.width, encoding=row_format.kind.value, num_blocks=4)
    slots = torch.tensor([63, -1, 64, 255, -7])
    rows = torch.randn(5, row_format.width, generator=torch.Generator().manual_seed(3))
    store_rows(region, slots, rows, impl=impl)
    expected = encode_rows(rows, row_format)
    for plane, wanted in zip(region.planes, expected, strict=True):
        flat = plane.flatten(0, 1).contiguous().view(torch.uint8).view(256, -1)
        wanted_bytes = wanted.contiguous().view(torch.uint8)
        for row, slot in enumerate(slots.tolist()):
            assert slot < 0 or torch.equal(flat[slot], wanted_bytes[row])
        others = torch.ones(256, dtype=torch.bool)
        others[slots[slots >= 0]] = False
        assert (flat[others] == 0xFF).all(), "no other row may be written"


@pytest.mark.parametrize("row_format", FORMATS, **BY_NAME)
def test_blocks_are_loaded_in_the_order_asked_for(row_format: RowFormat) -> None:
    region = poisoned_region(row_format.width, encoding=row_format.kind.value, num_blocks=4)
    rows = torch.randn(128, row_format.width, generator=torch.Generator().manual_seed(4))
    store_rows(region, torch.cat((torch.arange(64) + 64, torch.arange(64) + 192)), rows)
    numbers, scales = load_blocks(region, torch.tensor([3, 1]))
    expected, expected_scales = decode_rows(encode_rows(rows.roll(64, 0), row_format), row_format)
    assert torch.equal(numbers, expected)
    assert (scales is None and expected_scales is None) or torch.equal(scales, expected_scales)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", INDEX_KINDS)
def test_queries_are_rounded_per_token_and_head_and_their_scale_moves_into_the_weight(kind: RowKind) -> None:
    row_format = make_row_format(kind, 128)
    generator = torch.Generator().manual_seed(5)
    queries, weights = torch.randn(3, 4, 128, generator=generator), torch.randn(3, 4, generator=generator)
    queries[1, 2] *= 100
    rounded, weighed = round_queries(queries, weights, row_format)
    for token, head in itertools.product(range(3), range(4)):
        numbers, scale = decode_rows(encode_rows(queries[token, head][None], row_format), row_format)
        assert torch.equal(rounded[token, head], numbers[0])
        assert weighed[token, head] == weights[token, head] * (1.0 if scale is None else scale.item())


def test_queries_stay_as_they_are_beside_unpacked_keys() -> None:
    queries, weights = torch.randn(3, 4, 128), torch.randn(3, 4)
    rounded, weighed = round_queries(queries, weights, make_row_format(RowKind.BF16, 128))
    assert rounded is queries
    assert weighed is weights


def test_refuses_rows_of_another_width() -> None:
    row_format = make_row_format(RowKind.FP8_DS_MLA, 576)
    with pytest.raises(ValueError, match=r"encode_rows: values has shape \[1, 575\]"):
        encode_rows(torch.zeros(1, 575), row_format)
    with pytest.raises(ValueError, match=r"decode_rows: stored has shape \[1, 655\]"):
        decode_rows((torch.zeros(1, 655, dtype=torch.uint8),), row_format)
