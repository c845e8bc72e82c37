"""Typed calls into the compiled kernels. One table of signatures; pointers are `Tensor.data_ptr()`.

A call releases the interpreter's lock and runs on torch's own OpenMP threads (one copy of libgomp serves both). Products are told how
many, `torch.get_num_threads()`. The other kernels take OpenMP's number, which every calling thread has for itself: torch's first parallel
work, or `torch.set_num_threads`, in a thread sets it there, so the two agree on the engine thread, which loads and runs.
Nothing is checked here: shapes, dtypes and contiguity are the ops' business.
"""

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch  # noqa: F401  its libgomp must be in the process before ours is looked up

from glm_runtime.native.build import BuildFailed, build_library, missing_features
from glm_runtime.runtime_config import KernelsChoice
from kv_transfer.errors import ConfigError

logger = logging.getLogger(__name__)

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

SIGNATURES: dict[str, tuple[type, ...]] = {
    "glm_linear": (_P, _I, _I, _P, _I, _I, _I, _I, _I, _P, _I, _I, _I, _P, _I, _I, _I),
    "glm_experts": (_P, _I, _P, _P, _I, _I, _P, _I, _P, _I, _I, _I, _I, _P, _P, _P, _P, _I),
    "glm_add_rms_norm": (_P, _I, _P, _I, _I, _P, _I, _I, _P, _I, _P, _P, _I, _I, _I, _F),
    "glm_embed_eh_norm": (_P, _P, _P, _I, _P, _I, _P, _P, _I, _P, _I, _I, _I, _F),
    "glm_fused_norm_rope": (_P, _I, _P, _I, _I, *(_P,) * 4, _I, *(_P,) * 9, *(_I,) * 7, _F, _F),
    "glm_moe_route": (_P, _I, _P, _P, _P, _P, *(_I,) * 6, _F),
    "glm_vocab_argmax": (_P, _I, _I, _P, _P, _P, _I, _I),
    "glm_top_probability": (_P, _I, _I, _P, _P, _I, _I),
    "glm_store_rows": (_P, _I, _I, _P, _P, _I, _I),
    "glm_select_topk": (_P, _I, _I, _P, _I, _P),
    "glm_merge_topk": (_P, _P, _I, _I, _I, _I, _P),
    "glm_index_logits": (_P, _I, _P, _I, _I, _I, _I, _P, _I, _I, _P, _I, _I, _I, _I, _P, _I, _P, _P),
    "glm_index_select": (_P, _I, _P, _I, _I, _I, _P, _I, _I, _P, _I, _I, _I, _I, _P, _I, _P, _P, _I, _I, _I, _P, _P),
    "glm_fused_q": (_P, _I, _P, _I, _I, _I, _P, _P, _I, _I, _I, _I, _I, _P),
    "glm_index_queries": (_P, _I, _I, _P, _P, _P, _I, _I, _I, _I, _I, _P, _P),
    "glm_topk_to_slots": (_P, _I, _I, _P, _P, _I, _I, _I, _I, _I, _P, _P),
    "glm_dense_mla": (_P, _I, _I, _I, _I, _I, _I, _P, _P, _I, _P, _I, _I, _F, _P),
    "glm_load_blocks": (_P, _I, _I, _I, _I, _P, _I, _I, _I, _P),
    "glm_sparse_mla": (_P, _I, _I, _I, _I, _I, _P, _I, _I, _I, _P, _I, _F, _I, _P, _P),
}
"""Name of each exported function -> its arguments. All return nothing."""


Call = tuple[Callable[..., object], tuple[Any, ...]]
"""A function and its arguments."""


class NativeLibrary:
    """The loaded kernels: one attribute per entry of `SIGNATURES`. Raises BuildFailed for a file that cannot be loaded."""

    def __init__(self, path: Path) -> None:
        self._noting = threading.Lock()
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise BuildFailed(f"{path} cannot be loaded: {error}; remove it, so that it is compiled again") from error
        supported = self._library.glm_supported
        supported.argtypes, supported.restype = (), ctypes.c_int
        self.is_supported = bool(supported())
        for name, arguments in SIGNATURES.items() if self.is_supported else ():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, None
            setattr(self, name, function)

    @contextmanager
    def noted_calls(self) -> Iterator[list[Call]]:
        """Note the calls that this thread makes meanwhile. One thread at a time notes; the others call as ever."""
        calls: list[Call] = []
        with self._noting:
            plain = {name: getattr(self, name) for name in SIGNATURES}
            for name, kernel in plain.items():
                setattr(self, name, _noted(kernel, calls, threading.get_ident()))
            try:
                yield calls
            finally:
                for name, kernel in plain.items():
                    setattr(self, name, kernel)

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Reached for names that are no entry of the table; also says what the entries are."""
        raise AttributeError(f"no kernel is called {name}")


def _noted(kernel: Callable[..., None], calls: list[Call], thread: int) -> Callable[..., None]:
    def call(*arguments: Any) -> None:
        if threading.get_ident() == thread:
            calls.append((kernel, arguments))
        kernel(*arguments)

    return call


@cache
def library() -> NativeLibrary:
    """The kernels of this process, built and loaded at the first call. Raises BuildFailed."""
    loaded = NativeLibrary(build_library())
    if not loaded.is_supported:
        raise BuildFailed(f"the compiled kernels need AVX-512 (F, BW, DQ, VL, BF16); {_why_unsupported()}")
    return loaded


def _why_unsupported() -> str:
    if missing := missing_features():
        return f"this processor has no {', '.join(missing)}"
    return "this processor has it, but the compiler is too old to use it: install g++ 10, clang 9, or a newer one"


def choose_kernels(choice: KernelsChoice) -> bool:
    """Whether the compiled kernels serve here. Logs a fallback. Raises ConfigError when "native" is asked for and cannot be had."""
    if choice == "torch":
        return False
    try:
        library()
    except BuildFailed as error:
        if choice == "native":
            raise ConfigError(f"is 'native', but {error}", path="runtime.kernels") from error
        logger.warning("compiled kernels unavailable, torch serves more slowly reason=%s", error)
        return False
    return True
