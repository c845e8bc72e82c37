"""One rank's loaded model: configuration, cache layout and weights, ready to be bound to a pool of blocks."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from glm_runtime.cache_format import SERVING_DEVICE, CacheFormats, choose_cache_formats
from glm_runtime.cache_layout import make_cache_layout
from glm_runtime.checkpoint import check_checkpoint, checkpoint_digest, tokenizer_digest
from glm_runtime.config import GlmConfig
from glm_runtime.engine.runner import ModelRunner
from glm_runtime.model import GlmModel, build_model
from glm_runtime.moe import MixtureOfExperts
from glm_runtime.mtp import MtpLayer, build_mtp
from glm_runtime.native.library import choose_kernels
from glm_runtime.numerics import make_numerics, weight_dtype
from glm_runtime.ops.impl import Impl
from glm_runtime.ops.index_logits import KEY_TILE_TOKENS
from glm_runtime.paged_cache import PagedCache
from glm_runtime.parallel.context import ParallelContext, one_rank
from glm_runtime.parallel.expert import starting_placement
from glm_runtime.parallel.expert_balance import ExpertBalancer
from glm_runtime.parallel.layout import check_layout
from glm_runtime.parallel.weight_cut import WeightCut, cut_weights
from glm_runtime.runtime_config import MOST_DRAFTS, RuntimeConfig, choose_max_drafts
from glm_runtime.weights import LoadProgress, gemm_shapes, load_weights
from kv_transfer.errors import ConfigError
from kv_transfer.layout import CacheLayout
from kv_transfer.pool_memory import PoolMemory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class GlmRuntime:
    """Everything of a rank that does not depend on where the cache lies. weights_version: digest that peers must agree on.

    mtp: None where nothing is drafted.
    """

    runtime_config: RuntimeConfig
    config: GlmConfig
    formats: CacheFormats
    layout: CacheLayout
    weights_version: str
    model: GlmModel
    mtp: MtpLayer | None

    @classmethod
    def load(
        cls, runtime_config: RuntimeConfig, on_progress: LoadProgress | None = None, context: ParallelContext | None = None
    ) -> "GlmRuntime":
        """Read and check the checkpoint and load its weights; takes seconds to minutes. Sets torch's thread count for the process.

        context: which rank of `runtime_config.parallel` this is, and whom it meets; None is the only one.
        Raises ConfigError as `check_checkpoint`, `check_layout` and `choose_cache_formats` do, when `cache_bytes` holds no block, when a
        length is not what the model can do, when the context is of another layout, and when the deterministic mode cannot be had on this
        machine.
        """
        context = context or one_rank()
        directory = Path(runtime_config.checkpoint)
        config = check_checkpoint(directory)
        version = checkpoint_digest(directory)
        formats = choose_cache_formats(runtime_config, config, SERVING_DEVICE)
        max_drafts = choose_max_drafts(runtime_config, config)
        layout = make_cache_layout(
            config,
            formats,
            model_digest=version,
            tokenizer_digest=tokenizer_digest(directory),
            block_size_tokens=runtime_config.block_size_tokens,
            with_mtp=max_drafts > 0,
        )
        check_runtime_config(runtime_config, config, layout)
        if context.layout != runtime_config.parallel:
            asked, given = runtime_config.parallel.describe(), context.layout.describe()
            raise ConfigError(f"is '{asked}', and this process is a rank of '{given}'", path="runtime.parallel")
        if runtime_config.num_threads is not None:
            torch.set_num_threads(runtime_config.num_threads)
        impl: Impl = "native" if choose_kernels(runtime_config.kernels) else "cpu"
        is_packed, dtype = impl == "native", weight_dtype(runtime_config.numerics, config)
        cut = _cut(config, context)
        weights = load_weights(directory, config, dtype, on_progress, is_packed=is_packed, with_mtp=max_drafts > 0, cut=cut)
        shapes = set() if is_packed else gemm_shapes(weights) | {(config.index_head_dim, KEY_TILE_TOKENS)}
        numerics = make_numerics(runtime_config.numerics, config, shapes, impl)
        longest = runtime_config.max_model_len_tokens or config.max_position_embeddings
        model = build_model(config, weights, numerics, longest, runtime_config.max_step_tokens, context)
        logger.info(
            "cache formats chosen requested=%s backend=%s device=%s cache_format=%s index_format=%s index_scale=%s bytes_per_token=%g",
            runtime_config.cache_format, formats.backend, SERVING_DEVICE, formats.main, formats.index, formats.index_scale,
            layout.bytes_per_token,
        )  # fmt: skip
        logger.info(
            "model loaded checkpoint=%s weights_version=%s numerics=%s kernels=%s row_tile=%d threads=%d block_bytes=%d max_drafts=%d "
            "layout='%s' rank=%d",
            directory, version, numerics.mode, numerics.impl, numerics.gemm.row_tile, torch.get_num_threads(), layout.block_bytes,
            max_drafts, context.layout.describe(), context.rank,
        )  # fmt: skip
        return cls(
            runtime_config=runtime_config,
            config=config,
            formats=formats,
            layout=layout,
            weights_version=version,
            model=model,
            mtp=build_mtp(model, weights.mtp, runtime_config.max_step_tokens) if weights.mtp is not None else None,
        )

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool that the configuration asks for, on this rank."""
        return self.runtime_config.cache_bytes // self.layout.block_bytes

    @property
    def num_homes(self) -> int:
        """Ranks that share a sequence's cache, each with a pool of its own: the worker has so many times `num_blocks`."""
        return self.runtime_config.parallel.dcp_size

    @property
    def max_drafts(self) -> int:
        """Most drafts of a step; 0 where nothing is drafted."""
        return self.runtime_config.max_drafts if self.mtp is not None else 0

    @property
    def hidden_state_bytes(self) -> int | None:
        """Of one row's hidden state, as a hand-off carries it; None where nothing is drafted."""
        return self.config.hidden_size * self.model.numerics.dtype.itemsize if self.mtp is not None else None

    @property
    def max_model_len_tokens(self) -> int:
        """Longest sequence, prompt and output together."""
        return self.runtime_config.max_model_len_tokens or self.config.max_position_embeddings

    def attach(self, pool_memory: PoolMemory) -> ModelRunner:
        """Bind the model to a pool. The memory must outlive the runner. Raises ValueError if its blocks have another size."""
        if pool_memory.block_bytes != self.layout.block_bytes:
            raise ValueError(f"the pool's blocks have {pool_memory.block_bytes} bytes; this layout's have {self.layout.block_bytes}")
        cache = PagedCache(self.layout, pool_memory.buffer, pool_memory.num_blocks)
        return ModelRunner(self.model, cache, self.mtp, self.runtime_config.verification, self._balancer())

    def _balancer(self) -> ExpertBalancer | None:
        """What moves experts, where they are spread over ranks and may be moved."""
        every_steps = self.runtime_config.num_balance_steps
        layers = [*self.model.layers, *([self.mtp.layer] if self.mtp is not None else [])]
        shelves = [layer.mlp.shelf for layer in layers if isinstance(layer.mlp, MixtureOfExperts) and layer.mlp.shelf is not None]
        return ExpertBalancer(shelves, self.model.context.world, every_steps) if every_steps and shelves else None


