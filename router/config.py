"""The dials of the router and of the gateway, as frozen values; units are in the names.

Knows: every default and what it means. Does no I/O, except `load_process_config`, which reads the one file that the supervisor writes.
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import msgspec

from kv_transfer.config import WireConfig
from kv_transfer.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """How requests are admitted, placed and retried.

    block_size_tokens, keys_look_ahead: must equal the workers' layout; only the quality of placement depends on them. The latter is
    filled in when the cluster starts.
    local_prefill_below_tokens: with fewer uncached prompt tokens than this a decode worker prefills by itself; 0 is never.
    decode_row_tokens: what one more running request costs a decode worker, in tokens of work, beside the tokens it holds.
    """

    block_size_tokens: int = 64
    keys_look_ahead: bool = False
    local_prefill_below_tokens: int = 0
    decode_row_tokens: int = 256
    prefix_index_keys_per_worker: int = 65536

    max_in_flight_requests: int = 4096
    max_waiting_requests: int = 1024
    worker_wait_s: float = 60.0
    """How long a request that never had a worker waits for a usable pair before it is answered 503."""
    overloaded_retry_after_s: float = 2.0
    request_deadline_s: float = 900.0

    max_attempts: int = 8
    """Attempts of one request that may fail. One that a worker put off (BUSY, retryable later) is none."""
    retry_backoff_s: float = 0.05
    max_retry_backoff_s: float = 1.0

    control_rpc_s: float = 1.0
    control_rpc_tries: int = 3
    progress_timeout_s: float = 10.0
    """A prefill worker that owns the next step and says nothing for so long has lost the attempt."""
    ask_after_s: float = 2.0
    silence_timeout_s: float = 10.0
    """A decode worker that owns the next step, is asked every `ask_after_s` and says nothing for so long has lost the attempt."""
    link_grace_s: float = 5.0
    """A worker whose link has been down for so long has dropped what we opened there (PROTOCOL: PING)."""
    tick_s: float = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GatewayConfig:
    """The OpenAI-compatible surface.

    tokenizer_dir: holds tokenizer.json, config.json and generation_config.json of the checkpoint.
    directory_port, secret_file: filled in by the supervisor, since only it knows them; port 0 of `port` lets the system choose.
    control_tokens_in_text: True restores the reference tokenizer, which turns `<|user|>` inside a message into a control token.
    reasoning_fields: names under which thinking is returned; add "reasoning" for clients that expect that name.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str = "glm"
    tokenizer_dir: str = ""
    directory_host: str = "127.0.0.1"
    directory_port: int = 0
    secret_file: str = ""

    max_body_bytes: int = 16 * 1024 * 1024
    max_model_len_tokens: int = 0
    """Upper limit of prompt + output; 0 takes the checkpoint's. What the workers announce lowers it further."""
    max_prompts_per_request: int = 128
    grammar_check_s: float = 1.0
    """A schema, regex or grammar that takes more CPU time to compile is a 400."""
    completions_default_max_tokens: int = 16
    strict_fields: bool = False
    control_tokens_in_text: bool = False
    reasoning_fields: tuple[Literal["reasoning_content", "reasoning"], ...] = ("reasoning_content",)
    logprobs_mode: Literal["raw", "processed"] = "raw"
    """Of which distribution log-probabilities are told: the model's own, or the one that tokens are drawn from."""
    max_prompt_logprobs: int = 262144
    """Most log-probabilities told of one request's prompts: their tokens, times one more than `logprobs` or `prompt_logprobs` asks for,
    times `n`. Those of a prompt travel in one frame."""
    keepalive_s: float = 10.0
    """A stream that has been silent for so long gets an SSE comment; also how long the status line waits for the first token."""
    tokenize_inline_below_characters: int = 32768
    """Longer texts are tokenised on a thread, so that they hold up nobody's stream."""
    drain_s: float = 30.0
    recent_requests: int = 256
    """How many finished requests the status page's TTFT and ITL figures cover."""
    logging_config_file: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GatewayProcessConfig:
    """All that one gateway process is told: `python -m router.gateway --config FILE`. wire: the cluster's control connections."""

    gateway: GatewayConfig
    router: RouterConfig
    wire: WireConfig = dataclasses.field(default_factory=WireConfig)


def load_process_config(path: Path) -> GatewayProcessConfig:
    """Read a process configuration from JSON. Raises ConfigError naming the file and the field."""
    try:
        tree = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        refuse_unknown_keys(tree, GatewayProcessConfig, str(path))
        return msgspec.convert(tree, GatewayProcessConfig)
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror})", path=str(path)) from None
    except msgspec.MsgspecError as error:
        raise ConfigError(str(error), path=str(path)) from None


def refuse_unknown_keys(tree: dict[str, Any], config_type: type, path: str) -> None:
    """Raise ConfigError for a key that the configuration does not have: a typo must not pass as a default."""
    fields = {field.name: field.type for field in dataclasses.fields(config_type)}
    for key, value in tree.items():
        if key not in fields:
            raise ConfigError("unknown key", path=f"{path}:{key}")
        field_type = fields[key]
        if isinstance(field_type, type) and dataclasses.is_dataclass(field_type) and isinstance(value, dict):
            refuse_unknown_keys(value, field_type, f"{path}:{key}")


def dump_process_config(config: GatewayProcessConfig) -> bytes:
    """The JSON that `load_process_config` reads back."""
    return msgspec.json.format(msgspec.json.encode(config), indent=2)
