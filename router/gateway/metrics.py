"""Every metric of the gateway and the router, in a registry of its own.

Knows: names, labels and buckets. Does not know who reads them. Names are `glm_...`; the three `vllm:` gauges are aliases for schedulers
and dashboards that look for those names, summed over the whole cluster.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.policy import Placement
from router.registry import WorkerView
from router.relay import Relay, RelayHooks, RequestRecord

FAST_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 160.0, 640.0, 2560.0)
TOKEN_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)

WORKER_GAUGES: dict[str, tuple[str, Callable[[WorkerView], float]]] = {
    "glm_worker_up": ("Whether the worker serves and is connected to this gateway.", lambda view: float(view.is_usable)),
    "glm_worker_running_requests": ("Requests in the worker's batch.", lambda view: view.load.num_running),
    "glm_worker_waiting_requests": ("Requests queued on the worker.", lambda view: view.load.num_waiting),
    "glm_worker_queued_prefill_tokens": ("Prompt tokens queued on the worker.", lambda view: view.load.queued_prefill_tokens),
    "glm_worker_blocks_total": ("Cache blocks.", lambda view: view.load.blocks_total),
    "glm_worker_blocks_free": ("Cache blocks that hold nothing.", lambda view: view.load.blocks_free),
    "glm_worker_blocks_cached": ("Cache blocks kept for reuse only.", lambda view: view.load.blocks_cached),
    "glm_worker_blocks_held": ("Cache blocks in use.", lambda view: view.load.blocks_held),
    "glm_worker_blocks_quarantined": ("Cache blocks that a lost transfer may still write.", lambda view: view.load.blocks_quarantined),
    "glm_worker_transfers": ("Hand-offs that are not closed.", lambda view: view.load.num_transfers),
    "glm_worker_read_bytes": ("Bytes pulled from other workers since start.", lambda view: view.load.bytes_read),
    "glm_worker_read_seconds": ("Time spent in pulls since start.", lambda view: view.load.read_s),
    "glm_worker_prefix_hit_tokens": ("Prompt tokens found in the worker's cache since start.", lambda view: view.load.prefix_hit_tokens),
    "glm_worker_prefix_query_tokens": ("Prompt tokens looked up in it since start.", lambda view: view.load.prefix_query_tokens),
    "glm_worker_preemptions": ("Requests preempted since start.", lambda view: view.load.preemptions),
}  # fmt: skip


class GatewayMetrics:
    """Counters and histograms that are fed as things happen."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        registry = self.registry
        self._http = Counter("glm_http_requests", "HTTP requests by route and status.", ("method", "path", "status"), registry=registry)
        self._http_children: dict[tuple[str, str, int], Counter] = {}
        self._duration = Histogram(
            "glm_router_request_duration_seconds", "From admission to the last token.", buckets=FAST_BUCKETS, registry=registry
        )  # fmt: skip
        self._ttft = Histogram(
            "glm_router_ttft_seconds", "From admission to the first token.", buckets=FAST_BUCKETS, registry=registry
        )  # fmt: skip
        self._itl = Histogram(
            "glm_router_itl_seconds", "Per token: the gap between two frames, divided by the tokens in it.", buckets=FAST_BUCKETS,
            registry=registry,
        )  # fmt: skip
        self._prompt_tokens = Histogram("glm_router_prompt_tokens", "Prompt length.", buckets=TOKEN_BUCKETS, registry=registry)
        self._output_tokens = Histogram("glm_router_output_tokens", "Output length.", buckets=TOKEN_BUCKETS, registry=registry)
        self._cached_tokens = Counter("glm_router_cached_prompt_tokens", "Prompt tokens that needed no prefill.", registry=registry)
        self._ended = Counter("glm_router_requests", "Requests by outcome.", ("outcome", "reason"), registry=registry)
        self._retries = Counter("glm_router_retries", "Attempts after the first.", registry=registry)
        self._selections = Counter("glm_router_selections", "Placements by worker.", ("role", "worker_id"), registry=registry)
        self._bypasses = Counter("glm_router_local_prefills", "Placements without a prefill worker.", registry=registry)
        self._gone = Counter("glm_router_client_disconnects", "Requests whose client went away.", registry=registry)
        self._ignored = Counter("glm_http_ignored_fields", "Unknown request fields.", registry=registry)
        self._stream_errors = Counter("glm_http_stream_errors", "Errors sent inside a stream.", ("code",), registry=registry)

    def watch(self, relay: Relay) -> None:
        """Export the relay's present state with each scrape."""
        self.registry.register(_StateCollector(relay))

    def hooks(self) -> RelayHooks:
        """What the relay calls."""
        return RelayHooks(on_placed=self._note_placement, on_tokens=self._note_tokens, on_ended=self._note_end)

    def count_http(self, method: str, path: str, status: int) -> None:
        """One answered HTTP request. `path` is a route, not what the client typed: that would have no bound."""
        key = (method, path, status)
        child = self._http_children.get(key)
        if child is None:
            child = self._http_children[key] = self._http.labels(method, path, str(status))
        child.inc()

    def count_ignored_fields(self, num_fields: int) -> None:
        """Unknown fields in one request."""
        self._ignored.inc(num_fields)

    def count_stream_error(self, code: str) -> None:
        """A stream that ended in an error event."""
        self._stream_errors.labels(code).inc()

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)

    def _note_placement(self, placement: Placement) -> None:
        self._selections.labels("decode", placement.decode.worker_id).inc()
        if placement.prefill is None:
            self._bypasses.inc()
        else:
            self._selections.labels("prefill", placement.prefill.worker_id).inc()

    def _note_tokens(self, gap_s: float | None, num_tokens: int) -> None:
        if gap_s is not None:
            self._itl.observe(gap_s / max(num_tokens, 1))

    def _note_end(self, record: RequestRecord) -> None:
        self._ended.labels(record.outcome, record.reason).inc()
        self._duration.observe(record.duration_s)
        self._prompt_tokens.observe(record.num_prompt_tokens)
        self._output_tokens.observe(record.num_output_tokens)
        self._cached_tokens.inc(record.num_cached_tokens)
        self._retries.inc(record.retries)
        if record.ttft_s is not None:
            self._ttft.observe(record.ttft_s)
        if record.reason == "client_gone":
            self._gone.inc()


