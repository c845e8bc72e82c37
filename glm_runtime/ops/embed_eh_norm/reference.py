"""The specification of the MTP layer's input. Legend: `T` rows, `H` hidden size, `V` vocabulary."""

from dataclasses import dataclass

import torch
from torch import Tensor

from glm_runtime.norm import rms_norm


@dataclass(frozen=True, slots=True)
class EhNorms:
    """Weights of enorm (for embeddings) and hnorm (for hidden states), [H] each; eps is the config's rms_norm_eps."""

    embedding: Tensor
    hidden: Tensor
    eps: float


def embed_eh_norm(tokens: Tensor, positions: Tensor, hidden: Tensor, embedding: Tensor, norms: EhNorms) -> Tensor:
    """[RMS_enorm(emb(t_{P+1})) | RMS_hnorm(h_P)], the embedding first; at position 0 the embedding is zero. Source: FACTS 3.10.

    tokens: [T] int64 — the token *after* each row. positions: [T] int64 — the row's own, P. hidden: [T, H] — after the target's final
    norm, or recycled. embedding: [V, H] of any float dtype. Returns [T, 2 H] of hidden's dtype, new.
    Rounds: each norm once, to hidden's dtype, from the embedding as it is stored. A zero embedding stays exactly zero.
    """
    embedded = embedding.index_select(0, tokens).float()
    embedded = torch.where((positions == 0)[:, None], 0.0, embedded)
    left = rms_norm(embedded, norms.embedding, norms.eps).to(hidden.dtype)
    return torch.cat((left, rms_norm(hidden, norms.hidden, norms.eps)), dim=1)
