"""What one cached row of numbers is as bytes: every format of both caches, with its planes and the words that peers compare.

Knows: sizes, the order of parts, and the rule of each scale, in words. Does not know which format a rank uses (`cache_format.py`) or
how numbers are rounded into it (`ops/cache_rows`).
"""

from dataclasses import dataclass
from enum import Enum, unique
from itertools import accumulate

from kv_transfer.layout import CacheComponent


@unique
class RowKind(Enum):
    """The head of a component's encoding. The two FP8 kinds of index keys have the same size and other scale bytes."""

    BF16 = "bf16"
    FP32 = "fp32"
    FP8_E4M3 = "fp8_e4m3"
    FP8_DS_MLA = "fp8_ds_mla"
    NVFP4_DS_MLA = "nvfp4_ds_mla"
    INDEX_FP8_FP32 = "fp8 fp32-scaled"
    INDEX_FP8_UE8M0 = "fp8 ue8m0-scaled"
    INDEX_MXFP4 = "mxfp4"


PACKED_LATENT = 512
PACKED_ROPE = 64
PACKED_INDEX_WIDTH = 128
"""The shapes that the packed formats are made for; no other fits them."""

FP8_TILE = 128
NVFP4_TILE = 16
MXFP4_TILE = 32
"""Numbers under one scale."""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Rows of `width` numbers. A region holds its planes one after another, each for all tokens of the block: `plane_bytes` per token."""

    kind: RowKind
    width: int
    plane_bytes: tuple[int, ...]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one row, all planes."""
        return sum(self.plane_bytes)

    def plane_offsets(self, block_size_tokens: int) -> tuple[int, ...]:
        """Where each plane starts inside a region, in bytes."""
        return tuple(accumulate((size * block_size_tokens for size in self.plane_bytes[:-1]), initial=0))


_ELEMENT_BYTES = {RowKind.BF16: 2, RowKind.FP32: 4, RowKind.FP8_E4M3: 1}

_PACKED_ROWS = {
    RowKind.FP8_DS_MLA: (PACKED_LATENT + PACKED_ROPE, (PACKED_LATENT + 4 * (PACKED_LATENT // FP8_TILE) + 2 * PACKED_ROPE,)),
    RowKind.NVFP4_DS_MLA: (PACKED_LATENT + PACKED_ROPE, (PACKED_LATENT // 2 + PACKED_ROPE + PACKED_LATENT // NVFP4_TILE,)),
    RowKind.INDEX_FP8_FP32: (PACKED_INDEX_WIDTH, (PACKED_INDEX_WIDTH, 4)),
    RowKind.INDEX_FP8_UE8M0: (PACKED_INDEX_WIDTH, (PACKED_INDEX_WIDTH, 4)),
    RowKind.INDEX_MXFP4: (PACKED_INDEX_WIDTH, (PACKED_INDEX_WIDTH // 2, PACKED_INDEX_WIDTH // MXFP4_TILE)),
}

_PARTS = {
    RowKind.BF16: "latent {latent} | kpe {rope}",
    RowKind.FP32: "latent {latent} | kpe {rope}",
    RowKind.FP8_E4M3: "latent {latent} e4m3 | kpe {rope} e4m3; one scale of 1.0",
    RowKind.FP8_DS_MLA: "latent 512 e4m3 | 4 scales fp32 | kpe 64 bf16; scale of 128 = 2^ceil(log2(max(amax/448, 1e-4)))",
    RowKind.NVFP4_DS_MLA: (
        "latent 512 e2m1, even index in the low nibble | kpe 64 e4m3, no scale | 32 scales e4m3, tile j at 8*(j mod 4) + j div 4; "
        "scale of 16 = max(amax/6, 2^-9)"
    ),
}
_INDEX_PARTS = {
    RowKind.BF16: "no scale",
    RowKind.FP32: "no scale",
    RowKind.INDEX_FP8_FP32: "planes of 128 e4m3, 1 scale fp32; scale of 128 = 2^ceil(log2(max(amax, 1e-4)/448))",
    RowKind.INDEX_FP8_UE8M0: "planes of 128 e4m3, 1 scale as 4 equal UE8M0 bytes; scale of 128 = 2^ceil(log2(max(amax, 1e-4)/448))",
    RowKind.INDEX_MXFP4: (
        "planes of 64 bytes e2m1, even index in the low nibble, 4 scales UE8M0; scale of 32 = 2^ceil(log2(max(amax, 6*2^-126)/6))"
    ),
}


def make_row_format(kind: RowKind, width: int) -> RowFormat:
    """The format of rows `width` numbers wide. A packed kind has one width only; the start-up checks saw to that."""
    if kind in _ELEMENT_BYTES:
        return RowFormat(kind, width, (width * _ELEMENT_BYTES[kind],))
    packed_width, planes = _PACKED_ROWS[kind]
    assert width == packed_width, f"{kind.value} rows have {packed_width} numbers, not {width}"
    return RowFormat(kind, width, planes)


def mla_encoding(kind: RowKind, latent: int, rope: int) -> str:
    """What the bytes of an MLA row mean: dtype, order of parts, scale rule, order of rotated pairs."""
    return f"{kind.value}; {_PARTS[kind].format(latent=latent, rope=rope)}; kpe rope pairs interleaved"


def index_encoding(kind: RowKind, rotated: int, passed: int) -> str:
    """What the bytes of an index key mean. Another rotation of the key before rounding would be another encoding."""
    return f"{kind.value}; rotated {rotated} | passed {passed}; rope pairs interleaved; no Hadamard; {_INDEX_PARTS[kind]}"


def row_format_of(component: CacheComponent) -> RowFormat:
    """The format of a component's rows, from its encoding's head. Raises ValueError for an encoding that was not made here."""
    kind = RowKind(component.encoding.split(";")[0])
    if kind in _ELEMENT_BYTES:
        return make_row_format(kind, component.bytes_per_token // _ELEMENT_BYTES[kind])
    return make_row_format(kind, _PACKED_ROWS[kind][0])
