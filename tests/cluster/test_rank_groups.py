"""Workers of two ranks through the command line: the tokens of one process, and one rank's death is the worker's, once.

One cluster serves all of this file. Ranks sum in another order than one process does, so answers are compared up to the first place
where two tokens are almost equally good (`tests/rank_answers.py`).
"""

import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from kv_transfer.messages import SamplingParameters
from tests.glm_checkpoints import TINY
from tests.prompts import make_prompt
from tests.rank_answers import assert_answers, config_of, one_rank_answers
from tests.running_cluster import RunningCluster, Streaming, start_cluster, token_ids, wait_until

pytestmark = pytest.mark.cluster

CONFIG = """
[decode.parallel]
tp_size = 2
[router]
local_prefill_below_tokens = 8192
[runtime]
max_step_tokens = 512
cache_bytes = 134217728
"""
FENCED_S = 1.0
LOST = re.compile(
    r"^(?P<time>\S+ \S+) WARNING cluster\.fleet worker lost worker_id=decode-0 rank=(?P<rank>\d+) failures=(?P<failures>\d+)", re.M
)


@pytest.fixture(scope="module")
def started() -> Iterator[RunningCluster]:
    running = start_cluster(config=CONFIG)
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture
def ranks(started: RunningCluster) -> Iterator[RunningCluster]:
    """The cluster with its decode worker of two ranks, serving; afterwards nothing may be held."""
    started.wait_until_serving()
    yield started
    started.wait_until_quiescent()


def assert_one_process_says_so(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], max_tokens: int) -> None:
    sampling = SamplingParameters(max_tokens=max_tokens, seed=0, temperature=0.0)
    assert [len(answer) for answer in answers] == [max_tokens for _ in prompts]
    assert_answers(answers, *one_rank_answers(config_of(TINY), prompts, sampling))


def test_a_group_answers_as_one_process(ranks: RunningCluster) -> None:
    worker = ranks.worker("decode-0")
    assert worker["parallel"] == "tp2"
    assert len(set(worker["rank_pids"])) == 2
    prompts = [make_prompt(length, 500 + number) for number, length in enumerate((5, 64, 150, 700, 1300))]
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda prompt: token_ids(ranks.complete(prompt, 48)), prompts))
    assert_one_process_says_so(prompts, answers, 48)
    accepted = ranks.worker("decode-0")["accepted"]
    assert sum(accepted) > 0, "both ranks draft"


def test_what_only_the_leading_rank_reads_reaches_every_answer(ranks: RunningCluster) -> None:
    """Grammars, penalties and log-probabilities stay with rank 0; the other rank learns what was drawn."""
    prompt = make_prompt(90, 510)
    answer = ranks.complete(
        prompt, 24, temperature=0.7, seed=5, structured_outputs={"regex": "[0-9]{5}"}, frequency_penalty=0.5, logprobs=2, ignore_eos=False
    )
    (choice,) = answer["choices"]
    assert re.fullmatch("[0-9]{5}", choice["text"])
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])


@pytest.mark.parametrize("rank", [1, 0])
def test_a_rank_dies_in_the_middle_of_an_answer(ranks: RunningCluster, rank: int) -> None:
    prompts = [make_prompt(150, 520 + rank), make_prompt(400, 530 + rank)]
    pids = ranks.worker("decode-0")["rank_pids"]
    others = [psutil.Process(pid) for number, pid in enumerate(pids) if number != rank]
    num_lost = len(losses(ranks))
    streams = [Streaming(ranks, prompt, 240) for prompt in prompts]
    wait_until(lambda: all(len(stream.tokens) >= 20 for stream in streams), 60, lambda: "twenty tokens of each did not come")
    os.kill(pids[rank], signal.SIGKILL)
    killed_s = time.time()
    wait_until(lambda: all(map(has_ended, others)), 10, lambda: "the other ranks live on")
    ended_s = time.time() - killed_s
    assert all(len(stream.tokens) < 240 for stream in streams), "it must die before the answers are done"
    answers = [stream.finish() for stream in streams]
    assert_one_process_says_so(prompts, answers, 240)
    ranks.wait_until_serving()
    found = losses(ranks)[num_lost:]
    assert len(found) == 1, f"one death of a worker, however many of its ranks end: {found}"
    noticed_s, _, failures = found[0]
    print(f"rank {rank} of decode-0: noticed after {1e3 * (noticed_s - killed_s):.0f} ms, all ranks ended after {1e3 * ended_s:.0f} ms")
    assert max(ended_s, noticed_s - killed_s) < FENCED_S
    assert failures == num_lost + 1, "failures in a row are counted by worker"
    assert not set(pids) & set(ranks.worker("decode-0")["rank_pids"]), "all its ranks are others now"


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_given_up(ranks: RunningCluster) -> None:
    """SIGSTOP: no connection closes and Ray never notices; the rank's silence does it, in the middle of a step."""
    prompt = make_prompt(150, 540)
    pids = ranks.worker("decode-0")["rank_pids"]
    num_lost = len(losses(ranks))
    streaming = Streaming(ranks, prompt, 240)
    wait_until(lambda: len(streaming.tokens) >= 20, 60, lambda: "twenty tokens did not come")
    os.kill(pids[1], signal.SIGSTOP)
    stopped_s = time.time()
    assert_one_process_says_so([prompt], [streaming.finish()], 240)
    ranks.wait_until_serving()
    ((noticed_s, _, _),) = losses(ranks)[num_lost:]
    print(f"rank 1 of decode-0 stopped: given up after {noticed_s - stopped_s:.1f} s")
    assert noticed_s - stopped_s < 10
    (log,) = ranks.temp_dir.glob("glm-cluster-*/*/logs/decode-0.log")
    assert "rank 1 of decode-0 has not been heard for" in log.read_text()


def has_ended(process: psutil.Process) -> bool:
    """Whether it computes and serves no more; Ray may take its time to collect it."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def losses(cluster: RunningCluster) -> list[tuple[float, int, int]]:
    """When the supervisor has seen the decode worker die, by which rank, and which failure in a row that was."""
    (log,) = cluster.temp_dir.glob("glm-cluster-*/*/logs/supervisor.log")
    found = LOST.finditer(Path(log).read_text())
    return [
        (datetime.fromisoformat(match["time"].replace(",", ".")).timestamp(), int(match["rank"]), int(match["failures"])) for match in found
    ]
