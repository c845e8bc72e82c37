"""Reads and checks the header of one safetensors file: names, dtypes, shapes, byte ranges. Tensor bytes are not read.

Format: 8 bytes little-endian header length, that many bytes of JSON, then the tensors' bytes without gaps.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kv_transfer.errors import ConfigError

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 256 << 20
"""A GLM-5.3 shard's header is a few MB; more means that the file is not safetensors."""

_DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor: safetensors dtype name, shape, and the absolute byte range [begin, end) in its file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


def read_header(path: Path) -> dict[str, TensorHeader]:
    """The tensors of one file.

    Raises ConfigError naming the file when it cannot be read, is not safetensors, is shorter or longer than its header says, or
    holds a tensor whose byte range does not fit its shape.
    """
    try:
        with path.open("rb") as file:
            file_bytes = path.stat().st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if not 2 <= length <= min(_MAX_HEADER_BYTES, file_bytes - _LENGTH_BYTES):
                raise ConfigError(f"is not a safetensors file, or was cut off in its header ({file_bytes} bytes)", path=str(path))
            raw = json.loads(file.read(length))
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror})", path=str(path)) from None
    except ValueError:
        raise ConfigError("is not a safetensors file: its header is not JSON", path=str(path)) from None
    if not isinstance(raw, dict):
        raise ConfigError("is not a safetensors file: its header is not an object", path=str(path))
    start = _LENGTH_BYTES + length
    headers = {name: _tensor_header(path, name, entry, start) for name, entry in raw.items() if name != "__metadata__"}
    _check_extent(path, headers, start, file_bytes)
    return headers


def _tensor_header(path: Path, name: str, entry: Any, start: int) -> TensorHeader:
    try:
        dtype = str(entry["dtype"])
        shape = tuple(int(size) for size in entry["shape"])
        begin, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"the header entry of tensor {name} is corrupt", path=str(path)) from None
    if dtype not in _DTYPE_BYTES:
        raise ConfigError(f"tensor {name} has dtype {dtype}, which this runtime does not know", path=str(path))
    if end - begin != math.prod(shape) * _DTYPE_BYTES[dtype] or begin < 0:
        raise ConfigError(f"tensor {name} has {end - begin} bytes; {dtype} {list(shape)} takes another number", path=str(path))
    return TensorHeader(dtype, shape, start + begin, start + end)


def _check_extent(path: Path, headers: dict[str, TensorHeader], start: int, file_bytes: int) -> None:
    expected_begin = start
    for header in sorted(headers.values(), key=lambda header: (header.begin, header.end)):
        if header.begin != expected_begin:
            raise ConfigError("is corrupt: the byte ranges of its tensors overlap or leave gaps", path=str(path))
        expected_begin = header.end
    if expected_begin != file_bytes:
        kind = "truncated" if file_bytes < expected_begin else "corrupt"
        raise ConfigError(f"is {kind}: it has {file_bytes} bytes, its header describes {expected_begin}. Copy it again", path=str(path))
