"""Absorbed MLA over a list of cached rows per query row."""

from torch import Tensor

from glm_runtime.ops.impl import Impl, check_shape, check_width, choose_impl
from glm_runtime.ops.sparse_mla import cpu, native, reference
from glm_runtime.paged_cache import CacheRegion

__all__ = ["sparse_mla"]


def sparse_mla(
    queries: Tensor,
    mla: CacheRegion,
    addresses: Tensor,
    *,
    latent_dim: int,
    scale: float,
    scratch_bytes: int,
    uses_bf16: bool = False,
    impl: Impl | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to the listed rows. See `reference.py`. Raises ValueError for shapes that do not fit together.

    uses_bf16: allows the compiled kernel products of bf16 numbers; the other forms compute in fp32 anyway.
    """
    check_width("sparse_mla", "mla", mla, queries.shape[2])
    check_shape("sparse_mla", "addresses", addresses, (queries.shape[0], -1))
    if not 0 < latent_dim <= queries.shape[2]:
        raise ValueError(f"sparse_mla: latent_dim is {latent_dim}; queries are {queries.shape[2]} wide")
    chosen = choose_impl(impl, queries)
    if chosen == "native":
        return native.sparse_mla(queries, mla, addresses, latent_dim, scale, uses_bf16)
    if chosen == "cpu":
        return cpu.sparse_mla(queries, mla, addresses, latent_dim, scale, scratch_bytes)
    return reference.sparse_mla(queries, mla, addresses, latent_dim, scale)
