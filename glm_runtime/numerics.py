"""The two ways to compute: `deterministic`, where a row's bits depend on its own sequence alone, and `fast`.

Deterministic means fp32 weights and activations, row-invariant matrix products (`linear.py`), one attention form over a list of
fixed width, fixed key tiles, sums in a fixed order, and no function whose vector and scalar paths differ (`activation.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from glm_runtime.config import GlmConfig
from glm_runtime.linear import Gemm, Products, check_items_independent, choose_gemm
from glm_runtime.native_gemm import NativeGemm
from glm_runtime.ops.impl import Impl

NumericsMode = Literal["deterministic", "fast"]
_TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics:
    """dtype: of weights and activations; scores, softmax, norms and router are fp32 always.

    impl: of the ops; "native" where the compiled kernels serve. scratch_bytes: what one kernel may use for gathered rows. More is
    slower: beyond the caches each new page costs more than the arithmetic.
    """

    mode: NumericsMode
    dtype: torch.dtype
    gemm: Products
    impl: Impl = "cpu"
    scratch_bytes: int = 2 << 20

    @property
    def is_deterministic(self) -> bool:
        return self.mode == "deterministic"


def weight_dtype(mode: NumericsMode, config: GlmConfig) -> torch.dtype:
    """What weights and activations are: fp32 in deterministic mode, else the checkpoint's own dtype."""
    return torch.float32 if mode == "deterministic" else _TORCH_DTYPES[config.dtype]


def make_numerics(mode: NumericsMode, config: GlmConfig, gemm_shapes: Iterable[tuple[int, int]], impl: Impl = "cpu") -> Numerics:
    """Resolve a mode for this model and machine.

    gemm_shapes: (K, N) of all products with row-wise meaning, where torch forms them. Compiled kernels are row-invariant by
    construction and are not probed.

    Raises ConfigError when this machine's BLAS is to serve and cannot be made deterministic (`choose_gemm`, `check_items_independent`).
    """
    dtype = weight_dtype(mode, config)
    if impl == "native":
        return Numerics(mode=mode, dtype=dtype, gemm=NativeGemm(), impl=impl)
    if mode == "fast":
        return Numerics(mode=mode, dtype=dtype, gemm=Gemm(), impl=impl)
    heads, topk = config.num_attention_heads, config.index_topk
    check_items_independent(heads, config.latent_dim, topk)
    check_items_independent(heads, topk, config.kv_lora_rank)
    return Numerics(mode=mode, dtype=dtype, gemm=choose_gemm(gemm_shapes), impl=impl)
