"""Computations that are made again as they were: on a few rows of a small model most of a step is what Python does between its kernels.

Knows: which kernels and torch operations a function called, with which arguments, and that the memory they name lives on. Does not know
what they compute.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from glm_runtime.native.library import Call, NativeLibrary


@dataclass(frozen=True, slots=True)
class Recording:
    """Calls in their order. kept: tensors that they name, beside those of the recorded function's owner."""

    calls: tuple[Call, ...]
    kept: tuple[Tensor, ...]

    def replay(self) -> None:
        """Make the calls: what they read is what now lies where it lay, what they write comes where it came."""
        for function, arguments in self.calls:
            function(*arguments)


def record(kernels: NativeLibrary, function: Callable[[], Sequence[Tensor]], most_bytes: int) -> Recording | None:
    """Call `function` and note what it calls. Each replay overwrites the result that it had.

    What Python decides by the numbers it sees (checks, say) is not decided again: do not record a function whose result depends on a
    number that Python has read. That the calls alone make the result is tried, over the same numbers: everything that the function made
    is spoilt, and must come out of a replay bit for bit; None where it does not, and where it made more than `most_bytes`. What the
    function changes of its surroundings it must change again in the same way. Its result must have no NaN.
    """
    with kernels.noted_calls() as calls, _NotedOperations(calls) as noted:
        result = function()
    if sum([each.nbytes for each in noted.made]) > most_bytes:
        return None
    recording = Recording(tuple(calls), tuple(noted.kept))
    expected = [each.clone() for each in result]
    for each in (*noted.made, *result):
        each.fill_(torch.nan if each.is_floating_point() else 0)
    recording.replay()
    return recording if all(map(torch.equal, result, expected)) else None


class _NotedOperations(TorchDispatchMode):
    """Notes torch's operations among the kernels' calls: those that change a tensor, and those that make one, to be made in its place.

    made: new tensors. kept: all that were returned, so that no address is given to others.
    """

    def __init__(self, calls: list[Call]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.made: list[Tensor] = []
        self.kept: list[Tensor] = []
        self._calls = calls

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would import its compiler to keep it away from here, which takes a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As torch calls it for each of its operations."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        new = [each for each in _tensors(result) if _storage(each) not in set(map(_storage, _tensors((args, kwargs))))]
        self.kept += _tensors(result)
        self.made += new
        if func._schema.is_mutable:
            self._calls.append((lambda: func(*args, **kwargs), ()))
        elif isinstance(result, Tensor) and new and "empty" not in func._schema.name:
            self._calls.append((lambda: result.copy_(func(*args, **kwargs)), ()))
        return result


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
