"""Rows of drafts: their limits as tables, and on the bench what they do to sequences, blocks and counters."""

import dataclasses

import pytest

from decode_worker.config import DecodeConfig
from decode_worker.draft_controller import STEPS_BETWEEN_MEASUREMENTS, DraftController
from decode_worker.speculative import choose_num_drafts, share_draft_rows
from glm_runtime.engine.calibration import MeasuredCosts
from glm_runtime.engine.draft_stop import StopRule
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan, StepResult
from kv_transfer.block_keys import block_keys
from kv_transfer.identity import RequestId, SequenceId, pack_tokens
from kv_transfer.messages import FinishReason, SamplingParameters, Tokens
from tests.fakes.toy_model import BLOCK_SIZE_TOKENS, ToyRunner, toy_generate
from tests.fakes.worker_bench import BenchRequest, World


@pytest.mark.parametrize(
    ("num_available", "num_wanted", "num_left_tokens", "expected"),
    [(5, 5, 100, 5), (2, 5, 100, 2), (5, 3, 100, 3), (5, 0, 100, 0), (0, 5, 100, 0), (5, 5, 3, 2), (5, 5, 1, 0), (5, 5, 0, 0)],
)
def test_choose_num_drafts(num_available: int, num_wanted: int, num_left_tokens: int, expected: int) -> None:
    chosen = choose_num_drafts(num_available=num_available, num_wanted=num_wanted, num_left_tokens=num_left_tokens)
    assert chosen == expected


@pytest.mark.parametrize(
    ("num_drafts", "budget_rows", "expected"),
    [((), 3, ()), ((5, 5), 10, (5, 5)), ((5, 5), 7, (5, 2)), ((5, 5, 5), 5, (5, 0, 0)), ((5,), 0, (0,)), ((5,), -2, (0,))],
)
def test_share_draft_rows(num_drafts: tuple[int, ...], budget_rows: int, expected: tuple[int, ...]) -> None:
    assert share_draft_rows(num_drafts, budget_rows) == expected


def request(name: str, num_tokens: int, max_tokens: int, *, is_local: bool = False, **sampling: object) -> BenchRequest:
    parameters = SamplingParameters(max_tokens=max_tokens, seed=1, **sampling)  # type: ignore[arg-type]
    return BenchRequest(RequestId(name), [(len(name) * 7 + i) % 50 for i in range(num_tokens)], parameters, is_local=is_local)


def runner_of(world: World) -> ToyRunner:
    runner = world.decodes[0].model.runner
    assert isinstance(runner, ToyRunner)
    return runner


@pytest.mark.parametrize("is_local", [False, True])
def test_several_tokens_a_step(is_local: bool) -> None:
    world = World(max_drafts=5)
    asked = world.router.submit(request("a", 20, 60, is_local=is_local))
    world.settle()
    assert asked.output == toy_generate(asked.prompt, asked.sampling)
    decode = world.decodes[0]
    deltas = [delta for _, _, message in world.wire.sent if isinstance(message, Tokens) for delta in message.deltas]
    assert max(len(delta.tokens) for delta in deltas) > 1
    assert decode.engine.meter.num_steps < 40
    drafts = decode.engine.drafts.meter
    assert drafts.drafted[0] >= drafts.accepted[0] > 0
    assert drafts.drafted == sorted(drafts.drafted, reverse=True)
    assert drafts.accepted == sorted(drafts.accepted, reverse=True)
    assert drafts.drafted[5:] == [0, 0, 0]


def test_a_handed_off_sequence_drafts_in_its_first_step() -> None:
    world = World(max_drafts=5)
    world.router.submit(request("a", 20, 60))
    world.settle()
    assert runner_of(world).num_seeded == 1


def test_a_record_without_the_layers_keys_costs_one_row_and_no_token() -> None:
    world = World(max_drafts=5)
    prefill = world.prefills[0]
    completed = prefill.sender.completed
    prefill.sender.completed = lambda sequence, token, now_s, hidden_state=None, logprobs=None: completed(sequence, token, now_s, None)  # type: ignore[method-assign]
    asked = world.router.submit(request("a", 20, 60))
    world.settle()
    assert asked.output == toy_generate(asked.prompt, asked.sampling)
    assert runner_of(world).num_seeded == 0


