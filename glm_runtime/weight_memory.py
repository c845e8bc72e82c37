"""How much memory a checkpoint's weights will take, before they are read. Torch is not imported."""

from glm_runtime.config import GlmConfig
from glm_runtime.native.build import are_kernels_expected
from glm_runtime.parallel.weight_cut import cut_weights
from glm_runtime.runtime_config import RuntimeConfig, choose_max_drafts
from glm_runtime.stored_tensors import stored_tensors
from glm_runtime.tensor_table import loaded_weight_bytes


def expected_weight_bytes(config: GlmConfig, runtime_config: RuntimeConfig) -> int:
    """Of what one rank loads under this configuration on this machine. Raises ConfigError as `stored_tensors`."""
    narrow: set[str] = set()
    if are_kernels_expected(runtime_config.kernels):
        narrow = {name for name, tensor in stored_tensors(runtime_config.checkpoint).items() if tensor.header.dtype == "BF16"}
    layout = runtime_config.parallel
    experts = range(config.n_routed_experts // layout.ep_size + layout.num_redundant_experts) if layout.ep_size > 1 else None
    return loaded_weight_bytes(
        config,
        runtime_config.numerics,
        narrow,
        with_mtp=choose_max_drafts(runtime_config, config) > 0,
        cut=cut_weights(layout, 0, experts),
    )
