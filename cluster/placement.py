"""Which workers there shall be and which placement group each of them gets. Pure: counts in, plans out.

Knows: worker names, one group per worker, what its bundles ask for. Does not know Ray (`actors.py` turns a plan into a
group) and never looks a group up by its name: without fault-tolerant GCS that look-up aborts the calling process.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kv_transfer.identity import WorkerId

Role = Literal["prefill", "decode"]
Strategy = Literal["STRICT_PACK", "PACK"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """`num_workers` alike workers of one role, each with `num_ranks` ranks that reserve `cpus_per_rank` each."""

    role: Role
    num_workers: int
    num_ranks: int = 1
    cpus_per_rank: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlan:
    """The placement group of one worker: all its bundles are reserved together or not at all."""

    worker_id: WorkerId
    role: Role
    strategy: Strategy
    bundles: tuple[dict[str, float], ...]


def plan_groups(pools: Sequence[Pool]) -> list[GroupPlan]:
    """One group per worker, in the order of the pools.

    A worker's ranks share a node (STRICT_PACK): they meet in a collective at every layer. Between workers nothing is asked.
    """
    return [_plan_group(pool, number) for pool in pools for number in range(pool.num_workers)]


def _plan_group(pool: Pool, number: int) -> GroupPlan:
    return GroupPlan(
        worker_id=WorkerId(f"{pool.role}-{number}"),
        role=pool.role,
        strategy="STRICT_PACK",
        bundles=tuple({"CPU": pool.cpus_per_rank} for _ in range(pool.num_ranks)),
    )


def count_cpus(plans: Sequence[GroupPlan]) -> float:
    """CPUs that all groups reserve together: what a local Ray must offer so that every group can be placed."""
    return sum(bundle.get("CPU", 0.0) for plan in plans for bundle in plan.bundles)
