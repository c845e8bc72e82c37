"""Two workers of each role under load while one after the other is killed: every stream ends with the tokens of a calm run."""

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.prompts import make_prompt
from tests.reference import Reference
from tests.running_cluster import start_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NUM_STREAMS = 24
NUM_KILLS = 6
SEED = 20261130


def test_streams_survive_a_storm_of_kills(reference: Reference) -> None:
    rng = random.Random(SEED)
    prompts = [make_prompt(rng.choice([40, 200, 700, 1500]), 400 + number) for number in range(NUM_STREAMS)]
    lengths = [rng.choice([20, 60, 150]) for _ in prompts]
    expected = [reference.greedy([prompt], length)[0] for prompt, length in zip(prompts, lengths, strict=True)]
    running = start_cluster("--prefill", "2", "--decode", "2", config="[router]\nmax_attempts = 50\n[runtime]\nmax_step_tokens = 512\n")
    try:
        with ThreadPoolExecutor(6) as threads:
            streams = [
                threads.submit(
                    lambda prompt=prompt, length=length: [token for tokens in running.stream(prompt, length) for token in tokens]
                )
                for prompt, length in zip(prompts, lengths, strict=True)
            ]
            for _ in range(NUM_KILLS):
                time.sleep(rng.uniform(1, 4))
                victims = [worker for worker in running.status()["workers"] if worker["state"] == "serving"]
                if victims:
                    victim = rng.choice(victims)
                    print(f"seed {SEED}: kill {victim['id']} (pid {victim['pid']})")
                    os.kill(victim["pid"], signal.SIGKILL)
            answers = [stream.result() for stream in streams]
        assert answers == expected
        running.wait_until_serving()
        running.wait_until_quiescent()
    finally:
        print(running.log_tails(60))
        running.stop()
