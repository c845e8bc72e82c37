"""A prefill and a decode worker in two processes, with real sockets, real NIXL and the shipped checkpoint, without Ray.

What they answer must equal `glm_runtime.engine.offline.generate`, token by token; and when all is over nobody holds a block.
"""

import asyncio
import dataclasses
import multiprocessing
import secrets
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

import glm_runtime
from glm_runtime.runtime_config import RuntimeConfig
from kv_transfer.config import ProtocolTimers
from kv_transfer.identity import WorkerId
from kv_transfer.messages import FailureKind, FinishReason, SamplingParameters, WorkerLoad
from tests.fakes.link_router import Answer, LinkRouter
from tests.glm_checkpoints import CACHE_CHOICES

ResultT = TypeVar("ResultT")
RUNTIME = RuntimeConfig(checkpoint=Path(glm_runtime.__file__).parent / "tiny", cache_bytes=12 << 20, max_step_tokens=256, num_threads=1)
"""A pool of 21 blocks of 64 tokens, so that two long answers do not fit together."""
TIMERS = ProtocolTimers(credit_output_tokens=64)
GREEDY = SamplingParameters(max_tokens=12, seed=0, temperature=0.0)


def serve_prefill(port: int, secret: bytes, runtime: RuntimeConfig) -> None:
    """The prefill worker's process."""
    from glm_runtime.engine.worker_config import WorkerIdentity, WorkerNetwork
    from prefill_worker.config import PrefillConfig
    from prefill_worker.service import PrefillService

    identity = WorkerIdentity(worker_id=WorkerId("p0"), host="127.0.0.1", directory_host="127.0.0.1", directory_port=port, secret=secret)
    PrefillService(identity, runtime, PrefillConfig(), WorkerNetwork(timers=TIMERS)).run()


def serve_decode(port: int, secret: bytes, runtime: RuntimeConfig) -> None:
    """The decode worker's process."""
    from decode_worker.config import DecodeConfig
    from decode_worker.service import DecodeService
    from glm_runtime.engine.worker_config import WorkerIdentity, WorkerNetwork

    identity = WorkerIdentity(worker_id=WorkerId("d0"), host="127.0.0.1", directory_host="127.0.0.1", directory_port=port, secret=secret)
    DecodeService(identity, runtime, DecodeConfig(max_running=8, max_chunk_tokens=128), WorkerNetwork(timers=TIMERS)).run()


class Pair:
    """Both workers, and a router on an event loop of its own thread."""

    def __init__(self, runtime: RuntimeConfig = RUNTIME) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        secret = secrets.token_bytes(32)
        self.router = self.run(self._make_router(secret))
        port = self.run(self.router.start())
        spawn = multiprocessing.get_context("spawn")
        arguments = (port, secret, runtime)
        self._processes = [spawn.Process(target=target, args=arguments, daemon=True) for target in (serve_prefill, serve_decode)]
        for process in self._processes:
            process.start()
        self.run(self.router.wait_for_pair("p0", "d0"))

    @staticmethod
    async def _make_router(secret: bytes) -> LinkRouter:
        return LinkRouter(secret)

    def run(self, coroutine: Coroutine[Any, Any, ResultT], timeout_s: float = 120.0) -> ResultT:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    def ask(self, prompt: list[int], sampling: SamplingParameters = GREEDY, **options: Any) -> Answer:
        options.setdefault("prefill", "p0")
        return self.run(self.router.ask(prompt, sampling, decode="d0", **options))

    def ask_all(self, prompts: list[list[int]], sampling: list[SamplingParameters]) -> list[Answer]:
        async def together() -> list[Answer]:
            asked = (self.router.ask(p, s, decode="d0", prefill="p0") for p, s in zip(prompts, sampling, strict=True))
            return list(await asyncio.gather(*asked))

        return self.run(together())

    def load(self, name: str) -> WorkerLoad:
        """What the worker says once it is quiescent."""
        self.run(self.router.wait_until_quiescent(name))
        return self.router.loads[WorkerId(name)]

    def close(self) -> None:
        self.run(self.router.close())
        for process in self._processes:
            process.terminate()
            process.join(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


@pytest.fixture(scope="module")
def shared_pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


@pytest.fixture
def pair(shared_pair: Pair) -> Iterator[Pair]:
    """The pair; afterwards nobody may hold anything."""
    yield shared_pair
    shared_pair.run(shared_pair.router.wait_until_quiescent("p0", "d0"))


@pytest.fixture(scope="module")
def runtime() -> Any:
    from glm_runtime.runtime import GlmRuntime

    return GlmRuntime.load(RUNTIME)


def expected(runtime: Any, prompts: list[list[int]], sampling: list[SamplingParameters]) -> list[list[int]]:
    from glm_runtime.engine.offline import generate

    return generate(runtime, prompts, sampling, max_drafts=0)


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    return [(seed * 7919 + 31 * i * i + 17 * i) % 2500 for i in range(num_tokens)]


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 128, 300, 700])
def test_greedy_answers_equal_one_process(pair: Pair, runtime: Any, num_tokens: int) -> None:
    prompt = prompt_of(num_tokens, num_tokens)
    answer = pair.ask(prompt)
    assert answer.tokens == expected(runtime, [prompt], [GREEDY])[0]
    assert answer.finish is FinishReason.LENGTH


