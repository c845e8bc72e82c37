"""What a whole build stores: which matrices it quantises, and what its config.json says about that. Torch is not imported."""

from collections.abc import Mapping
from enum import Enum, unique
from typing import Any

from glm_runtime.config import GlmConfig
from glm_runtime.config_fields import FP8_BLOCK
from glm_runtime.tensor_table import TensorSpec
from glm_runtime.weight_format import NVFP4_GROUP, PlannedTensor, WeightFormat, stored_forms


@unique
class WeightScheme(Enum):
    """What a build quantises. fp8: all matrices but router, weights_proj, eh_proj, embedding and head. nvfp4: routed experts only."""

    BF16 = "bf16"
    FP32 = "fp32"
    FP8 = "fp8"
    NVFP4 = "nvfp4"


SCHEME_FIELDS: Mapping[WeightScheme, Mapping[str, Any]] = {
    WeightScheme.BF16: {"dtype": "bfloat16"},
    WeightScheme.FP32: {"dtype": "float32"},
    WeightScheme.FP8: {
        "dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        },
    },
    WeightScheme.NVFP4: {
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": NVFP4_GROUP},
    },
}
_KEPT_BY_FP8 = ("indexer.weights_proj.weight", "eh_proj.weight")


def scheme_format(name: str, spec: TensorSpec, scheme: WeightScheme, config: GlmConfig) -> WeightFormat:
    """The format of one entry of the tensor table in a build of this scheme."""
    if scheme is WeightScheme.FP8 and spec.is_quantisable and not name.endswith(_KEPT_BY_FP8):
        return WeightFormat.BLOCK_FP8
    is_mtp = name.startswith(tuple(f"model.layers.{layer}." for layer in config.mtp_layers))
    if scheme is WeightScheme.NVFP4 and spec.is_routed_expert and not is_mtp:
        return WeightFormat.NVFP4
    return WeightFormat.PLAIN


def planned_tensors(name: str, spec: TensorSpec, scheme: WeightScheme, config: GlmConfig) -> list[PlannedTensor]:
    """What a build of this scheme stores for one entry of the tensor table, the weight first."""
    plain = "BF16" if config.dtype == "bfloat16" else "F32"
    forms = stored_forms(name, spec, scheme_format(name, spec, scheme, config))
    return [
        PlannedTensor(stored, plain if plain in form.dtypes and len(form.dtypes) > 1 else form.dtypes[0], form.shape)
        for stored, form in forms.items()
    ]
