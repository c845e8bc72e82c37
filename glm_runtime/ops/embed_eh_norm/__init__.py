"""What enters the MTP layer: the next token's embedding and the row's hidden state, each normalised, side by side."""

import torch
from torch import Tensor

from glm_runtime.ops.embed_eh_norm import native, reference
from glm_runtime.ops.embed_eh_norm.reference import EhNorms
from glm_runtime.ops.impl import Impl, check_shape

__all__ = ["EhNorms", "embed_eh_norm"]


def embed_eh_norm(
    tokens: Tensor, positions: Tensor, hidden: Tensor, embedding: Tensor, norms: EhNorms, *, impl: Impl | None = None
) -> Tensor:
    """The input rows of eh_proj. See `reference.py`, which is what serves without compiled kernels.

    Raises ValueError for shapes that do not fit together, for tokens and positions that are not int64, and for a token that has no
    row in the embedding.
    """
    width = hidden.shape[1]
    check_shape("embed_eh_norm", "tokens", tokens, (hidden.shape[0],))
    check_shape("embed_eh_norm", "positions", positions, (hidden.shape[0],))
    check_shape("embed_eh_norm", "embedding", embedding, (-1, width))
    check_shape("embed_eh_norm", "norms.embedding", norms.embedding, (width,))
    check_shape("embed_eh_norm", "norms.hidden", norms.hidden, (width,))
    if tokens.dtype is not torch.int64 or positions.dtype is not torch.int64:
        raise ValueError(f"embed_eh_norm: tokens are {tokens.dtype} and positions {positions.dtype}; expected int64")
    if tokens.numel():
        least, largest = torch.aminmax(tokens)
        if int(least) < 0 or int(largest) >= embedding.shape[0]:
            raise ValueError(f"embed_eh_norm: tokens lie in [{int(least)}, {int(largest)}]; expected [0, {embedding.shape[0]})")
    if impl == "native":
        return native.embed_eh_norm(tokens, positions, hidden, embedding, norms)
    return reference.embed_eh_norm(tokens, positions, hidden, embedding, norms)
