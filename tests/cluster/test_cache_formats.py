"""The cluster's answers in every cache format are one process's in that format: real Ray, real NIXL, HTTP, no margin.

Two formats in every run, the whole matrix with `make test-full`; a cluster is started for each.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest

from tests.prompts import make_prompt
from tests.reference import Reference
from tests.running_cluster import RunningCluster, cached_tokens, start_cluster, token_ids

pytestmark = pytest.mark.cluster

BLOCK = 64
MAX_STEP_TOKENS = 256
"""Smaller than the longest prompt, so that it is computed in chunks."""
MAX_TOKENS = 12

FORMATS: Mapping[str, Mapping[str, str]] = {
    "fp8_ds_mla+fp8": {"cache_format": "fp8_ds_mla"},
    "nvfp4_ds_mla+mxfp4": {"cache_format": "nvfp4_ds_mla", "index_format": "mxfp4"},
    "fp32+fp32": {"cache_format": "fp32"},
    "bf16+bf16": {"cache_format": "bf16"},
    "bf16+fp8": {"cache_format": "bf16", "index_format": "fp8"},
    "fp8_e4m3+fp8": {"cache_format": "fp8_e4m3"},
    "fp8_ds_mla+fp8, ue8m0 scales": {"cache_format": "fp8_ds_mla", "index_scale": "ue8m0"},
    "fp8_ds_mla+mxfp4": {"cache_format": "fp8_ds_mla", "index_format": "mxfp4"},
    "nvfp4_ds_mla+fp8": {"cache_format": "nvfp4_ds_mla"},
}
ALWAYS = ("fp8_ds_mla+fp8", "nvfp4_ds_mla+mxfp4")


@pytest.fixture(scope="module", params=[name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in FORMATS])
def choices(request: pytest.FixtureRequest) -> Mapping[str, str]:
    """Fields of the configuration's `[runtime]`."""
    return FORMATS[request.param]


@pytest.fixture(scope="module")
def cluster_of_format(choices: Mapping[str, str]) -> Iterator[RunningCluster]:
    fields: Mapping[str, Any] = {"max_step_tokens": MAX_STEP_TOKENS, **choices}
    running = start_cluster(config="[runtime]\n" + "".join(f"{name} = {value!r}\n" for name, value in fields.items()))
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="module")
def reference_of_format(choices: Mapping[str, str]) -> Reference:
    return Reference(choices)


def test_answers_equal_one_process(cluster_of_format: RunningCluster, reference_of_format: Reference) -> None:
    """Around block edges, in chunks, found again as a prefix, and the next turn after an answer that crosses a block's edge."""
    prompts = [make_prompt(length, number) for number, length in enumerate((1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1, 700))]
    answers = [cluster_of_format.complete(prompt, MAX_TOKENS) for prompt in prompts]
    again = cluster_of_format.complete(prompts[-1], MAX_TOKENS)
    assert cached_tokens(again) == 10 * BLOCK
    first = cluster_of_format.complete(prompts[3], BLOCK + 10)  # one more than a block: with drafts a key looks one token ahead
    turn = prompts[3] + token_ids(first) + make_prompt(30, 99)
    second = cluster_of_format.complete(turn, MAX_TOKENS)
    assert cached_tokens(second) >= BLOCK
    expected = reference_of_format.greedy([*prompts, prompts[-1], turn], MAX_TOKENS)
    assert [token_ids(answer) for answer in (*answers, again, second)] == expected
    assert [token_ids(first)] == reference_of_format.greedy([prompts[3]], BLOCK + 10)
    cluster_of_format.wait_until_quiescent()


def test_the_format_that_landed_is_shown(cluster_of_format: RunningCluster, choices: Mapping[str, str]) -> None:
    """In status, in /metrics and in each worker's log at start."""
    for worker_id in ("prefill-0", "decode-0"):
        landed = cluster_of_format.worker(worker_id)["cache_formats"]
        assert landed["mla_kv"] == choices["cache_format"]
        metrics = httpx.get(f"{cluster_of_format.url}/metrics", timeout=10).text
        for component, cache_format in landed.items():
            lines = [line for line in metrics.splitlines() if line.startswith("glm_worker_cache_format{") and worker_id in line]
            assert any(f'component="{component}"' in line and f'format="{cache_format}"' in line for line in lines), lines
        logs = sorted(cluster_of_format.temp_dir.glob(f"glm-cluster-*/*/logs/*{worker_id}*.log"))
        assert any(f" cache_format={choices['cache_format']} " in log.read_text() for log in logs)
