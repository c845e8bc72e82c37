"""Step holders, the request check and the step meter."""

import math

import msgspec
import pytest

from glm_runtime.engine.request_check import RequestLimits, check_request
from glm_runtime.engine.step_holders import StepHolders
from glm_runtime.engine.step_meter import StepMeter
from kv_transfer.block_pool import BlockPool, Holder, HolderKind
from kv_transfer.errors import InvalidRequest, PromptTooLong
from kv_transfer.identity import PackedTokens, SequenceId, pack_tokens
from kv_transfer.messages import SamplingParameters

REQUEST = Holder(HolderKind.REQUEST, "r")
ONE, TWO = SequenceId("one"), SequenceId("two")


def test_blocks_of_a_step_stay_held_until_it_lands() -> None:
    pool = BlockPool(4, 8)
    holders = StepHolders(pool)
    blocks = pool.allocate(3, REQUEST)
    holders.cover(ONE, blocks)
    holders.launch([ONE])
    holders.uncover(ONE)
    pool.release_all(REQUEST)
    assert pool.num_free == 1
    holders.land()
    assert pool.num_free == 4


def test_a_sequence_that_is_not_in_the_step_lets_go_at_once() -> None:
    pool = BlockPool(4, 8)
    holders = StepHolders(pool)
    holders.cover(ONE, pool.allocate(2, REQUEST))
    holders.launch([TWO])
    holders.uncover(ONE)
    holders.uncover(ONE)
    pool.release_all(REQUEST)
    assert pool.num_free == 4
    holders.land()
    pool.audit()


def test_two_steps_in_flight_are_a_bug() -> None:
    holders = StepHolders(BlockPool(1, 8))
    holders.launch([ONE])
    with pytest.raises(AssertionError, match="in flight"):
        holders.launch([TWO])


LIMITS = RequestLimits(vocab_size=50, max_model_len_tokens=100, capacity_tokens=64)
SAMPLING = SamplingParameters(max_tokens=10, seed=0)


def check(tokens: PackedTokens, *, num_prompt_tokens: int = 3, first_index: int = 0, sampling: SamplingParameters = SAMPLING) -> None:
    check_request(tokens, num_prompt_tokens=num_prompt_tokens, first_index=first_index, sampling=sampling, limits=LIMITS)


def test_a_request_that_fits_exactly_is_taken() -> None:
    check(pack_tokens(range(3)), sampling=SamplingParameters(max_tokens=62, seed=0))
    check(pack_tokens(range(5)), first_index=2)


def test_one_token_more_than_fits_is_too_long() -> None:
    with pytest.raises(PromptTooLong, match="3 tokens and asks for 63 more; a sequence may have 65"):
        check(pack_tokens(range(3)), sampling=SamplingParameters(max_tokens=63, seed=0))


def test_a_prompt_that_is_only_scored_may_fill_the_context_and_the_pool() -> None:
    scored = SamplingParameters(max_tokens=1, seed=0, prompt_logprobs=0)
    by_context = RequestLimits(vocab_size=50, max_model_len_tokens=8, capacity_tokens=64)
    by_pool = RequestLimits(vocab_size=50, max_model_len_tokens=100, capacity_tokens=8)
    for limits in (by_context, by_pool):
        check_request(pack_tokens(range(8)), num_prompt_tokens=8, first_index=0, sampling=scored, limits=limits)
        with pytest.raises(PromptTooLong, match="9 tokens and asks for 1 more"):
            check_request(pack_tokens(range(9)), num_prompt_tokens=9, first_index=0, sampling=scored, limits=limits)
    for max_tokens, num_top, first_index in ((1, -1, 0), (2, 0, 0), (2, 0, 1)):
        wanted = SamplingParameters(max_tokens=max_tokens, seed=0, prompt_logprobs=num_top)
        with pytest.raises(PromptTooLong):
            check_request(
                pack_tokens(range(8 + first_index)), num_prompt_tokens=8, first_index=first_index, sampling=wanted, limits=by_context
            )


@pytest.mark.parametrize(
    ("tokens", "fields"),
    [
        (b"", {"num_prompt_tokens": 0}),
        (b"abc", {}),
        (pack_tokens([1, 2, 50]), {}),
        (pack_tokens([1, -2, 3]), {}),
        (pack_tokens([1, 2]), {}),
        (pack_tokens([1, 2, 3, 4]), {}),
        (pack_tokens(range(13)), {"first_index": 10}),
        (pack_tokens(range(2)), {"first_index": -1}),
    ],
    ids=["empty", "torn", "above the vocabulary", "negative", "too few", "too many", "nothing left", "negative index"],
)
def test_tokens_that_cannot_be_computed_are_the_request_s_fault(tokens: bytes, fields: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest):
        check(PackedTokens(tokens), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -1)],
)
def test_sampling_out_of_range_names_the_parameter(field: str, value: float) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(pack_tokens(range(3)), sampling=msgspec.structs.replace(SAMPLING, **{field: value}))
    assert caught.value.param == field


def test_the_meter_smooths_and_ignores_steps_without_prompts() -> None:
    meter = StepMeter()
    assert meter.start(1.0) == 1
    meter.end(100, 1.5)
    assert (meter.step_s, meter.prefill_tokens_per_s) == (0.5, 200.0)
    assert meter.start(2.0) == 2
    meter.end(0, 3.0)
    assert meter.step_s == pytest.approx(0.6)
    assert meter.prefill_tokens_per_s == 200.0
