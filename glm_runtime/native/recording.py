"""Kernel calls that are made again as they were: on a few rows of a small model most of a step is what Python does between its kernels.

Knows: which kernels a function called, with which arguments, and that the memory they name lives on. Does not know what they compute.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from glm_runtime.native.library import KernelCall, NativeLibrary


@dataclass(frozen=True, slots=True)
class Recording:
    """Calls in their order. kept: tensors that the recorded function made; its callers' own are theirs to keep."""

    calls: tuple[KernelCall, ...]
    kept: tuple[Tensor, ...]

    def replay(self) -> None:
        """Make the calls: what they read is what now lies where it lay, what they write comes where it came."""
        for kernel, arguments in self.calls:
            kernel(*arguments)


def record(kernels: NativeLibrary, function: Callable[[], Sequence[Tensor]]) -> tuple[Recording, Sequence[Tensor]] | None:
    """Call `function` and note its kernel calls. Returns them and its result, which each replay overwrites.

    None where the calls alone do not make the result: torch has computed a part of it. That is tried: everything that the function made
    is spoilt, and must come out of a replay bit for bit. So it must not change what it reads, and its result must have no NaN. What it
    decides by the numbers it sees (checks, say) is not decided again.
    """
    kept = _MadeTensors()
    with kernels.noted_calls() as calls, kept:
        result = function()
    recording = Recording(tuple(calls), tuple(kept.made))
    expected = [each.clone() for each in result]
    for each in recording.kept:
        each.fill_(torch.nan if each.is_floating_point() else 0)
    recording.replay()
    is_whole = all(map(torch.equal, result, expected))
    return (recording, result) if is_whole else None


class _MadeTensors(TorchDispatchMode):
    """Keeps every tensor that torch makes meanwhile, views of older ones aside."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As torch calls it for each of its operations."""
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            known = {_storage(each) for each in args if isinstance(each, Tensor)}
            if _storage(result) not in known:
                self.made.append(result)
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
