"""Writes a sharded safetensors checkpoint tensor by tensor: no more of it is in memory than the piece at hand.

Knows: the file format, shards and their index. Does not know models or formats of weights (`synthetic.py`).
A shard has its final name only when it is whole, and the index is written last: an interrupted run leaves no checkpoint.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from glm_runtime.stored_tensors import INDEX_FILE, WEIGHTS_FILE
from glm_runtime.weight_format import DTYPE_BYTES, PlannedTensor
from kv_transfer.errors import ConfigError

PARTIAL_SUFFIX = ".partial"
_HEADER_ALIGNMENT = 8


@dataclass(slots=True)
class _Shard:
    """One file on its way. cursors: for each tensor the position of its next byte in the file and its end."""

    path: Path
    tensors: list[PlannedTensor]
    cursors: dict[str, tuple[int, int]] = field(default_factory=dict)
    bytes_left: int = 0
    descriptor: int = -1


class SafetensorsWriter:
    """A checkpoint's weight files; use it as a context manager. Files are preallocated, tensors may come in any order.

    groups: tensors that stay in one shard, e.g. a weight and its scales. max_shard_bytes: a shard is closed before it would
    exceed this, unless one group alone does. One shard is model.safetensors; more are numbered and have an index.
    Raises ConfigError as `check_is_free`, and when the directory cannot be written.
    """

    def __init__(self, directory: Path, groups: Sequence[Sequence[PlannedTensor]], max_shard_bytes: int) -> None:
        self._directory = directory
        check_is_free(directory)
        batches = _split(groups, max_shard_bytes)
        names = [WEIGHTS_FILE] if len(batches) == 1 else [f"model-{n + 1:05}-of-{len(batches):05}.safetensors" for n in range(len(batches))]
        self._shards = [_Shard(directory / name, batch) for name, batch in zip(names, batches, strict=True)]
        self._shard_of = {tensor.name: shard for shard in self._shards for tensor in shard.tensors}

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for shard in self._shards:
            if shard.descriptor >= 0:
                os.close(shard.descriptor)
        if kind is None:
            assert all(shard.cursors and not shard.bytes_left for shard in self._shards), "every tensor must be written"
            self._write_index()

    def append(self, name: str, piece: Tensor) -> None:
        """Write the next bytes of a tensor: the whole of it, or its next rows. Raises ConfigError when the disk refuses them."""
        shard = self._shard_of[name]
        content = piece.contiguous().view(-1).view(torch.uint8).numpy().data
        try:
            if not shard.cursors:
                _open(shard)
            begin, end = shard.cursors[name]
            assert begin + len(content) <= end, f"{name} has {end - begin} bytes left, not {len(content)}"
            written = 0
            while written < len(content):
                written += os.pwrite(shard.descriptor, content[written:], begin + written)
            shard.cursors[name] = (begin + written, end)
            shard.bytes_left -= written
            if not shard.bytes_left:
                _finish(shard)
        except OSError as error:
            raise ConfigError(f"cannot be written ({error.strerror})", path=str(shard.path)) from None

    def _write_index(self) -> None:
        if len(self._shards) == 1:
            return
        total = sum(tensor.num_bytes for shard in self._shards for tensor in shard.tensors)
        placed = {tensor.name: shard.path.name for shard in self._shards for tensor in shard.tensors}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
        (self._directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def check_is_free(directory: Path) -> None:
    """Raise ConfigError when the directory has weights already, or the remains of an interrupted run."""
    if taken := sorted(directory.glob("*.safetensors*")):
        raise ConfigError(f"has {taken[0].name} already; choose an empty directory", path=str(directory))


def _split(groups: Sequence[Sequence[PlannedTensor]], max_shard_bytes: int) -> list[list[PlannedTensor]]:
    """Consecutive groups to shards, as many in each as fit."""
    batches: list[list[PlannedTensor]] = [[]]
    num_bytes = 0
    for group in groups:
        group_bytes = sum(tensor.num_bytes for tensor in group)
        if batches[-1] and num_bytes + group_bytes > max_shard_bytes:
            batches.append([])
            num_bytes = 0
        batches[-1].extend(group)
        num_bytes += group_bytes
    # Wide elements first, as the format's own library does: every tensor then lies at a multiple of its element's size.
    return [sorted(batch, key=lambda tensor: -DTYPE_BYTES[tensor.dtype]) for batch in batches]


def _open(shard: _Shard) -> None:
    """Create the file with its header and its full length."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in shard.tensors:
        end = offset + tensor.num_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        shard.cursors[tensor.name] = (offset, end)
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _HEADER_ALIGNMENT)
    start = 8 + len(encoded)
    shard.cursors = {name: (start + begin, start + end) for name, (begin, end) in shard.cursors.items()}
    shard.bytes_left = offset
    shard.descriptor = os.open(_partial(shard), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    os.posix_fallocate(shard.descriptor, 0, start + offset)  # a full disk is said now, not after an hour
    os.pwrite(shard.descriptor, len(encoded).to_bytes(8, "little") + encoded, 0)


def _finish(shard: _Shard) -> None:
    os.close(shard.descriptor)
    shard.descriptor = -1
    _partial(shard).rename(shard.path)


def _partial(shard: _Shard) -> Path:
    return shard.path.with_name(shard.path.name + PARTIAL_SUFFIX)
