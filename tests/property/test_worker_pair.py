"""Whatever happens in whatever order, the workers' answers are those of one process, and nobody keeps a block.

Engines, sessions and pools are the real ones, the model hashes every cache entry it attends to, time is virtual.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.config import DecodeConfig
from kv_transfer.geometry import CacheSharding
from kv_transfer.identity import RequestId
from kv_transfer.messages import SamplingParameters
from kv_transfer.transports.loopback import FaultPlan, LoopbackFabric
from prefill_worker.config import PrefillConfig
from tests.fakes.toy_grammars import END, TOY_GRAMMARS
from tests.fakes.toy_model import VOCAB_SIZE, toy_generate, toy_logprobs
from tests.fakes.worker_bench import BenchRequest, World

PREFIX = [3, 1, 4, 1, 5, 9, 2, 6] * 4
"""Shared by some prompts, so that they hit each other's blocks; others go on after an earlier prompt and its answer."""


@st.composite
def requests(draw: st.DrawFn) -> list[BenchRequest]:
    drawn: list[BenchRequest] = []
    beginnings = [PREFIX]
    for number in range(draw(st.integers(1, 8))):
        shared = draw(st.sampled_from(beginnings))[: draw(st.sampled_from([0, 8, 9, 15, 16, 17, 24, 25, 32]))]
        own = [draw(st.integers(0, VOCAB_SIZE - 1)) for _ in range(draw(st.integers(1, 12)))]
        stop = tuple(draw(st.sets(st.integers(0, VOCAB_SIZE - 1), max_size=1)))
        grammar = draw(st.sampled_from([None, None, *TOY_GRAMMARS]))
        sampling = SamplingParameters(
            max_tokens=draw(st.integers(1, 40)),
            seed=draw(st.integers(0, 9)),
            stop_token_ids=stop if grammar is None else tuple({*stop, END}),
            grammar=grammar,
            logprobs=draw(st.sampled_from([-1, -1, 2])),
            prompt_logprobs=draw(st.sampled_from([-1, -1, 1])),
        )
        beginnings.append(shared + own + toy_generate(shared + own, sampling)[:8])
        drawn.append(BenchRequest(RequestId(f"r{number}"), shared + own, sampling, is_local=draw(st.booleans())))
    return drawn


def assert_logprobs(request: BenchRequest) -> None:
    """Each token's, and each prompt token's but the first, once and in order."""
    given = request.sampling
    told = [toy_logprobs(token, given.logprobs) for token in request.output] if given.logprobs >= 0 else []
    assert request.logprobs == told
    if given.prompt_logprobs >= 0 and request.output:
        assert request.prompt_logprobs == [toy_logprobs(token, given.prompt_logprobs) for token in request.prompt[1:]]


def assert_answers(asked: list[BenchRequest]) -> None:
    for request in asked:
        expected = toy_generate(request.prompt, request.sampling)
        assert request.failure is None
        assert_logprobs(request)
        if request.is_cancelled:
            assert request.output == expected[: len(request.output)]
        else:
            assert request.output == expected


@settings(max_examples=100)
@given(
    requests(),
    st.integers(0, 2**32),
    st.integers(11, 30),
    st.integers(11, 30),
    st.sampled_from([8, 16, 40]),
    st.sampled_from([0.0, 0.005, 0.03]),
    st.sampled_from([0, 1, 3, 8]),
)
def test_answers_equal_one_process(
    asked: list[BenchRequest], seed: int, prefill_blocks: int, decode_blocks: int, budget: int, cancel_rate: float, max_drafts: int
) -> None:
    """With drafts too, whose keys the model checks at every position of every step."""
    world = World(
        seed=seed,
        prefill_blocks=prefill_blocks,
        decode_blocks=decode_blocks,
        max_step_tokens=budget,
        prefill_config=PrefillConfig(max_computing=3),
        decode_config=DecodeConfig(max_running=min(6, budget), max_chunk_tokens=16),
        max_drafts=max_drafts,
    )
    for request in asked:
        world.router.submit(request)
    for _ in range(world.rng.randrange(600)):
        world.turn()
        if world.rng.random() < cancel_rate:
            world.router.cancel(world.rng.choice(asked).request_id)
    world.settle()
    assert_answers(asked)


