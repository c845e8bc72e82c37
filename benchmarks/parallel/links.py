"""Two ways for ranks that share a cache to put an answer together, over links of any speed: pure arithmetic on the planner's ledger.

"a2a with replicated queries" computes the queries of all heads of the group on every rank and exchanges outputs once. "ag_rs with gathered
queries" computes its own heads' queries and gathers them, then gathers log-sums and scatters outputs: fewer weights, more exchanges.
"""

from dataclasses import dataclass

from cluster.planner.communication import Ledger, add_attention
from glm_runtime.config import GlmConfig
from glm_runtime.parallel.layout import ParallelLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Between the ranks of a group. latency_s: of one exchange; bytes_per_s: that one rank sends."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What a rank computes with: bytes a second from its memory, and multiplications with addition a second on 8-bit weights."""

    memory_bytes_per_s: float
    products_per_s: float


H200 = Device(memory_bytes_per_s=4.0e12, products_per_s=0.6e15)
"""Reachable, not peak: about 85 % of 4.8 TB/s, and 60 % of 1 P products/s."""


def replicated(dcp_size: int) -> ParallelLayout:
    """The model's default."""
    return ParallelLayout(tp_size=dcp_size, dcp_size=dcp_size)


def gathered(dcp_size: int) -> ParallelLayout:
    """The alternative."""
    return ParallelLayout(tp_size=dcp_size, dcp_size=dcp_size, dcp_combine="ag_rs", replicates_queries=False)


def layer_s(config: GlmConfig, layout: ParallelLayout, num_rows: int, link: Link, device: Device) -> float:
    """Seconds that one layer takes for queries and for putting outputs together; what both ways have in common is left out."""
    ledger = Ledger(config, layout, item_bytes=2)
    add_attention(ledger, num_rows)
    entries = ledger.entries.values()
    exchanged = sum(each.calls * link.latency_s + each.bytes_sent / link.bytes_per_s for each in entries)
    heads = config.num_attention_heads // (1 if layout.replicates_queries else layout.tp_size)
    up, absorb = heads * config.qk_head_dim * config.q_lora_rank, heads * config.qk_nope_head_dim * config.kv_lora_rank
    weight_bytes, products = up + 2 * absorb, num_rows * (up + 2 * absorb)  # q_b in 8 bits, W_UK in bf16 at half the rate
    return exchanged + max(weight_bytes / device.memory_bytes_per_s, products / device.products_per_s)


def speed_up(config: GlmConfig, dcp_size: int, num_rows: int, link: Link, device: Device = H200) -> float:
    """How many times as long the alternative takes."""
    default, other = (layer_s(config, layout, num_rows, link, device) for layout in (replicated(dcp_size), gathered(dcp_size)))
    return other / default
