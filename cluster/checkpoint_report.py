"""What `glm-cluster inspect` says about a checkpoint: its layers, tensors and parameters, cache formats, and what GPUs hold of them.

config.json alone is enough; with weights beside it their tensors are checked and counted too. Plain values for JSON, text for people.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.planner.capacity import (
    GPU_MEMORY_BYTES,
    Capacity,
    GpuGroup,
    Split,
    bytes_per_token,
    choose_num_gpus,
    find_capacity,
    weight_bytes_per_gpu,
)
from cluster.terminal import render_columns
from glm_runtime.cache_format import INDEX_FORMATS, SERVING_DEVICE, choose_cache_formats
from glm_runtime.cache_layout import make_cache_layout
from glm_runtime.config import GlmConfig
from glm_runtime.runtime_config import RuntimeConfig
from glm_runtime.stored_tensors import has_weights, stored_tensors
from glm_runtime.tensor_check import check_tensors
from glm_runtime.tensor_table import count_parameters, tensor_table
from glm_runtime.weight_format import find_format
from glm_runtime.weight_scheme import WeightScheme
from kv_transfer.errors import ConfigError
from kv_transfer.layout import CacheLayout

PREFERRED_FORMATS = ("fp8_ds_mla+fp8", "bf16+bf16", "fp32+fp32")
"""Of those that a model's shape allows, the first one is what capacity is computed for when nothing else is asked."""
MILLION = 1_000_000
GB = 1_000_000_000


def describe_checkpoint(
    directory: Path, *, scheme: WeightScheme, num_gpus: int | None = None, cache_format: str | None = None
) -> dict[str, Any]:
    """Everything that inspect knows, as plain values.

    scheme, cache_format: what capacity is computed for, whatever is stored; no format is the first of `PREFERRED_FORMATS` that fits.
    num_gpus: of a group; None is `choose_num_gpus`.
    Raises ConfigError as `GlmConfig.from_checkpoint` and `check_tensors`, and for a format that this model cannot have.
    """
    config = GlmConfig.from_checkpoint(directory)
    counts = count_parameters(config)
    return {
        "checkpoint": str(directory),
        "layers": [_describe_layer(config, layer) for layer in range(config.num_hidden_layers)],
        "mtp_layers": list(config.mtp_layers),
        "index_groups": [list(group) for group in config.index_groups],
        "experts": {"routed": config.n_routed_experts, "shared": config.n_shared_experts, "per_token": config.num_experts_per_tok},
        "parameters": {
            "target": counts.target,
            "mtp": counts.mtp,
            "total": counts.total,
            "active_per_token": counts.active,
            "active_per_token_without_head": counts.active - counts.head,
        },
        "tensors": _describe_tensors(directory, config) if has_weights(directory) else None,
        "cache_formats": [_describe_format(config, name, layout) for name, layout in cache_layouts(config)],
        "capacity": _describe_capacity(config, scheme, choose_num_gpus(config) if num_gpus is None else num_gpus, cache_format),
    }


def cache_layouts(config: GlmConfig) -> Iterator[tuple[str, CacheLayout]]:
    """Every pair of formats that this model's shape allows, by name: MLA cache + index keys."""
    for main, indexes in INDEX_FORMATS.items():
        for index in indexes:
            requested = RuntimeConfig(checkpoint=Path(), cache_format=main, index_format=index)
            try:
                formats = choose_cache_formats(requested, config, SERVING_DEVICE)
            except ConfigError:  # a packed format is made for GLM-5.3's widths, and this model has others
                continue
            yield f"{main}+{index}", make_cache_layout(config, formats, "", "")


def _describe_layer(config: GlmConfig, layer: int) -> dict[str, Any]:
    return {"layer": layer, "mlp": config.mlp_layer_types[layer].value, "indexer": config.indexer_types[layer].value}


def _describe_tensors(directory: Path, config: GlmConfig) -> dict[str, Any]:
    stored = stored_tensors(directory)
    check_tensors(config, stored, directory)
    by_dtype: Counter[str] = Counter()
    for tensor in stored.values():
        by_dtype[tensor.header.dtype] += tensor.header.num_bytes
    matrices = Counter(find_format(name, spec, stored).value for name, spec in tensor_table(config).items() if len(spec.shape) == 2)
    return {
        "count": len(stored),
        "files": len({tensor.file for tensor in stored.values()}),
        "bytes": sum(by_dtype.values()),
        "bytes_by_dtype": dict(by_dtype.most_common()),
        "matrices_by_format": dict(matrices.most_common()),
    }


def _describe_format(config: GlmConfig, name: str, layout: CacheLayout) -> dict[str, Any]:
    return {
        "format": name,
        "components": {component.name: component.bytes_per_token for component in layout.components},
        "bytes_per_token": bytes_per_token(layout),
        "bytes_per_token_with_mtp": bytes_per_token(layout, config.num_nextn_predict_layers),
        "block_bytes": layout.block_bytes,
    }


