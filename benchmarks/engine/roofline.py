"""What a decode step has to read at least, and what share of the memory's read bandwidth a step's time makes of it: pure functions."""

from collections.abc import Mapping
from dataclasses import dataclass

from glm_runtime.config import GlmConfig
from glm_runtime.tensor_table import TensorSpec, tensor_table


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBytes:
    """Bytes a step must read once. weights: of the model; cache: of the sequences."""

    weights: float
    cache: float

    @property
    def total(self) -> float:
        return self.weights + self.cache


def step_bytes(config: GlmConfig, *, batch: int, context: int, experts_hit: float, mla_row_bytes: int, index_row_bytes: float) -> StepBytes:
    """What `batch` rows read, each with `context` tokens before its own, the own one included.

    Weights as the checkpoint stores them: every matrix once, of the embedding the batch's rows, of the routed experts the share
    experts_hit / n_routed_experts (mean over layers). Cache: of each row and layer the selected MLA rows; of each row and indexing
    layer all index keys, unless the context is so short that nothing has to be selected. The MTP layer takes no part.
    """
    visible = context + 1
    selected = min(visible, config.index_topk)
    scanned = visible if visible > config.index_topk else 0
    indexing = sum(config.is_indexing_layer(layer) for layer in range(config.num_hidden_layers))
    cache = batch * (config.num_hidden_layers * selected * mla_row_bytes + indexing * scanned * index_row_bytes)
    return StepBytes(weights=_weight_bytes(config, batch, experts_hit), cache=cache)


def bandwidth_share_percent(read: StepBytes, step_s: float, bandwidth: float) -> float:
    """Of `bandwidth` bytes a second, in percent."""
    return 100.0 * read.total / step_s / bandwidth


def _weight_bytes(config: GlmConfig, batch: int, experts_hit: float) -> float:
    mtp = tuple(f"model.layers.{layer}." for layer in config.mtp_layers)
    table: Mapping[str, TensorSpec] = {name: spec for name, spec in tensor_table(config).items() if not name.startswith(mtp)}
    element_bytes = 4 if config.dtype == "float32" else 2
    total = 0.0
    for name, spec in table.items():
        share = experts_hit / config.n_routed_experts if spec.is_routed_expert else 1.0
        if "embed_tokens" in name:
            share = min(1.0, batch / config.vocab_size)
        total += share * spec.num_elements * (4 if spec.must_be_fp32 else element_bytes)
    return total