@pytest.mark.parametrize("cut", [slice(16), slice(0)])
def test_a_hidden_state_of_another_dtype_costs_one_row_and_no_token(cut: slice) -> None:
    world = World(max_drafts=5)
    prefill = world.prefills[0]
    completed = prefill.sender.completed

    def completed_in_half(sequence, token, now_s, hidden_state=None, logprobs=None):  # type: ignore[no-untyped-def]
        completed(sequence, token, now_s, hidden_state[cut], logprobs)

    prefill.sender.completed = completed_in_half  # type: ignore[method-assign]
    asked = world.router.submit(request("a", 20, 60))
    world.settle()
    assert asked.output == toy_generate(asked.prompt, asked.sampling)
    assert runner_of(world).num_seeded == 0


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4])
def test_no_row_beyond_the_last_token(max_tokens: int) -> None:
    world = World(max_drafts=8)
    asked = world.router.submit(request("a", 16, max_tokens))
    world.settle()
    assert asked.output == toy_generate(asked.prompt, asked.sampling)
    assert asked.finish is FinishReason.LENGTH
    drafts = world.decodes[0].engine.drafts.meter
    assert max((position + 1 for position, count in enumerate(drafts.drafted) if count), default=0) <= max(max_tokens - 2, 0)


def test_a_stop_token_inside_the_run_ends_it() -> None:
    free = toy_generate([(7 + i) % 50 for i in range(20)], SamplingParameters(max_tokens=30, seed=1))
    for place in range(1, 12):
        world = World(max_drafts=8)
        asked = world.router.submit(request("a", 20, 30, stop_token_ids=(free[place],)))
        world.settle()
        assert asked.output == free[: free.index(free[place]) + 1]
        assert asked.finish is FinishReason.STOP


@pytest.mark.parametrize("num_tokens", [BLOCK_SIZE_TOKENS * 2 - 1, BLOCK_SIZE_TOKENS * 2, BLOCK_SIZE_TOKENS * 2 + 1])
@pytest.mark.parametrize("is_local", [False, True])
def test_every_block_with_a_known_next_token_is_found_again(num_tokens: int, is_local: bool) -> None:
    """The last block of a prompt that ends at its edge gets its key when the first token is known."""
    world = World(max_drafts=3)
    asked = world.router.submit(request("a", num_tokens, 20, is_local=is_local))
    world.settle()
    tokens = pack_tokens(asked.prompt + asked.output)
    keys = block_keys(tokens, b"", BLOCK_SIZE_TOKENS, True)
    num_stored = (num_tokens + 19) // BLOCK_SIZE_TOKENS
    pool = world.decodes[0].model.pool
    assert len(pool.lookup(keys)) == num_stored


def test_the_next_token_decides_a_hit_of_the_last_block() -> None:
    world = World(max_drafts=3)
    first = world.router.submit(request("a", 2 * BLOCK_SIZE_TOKENS + 1, 4))
    world.settle()
    for last, expected in ((first.prompt[-1], 2), (first.prompt[-1] + 1, 1)):
        prompt = [*first.prompt[:-1], last]
        other = world.router.submit(BenchRequest(RequestId(f"b{last}"), prompt, SamplingParameters(max_tokens=4, seed=1)))
        world.settle()
        assert other.output == toy_generate(prompt, other.sampling)
        assert other.num_cached_tokens == expected * BLOCK_SIZE_TOKENS


def test_drafts_never_preempt() -> None:
    plain, drafting = (
        World(decode_blocks=7, max_drafts=max_drafts, decode_config=DecodeConfig(max_running=2, max_chunk_tokens=16))
        for max_drafts in (0, 8)
    )
    for world in (plain, drafting):
        for name in ("a", "bb"):
            world.router.submit(request(name, 12, 14, is_local=True))
        world.settle()
        assert world.decodes[0].engine.num_preemptions == 0