def _describe_capacity(config: GlmConfig, scheme: WeightScheme, num_gpus: int, cache_format: str | None) -> dict[str, Any]:
    layouts = dict(cache_layouts(config))
    name = cache_format or next(name for name in PREFERRED_FORMATS if name in layouts)
    if name not in layouts:
        raise ConfigError(f"is {name!r}; this model's are {', '.join(layouts)}", path="--cache-format")
    groups = [GpuGroup(gpu=gpu, split=split, num_gpus=num_gpus) for gpu in GPU_MEMORY_BYTES for split in Split]
    try:
        weight_bytes = {split: weight_bytes_per_gpu(config, scheme, split, num_gpus) for split in Split}
    except ValueError as error:
        raise ConfigError(str(error), path="--gpus") from None
    num_mtp_layers = len(config.mtp_layers)
    rows = [
        _describe_group(find_capacity(layouts[name], group, weight_bytes[group.split], num_mtp_layers=num_mtp_layers)) for group in groups
    ]
    return {
        "weights": scheme.value,
        "cache_format": name,
        "num_gpus": num_gpus,
        "usable_share": groups[0].usable_share,
        "workspace_bytes": groups[0].workspace_bytes,
        "has_mtp": bool(config.mtp_layers),
        "groups": rows,
    }


def _describe_group(capacity: Capacity) -> dict[str, Any]:
    return {
        "gpu": capacity.group.gpu,
        "split": capacity.group.name,
        "usable_bytes_per_gpu": capacity.group.usable_bytes,
        "weight_bytes_per_gpu": capacity.weight_bytes,
        "cache_bytes_per_gpu": capacity.cache_bytes,
        "kv_tokens": capacity.kv_tokens,
    }


def render_report(report: Mapping[str, Any]) -> str:
    """The report as text."""
    sections = (_render_model, _render_layers, _render_tensors, _render_formats, _render_capacity)
    return "\n\n".join("\n".join(section(report)) for section in sections)


def _render_model(report: Mapping[str, Any]) -> list[str]:
    parameters, experts = report["parameters"], report["experts"]
    mtp = f" + {_billions(parameters['mtp'])} in the MTP layer" if report["mtp_layers"] else ", no MTP layer"
    return [
        report["checkpoint"],
        f"parameters     {_billions(parameters['target'])}{mtp} = {parameters['total']:,}",
        f"per token      {_billions(parameters['active_per_token'])} active with the head, "
        f"{_billions(parameters['active_per_token_without_head'])} without",
        f"experts        {experts['routed']} routed ({experts['per_token']} per token), {experts['shared']} shared",
    ]


def _render_layers(report: Mapping[str, Any]) -> list[str]:
    layers = report["layers"]
    dense = [layer["layer"] for layer in layers if layer["mlp"] == "dense"]
    sparse = [layer["layer"] for layer in layers if layer["mlp"] == "sparse"]
    full = [layer["layer"] for layer in layers if layer["indexer"] == "full"]
    groups = report["index_groups"]
    return [
        f"layers         {len(layers)}: dense {_ranges(dense)}; MoE {_ranges(sparse)}" + _mtp_suffix(report["mtp_layers"]),
        f"indexers       {len(full)} full ({_ranges(full)}), {len(layers) - len(full)} shared",
        f"index groups   {len(groups)}: " + " ".join(f"{{{_ranges(group)}}}" for group in groups),
    ]


def _mtp_suffix(mtp_layers: Sequence[int]) -> str:
    return f"; MTP {_ranges(mtp_layers)}" if mtp_layers else ""


def _render_tensors(report: Mapping[str, Any]) -> list[str]:
    tensors = report["tensors"]
    if tensors is None:
        return ["tensors        no weights here; config.json alone was read"]
    dtypes = ", ".join(f"{dtype} {_size(num_bytes)}" for dtype, num_bytes in tensors["bytes_by_dtype"].items())
    formats = ", ".join(f"{count} {name}" for name, count in tensors["matrices_by_format"].items())
    return [
        f"tensors        {tensors['count']} in {tensors['files']} files, {_size(tensors['bytes'])}: {dtypes}",
        f"matrices       {formats}",
    ]


def _render_formats(report: Mapping[str, Any]) -> list[str]:
    rows = [("cache format", "bytes/token", "with MTP", "block", "1M tokens")]
    for entry in report["cache_formats"]:
        per_token = entry["bytes_per_token"]
        rows.append(
            (
                entry["format"],
                f"{per_token:,}",
                f"{entry['bytes_per_token_with_mtp']:,}",
                f"{entry['block_bytes']:,}",
                _size(per_token << 20),
            )
        )
    return render_columns(rows)


def _render_capacity(report: Mapping[str, Any]) -> list[str]:
    capacity = report["capacity"]
    rows = [("KV tokens", "", "weights/GPU", "cache/GPU", "tokens")]
    for group in capacity["groups"]:
        fits = group["kv_tokens"] > 0
        tokens = f"{group['kv_tokens'] / MILLION:.2f}M" if fits else f"weights do not fit {_size(group['usable_bytes_per_gpu'])}"
        rows.append(
            (
                group["gpu"],
                group["split"],
                _size(group["weight_bytes_per_gpu"]),
                _size(group["cache_bytes_per_gpu"]) if fits else "-",
                tokens,
            )
        )
    assumed = (
        f"{capacity['weights']} weights, {capacity['cache_format']} cache, {capacity['usable_share']:g} of memory, "
        f"{_size(capacity['workspace_bytes'])} workspace, {'with' if capacity['has_mtp'] else 'without'} MTP, vocabulary split"
    )
    return [*render_columns(rows, num_text_columns=2), f"({assumed})"]


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 10**8 else f"{count / 1e6:.2f} M"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GB:.2f} GB" if num_bytes >= GB // 10 else f"{num_bytes / MILLION:.2f} MB"


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers as people write them: 0-2, 6, 10-13."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "none"
