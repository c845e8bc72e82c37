"""What the ranks of a replica exchange in one step, by layout: calls and bytes that one rank sends. Pure.

The formulas of each exchange's bytes are those that `glm_runtime.parallel.collectives` counts with; here stands which exchanges a step
makes. `tests/conformance/test_communication_ledger.py` compares them with what ranks have counted. Source: FACTS 6.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from glm_runtime.config import GlmConfig
from glm_runtime.parallel.collectives import Operation, gathered_bytes, reduced_bytes, scattered_bytes
from glm_runtime.parallel.layout import GroupKind, ParallelLayout
from glm_runtime.parallel.prefill_context import zigzag
from kv_transfer.layout import CacheLayout

_INT64_BYTES = 8
_FP32_BYTES = 4
_BEST_BYTES = 16
"""Of a row's best token on one shard: value, id, whether all are finite, and its probability, four bytes each."""
_STEP_WISHES = 2
"""Of a worker, before a step: rows, and drafts from a hand-off's hidden state; a byte each. One more before each further draft step."""
_PAIR_BYTES = 8
"""Of a token's index score and position."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Calls, and bytes that one rank sends. Bytes of dispatched rows are expected ones, hence not whole."""

    calls: int = 0
    bytes_sent: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRows:
    """The rows of one step of one worker. rows: of the target, by sequence. num_scored: of those, that see more than index_topk tokens.

    num_drawn: rows after which a token is drawn; num_asking: sequences that draw; needs_logits: whether more than the best token is wanted
    of them. num_drafted: drafts that the step verifies. With an MTP layer: mtp_rows of its step 0, by sequence, num_mtp_scored of those
    with scores; num_drafting: sequences that draft in each of num_draft_steps, step 0's included.
    """

    rows: tuple[int, ...]
    num_scored: int = 0
    num_drawn: int = 0
    num_asking: int = 0
    needs_logits: bool = False
    num_drafted: int = 0
    mtp_rows: tuple[int, ...] = ()
    num_mtp_scored: int = 0
    num_drafting: int = 0
    num_draft_steps: int = 0


@dataclass(frozen=True, slots=True)
class Share:
    """Rows of a pass on the leading rank, padding included, and on the rank that has most."""

    own: int
    most: int

    @classmethod
    def of(cls, rows: Sequence[int], pcp_size: int) -> "Share":
        """rows: by sequence."""
        each = [sum(part.end - part.start for count in rows for part in zigzag(count, pcp_size, rank)) for rank in range(pcp_size)]
        return cls(max(each[0], 1), max(each))


@dataclass(slots=True)
class Ledger:
    """Exchanges of a step as they add up. item_bytes: of an activation."""

    config: GlmConfig
    layout: ParallelLayout
    item_bytes: int
    entries: dict[tuple[GroupKind, Operation], Traffic] = field(default_factory=dict)

    def size(self, kind: GroupKind) -> int:
        """Ranks of a group."""
        return len(self.layout.members(kind, 0))

    def add(self, kind: GroupKind, operation: Operation, num_bytes: float, times: int = 1) -> None:
        """`times` exchanges that send `num_bytes` each; none in a group of one rank."""
        if times and self.size(kind) > 1:
            known = self.entries.get((kind, operation), Traffic())
            self.entries[kind, operation] = Traffic(known.calls + times, known.bytes_sent + times * num_bytes)

    def add_sum(self, num_rows: int, times: int = 1) -> None:
        """Sums of hidden states over tensor ranks."""
        numel = num_rows * self.config.hidden_size
        self.add(GroupKind.TENSOR, Operation.ALL_REDUCE, reduced_bytes(numel, self.item_bytes, self.size(GroupKind.TENSOR)), times)

    def add_gather(self, kind: GroupKind, num_bytes: int, times: int = 1) -> None:
        """Gathers of `num_bytes` of each rank."""
        self.add(kind, Operation.ALL_GATHER, gathered_bytes(num_bytes, self.size(kind)), times)

    def add_embedding(self, num_rows: int) -> None:
        """The embedding's sum, where it is cut."""
        if not self.layout.replicates_embedding:
            self.add_sum(num_rows)


def step_traffic(
    config: GlmConfig, layout: ParallelLayout, rows: StepRows, cache: CacheLayout, item_bytes: int
) -> Mapping[tuple[GroupKind, Operation], Traffic]:
    """What a worker's leading rank takes part in, where the other workers of the replica have steps of the same size.

    cache: of one worker's blocks. item_bytes: of an activation; 2 in fast mode.
    """
    ledger = Ledger(config, layout, item_bytes)
    ledger.add_gather(GroupKind.DATA, _STEP_WISHES)
    share = Share.of(rows.rows, layout.pcp_size)
    ledger.add_embedding(share.own)
    for layer in range(config.num_hidden_layers):
        _add_layer(ledger, cache, ("mla_kv", "index_k"), layer, share, rows.num_scored, is_moe=layer in config.moe_layers)
    ledger.add_gather(GroupKind.PREFILL_CONTEXT, share.most * config.hidden_size * item_bytes)
    if rows.num_drawn:
        _add_drawing(ledger, rows)
    if rows.mtp_rows:
        _add_mtp(ledger, cache, rows)
    return ledger.entries


