"""The whole configuration of one cluster: the packages' own dataclasses side by side, and what must hold between them.

Knows: `ServeConfig`, its cross-checks, and how "auto" and other open values are resolved into a new object. Does not know files
or the command line (`config_file.py`), nor what a single dial means (the config module of the package that uses it).
"""

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import glm_runtime
from cluster.placement import Pool, Role
from cluster.reconcile import RestartPolicy
from cluster.replica_layout import find_layout_mistakes
from cluster.run_state import default_state_dir
from decode_worker.config import DecodeConfig
from glm_runtime.cache_format import SERVING_DEVICE, choose_cache_formats
from glm_runtime.cache_layout import make_cache_layout
from glm_runtime.config import GlmConfig
from glm_runtime.parallel.layout import ParallelLayout
from glm_runtime.runtime_config import MOST_DRAFTS, RuntimeConfig, choose_max_drafts
from kv_transfer.config import ProtocolTimers, TransportConfig, WireConfig
from kv_transfer.errors import ConfigError
from kv_transfer.layout import CacheLayout
from prefill_worker.config import PrefillConfig
from router.config import GatewayConfig, RouterConfig

SHIPPED_CHECKPOINT = Path(glm_runtime.__file__).parent / "tiny"
SHIPPED_LOGGING = Path(__file__).parent.parent / "deploy" / "logging.json"
WORKER_BASE_BYTES = 300 * 1024 * 1024
"""Resident memory of a worker process before weights and cache: Python, Ray, torch and NIXL (measured 280-360 MiB)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConfig:
    """How many workers there are and how they are looked after.

    worker_host: the address on which workers and the directory listen for control connections.
    state_dir: where runs leave their address and logs; empty is a directory of this user below the system's temporary one.
    logging_config_file: a logging.config dictionary as JSON for every process; empty is the shipped deploy/logging.json.
    object_store_bytes: Ray's shared memory; nothing is put there. tick_s: how often the supervisor looks at its workers.
    restart: when a worker is given up on and how soon it is replaced.
    """

    num_prefill_workers: int = 1
    num_decode_workers: int = 1
    worker_host: str = "127.0.0.1"
    state_dir: str = ""
    logging_config_file: str = ""
    object_store_bytes: int = 80 * 1024 * 1024
    tick_s: float = 0.25
    restart: RestartPolicy = field(default_factory=RestartPolicy)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """One section of the config file per field."""

    runtime: RuntimeConfig = field(default_factory=lambda: RuntimeConfig(checkpoint=SHIPPED_CHECKPOINT))
    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    timers: ProtocolTimers = field(default_factory=ProtocolTimers)
    wire: WireConfig = field(default_factory=WireConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    @property
    def pools(self) -> tuple[Pool, Pool]:
        """The two worker pools."""
        return (
            Pool(role="prefill", num_workers=self.cluster.num_prefill_workers, num_ranks=self.prefill.parallel.num_ranks),
            Pool(role="decode", num_workers=self.cluster.num_decode_workers, num_ranks=self.decode.parallel.num_ranks),
        )

    @property
    def num_ranks(self) -> int:
        """Processes that run the model: the ranks of all workers of both roles."""
        return sum(pool.num_workers * pool.num_ranks for pool in self.pools)

    @property
    def layouts(self) -> Mapping[Role, ParallelLayout]:
        """How the workers of each role are cut."""
        return {"prefill": self.prefill.parallel, "decode": self.decode.parallel}

    def runtime_of(self, role: Role) -> RuntimeConfig:
        """How each rank of this role's workers runs the model."""
        return dataclasses.replace(self.runtime, parallel=self.layouts[role])


@dataclass(frozen=True, slots=True)
class Mistake:
    """One thing that is wrong: the dotted path of the field, and what to do about it."""

    path: str
    message: str


ZERO_HAS_A_MEANING = frozenset(
    {
        "gateway.directory_port",
        "gateway.max_model_len_tokens",
        "gateway.port",
        "prefill.priority_weight_s",
        "router.local_prefill_below_tokens",
        "runtime.max_drafts",
        "runtime.min_draft_probability",
        "runtime.num_balance_steps",
        "runtime.parallel.num_redundant_experts",
        "prefill.parallel.num_redundant_experts",
        "decode.parallel.num_redundant_experts",
        "transport.progress_delay_us",
    }
)
"""Numbers that may be 0; every other number must be above it."""

SUPERVISOR_FILLS = ("directory_host", "directory_port", "secret_file", "logging_config_file")
"""Fields of the gateway that only the supervisor knows."""