RANKS = {
    "replicated 2 to by_block 4": (CacheSharding.replicated(2), CacheSharding.by_block(4)),
    "by_block 2 to replicated 2": (CacheSharding.by_block(2), CacheSharding.replicated(2)),
    "replicated 4 to two pairs by block": (CacheSharding.replicated(4), CacheSharding(4, 2)),
}


@pytest.mark.parametrize("layouts", RANKS)
@settings(max_examples=25)
@given(requests(), st.integers(0, 2**32), st.integers(11, 24), st.integers(11, 24), st.sampled_from([0.0, 0.1]))
def test_so_do_those_of_workers_whose_ranks_are_cut_differently(
    layouts: str, asked: list[BenchRequest], seed: int, prefill_blocks: int, decode_blocks: int, error_rate: float
) -> None:
    """The model reads every byte on every rank that has it, so a block that was not copied among ranks in time shows, too."""
    prefill_sharding, decode_sharding = RANKS[layouts]
    world = World(
        seed=seed,
        prefill_blocks=prefill_blocks,
        decode_blocks=decode_blocks,
        fabric=LoopbackFabric(FaultPlan(error_rate=error_rate), seed=seed),
        max_drafts=5 * (seed % 2),
        prefill_sharding=prefill_sharding,
        decode_sharding=decode_sharding,
    )
    for request in asked:
        world.router.submit(request)
    for _ in range(world.rng.randrange(300)):
        world.turn()
    world.settle()
    assert_answers(asked)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 12), st.booleans()), min_size=1, max_size=4),
    st.integers(0, 2**32),
    st.integers(11, 40),
    st.integers(11, 40),
    st.sampled_from([0, 3]),
)
def test_turns_whose_prompts_end_at_a_block_s_edge(
    conversations: list[tuple[int, int, bool]], seed: int, prefill_blocks: int, decode_blocks: int, max_drafts: int
) -> None:
    """The key of such a prompt's last block looks at the first token of its answer, with which the next turn goes on."""
    world = World(seed=seed, prefill_blocks=prefill_blocks, decode_blocks=decode_blocks, max_drafts=max_drafts)
    prompts = [[number] * 8 * num_blocks for number, (num_blocks, _, _) in enumerate(conversations)]
    for turn in range(3):
        asked = []
        for number, (_, max_tokens, is_local) in enumerate(conversations):
            sampling = SamplingParameters(max_tokens=max_tokens, seed=seed % 100)
            request = BenchRequest(RequestId(f"r{number}.{turn}"), prompts[number], sampling, is_local=is_local and turn % 2 == 0)
            asked.append(world.router.submit(request))
        for _ in range(world.rng.randrange(200)):
            world.turn()
        world.settle()
        assert_answers(asked)
        ended = [request.prompt + request.output for request in asked]
        prompts = [[*tokens, *range(8 - len(tokens) % 8)] for tokens in ended]


@settings(max_examples=30)
@given(requests(), st.integers(0, 2**32), st.floats(0, 0.2))
def test_failing_reads_cost_attempts_but_no_token(asked: list[BenchRequest], seed: int, error_rate: float) -> None:
    fabric = LoopbackFabric(FaultPlan(error_rate=error_rate, max_delay_s=0.3), seed=seed)
    world = World(seed=seed, num_prefills=2, num_decodes=2, fabric=fabric, max_drafts=5 * (seed % 2))
    for request in asked:
        world.router.submit(request)
    for _ in range(200):
        world.turn()
    world.settle()
    assert_answers(asked)
