"""A bad configuration does not start: every mistake is named at once, with its file and field."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from cluster.config import SHIPPED_CHECKPOINT, ServeConfig, find_mistakes, needed_memory_bytes, resolve
from cluster.config_file import Option, load_config, render_config
from cluster.placement import Role
from decode_worker.config import DecodeConfig
from glm_runtime.config import GlmConfig
from glm_runtime.parallel.layout import ParallelLayout
from kv_transfer.errors import ConfigError


@pytest.fixture(scope="module")
def model() -> GlmConfig:
    return GlmConfig.from_checkpoint(SHIPPED_CHECKPOINT)


def _mistakes(tmp_path: Path, text: str, *options: Option) -> list[str]:
    """The lines of the one error that this file causes, without the file's name."""
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file, options)
    return [line.removeprefix(f"{file}: ") for line in str(caught.value).splitlines()]


def test_an_empty_file_is_the_default_configuration(tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text("")
    assert load_config(tmp_path / "empty.toml") == load_config(None)


def test_the_default_configuration_serves_the_shipped_checkpoint() -> None:
    config, _ = load_config(None)
    assert config.runtime.checkpoint == SHIPPED_CHECKPOINT
    assert config.runtime.cache_format == config.runtime.index_format == "bf16"
    assert (config.runtime.attention_backend, config.runtime.index_scale) == ("native", "none")
    assert config.runtime.numerics == "deterministic"
    assert config.runtime.num_threads is not None
    assert config.gateway.max_model_len_tokens == config.runtime.max_model_len_tokens == 8192
    assert config.gateway.tokenizer_dir == str(SHIPPED_CHECKPOINT)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[decode]\nmax_runing = 3", "decode.max_runing: unknown key; did you mean max_running?"),
        ("[cluster.restart]\nbackof_cap_s = 3", "cluster.restart.backof_cap_s: unknown key; did you mean backoff_cap_s?"),
        ("[decoder]\n", "decoder: unknown key; did you mean decode?"),
        ("decode = 3", "decode: must be a section, [decode], not 3"),
        ("[gateway]\nport = '8000'", 'gateway.port: input should be a valid integer, not "8000"'),
        ("[gateway]\nport = 80.5", "gateway.port: input should be a valid integer, not 80.5"),
        ("[gateway]\nport = true", "gateway.port: input should be a valid integer, not true"),
        ("[gateway]\nport = 65536", "gateway.port: is 65536; a port is below 65536 (0 takes a free one)"),
        ("[runtime]\ncache_format = 'fp7'", "runtime.cache_format: input should be 'auto', 'bf16', 'fp32', 'fp8', 'fp8_e4m3', "),
        ("[runtime]\nattention_backend = 'flashmla_sparse'", "runtime.attention_backend: is 'flashmla_sparse', which does not run on cpu"),
        (
            "[runtime]\ncache_format = 'fp8'\nindex_format = 'bf16'",
            "runtime.index_format: is 'bf16'; index keys beside a fp8_ds_mla cache are",
        ),
        ("[runtime]\nindex_scale = 'ue8m0'", "runtime.index_scale: is 'ue8m0'; the scale of bf16 index keys is 'none'"),
        (
            "[runtime]\nindex_format = 'fp8'\nblock_size_tokens = 8\n[router]\nblock_size_tokens = 8",
            "runtime.block_size_tokens: component index_k",
        ),
        ("[decode]\nmax_running = 0", "decode.max_running: is 0; it must be above 0"),
        ("[router]\nlocal_prefill_below_tokens = -1", "router.local_prefill_below_tokens: is -1; it must be 0 or above 0"),
        ("[cluster]\ntick_s = inf", "cluster.tick_s: is inf; a finite number is needed"),
        ("[cluster]\nnum_prefill_workers = 0", "cluster.num_prefill_workers: is 0; it must be above 0"),
        ("[gateway]\nsecret_file = 'x'", "gateway.secret_file: is filled in when the cluster starts; remove it"),
        ("[runtime.parallel]\ntp_size = 2", "runtime.parallel: is filled in when the cluster starts; set prefill.parallel and decode."),
        ("[decode.parallel]\ntp_size = 0", "decode.parallel.tp_size: is 0; it must be above 0"),
        ("[decode.parallel]\ntp = 2", "decode.parallel.tp: unknown key; "),
        ("[decode.parallel]\npp_size = 2", "decode.parallel.pp_size: unknown key; did you mean "),
        ("[prefill.parallel]\ntp_size = 3", "prefill.parallel: tp_size is 3, which does not divide the model's num_attention_heads"),
        ("[prefill.parallel]\ndcp_size = 2", "prefill.parallel.dcp_size: is 2: ranks that share a sequence's cache are for decode"),
        ("[prefill.parallel]\ndp_size = 2", "prefill.parallel.dp_size: is 2: data parallelism is for decode"),
        ("[decode.parallel]\ndp_size = 2\nis_expert_parallel = true", "decode.parallel.dp_size: is 2: the cluster does not start workers"),
        ("[decode.parallel]\npcp_size = 2", "decode.parallel.pcp_size: is 2: ranks that share a prompt's rows are for prefill"),
        ("[decode.parallel]\ntp_size = 2\ndcp_size = 4", "decode.parallel.dcp_size: is 4; it must divide tp_size, 2"),
        ("[runtime]\ncheckpoint = 'nowhere'", "runtime.checkpoint: there is no directory"),
    ],
)
def test_a_mistake_names_its_field_and_what_to_do(tmp_path: Path, text: str, expected: str) -> None:
    (line,) = _mistakes(tmp_path, text)
    assert line.startswith(expected)