def test_concurrent_requests_of_mixed_length_and_sampling(pair: Pair, runtime: Any) -> None:
    prompts = [prompt_of(seed, 20 + 37 * seed) for seed in range(6)]
    sampling = [SamplingParameters(max_tokens=5 + 3 * seed, seed=seed, temperature=0.5 * (seed % 3), top_p=0.9) for seed in range(6)]
    answers = pair.ask_all(prompts, sampling)
    assert [answer.tokens for answer in answers] == expected(runtime, prompts, sampling)


def test_a_prefix_hit_on_both_sides(pair: Pair, runtime: Any) -> None:
    prompt = prompt_of(77, 200)
    pair.ask(prompt)
    longer = prompt + prompt_of(78, 100)
    answer = pair.ask(longer)
    assert answer.have_tokens == 192
    assert answer.num_cached_tokens == 192
    assert answer.tokens == expected(runtime, [longer], [GREEDY])[0]


def test_the_next_turn_begins_with_the_last_answer(pair: Pair, runtime: Any) -> None:
    first = prompt_of(80, 100)
    answer = pair.ask(first, SamplingParameters(max_tokens=60, seed=0, temperature=0.0))
    second = first + answer.tokens + prompt_of(81, 10)
    again = pair.ask(second)
    assert again.have_tokens == (100 + 60 - 1) // 64 * 64
    assert again.tokens == expected(runtime, [second], [GREEDY])[0]


def test_a_prompt_that_decode_computes_itself(pair: Pair, runtime: Any) -> None:
    prompt = prompt_of(5, 333)
    assert pair.ask(prompt, prefill=None).tokens == expected(runtime, [prompt], [GREEDY])[0]


def test_a_later_attempt_goes_on_where_the_first_left_off(pair: Pair, runtime: Any) -> None:
    prompt = prompt_of(6, 150)
    sampling = SamplingParameters(max_tokens=20, seed=9, temperature=1.0)
    whole = expected(runtime, [prompt], [sampling])[0]
    assert pair.ask(prompt, sampling, emitted=whole[:7]).tokens == whole[7:]
    assert pair.ask(prompt, sampling, emitted=whole[:13], prefill=None).tokens == whole[13:]


RICH = SamplingParameters(
    max_tokens=24, seed=11, temperature=0.9, top_p=0.95, top_k=60, min_p=0.01, min_tokens=6, stop_token_ids=(7, 8, 9),
    repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.3, logit_bias=((40, 2.0), (41, -3.0)),
    allowed_token_ids=tuple(range(1200)), bad_words=((5,), (40, 41)), logprobs=3,
)  # fmt: skip
"""All of the sampler at once."""