def find_mistakes(config: ServeConfig, model: GlmConfig | None) -> list[Mistake]:
    """Everything that is wrong with these values, alone and where the parts meet. `model` is None when the checkpoint is unreadable."""
    mistakes = [*_check_numbers(config), *_check_parts(config)]
    if model is not None and not mistakes:
        mistakes += _check_against_model(config, model)
    return mistakes


def make_layout(config: ServeConfig, model: GlmConfig) -> CacheLayout:
    """The layout that the workers will have, without digests: enough for sizes. Raises ConfigError as `choose_cache_formats` does."""
    formats = choose_cache_formats(config.runtime, model, SERVING_DEVICE)
    with_mtp = choose_max_drafts(config.runtime, model) > 0
    return make_cache_layout(model, formats, "", "", block_size_tokens=config.runtime.block_size_tokens, with_mtp=with_mtp)


def resolve(config: ServeConfig, model: GlmConfig, *, num_cores: int) -> ServeConfig:
    """A new configuration in which nothing is left open but ports, secret and directory, which exist only once the run starts."""
    runtime = config.runtime
    checkpoint = Path(os.path.normpath(runtime.checkpoint.absolute()))
    formats = choose_cache_formats(runtime, model, SERVING_DEVICE)
    max_model_len_tokens = min(runtime.max_model_len_tokens or model.max_position_embeddings, model.max_position_embeddings)
    return dataclasses.replace(
        config,
        runtime=dataclasses.replace(
            runtime,
            checkpoint=checkpoint,
            attention_backend=formats.backend,
            cache_format=formats.main,
            index_format=formats.index,
            index_scale=formats.index_scale,
            num_threads=runtime.num_threads or max(1, num_cores // config.num_ranks),
            max_model_len_tokens=max_model_len_tokens,
            max_drafts=choose_max_drafts(runtime, model),
        ),
        router=dataclasses.replace(config.router, keys_look_ahead=make_layout(config, model).looks_one_token_ahead),
        gateway=dataclasses.replace(
            config.gateway,
            tokenizer_dir=config.gateway.tokenizer_dir or str(checkpoint),
            max_model_len_tokens=min(config.gateway.max_model_len_tokens or max_model_len_tokens, max_model_len_tokens),
        ),
        cluster=dataclasses.replace(
            config.cluster,
            state_dir=config.cluster.state_dir or str(default_state_dir()),
            logging_config_file=config.cluster.logging_config_file or str(SHIPPED_LOGGING),
        ),
    )


def needed_memory_bytes(config: ServeConfig, weight_bytes: Mapping[Role, int]) -> int:
    """Memory that all ranks together will touch: process, weights as they are loaded, and cache of each. weight_bytes: of one rank."""
    return sum(
        pool.num_workers * pool.num_ranks * (WORKER_BASE_BYTES + weight_bytes[pool.role] + config.runtime.cache_bytes)
        for pool in config.pools
    )


def _check_numbers(config: ServeConfig) -> Iterator[Mistake]:
    for path, value in _walk_numbers(config, ""):
        if not math.isfinite(value):
            yield Mistake(path, f"is {value}; a finite number is needed")
        elif value < 0 or (value == 0 and path not in ZERO_HAS_A_MEANING):
            yield Mistake(path, f"is {value}; it must be {'0 or ' if path in ZERO_HAS_A_MEANING else ''}above 0")


def _walk_numbers(part: Any, path: str) -> Iterator[tuple[str, float]]:
    for item in dataclasses.fields(part):
        value, below = getattr(part, item.name), f"{path}{item.name}"
        if dataclasses.is_dataclass(value):
            yield from _walk_numbers(value, f"{below}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield below, value


def _check_parts(config: ServeConfig) -> Iterator[Mistake]:
    """Rules between sections, each a path, what must hold, and what to say when it does not."""
    runtime, router, gateway, timers, wire = config.runtime, config.router, config.gateway, config.timers, config.wire
    restart = config.cluster.restart
    defaults = GatewayConfig()
    for name in SUPERVISOR_FILLS:
        if getattr(gateway, name) != getattr(defaults, name):
            yield Mistake(f"gateway.{name}", "is filled in when the cluster starts; remove it")
    if runtime.parallel != ParallelLayout():
        yield Mistake("runtime.parallel", "is filled in when the cluster starts; set prefill.parallel and decode.parallel instead")
    rules: list[tuple[str, Callable[[], bool], str]] = [
        ("gateway.port", lambda: gateway.port < 65536, f"is {gateway.port}; a port is below 65536 (0 takes a free one)"),
        (
            "router.block_size_tokens",
            lambda: router.block_size_tokens == runtime.block_size_tokens,
            f"is {router.block_size_tokens}, runtime.block_size_tokens is {runtime.block_size_tokens}; "
            "the router counts in the workers' blocks, so they must be equal",
        ),
        (
            "runtime.max_step_tokens",
            lambda: runtime.max_step_tokens >= runtime.block_size_tokens,
            f"is {runtime.max_step_tokens}; a prompt chunk is whole blocks, so at least runtime.block_size_tokens "
            f"({runtime.block_size_tokens}) must fit",
        ),
        (
            "runtime.max_drafts",
            lambda: runtime.max_drafts <= MOST_DRAFTS,
            f"is {runtime.max_drafts}; a step verifies at most {MOST_DRAFTS} drafts of a request (0 drafts nothing)",
        ),
        (
            "runtime.min_draft_probability",
            lambda: (runtime.min_draft_probability or 0.0) <= 1.0,
            f"is {runtime.min_draft_probability}; a probability is at most 1 (0 never stops drafting early)",
        ),
        (
            "decode.max_running",
            lambda: config.decode.max_running <= runtime.max_step_tokens,
            f"is {config.decode.max_running}; every running request is a row of a step, and runtime.max_step_tokens is "
            f"{runtime.max_step_tokens}",
        ),
        (
            "timers.lease_s",
            lambda: timers.lease_s >= 3 * timers.keep_interval_s,
            f"is {timers.lease_s:g}; it must outlive two lost renewals, 3 x timers.keep_interval_s ({timers.keep_interval_s:g})",
        ),
        (
            "timers.no_progress_s",
            lambda: timers.no_progress_s >= 3 * timers.progress_interval_s,
            f"is {timers.no_progress_s:g}; it must outlive two lost messages, 3 x timers.progress_interval_s "
            f"({timers.progress_interval_s:g})",
        ),
        (
            "wire.silence_timeout_s",
            lambda: wire.silence_timeout_s >= 3 * wire.ping_interval_s,
            f"is {wire.silence_timeout_s:g}; it must outlive two lost pings, 3 x wire.ping_interval_s ({wire.ping_interval_s:g})",
        ),
        (
            "cluster.restart.silence_timeout_s",
            lambda: restart.silence_timeout_s >= 3 * wire.report_interval_s,
            f"is {restart.silence_timeout_s:g}; it must outlive two lost reports, 3 x wire.report_interval_s ({wire.report_interval_s:g})",
        ),
        (
            "gateway.drain_s",
            lambda: gateway.drain_s <= timers.drain_cap_s,
            f"is {gateway.drain_s:g}; workers give up draining after timers.drain_cap_s ({timers.drain_cap_s:g}) and would end "
            "requests that the gateway still waits for",
        ),
    ]
    for path, holds, message in rules:
        if not holds():
            yield Mistake(path, message)


def _check_against_model(config: ServeConfig, model: GlmConfig) -> Iterator[Mistake]:
    try:
        layout = make_layout(config, model)
    except ConfigError as error:
        yield Mistake(error.path or "runtime.block_size_tokens", error.reason)
        return
    if config.router.keys_look_ahead and not layout.looks_one_token_ahead:
        yield Mistake("router.keys_look_ahead", "is true, but nothing is drafted; leave it out, it follows the workers")
    longest = config.runtime.max_model_len_tokens
    if longest is not None and longest > model.max_position_embeddings:
        yield Mistake("runtime.max_model_len_tokens", f"is {longest}; the checkpoint was trained for {model.max_position_embeddings}")
    cuts = [Mistake(path, message) for path, message in find_layout_mistakes(config.layouts, model)]
    if cuts:
        yield from cuts
        return
    resolved = resolve(config, model, num_cores=1)
    admitted = resolved.gateway.max_model_len_tokens
    needed = -(-admitted // layout.block_size_tokens)
    num_blocks = config.runtime.cache_bytes // layout.block_bytes * config.decode.parallel.dcp_size
    if num_blocks < needed:
        yield Mistake(
            "runtime.cache_bytes",
            f"is {config.runtime.cache_bytes}: {num_blocks} blocks of {layout.block_bytes} bytes. The longest admitted request "
            f"({admitted} tokens) needs {needed} on its decode worker: give at least {needed * layout.block_bytes}, "
            "or lower gateway.max_model_len_tokens",
        )