class TestController:
    """With costs told to it, on the bench's clock."""

    def make(self, *, draft_s: float, adapts: bool = True) -> DraftController:
        world = World(max_drafts=5)
        costs = MeasuredCosts(target={1: 0.010, 8: 0.024, 64: 0.300}, first={1: draft_s, 64: draft_s}, further={1: draft_s, 64: draft_s})
        return DraftController(dataclasses.replace(world.decodes[0].model, adapts_drafts=adapts, measured_costs=costs))

    def run(
        self, controller: DraftController, num_steps: int, num_accepted: int, *, num_sequences: int = 1, is_halved: bool = False
    ) -> list[int]:
        seen = []
        for number in range(num_steps):
            controller.choose(num_sequences)
            seen.append(controller.num_drafts)
            for _ in range(num_sequences):
                num_held = 0 if is_halved and number % 2 else num_accepted
                controller.meter.count(num_drafted=controller.num_drafts, num_accepted=min(num_held, controller.num_drafts))
            controller.take(StepPlan(step_number=0, slices=()), StepResult(step_number=0, samples={}), 0.01, 0)
        return seen

    def test_cheap_drafts_that_hold_are_all_made(self) -> None:
        assert self.run(self.make(draft_s=0.0001), 100, 5)[-1] == 5

    def test_drafts_that_never_hold_are_given_up_and_tried_again(self) -> None:
        controller = self.make(draft_s=0.002)
        seen = self.run(controller, 2000, 0)
        assert seen[-1] == 0
        assert 0 < sum(seen[1000:]) < 20
        assert self.run(controller, 20_000, 5)[-1] > 0

    def test_a_large_batch_drafts_less(self) -> None:
        controller = self.make(draft_s=0.001)
        assert self.run(controller, 400, 3, is_halved=True)[-1] == 3
        assert self.run(controller, 400, 3, is_halved=True, num_sequences=64)[-1] == 0

    def test_a_fixed_number_stays(self) -> None:
        assert set(self.run(self.make(draft_s=1.0, adapts=False), 100, 0)) == {5}

    def test_costs_are_not_followed_where_nothing_is_drafted(self) -> None:
        model = dataclasses.replace(World().decodes[0].model, adapts_drafts=True)
        assert model.max_drafts == 0
        controller = DraftController(model)
        for _ in range(STEPS_BETWEEN_MEASUREMENTS):
            controller.take(StepPlan(step_number=0, slices=()), StepResult(step_number=0, samples={}, target_s=0.01), 0.01, 1)
        assert controller._costs.costs().target.points == ()

    def test_early_stops_are_priced_by_what_is_measured(self) -> None:
        controller = self.make(draft_s=0.001)
        assert controller.stop_rule is None
        self.run(controller, 8, 5)
        rule = controller.stop_rule
        assert rule is not None
        assert 0.0 < rule.row < 1.0
        assert 0.0 < rule.step < 1.0
        self.run(controller, 2000, 0)
        assert controller.stop_rule is None, "at no drafts there is nothing to stop"

    @pytest.mark.parametrize(("least", "expected"), [(0.3, StopRule(row=0.3)), (0.0, None)])
    def test_a_configured_probability_is_the_rule(self, least: float, expected: StopRule | None) -> None:
        model = dataclasses.replace(World(max_drafts=5).decodes[0].model, adapts_drafts=True, min_draft_probability=least)
        controller = DraftController(model)
        self.run(controller, 20, 5)
        assert controller.stop_rule == expected

    def test_a_fixed_number_never_stops_by_itself(self) -> None:
        controller = self.make(draft_s=0.001, adapts=False)
        self.run(controller, 20, 5)
        assert controller.stop_rule is None

    def test_what_early_stops_leave_is_counted(self) -> None:
        controller = self.make(draft_s=0.001)
        piece = SequenceSlice(
            sequence_id=SequenceId("a"),
            tokens=(1,),
            start=0,
            block_table=(),
            sampling=SamplingParameters(max_tokens=9, seed=0),
            num_next_drafts=5,
        )
        result = StepResult(step_number=0, samples={}, drafts={SequenceId("a"): (1, 2)}, num_draft_steps=3)
        for _ in range(300):
            controller.take(StepPlan(step_number=0, slices=(piece,), stop_rule=StopRule(row=0.3)), result, 0.01, 1)
        assert controller.meter.made[1] > 0.95
        assert controller.meter.made[2] < 0.1
