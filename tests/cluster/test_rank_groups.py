"""Workers of two ranks through the command line: what only rank 0 knows reaches answers, and one rank's death is its worker's, once.

Ranks sum in another order than one process does, so answers are compared up to the first place
where two tokens are almost equally good (`tests/rank_answers.py`).
"""

import os
import re
import signal
import time
from collections.abc import Sequence
from datetime import datetime

import psutil
import pytest

from kv_transfer.messages import SamplingParameters
from tests.glm_checkpoints import TINY
from tests.prompts import make_prompt
from tests.rank_answers import assert_answers, config_of, one_rank_answers
from tests.running_cluster import RunningCluster, Streaming, wait_until

pytestmark = pytest.mark.cluster

FENCED_S = 1.0
LOST = re.compile(r"^(?P<time>\S+ \S+) WARNING cluster\.fleet worker lost worker_id=decode-0 rank=\d+", re.M)


def assert_one_process_says_so(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], max_tokens: int) -> None:
    sampling = SamplingParameters(max_tokens=max_tokens, seed=0, temperature=0.0)
    assert [len(answer) for answer in answers] == [max_tokens for _ in prompts]
    assert_answers(answers, *one_rank_answers(config_of(TINY), prompts, sampling))


def test_each_rank_is_a_process_with_a_log_of_its_own(ranks: RunningCluster) -> None:
    for worker_id in ("prefill-0", "decode-0"):
        assert len(set(ranks.worker(worker_id)["rank_pids"])) == 2
        (log,) = ranks.temp_dir.glob(f"glm-cluster-*/*/logs/{worker_id}.rank1.log")
        assert "rank follows" in log.read_text()
    ranks.complete(make_prompt(90, 500), 64)
    assert sum(ranks.settled_worker("decode-0")["accepted"]) > 0, "ranks draft together"


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
    (noticed_s,) = found
    print(f"rank {rank} of decode-0: noticed after {1e3 * (noticed_s - killed_s):.0f} ms, all ranks ended after {1e3 * ended_s:.0f} ms")
    assert max(ended_s, noticed_s - killed_s) < FENCED_S
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
    (noticed_s,) = losses(ranks)[num_lost:]
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


def losses(cluster: RunningCluster) -> list[float]:
    """When the supervisor has seen the decode worker die."""
    (log,) = cluster.temp_dir.glob("glm-cluster-*/*/logs/supervisor.log")
    times = [match["time"] for match in LOST.finditer(log.read_text())]
    return [datetime.fromisoformat(time.replace(",", ".")).timestamp() for time in times]
