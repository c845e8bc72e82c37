"""How a checkpoint may store one matrix: as it is, as block-FP8 or as NVFP4. Names, dtypes and shapes only; torch is not imported.

Knows: which tensors beside `X.weight` make which format, and that their presence decides: lists and names in config.json are
misspelt in published checkpoints. Does not know what the bytes mean (`quantisation.py`) or which matrices there are
(`tensor_table.py`).
"""

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass
from enum import Enum, unique

from glm_runtime.config_fields import FP8_BLOCK
from glm_runtime.tensor_table import TensorSpec

WEIGHT_SUFFIX = ".weight"
FP8_SCALE_SUFFIX = ".weight_scale_inv"
"""A block-FP8 scale. Despite "inv" it multiplies."""
NVFP4_SCALE_SUFFIX = ".weight_scale"
NVFP4_GLOBAL_SCALE_SUFFIX = ".weight_scale_2"
NVFP4_INPUT_SCALE_SUFFIX = ".input_scale"
NVFP4_SUFFIXES = (NVFP4_SCALE_SUFFIX, NVFP4_GLOBAL_SCALE_SUFFIX, NVFP4_INPUT_SCALE_SUFFIX)
NVFP4_GROUP = 16
"""Columns that share one NVFP4 scale."""

FP8_DTYPE = "F8_E4M3"
PACKED_DTYPE = "U8"
PLAIN_DTYPES = ("BF16", "F32")
DTYPE_BYTES: Mapping[str, int] = {"F32": 4, "BF16": 2, FP8_DTYPE: 1, PACKED_DTYPE: 1}
"""The safetensors dtypes of these formats."""


@unique
class WeightFormat(Enum):
    """plain: bf16 or fp32. block-fp8: e4m3 with an fp32 scale per 128 x 128 block. nvfp4: two e2m1 a byte with e4m3 scales per 16."""

    PLAIN = "plain"
    BLOCK_FP8 = "block-fp8"
    NVFP4 = "nvfp4"


@dataclass(frozen=True, slots=True)
class StoredForm:
    """What one stored tensor must be. dtypes: safetensors names, any of which will do."""

    dtypes: tuple[str, ...]
    shape: tuple[int, ...]

    def has_shape(self, shape: tuple[int, ...]) -> bool:
        """Whether a stored shape is this one; a scalar may also come as one element."""
        return shape == self.shape or (not self.shape and shape == (1,))


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor that will be written: its name, safetensors dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def beside(name: str, suffix: str) -> str:
    """The name of a tensor that lies beside matrix `name`."""
    return name.removesuffix(WEIGHT_SUFFIX) + suffix


def find_format(name: str, spec: TensorSpec, stored_names: Container[str]) -> WeightFormat:
    """The format of a matrix, by the tensors that lie beside it. One of several is enough: what lacks is an error, not another format."""
    if spec.is_quantisable and beside(name, FP8_SCALE_SUFFIX) in stored_names:
        return WeightFormat.BLOCK_FP8
    if spec.is_routed_expert and any(beside(name, suffix) in stored_names for suffix in NVFP4_SUFFIXES):
        return WeightFormat.NVFP4
    return WeightFormat.PLAIN


def stored_forms(name: str, spec: TensorSpec, weight_format: WeightFormat) -> dict[str, StoredForm]:
    """Every tensor that a checkpoint has for one entry of the tensor table, the weight itself first."""
    if weight_format is WeightFormat.BLOCK_FP8:
        return {
            name: StoredForm((FP8_DTYPE,), spec.shape),
            beside(name, FP8_SCALE_SUFFIX): StoredForm(("F32",), tuple(-(-size // FP8_BLOCK) for size in spec.shape)),
        }
    if weight_format is WeightFormat.NVFP4:
        rows, columns = spec.shape
        return {
            name: StoredForm((PACKED_DTYPE,), (rows, columns // 2)),
            beside(name, NVFP4_SCALE_SUFFIX): StoredForm((FP8_DTYPE,), (rows, columns // NVFP4_GROUP)),
            beside(name, NVFP4_GLOBAL_SCALE_SUFFIX): StoredForm(("F32",), ()),
            beside(name, NVFP4_INPUT_SCALE_SUFFIX): StoredForm(("F32",), ()),
        }
    return {name: StoredForm(("F32",) if spec.must_be_fp32 else PLAIN_DTYPES, spec.shape)}
