"""How one rank runs the model: what to load, in which numerics, with how much cache. No dimensions of the model."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from glm_runtime.config import GlmConfig
from glm_runtime.parallel.layout import ParallelLayout

CacheFormatChoice = Literal["auto", "bf16", "fp32", "fp8", "fp8_e4m3", "fp8_ds_mla", "nvfp4_ds_mla"]
IndexFormatChoice = Literal["auto", "bf16", "fp32", "fp8", "mxfp4"]
IndexScaleChoice = Literal["auto", "none", "fp32", "ue8m0"]
BackendChoice = Literal["auto", "native", "flashmla_sparse", "flashinfer_mla_sparse"]
NumericsChoice = Literal["deterministic", "fast"]
KernelsChoice = Literal["auto", "native", "torch"]
VerificationChoice = Literal["exact", "ratio", "ratio_greedy"]

MOST_DRAFTS = 8
"""A step's rows per sequence stay below the smallest block, so that one more block is always enough for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeConfig:
    """One rank's runtime.

    parallel: how the replica is cut, of which this is one rank; sizes and thread counts below are each rank's.
    num_balance_steps: steps between two looks at what experts are asked for, where they are spread over ranks; those of the fullest
    rank then move. 0 is never, and the only choice in deterministic mode.
    attention_backend: whose kernels read the MLA cache; "auto" takes this runtime's own. cache_format: of the MLA cache; "auto" and
    "fp8" become what the backend reads on this device. index_format: of the index keys; "auto" follows the MLA cache. index_scale:
    bytes of an index key's scale; "auto" follows format and device. `cache_format.py` has the table of all four.
    numerics: "deterministic" makes a row's bits depend on its own sequence only; "fast" computes in the checkpoint's dtype.
    kernels: "auto" compiles the CPU kernels where a compiler and AVX-512 are there and else serves with torch; "native" insists.
    num_threads: None keeps torch's choice. cache_bytes: the pool; it is rounded down to whole blocks. max_step_tokens: most rows one
    step may have. max_model_len_tokens: longest sequence; None takes the model's max_position_embeddings.
    max_drafts: most tokens that the MTP layer guesses ahead of a step, 1 to 8; 0 leaves the layer out, its weights and its part of the
    cache too. A checkpoint without an MTP layer takes it for 0. adapts_drafts: make fewer, or none, while that is measured to be faster.
    min_draft_probability: a draft less likely than this to hold, by the MTP layer's own probabilities, is not verified and ends its
    sequence's drafts of the step; 0 never. None leaves it to what is measured where `adapts_drafts`, and is never elsewhere. Drafts
    that are drawn are exempt.
    verification: "exact": a draft holds iff it is the token drawn without it. "ratio": drafts of requests that are not greedy are drawn,
    and hold by the ratio of probabilities; "ratio_greedy": they are the best guesses, and hold with the probability the target gives them.
    """

    checkpoint: Path
    attention_backend: BackendChoice = "auto"
    cache_format: CacheFormatChoice = "auto"
    index_format: IndexFormatChoice = "auto"
    index_scale: IndexScaleChoice = "auto"
    numerics: NumericsChoice = "deterministic"
    kernels: KernelsChoice = "auto"
    num_threads: int | None = None
    cache_bytes: int = 512 << 20
    max_step_tokens: int = 2048
    max_model_len_tokens: int | None = None
    block_size_tokens: int = 64
    max_drafts: int = 5
    adapts_drafts: bool = True
    min_draft_probability: float | None = None
    verification: VerificationChoice = "exact"
    parallel: ParallelLayout = field(default_factory=ParallelLayout)
    num_balance_steps: int = 0


def choose_max_drafts(runtime_config: RuntimeConfig, config: GlmConfig) -> int:
    """Drafts that a step may have here: what was asked for, or 0 where the checkpoint has no MTP layer that this runtime computes.

    Without `index_share_for_mtp_iteration` each draft step would choose a list of its own, which is not built.
    """
    can_draft = bool(config.mtp_layers) and config.index_share_for_mtp_iteration
    return runtime_config.max_drafts if can_draft else 0
