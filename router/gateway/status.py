"""The cluster as this gateway sees it, as plain values for `/status.json` and the status page."""

from collections.abc import Sequence
from typing import Any

import msgspec

from router.registry import WorkerView
from router.relay import Relay

QUANTILES = (0.5, 0.9, 0.99)


def describe_status(relay: Relay, *, model: str, version: str, uptime_s: float, is_directory_connected: bool) -> dict[str, Any]:
    """Workers, requests by phase, recent latencies and recent requests (newest first). Seconds, bytes, tokens, blocks."""
    recent = list(relay.recent)
    return {
        "model": model,
        "version": version,
        "uptime_s": round(uptime_s, 1),
        "is_ready": relay.registry.has_usable_pair() and not relay.is_draining,
        "is_draining": relay.is_draining,
        "is_directory_connected": is_directory_connected,
        "workers": [_describe_worker(view) for view in relay.registry.views()],
        "requests": {
            "in_flight": relay.num_live,
            "phases": relay.count_phases(),
            "unclosed_attempts": relay.farewells.num_open,
        },
        "recent": {
            "num_requests": len(recent),
            "num_failed": sum(record.outcome == "failed" and record.reason not in ("client_gone", "closed") for record in recent),
            "num_retries": sum(record.retries for record in recent),
            "ttft_s": _quantiles([record.ttft_s for record in recent if record.ttft_s is not None]),
            "itl_s": _quantiles([record.itl_s for record in recent if record.itl_s is not None]),
            "cached_tokens": sum(record.num_cached_tokens for record in recent),
            "prompt_tokens": sum(record.num_prompt_tokens for record in recent),
            "requests": [msgspec.to_builtins(record) for record in recent[:-13:-1]],
        },
    }


def _describe_worker(view: WorkerView) -> dict[str, Any]:
    load = view.load
    return {
        "id": view.ref.worker_id,
        "role": view.entry.role,
        "pid": view.entry.pid,
        "parallel": view.entry.parallel,
        "rank_pids": view.entry.rank_pids,
        "state": view.state.value,
        "incarnation": f"{view.ref.incarnation:x}",
        "address": f"{view.entry.address.host}:{view.entry.address.port}",
        "is_linked": view.is_linked,
        "pairs_up": sorted(ref.worker_id for ref in view.pairs),
        "blocks_total": load.blocks_total,
        "blocks_free": load.blocks_free,
        "blocks_cached": load.blocks_cached,
        "blocks_held": load.blocks_held,
        "blocks_quarantined": load.blocks_quarantined,
        "load": msgspec.to_builtins(
            {name: getattr(load, name) for name in type(load).__struct_fields__ if not name.startswith("blocks_")}
        ),
    }  # fmt: skip


def _quantiles(values: Sequence[float]) -> dict[str, float] | None:
    """Nearest-rank quantiles; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    last = len(ordered) - 1
    return {f"p{round(quantile * 100)}": round(ordered[round(quantile * last)], 6) for quantile in QUANTILES}