class _StateCollector(Collector):
    """Gauges that are read when somebody asks."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    def describe(self) -> Iterator[Metric]:
        """Nothing: the registry need not collect to know that these names are ours."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """All gauges, now."""
        relay = self._relay
        phases = GaugeMetricFamily("glm_router_inflight_requests", "Live requests by phase.", labels=["phase"])
        counts = relay.count_phases()
        for phase, count in counts.items():
            phases.add_metric([phase], count)
        yield phases
        yield GaugeMetricFamily("glm_router_unclosed_attempts", "Left attempts that a worker has not closed.", relay.farewells.num_open)
        views = relay.registry.views()
        for name, (text, read) in WORKER_GAUGES.items():
            family = GaugeMetricFamily(name, text, labels=["worker_id", "role"])
            for view in views:
                family.add_metric([view.ref.worker_id, view.entry.role], read(view))
            yield family
        yield _cache_formats(views)
        yield _drafts(
            "glm_worker_drafted_tokens", "Tokens guessed ahead of a step since start, by position in it, from 1.", views, _drafted
        )
        yield _drafts("glm_worker_accepted_tokens", "Those of them that held.", views, _accepted)
        yield from _alias_gauges(counts, views)


def _cache_formats(views: list[WorkerView]) -> GaugeMetricFamily:
    labels = ["worker_id", "role", "component", "format"]
    family = GaugeMetricFamily(
        "glm_worker_cache_format", "1 for the format in which a worker stores a component of its cache.", labels=labels
    )
    for view in views:
        for component, cache_format in view.entry.cache_formats:
            family.add_metric([view.ref.worker_id, view.entry.role, component, cache_format], 1.0)
    return family


def _drafted(view: WorkerView) -> tuple[int, ...]:
    return view.load.drafted


def _accepted(view: WorkerView) -> tuple[int, ...]:
    return view.load.accepted


def _drafts(name: str, text: str, views: list[WorkerView], read: Callable[[WorkerView], tuple[int, ...]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=["worker_id", "role", "position"])
    for view in views:
        for position, drafts in enumerate(read(view), start=1):
            family.add_metric([view.ref.worker_id, view.entry.role, str(position)], drafts)
    return family


def _alias_gauges(counts: dict[str, int], views: list[WorkerView]) -> Iterator[Metric]:
    decodes = [view for view in views if view.entry.role == "decode"]
    total = sum(view.load.blocks_total for view in decodes)
    held = sum(view.load.blocks_held for view in decodes)
    running = counts["decoding"]
    yield GaugeMetricFamily("vllm:num_requests_running", "Requests that decode.", running)
    yield GaugeMetricFamily("vllm:num_requests_waiting", "Requests that do not decode yet.", sum(counts.values()) - running)
    yield GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of decode's cache blocks in use, 0 to 1.", held / total if total else 0.0)