def _cut(config: GlmConfig, context: ParallelContext) -> WeightCut:
    layout = context.layout
    experts = starting_placement(config.n_routed_experts, layout).slots[context.rank] if layout.ep_size > 1 else None
    return cut_weights(layout, context.rank, experts)


def check_balance(runtime_config: RuntimeConfig) -> None:
    """Raises ConfigError where experts would be placed by load, and numerics forbid it."""
    if runtime_config.num_balance_steps < 0:
        raise ConfigError(f"is {runtime_config.num_balance_steps}; expected 0 (never) or more", path="runtime.num_balance_steps")
    layout = runtime_config.parallel
    if layout.ep_size == 1 or runtime_config.numerics != "deterministic":
        return
    for path, value in (
        ("runtime.num_balance_steps", runtime_config.num_balance_steps),
        ("runtime.parallel.num_redundant_experts", layout.num_redundant_experts),
    ):
        if value:
            raise ConfigError(
                f"is {value}, but numerics are deterministic: where experts are placed by load, the last bits of an answer depend on other "
                "requests; set it to 0, or runtime.numerics = 'fast'",
                path=path,
            )


def check_runtime_config(runtime_config: RuntimeConfig, config: GlmConfig, layout: CacheLayout) -> None:
    """Refuse what cannot run, before weights are read. Raises ConfigError naming the field."""
    check_layout(runtime_config.parallel, config)
    check_balance(runtime_config)
    if runtime_config.cache_bytes < layout.block_bytes:
        raise ConfigError(
            f"is {runtime_config.cache_bytes}; one block of {layout.block_size_tokens} tokens takes {layout.block_bytes} bytes",
            path="runtime.cache_bytes",
        )
    limit = config.max_position_embeddings
    length = runtime_config.max_model_len_tokens
    if length is not None and not 0 < length <= limit:
        raise ConfigError(f"is {length}; the model's max_position_embeddings is {limit}", path="runtime.max_model_len_tokens")
    if KEY_TILE_TOKENS % runtime_config.block_size_tokens:
        raise ConfigError(f"is {runtime_config.block_size_tokens}; it must divide {KEY_TILE_TOKENS}", path="runtime.block_size_tokens")
    for name in ("max_step_tokens", "num_threads"):
        value = getattr(runtime_config, name)
        if value is not None and value < 1:
            raise ConfigError(f"is {value}; expected at least 1", path=f"runtime.{name}")
    if not 0 <= runtime_config.max_drafts <= MOST_DRAFTS:
        raise ConfigError(f"is {runtime_config.max_drafts}; expected 0 (off) to {MOST_DRAFTS}", path="runtime.max_drafts")
    least = runtime_config.min_draft_probability
    if least is not None and not 0.0 <= least <= 1.0:
        raise ConfigError(f"is {least}; expected 0 (never stop) to 1", path="runtime.min_draft_probability")
    if runtime_config.verification not in ("exact", "ratio", "ratio_greedy"):
        raise ConfigError(f"is {runtime_config.verification!r}; expected 'exact', 'ratio' or 'ratio_greedy'", path="runtime.verification")
    if runtime_config.numerics not in ("deterministic", "fast"):
        raise ConfigError(f"is {runtime_config.numerics!r}; expected 'deterministic' or 'fast'", path="runtime.numerics")
    if runtime_config.kernels not in ("auto", "native", "torch"):
        raise ConfigError(f"is {runtime_config.kernels!r}; expected 'auto', 'native' or 'torch'", path="runtime.kernels")