def _add_layer(
    ledger: Ledger, cache: CacheLayout, components: tuple[str, str], layer: int, share: Share, num_scored: int, *, is_moe: bool
) -> None:
    """One decoder layer that stores its keys: two sums, the keys of ranks that share rows, what ranks that share a cache exchange."""
    ledger.add_sum(share.own, 2)
    stored = [each.bytes_per_token for each in cache.components if each.name in components and layer in each.layers]
    ledger.add_gather(GroupKind.PREFILL_CONTEXT, share.most * sum(stored))
    if len(stored) == len(components) and num_scored:
        ledger.add_gather(GroupKind.DECODE_CONTEXT, num_scored * ledger.config.index_topk * _PAIR_BYTES)
    add_attention(ledger, share.own)
    if is_moe:
        _add_experts(ledger, share.own)


def add_attention(ledger: Ledger, num_rows: int) -> None:
    """Queries, outputs and log-sums over a decode context group."""
    kind, config, size = GroupKind.DECODE_CONTEXT, ledger.config, ledger.size(GroupKind.DECODE_CONTEXT)
    own = num_rows * (config.num_attention_heads // ledger.layout.tp_size)  # (row, head) pairs of one rank
    if not ledger.layout.replicates_queries:
        ledger.add_gather(kind, own * config.latent_dim * ledger.item_bytes)
    outputs = own * config.kv_lora_rank * ledger.item_bytes
    if ledger.layout.dcp_combine == "a2a":
        ledger.add(kind, Operation.ALL_TO_ALL, scattered_bytes(size * (outputs + own * _FP32_BYTES), size))
    else:
        ledger.add_gather(kind, size * own * _FP32_BYTES)
        ledger.add(kind, Operation.REDUCE_SCATTER, scattered_bytes(size * outputs, size))


def _add_experts(ledger: Ledger, num_rows: int) -> None:
    """Rows to their experts and sums back, where ranks have different rows: counts, rows with slots and gates, sums."""
    layout, config = ledger.layout, ledger.config
    if not (layout.shards_rows and layout.ep_size > 1):
        return
    dispatched = num_rows / layout.tp_size
    parcels = dispatched * expected_copies(config, layout.ep_size)
    row_bytes = config.hidden_size * ledger.item_bytes
    world = GroupKind.WORLD
    ledger.add(world, Operation.ALL_TO_ALL, scattered_bytes(_INT64_BYTES * layout.ep_size, layout.ep_size))
    ledger.add(world, Operation.ALL_TO_ALL, parcels * (row_bytes + 2 * _FP32_BYTES * config.num_experts_per_tok))
    ledger.add(world, Operation.ALL_TO_ALL, parcels * row_bytes)


def expected_copies(config: GlmConfig, ep_size: int) -> float:
    """Other ranks to which a row goes on average, when every choice of experts is as likely: each rank at most once."""
    num_experts, chosen = config.n_routed_experts, config.num_experts_per_tok
    elsewhere = num_experts - num_experts // ep_size
    none_there = math.comb(elsewhere, chosen) / math.comb(num_experts, chosen)
    return (ep_size - 1) * (1.0 - none_there)


def _add_drawing(ledger: Ledger, rows: StepRows) -> None:
    """The best of each row, perhaps all logits, and what was drawn."""
    ledger.add_gather(GroupKind.TENSOR, rows.num_drawn * _BEST_BYTES)
    if rows.needs_logits:
        ledger.add_gather(GroupKind.TENSOR, rows.num_drawn * ledger.config.vocab_size // ledger.layout.tp_size * _FP32_BYTES)
    told = (2 * rows.num_asking + rows.num_drafted) * _INT64_BYTES
    ledger.add(GroupKind.WORKER, Operation.BROADCAST, (ledger.size(GroupKind.WORKER) - 1) * told)


def _add_mtp(ledger: Ledger, cache: CacheLayout, rows: StepRows) -> None:
    """Step 0 over the rows that stand, and draft steps of one row a sequence, which store nothing."""
    (layer,) = ledger.config.mtp_layers
    share = Share.of(rows.mtp_rows, ledger.layout.pcp_size)
    ledger.add_embedding(share.own)
    _add_layer(ledger, cache, ("mtp_mla_kv", "mtp_index_k"), layer, share, rows.num_mtp_scored, is_moe=True)
    ledger.add_gather(GroupKind.PREFILL_CONTEXT, share.most * ledger.config.hidden_size * ledger.item_bytes)
    ledger.add_gather(GroupKind.DATA, 1, max(rows.num_draft_steps, 1))
    if not rows.num_draft_steps:
        return
    ledger.add_gather(GroupKind.PREFILL_CONTEXT, share.most * ledger.config.index_topk * _INT64_BYTES)
    ledger.add_gather(GroupKind.TENSOR, rows.num_drafting * _BEST_BYTES, rows.num_draft_steps)
    for _ in range(rows.num_draft_steps - 1):
        ledger.add_embedding(rows.num_drafting)
        ledger.add_sum(rows.num_drafting, 2)
        add_attention(ledger, rows.num_drafting)
        _add_experts(ledger, rows.num_drafting)
