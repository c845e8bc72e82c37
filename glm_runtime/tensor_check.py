"""Compares the tensors of a checkpoint with those that its configuration needs: names, shapes, dtypes, scales.

Knows: how to name what is wrong and why it might be. Torch is not imported.
"""

from collections.abc import Mapping
from pathlib import Path

from glm_runtime.config import CONFIG_FILE, GlmConfig
from glm_runtime.stored_tensors import INDEX_FILE, WEIGHTS_FILE, StoredTensor
from glm_runtime.tensor_table import TensorSpec, tensor_table
from glm_runtime.weight_format import (
    FP8_DTYPE,
    NVFP4_GROUP,
    NVFP4_SCALE_SUFFIX,
    NVFP4_SUFFIXES,
    PACKED_DTYPE,
    StoredForm,
    WeightFormat,
    find_format,
    stored_forms,
)
from kv_transfer.errors import ConfigError


def check_tensors(config: GlmConfig, stored: Mapping[str, StoredTensor], directory: Path) -> None:
    """Compare what is stored with what the configuration needs: names, shapes, dtypes, and the scales of block-FP8 and NVFP4.

    Raises ConfigError naming file and tensor for the first mismatch, and how many there are.
    """
    table = tensor_table(config)
    if missing := [name for name in table if name not in stored]:
        raise ConfigError(_missing_message(config, missing), path=str(_home_of_missing(directory)))
    known: set[str] = set()
    for name, spec in table.items():
        _check_tensor(config, name, spec, stored)
        known.update(stored_forms(name, spec, find_format(name, spec, stored)))
    if extra := sorted(stored.keys() - known):
        raise ConfigError(_extra_message(config, extra), path=str(stored[extra[0]].file))


def _home_of_missing(directory: Path) -> Path:
    index_path = directory / INDEX_FILE
    return index_path if index_path.exists() else directory / WEIGHTS_FILE


def _missing_message(config: GlmConfig, missing: list[str]) -> str:
    name = missing[0]
    reason = ""
    if ".indexer." in name:
        reason = f"; {CONFIG_FILE}:indexer_types makes this layer 'full', so it needs an indexer"
    elif config.mtp_layers and name.startswith(f"model.layers.{config.mtp_layers[0]}."):
        reason = f"; {CONFIG_FILE}:num_nextn_predict_layers = {config.num_nextn_predict_layers} promises the MTP layer"
    return f"tensor {name} is missing ({len(missing)} in all){reason}"


def _extra_message(config: GlmConfig, extra: list[str]) -> str:
    name = extra[0]
    reason = ""
    if ".indexer." in name and any(
        name.startswith(f"model.layers.{layer}.") for layer in range(config.num_hidden_layers) if not config.is_indexing_layer(layer)
    ):
        reason = f"; {CONFIG_FILE}:indexer_types makes this layer 'shared', so it has no indexer"
    elif name.endswith(NVFP4_SUFFIXES):
        reason = "; NVFP4 is read for routed experts only"
    elif name.startswith(f"model.layers.{config.num_hidden_layers}."):
        reason = f"; {CONFIG_FILE} has {config.num_hidden_layers} layers and num_nextn_predict_layers = {config.num_nextn_predict_layers}"
    return f"tensor {name} is not one that {CONFIG_FILE} describes ({len(extra)} in all){reason}"


def _check_tensor(config: GlmConfig, name: str, spec: TensorSpec, stored: Mapping[str, StoredTensor]) -> None:
    weight_format = find_format(name, spec, stored)
    where = str(stored[name].file)
    if weight_format is WeightFormat.NVFP4 and spec.shape[1] % NVFP4_GROUP:
        raise ConfigError(f"tensor {name} has NVFP4 scales, but its {spec.shape[1]} columns are no multiple of {NVFP4_GROUP}", path=where)
    weight, *scales = stored_forms(name, spec, weight_format).items()
    if scales and not config.is_quantised:
        raise ConfigError(f"tensor {name} has a scale, but {CONFIG_FILE}:quantization_config is missing", path=where)
    _check_weight(weight[0], weight[1], weight_format, stored)
    for scale_name, form in scales:
        scale = stored.get(scale_name)
        if scale is None:
            raise ConfigError(f"tensor {scale_name} is missing, which {weight_format.value} needs beside {name}", path=where)
        if not form.has_shape(scale.header.shape) or scale.header.dtype not in form.dtypes:
            raise ConfigError(
                f"the scale {scale_name} of {name} is {scale.header.dtype} {list(scale.header.shape)}; "
                f"expected {form.dtypes[0]} {list(form.shape)}",
                path=str(scale.file),
            )


def _check_weight(name: str, form: StoredForm, weight_format: WeightFormat, stored: Mapping[str, StoredTensor]) -> None:
    header, where = stored[name].header, str(stored[name].file)
    if header.dtype not in form.dtypes:
        has_scale = "" if weight_format is WeightFormat.PLAIN else "has a scale but "
        hint = _SCALE_HINTS.get(header.dtype, "") if weight_format is WeightFormat.PLAIN else ""
        raise ConfigError(f"tensor {name} {has_scale}is {header.dtype}; expected {' or '.join(form.dtypes)}{hint}", path=where)
    if header.shape != form.shape:
        packed = ", two values a byte" if weight_format is WeightFormat.NVFP4 else ""
        raise ConfigError(f"tensor {name} has shape {list(header.shape)}; {CONFIG_FILE} says {list(form.shape)}{packed}", path=where)


_SCALE_HINTS = {
    FP8_DTYPE: "; its scale tensor is missing",
    PACKED_DTYPE: f"; its scale tensors ({NVFP4_SCALE_SUFFIX[1:]} and others) are missing",
}
