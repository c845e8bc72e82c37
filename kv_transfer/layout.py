"""What a cache layout *is*: an ordered list of components that together make one block.

Knows: regions of a block, their order, byte offsets and the fingerprint that two peers compare before the first byte.
Does not know: which components GLM-5.3 has (`glm_runtime/cache_layout.py`) or where blocks live (`geometry.py`, `block_pool.py`).
"""

import hashlib
from functools import cached_property
from typing import Literal

import msgspec

from kv_transfer.errors import ConfigError

PROTOCOL_MAJOR = 1
REGION_ALIGNMENT_BYTES = 64
"""Every region starts at a multiple of this, so that vector loads and element views never straddle an alignment."""


class CacheComponent(msgspec.Struct, frozen=True, array_like=True):
    """One kind of cached state, e.g. the MLA latents of all layers or the index keys of the indexing layers.

    `encoding` says what the bytes mean (dtype, scale layout, RoPE pair order): two mathematically equal encodings with
    another byte order are another component.
    """

    name: str
    layers: tuple[int, ...]
    bytes_per_token: int
    encoding: str
    keyed_by_next_token: bool = False
    sharding: Literal["replicated", "by_block"] = "replicated"


class Region(msgspec.Struct, frozen=True, array_like=True):
    """Where one layer of one component lies inside a block: `offset_bytes` from the block's start, `num_bytes` long."""

    component: str
    layer: int
    offset_bytes: int
    num_bytes: int


class CacheLayout(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """The paired caches of `block_size_tokens` tokens as one run of bytes, block-major.

    Raises ConfigError for an empty layout, a repeated component name, or a region that would break the 64-byte alignment.
    """

    block_size_tokens: int
    components: tuple[CacheComponent, ...]
    model_digest: str
    tokenizer_digest: str

    def __post_init__(self) -> None:
        names = [component.name for component in self.components]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"a layout needs one or more components with distinct names, got {names}")
        for component in self.components:
            num_bytes = component.bytes_per_token * self.block_size_tokens
            if component.bytes_per_token <= 0 or num_bytes % REGION_ALIGNMENT_BYTES:
                raise ConfigError(
                    f"component {component.name}: {component.bytes_per_token} bytes x {self.block_size_tokens} tokens is not a "
                    f"positive multiple of {REGION_ALIGNMENT_BYTES}"
                )

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """All regions in byte order."""
        regions = []
        offset = 0
        for component in self.components:
            num_bytes = component.bytes_per_token * self.block_size_tokens
            for layer in component.layers:
                regions.append(Region(component.name, layer, offset, num_bytes))
                offset += num_bytes
        return tuple(regions)

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block, all components."""
        last = self.regions[-1]
        return last.offset_bytes + last.num_bytes

    @property
    def bytes_per_token(self) -> float:
        """Bytes of cache that one token takes, all components and layers."""
        return self.block_bytes / self.block_size_tokens

    @property
    def looks_one_token_ahead(self) -> bool:
        """Whether a block's key must include the next token (PROTOCOL: block key)."""
        return any(component.keyed_by_next_token for component in self.components)

    @property
    def component_mask(self) -> int:
        """One bit per component; a block is whole when all are present."""
        return (1 << len(self.components)) - 1

    def region(self, component: str, layer: int) -> Region:
        """The region of one layer of one component. Raises KeyError if the layout has none."""
        for region in self.regions:
            if region.component == component and region.layer == layer:
                return region
        raise KeyError(f"no region for component {component!r}, layer {layer}")

    @cached_property
    def fingerprint(self) -> str:
        """Digest of everything that must agree between peers; geometry (ranks, block count) is not part of it."""
        canonical = msgspec.json.encode((PROTOCOL_MAJOR, self.block_size_tokens, self.components, self.model_digest, self.tokenizer_digest))
        return hashlib.sha256(canonical).hexdigest()[:32]