def test_all_of_the_sampler_equals_one_process_and_goes_on_after_a_resume(pair: Pair, runtime: Any) -> None:
    prompts = [prompt_of(40 + number, 30 + 45 * number) for number in range(3)]
    sampling = [msgspec.structs.replace(RICH, seed=number, temperature=0.45 * number) for number in range(3)]
    wholes = expected(runtime, prompts, sampling)
    answers = pair.ask_all(prompts, sampling)
    assert [answer.tokens for answer in answers] == wholes
    for prompt, given, whole, answer in zip(prompts, sampling, wholes, answers, strict=True):
        assert len(answer.logprobs) == len(whole)
        for count in (1, 5, 10):
            for prefill in ("p0", None):
                rest = pair.ask(prompt, given, emitted=whole[:count], prefill=prefill)
                assert rest.tokens == whole[count:], "what an earlier attempt has emitted is output: it is counted, and is no prompt"
                assert rest.logprobs == answer.logprobs[count:]


def test_a_prompt_is_scored_the_same_whoever_computes_it(pair: Pair) -> None:
    sampling = SamplingParameters(max_tokens=9, seed=0, temperature=0.0, logprobs=2, prompt_logprobs=2)
    handed = pair.ask(prompt_of(51, 150), sampling)
    assert (len(handed.prompt_logprobs), len(handed.logprobs)) == (149, 9)
    again = pair.ask(prompt_of(52, 150), sampling, prefill=None)
    assert (len(again.prompt_logprobs), len(again.logprobs)) == (149, 9)
    longer = pair.ask(prompt_of(51, 150) + handed.tokens + [5], msgspec.structs.replace(sampling, max_tokens=1), prefill=None, salt=b"x")
    assert longer.prompt_logprobs[149:158] == handed.logprobs
    assert longer.prompt_logprobs[:149] == handed.prompt_logprobs


def test_cancelled_while_it_computes(pair: Pair) -> None:
    answer = pair.ask(prompt_of(8, 900), cancel_after_s=0.1)
    assert answer.finish is None


def test_cancelled_while_it_decodes(pair: Pair, runtime: Any) -> None:
    sampling = SamplingParameters(max_tokens=400, seed=0, temperature=0.0)
    prompt = prompt_of(9, 70)
    answer = pair.ask(prompt, sampling, cancel_after_tokens=10)
    whole = expected(runtime, [prompt], [SamplingParameters(max_tokens=40, seed=0, temperature=0.0)])[0]
    assert answer.tokens[:40] == whole[: len(answer.tokens)][:40]


def test_a_pool_that_is_too_small_for_all_preempts_and_loses_nothing(pair: Pair, runtime: Any) -> None:
    sampling = [SamplingParameters(max_tokens=280, seed=seed, temperature=0.7) for seed in range(2)]
    prompts = [prompt_of(20 + seed, 500) for seed in range(2)]
    before = pair.load("d0").preemptions
    answers = pair.ask_all(prompts, sampling)
    assert [answer.tokens for answer in answers] == expected(runtime, prompts, sampling)
    assert pair.load("d0").preemptions > before


def test_what_cannot_fit_is_refused_by_name(pair: Pair) -> None:
    answer = pair.ask(prompt_of(1, 100), SamplingParameters(max_tokens=5000, seed=0))
    assert answer.failure is not None
    assert answer.failure.kind is FailureKind.REQUEST_FAULT
    assert answer.failure.code == "context_length_exceeded"


OTHER_FORMATS = [name if name == "fp8_ds_mla" else pytest.param(name, marks=pytest.mark.slow) for name in CACHE_CHOICES if name != "bf16"]


@pytest.mark.parametrize("name", OTHER_FORMATS)
def test_every_cache_format_survives_the_hand_off(name: str) -> None:
    """Handed over, found again as a prefix, and computed by decode itself: the tokens of one process with the same format."""
    from glm_runtime.runtime import GlmRuntime

    config = dataclasses.replace(RUNTIME, **CACHE_CHOICES[name])
    prompts = [prompt_of(40, 300), prompt_of(40, 300) + prompt_of(41, 90), prompt_of(42, 130)]
    pair = Pair(config)
    try:
        answers = [pair.ask(prompts[0]), pair.ask(prompts[1]), pair.ask(prompts[2], prefill=None)]
        pair.run(pair.router.wait_until_quiescent("p0", "d0"))
    finally:
        pair.close()
    assert answers[1].have_tokens == 256
    assert [answer.tokens for answer in answers] == expected(GlmRuntime.load(config), prompts, [GREEDY] * 3)