@pytest.mark.parametrize(
    "text", ["[decode.parallel]\ntp_size = 2", "[prefill.parallel]\npcp_size = 2\n[decode.parallel]\ntp_size = 4\ndcp_size = 2"]
)
def test_workers_may_be_cut_into_different_ranks(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    config, _ = load_config(path)
    assert config.decode.parallel.num_ranks > config.prefill.parallel.num_ranks


def test_every_mistake_is_reported_at_once(tmp_path: Path) -> None:
    text = "[runtime]\nnum_thread = 1\n[gateway]\nport = 'x'\n[nowhere]\n"
    lines = _mistakes(tmp_path, text, Option("cluster.num_decode_workers", "--decode", "two"))
    assert len(lines) == 4
    assert any(line.startswith("runtime.num_thread: ") for line in lines)
    assert any(line.startswith("gateway.port: ") for line in lines)
    assert any(line.startswith("nowhere: ") for line in lines)
    assert any(line.startswith("--decode (cluster.num_decode_workers): ") for line in lines)


def test_a_value_from_the_command_line_is_blamed_on_its_option() -> None:
    with pytest.raises(ConfigError, match=r"^--prefill \(cluster\.num_prefill_workers\): is 0; it must be above 0$"):
        load_config(None, [Option("cluster.num_prefill_workers", "--prefill", 0)])


def test_options_reach_sections_within_sections(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[decode.parallel]\ntp_size = 4\nis_expert_parallel = true")
    config, _ = load_config(tmp_path / "a.toml", [Option("decode.parallel.tp_size", "--decode-tp", 2)])
    assert (config.decode.parallel.tp_size, config.decode.parallel.is_expert_parallel) == (2, True)
    with pytest.raises(ConfigError, match=r"--prefill-tp \(prefill\.parallel\.tp_size\): is 0; it must be above 0"):
        load_config(None, [Option("prefill.parallel.tp_size", "--prefill-tp", 0)])


def test_options_win_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[gateway]\nport = 1\nhost = 'a'")
    config, _ = load_config(tmp_path / "a.toml", [Option("gateway.port", "--port", 2)])
    assert (config.gateway.port, config.gateway.host) == (2, "a")


@pytest.mark.parametrize(("text", "expected"), [("[gateway\n", "is no TOML: "), ("a = 1\na = 2", "is no TOML: ")])
def test_broken_toml_names_file_and_line(tmp_path: Path, text: str, expected: str) -> None:
    (line,) = _mistakes(tmp_path, text)
    assert line.startswith(expected)
    assert "(at " in line


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read \(No such file or directory\)"):
        load_config(tmp_path / "none.toml")


def test_relative_checkpoints_are_read_from_the_files_folder(tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(SHIPPED_CHECKPOINT)
    (tmp_path / "a.toml").write_text("[runtime]\ncheckpoint = 'model'")
    assert load_config(tmp_path / "a.toml")[0].runtime.checkpoint == tmp_path / "model"


def test_a_truncated_checkpoint_is_refused_with_its_file(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in SHIPPED_CHECKPOINT.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        load_config(None, [Option("runtime.checkpoint", "--checkpoint", str(broken))])


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("[router]\nblock_size_tokens = 32", "router.block_size_tokens"),
        ("[router]\nkeys_look_ahead = true\n[runtime]\nmax_drafts = 0", "router.keys_look_ahead"),
        ("[runtime]\nmax_drafts = 9", "runtime.max_drafts"),
        ("[runtime]\nmin_draft_probability = 1.5", "runtime.min_draft_probability"),
        ('[runtime]\nverification = "fly"', "runtime.verification"),
        ("[runtime]\nmax_step_tokens = 63", "runtime.max_step_tokens"),
        ("[decode]\nmax_running = 4096", "decode.max_running"),
        ("[timers]\nlease_s = 5.0", "timers.lease_s"),
        ("[timers]\nprogress_interval_s = 5.0", "timers.no_progress_s"),
        ("[wire]\nping_interval_s = 4.0", "wire.silence_timeout_s"),
        ("[wire]\nreport_interval_s = 9.0", "cluster.restart.silence_timeout_s"),
        ("[gateway]\ndrain_s = 500.0", "gateway.drain_s"),
        ("[runtime]\nmax_model_len_tokens = 8193", "runtime.max_model_len_tokens"),
        ("[runtime]\ncache_bytes = 1000000", "runtime.cache_bytes"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(tmp_path: Path, text: str, path: str) -> None:
    lines = _mistakes(tmp_path, text)
    assert path in [line.split(":")[0] for line in lines]


def test_the_longest_admitted_request_must_fit_one_decode_worker(tmp_path: Path, model: GlmConfig) -> None:
    (line,) = _mistakes(tmp_path, "[runtime]\ncache_bytes = 60_000_000")
    assert "89 blocks" in line
    assert "(8192 tokens) needs 128" in line
    config = dataclasses.replace(ServeConfig(), runtime=dataclasses.replace(ServeConfig().runtime, cache_bytes=60_000_000))
    shorter = dataclasses.replace(config, gateway=dataclasses.replace(config.gateway, max_model_len_tokens=89 * 64))
    assert find_mistakes(shorter, model) == []
    longer = dataclasses.replace(config, gateway=dataclasses.replace(config.gateway, max_model_len_tokens=89 * 64 + 1))
    assert [mistake.path for mistake in find_mistakes(longer, model)] == ["runtime.cache_bytes"]


@pytest.mark.parametrize(("num_cores", "num_threads"), [(1, 1), (2, 1), (5, 2), (16, 8)])
def test_workers_share_the_cores(model: GlmConfig, num_cores: int, num_threads: int) -> None:
    assert resolve(ServeConfig(), model, num_cores=num_cores).runtime.num_threads == num_threads


def test_configured_threads_are_kept(model: GlmConfig) -> None:
    config = dataclasses.replace(ServeConfig(), runtime=dataclasses.replace(ServeConfig().runtime, num_threads=7))
    assert resolve(config, model, num_cores=2).runtime.num_threads == 7


def test_resolving_changes_nothing_in_place(model: GlmConfig) -> None:
    config = ServeConfig()
    resolve(config, model, num_cores=2)
    assert config == ServeConfig()


def test_what_check_config_prints_loads_back_into_the_same_configuration(tmp_path: Path) -> None:
    config, _ = load_config(None, [Option("cluster.num_decode_workers", "--decode", 3)])
    (tmp_path / "effective.toml").write_text(render_config(config))
    assert load_config(tmp_path / "effective.toml")[0] == config


def test_memory_counts_every_rank_of_every_worker() -> None:
    weight_bytes: Mapping[Role, int] = {"prefill": 1000, "decode": 1000}
    one_each = needed_memory_bytes(ServeConfig(), weight_bytes)
    more = dataclasses.replace(ServeConfig(), cluster=dataclasses.replace(ServeConfig().cluster, num_decode_workers=3))
    assert needed_memory_bytes(more, weight_bytes) == 2 * one_each
    cut = dataclasses.replace(ServeConfig(), decode=DecodeConfig(parallel=ParallelLayout(tp_size=3)))
    assert needed_memory_bytes(cut, weight_bytes) == 2 * one_each
    assert needed_memory_bytes(cut, {"prefill": 1000, "decode": 0}) == 2 * one_each - 3000


def test_cores_are_shared_by_all_ranks(model: GlmConfig) -> None:
    cut = dataclasses.replace(ServeConfig(), decode=DecodeConfig(parallel=ParallelLayout(tp_size=4)))
    assert resolve(cut, model, num_cores=10).runtime.num_threads == 2
    assert resolve(cut, model, num_cores=2).runtime.num_threads == 1


def test_a_role_gets_its_own_layout() -> None:
    cut = dataclasses.replace(ServeConfig(), decode=DecodeConfig(parallel=ParallelLayout(tp_size=4)))
    assert cut.runtime_of("decode").parallel.tp_size == 4
    assert cut.runtime_of("prefill") == cut.runtime
    assert [pool.num_ranks for pool in cut.pools] == [1, 4]


def _numbers_without_unit(part: object, path: str) -> Iterator[str]:
    units = ("_s", "_ms", "_us", "_bytes", "_tokens", "_blocks", "_characters", "_share")
    counts = ("num_", "max_", "min_", "control_rpc_tries", "recent_requests", "prefix_index_keys", "port", "directory_port")
    counts += ("tp_size", "pcp_size", "dcp_size", "dp_size")  # ranks, by the field's names for them
    for item in dataclasses.fields(part):  # type: ignore[arg-type]
        value = getattr(part, item.name)
        if dataclasses.is_dataclass(value):
            yield from _numbers_without_unit(value, f"{path}{item.name}.")
        elif (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and not item.name.endswith(units)
            and not item.name.startswith(counts)
        ):
            yield path + item.name


def test_numbers_carry_their_unit_or_say_that_they_count() -> None:
    assert list(_numbers_without_unit(ServeConfig(), "")) == []
