"""Which cache formats a rank ends up with: the one table from (requested format, attention backend, device) to what really lands.

Knows: what each backend can read where, which index formats go with which MLA format, and the shapes that packed formats need.
Does not know bytes (`row_format.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from glm_runtime.config import GlmConfig
from glm_runtime.row_format import PACKED_INDEX_WIDTH, PACKED_LATENT, PACKED_ROPE, RowKind
from glm_runtime.runtime_config import RuntimeConfig
from kv_transfer.errors import ConfigError

CacheFormat = Literal["bf16", "fp32", "fp8_e4m3", "fp8_ds_mla", "nvfp4_ds_mla"]
IndexFormat = Literal["bf16", "fp32", "fp8", "mxfp4"]
IndexScale = Literal["none", "fp32", "ue8m0"]
AttentionBackend = Literal["native", "flashmla_sparse", "flashinfer_mla_sparse"]
DeviceKind = Literal["cpu", "sm90", "sm10x", "sm120"]
SERVING_DEVICE: DeviceKind = "cpu"
"""Where this runtime computes; the table's other rows serve capacity plans."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheFormats:
    """What landed: nothing is open any more."""

    backend: AttentionBackend
    main: CacheFormat
    index: IndexFormat
    index_scale: IndexScale

    @property
    def main_kind(self) -> RowKind:
        """How MLA rows lie in bytes."""
        return RowKind(self.main)

    @property
    def index_kind(self) -> RowKind:
        """How index keys lie in bytes."""
        if self.index == "fp8":
            return RowKind.INDEX_FP8_UE8M0 if self.index_scale == "ue8m0" else RowKind.INDEX_FP8_FP32
        return RowKind(self.index)


_ITSELF: Mapping[str, CacheFormat] = {"bf16": "bf16"}
_FLASHMLA: Mapping[str, CacheFormat] = {**_ITSELF, "fp8": "fp8_ds_mla", "fp8_e4m3": "fp8_ds_mla", "fp8_ds_mla": "fp8_ds_mla"}
"""FlashMLA reads one FP8 format and turns every request for FP8 into it."""

LANDS_AS: Mapping[tuple[AttentionBackend, DeviceKind], Mapping[str, CacheFormat]] = {
    ("native", "cpu"): {
        **_ITSELF,
        "fp32": "fp32",
        "fp8": "fp8_ds_mla",
        "fp8_e4m3": "fp8_e4m3",
        "fp8_ds_mla": "fp8_ds_mla",
        "nvfp4_ds_mla": "nvfp4_ds_mla",
    },
    ("flashmla_sparse", "sm90"): {**_FLASHMLA, "auto": "bf16"},
    ("flashmla_sparse", "sm10x"): {**_FLASHMLA, "auto": "fp8_ds_mla", "nvfp4_ds_mla": "nvfp4_ds_mla"},
    ("flashmla_sparse", "sm120"): {**_FLASHMLA, "auto": "bf16"},
    ("flashinfer_mla_sparse", "sm10x"): {**_ITSELF, "auto": "fp8_e4m3", "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3"},
    ("flashinfer_mla_sparse", "sm120"): {**_FLASHMLA, "auto": "bf16"},
}
"""Source: FACTS 1.3 and 4.1. No row: the backend does not run there. No entry: it does not read that format there. "auto" without
an entry is the checkpoint's own dtype. FP8 is what "auto" means on sm10x only, and then what the backend makes of it."""

INDEX_FORMATS: Mapping[CacheFormat, tuple[IndexFormat, ...]] = {
    "fp32": ("fp32",),
    "bf16": ("bf16", "fp8"),
    "fp8_e4m3": ("fp8", "mxfp4"),
    "fp8_ds_mla": ("fp8", "mxfp4"),
    "nvfp4_ds_mla": ("fp8", "mxfp4"),
}
"""Index formats that go with an MLA format; the first one is what "auto" means."""

_FORMAT_OF_DTYPE: Mapping[str, CacheFormat] = {"bfloat16": "bf16", "float32": "fp32"}


def choose_cache_formats(runtime: RuntimeConfig, model: GlmConfig, device: DeviceKind) -> CacheFormats:
    """What a request becomes on `device`. Choosing again from what was chosen changes nothing.

    Raises ConfigError naming the field for a backend that does not run there, a format that it does not read, an index format that
    does not go with the MLA format, a scale that the index format does not have, and a model whose shape a packed format cannot hold.
    """
    backend = _choose_backend(runtime.attention_backend, device)
    main = _choose_main(runtime.cache_format, backend, device, model)
    index = _choose_index(runtime.index_format, main)
    formats = CacheFormats(backend=backend, main=main, index=index, index_scale=_choose_scale(runtime.index_scale, index, device))
    _check_shapes(formats, model)
    return formats


def _choose_backend(requested: str, device: DeviceKind) -> AttentionBackend:
    here = [backend for backend, where in LANDS_AS if where == device]
    if requested == "auto":
        return here[0]
    for backend in here:
        if backend == requested:
            return backend
    raise ConfigError(f"is {requested!r}, which does not run on {device}; here: {_either(here)}", path="runtime.attention_backend")


def _choose_main(requested: str, backend: AttentionBackend, device: DeviceKind, model: GlmConfig) -> CacheFormat:
    lands_as = LANDS_AS[backend, device]
    wanted = _FORMAT_OF_DTYPE[model.dtype] if requested == "auto" and "auto" not in lands_as else requested
    if wanted not in lands_as:
        raise ConfigError(
            f"is {requested!r}, which {backend} does not read on {device}; expected {_either(['auto', *lands_as])}",
            path="runtime.cache_format",
        )
    return lands_as[wanted]


def _choose_index(requested: str, main: CacheFormat) -> IndexFormat:
    allowed = INDEX_FORMATS[main]
    if requested == "auto":
        return allowed[0]
    for index in allowed:
        if index == requested:
            return index
    raise ConfigError(f"is {requested!r}; index keys beside a {main} cache are {_either(allowed)}", path="runtime.index_format")


def _choose_scale(requested: str, index: IndexFormat, device: DeviceKind) -> IndexScale:
    allowed: tuple[IndexScale, ...] = ("none",)
    if index == "mxfp4":
        allowed = ("ue8m0",)
    elif index == "fp8":
        allowed = ("ue8m0", "fp32") if device == "sm10x" else ("fp32", "ue8m0")
    if requested == "auto":
        return allowed[0]
    for scale in allowed:
        if scale == requested:
            return scale
    raise ConfigError(f"is {requested!r}; the scale of {index} index keys is {_either(allowed)}", path="runtime.index_scale")


def _check_shapes(formats: CacheFormats, model: GlmConfig) -> None:
    needs: list[tuple[str, str, str, int]] = []
    if formats.main in ("fp8_ds_mla", "nvfp4_ds_mla"):
        needs += [("runtime.cache_format", formats.main, "kv_lora_rank", PACKED_LATENT)]
        needs += [("runtime.cache_format", formats.main, "qk_rope_head_dim", PACKED_ROPE)]
    if formats.index in ("fp8", "mxfp4"):
        needs += [("runtime.index_format", f"{formats.index} index keys", "index_head_dim", PACKED_INDEX_WIDTH)]
    for path, what, name, needed in needs:
        if getattr(model, name) != needed:
            raise ConfigError(f"{what} need {name} {needed}; this checkpoint has {getattr(model, name)}", path=path)


def _either(names: "list[str] | tuple[str, ...] | list[AttentionBackend]") -> str:
    *others, last = (repr(name) for name in names)
    return f"{', '.join(others)} or {last}" if others else last
