"""Reads a checkpoint's tensors one at a time, so that no more of it is in memory than what was asked for.

Knows: bytes of a file to a torch tensor, and formats to values. Does not know what a tensor is for (`weights.py`).
"""

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from glm_runtime.quantisation import dequantise_block_fp8, dequantise_nvfp4
from glm_runtime.stored_tensors import StoredTensor
from glm_runtime.tensor_table import TensorSpec
from glm_runtime.weight_format import (
    FP8_SCALE_SUFFIX,
    NVFP4_GLOBAL_SCALE_SUFFIX,
    NVFP4_INPUT_SCALE_SUFFIX,
    NVFP4_SCALE_SUFFIX,
    WeightFormat,
    beside,
    find_format,
)
from kv_transfer.errors import ConfigError

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
}
"""safetensors dtype names that a checked checkpoint can have."""


class TensorReader:
    """One open checkpoint; use it as a context manager. on_read is called with the number of bytes after each read.

    Files are read with plain reads, not mapped: mapped pages would count as memory of this process until it gives them up.
    """

    def __init__(self, stored: Mapping[str, StoredTensor], on_read: Callable[[int], None] | None = None) -> None:
        self._stored = stored
        self._on_read = on_read
        self._files: dict[Path, int] = {}

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def wide(self, name: str, spec: TensorSpec, rows: slice | None = None) -> Tensor:
        """One entry of the tensor table, or rows of it, new: as it is stored, or fp32 where it is quantised.

        rows: [start, stop); None is all. Of a plain tensor nothing else is read. Raises ConfigError naming the file.
        """
        weight_format = find_format(name, spec, self._stored)
        if weight_format is WeightFormat.PLAIN:
            return self.raw(name, rows)
        whole = self._dequantised(name, weight_format)
        return whole if rows is None or rows.stop - rows.start == spec.shape[0] else whole[rows].clone()

    def _dequantised(self, name: str, weight_format: WeightFormat) -> Tensor:
        if weight_format is WeightFormat.BLOCK_FP8:
            return dequantise_block_fp8(self.raw(name), self.raw(beside(name, FP8_SCALE_SUFFIX)))
        self.raw(beside(name, NVFP4_INPUT_SCALE_SUFFIX))  # for quantised activations, which a CPU does not have; read to be counted
        scale, global_scale = self.raw(beside(name, NVFP4_SCALE_SUFFIX)), self.raw(beside(name, NVFP4_GLOBAL_SCALE_SUFFIX))
        return dequantise_nvfp4(self.raw(name), scale, global_scale)

    def raw(self, name: str, rows: slice | None = None) -> Tensor:
        """One stored tensor, or rows [start, stop) of it, new. Raises ConfigError naming the file when its bytes cannot be read.

        `on_read` is told of the whole.
        """
        stored = self._stored[name]
        shape = stored.header.shape
        if rows is not None:
            shape = (rows.stop - rows.start, *shape[1:])
        dtype = TORCH_DTYPES[stored.header.dtype]
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        content = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
        self._read_into(content.numpy().data, name, stored, row_bytes * rows.start if rows is not None else 0)
        if self._on_read is not None:
            self._on_read(stored.header.num_bytes)
        return content.view(dtype).view(shape)

    def _read_into(self, buffer: memoryview, name: str, stored: StoredTensor, begin: int) -> None:
        done = 0
        try:
            descriptor = self._open(stored.file)
            while done < len(buffer):
                count = os.preadv(descriptor, [buffer[done:]], stored.header.begin + begin + done)
                if count == 0:
                    raise ConfigError(f"ends within tensor {name}; it was cut off after it was checked", path=str(stored.file))
                done += count
        except OSError as error:
            raise ConfigError(f"tensor {name} cannot be read ({error.strerror})", path=str(stored.file)) from None

    def _open(self, file: Path) -> int:
        if file not in self._files:
            self._files[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        return self._files[file]
