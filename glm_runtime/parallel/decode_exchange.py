"""What ranks that share a sequence's cache tell each other in a step, and in which form.

On an indexing layer: the best tokens of each rank's own with their scores, for the rows that see more than index_topk. On every layer:
outputs over each rank's own tokens for all heads of the group, with their log-sums, for the owners of the heads; and queries, where
ranks do not make those of the whole group themselves. Source: FACTS 6.4.
"""

import torch
from torch import Tensor

from glm_runtime.ops.combine_shards import combine_shards, shard_weights
from glm_runtime.ops.impl import Impl
from glm_runtime.ops.merge_topk import merge_topk
from glm_runtime.parallel.collectives import Collectives


def merge_best(scores: Tensor, tokens: Tensor, group: Collectives, impl: Impl | None = None) -> Tensor:
    """One exchange: the best K of all ranks' best. scores: [T, K] fp32; tokens: [T, K] int64 positions in the sequence, -1 for none.

    Returns [T, K] int64, new, ascending, -1 after the last, the same on all ranks. On the wire: 8 bytes for each, the score's bits and
    an int32.
    """
    pairs = torch.stack((scores.view(torch.int32), tokens.to(torch.int32)), dim=-1)
    gathered = group.all_gather(pairs)  # [W, T, K, 2]
    return merge_topk(gathered[..., 0].contiguous().view(torch.float32), gathered[..., 1].long(), tokens.shape[1], impl=impl)


def gather_heads(queries: Tensor, group: Collectives) -> Tensor:
    """One exchange: the queries of all heads of the group, [T, W * H, D], from each rank's own, [T, H, D]."""
    return group.all_gather(queries.contiguous()).transpose(0, 1).flatten(1, 2)


def lse_lanes(dtype: torch.dtype) -> int:
    """Numbers of a dtype that an fp32 fills."""
    return 4 // dtype.itemsize


class ShardOutputs:
    """This rank's outputs and log-sums for all heads of the group, filled in piece by piece and then exchanged for those of its own heads.

    Each rank's part lies together, and beside each output, in its last lanes, the bits of its log-sum. wire: [W, T, H / W, C + lanes].
    Rounds: outputs once, to dtype; log-sums never.
    """

    def __init__(self, num_rows: int, num_heads: int, width: int, dtype: torch.dtype, num_ranks: int) -> None:
        assert num_heads % num_ranks == 0, f"{num_heads} heads for {num_ranks} ranks"
        self._width = width
        self.wire = torch.empty(num_ranks, num_rows, num_heads // num_ranks, width + lse_lanes(dtype), dtype=dtype)

    def put(self, rows: slice, attended: Tensor, lse: Tensor) -> None:
        """attended: [t, H, C] fp32 and lse: [t, H] fp32 of these rows, heads in order of their ranks."""
        num_ranks, _, heads, _ = self.wire.shape
        piece = self.wire[:, rows]
        piece[..., : self._width] = attended.view(-1, num_ranks, heads, self._width).transpose(0, 1)
        piece[..., self._width :] = lse.view(-1, num_ranks, heads, 1).view(self.wire.dtype).transpose(0, 1)

    def swap(self, group: Collectives, impl: Impl | None = None) -> Tensor:
        """One all-to-all, "a2a": [T, H / W, C] fp32, new, of this rank's heads over the whole context."""
        return combine_shards(*self.split(group.all_to_all(self.wire)), impl=impl)

    def scatter(self, group: Collectives, impl: Impl | None = None) -> Tensor:
        """A gather of log-sums and a reduce-scatter of weighed outputs, "ag_rs": as `swap`. Rounds: each product, and the sum, to dtype."""
        attended, lse = self.split(self.wire)
        weights = shard_weights(group.all_gather(lse).flatten(1, 2), impl=impl)  # [W, W * T, H / W]
        own = weights[group.rank].view(lse.shape)
        return group.reduce_scatter((own[..., None] * attended.float()).to(self.wire.dtype)).float()

    def split(self, wire: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [W, T, H / W, C], a view, and log-sums [W, T, H / W] fp32, new, of what `put` laid side by side."""
        return wire[..., : self._width], wire[..., self._width :].contiguous().view(torch.float32).squeeze(-1)
