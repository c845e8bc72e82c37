"""The codec of step plans against random runs of plans: what comes out is what went in, without what only the drawing rank reads."""

from dataclasses import replace

import hypothesis.strategies as st
import msgspec
from hypothesis import given

from glm_runtime.engine.draft_stop import StopRule
from glm_runtime.engine.plan_codec import PlanDecoder, PlanEncoder
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan
from glm_runtime.sampling.history import TokenHistory
from kv_transfer.geometry import BlockCopy
from kv_transfer.grammar import GrammarKind, GrammarSpec
from kv_transfer.identity import BlockId, SequenceId
from kv_transfer.messages import SamplingParameters

NAMES = [SequenceId(name) for name in "abcd"]
"""Few, so that ids leave and come back as other sequences."""

tokens = st.lists(st.integers(0, 150_000), max_size=5).map(tuple)
parameters = st.builds(
    SamplingParameters,
    max_tokens=st.integers(1, 9),
    seed=st.integers(0, 2),
    temperature=st.sampled_from([0.0, 0.5]),
    stop_token_ids=tokens,
    logit_bias=st.lists(st.tuples(st.integers(0, 9), st.floats(-1, 1)), max_size=2).map(tuple),
    grammar=st.sampled_from([None, GrammarSpec(GrammarKind.REGEX, "a+")]),
)
pieces = st.builds(
    SequenceSlice,
    sequence_id=st.sampled_from(NAMES),
    tokens=st.lists(st.integers(0, 150_000), min_size=1, max_size=6).map(tuple),
    start=st.integers(0, 100_000),
    block_table=st.lists(st.integers(0, 5).map(BlockId), max_size=8),
    sampling=st.none() | parameters,
    token_index=st.integers(0, 100),
    history=st.none() | st.just(TokenHistory([1, 2])),
    following=tokens,
    num_prompt_logprobs=st.integers(0, 3),
    num_drafts=st.integers(0, 5),
    next_token=st.none() | st.integers(0, 9),
    num_next_drafts=st.integers(0, 5),
    seed_hidden=st.none() | st.binary(max_size=4),
    num_seed_drafts=st.integers(0, 5),
    keeps_hidden=st.booleans(),
)
rules = st.none() | st.builds(StopRule, row=st.floats(0, 9), step=st.floats(0, 9))
plans = st.builds(
    StepPlan,
    step_number=st.integers(0, 1 << 40),
    slices=st.lists(pieces, max_size=4, unique_by=lambda piece: piece.sequence_id).map(tuple),
    stop_rule=rules,
    copies=st.lists(st.builds(BlockCopy, st.integers(0, 99).map(BlockId), st.integers(0, 7)), max_size=3).map(tuple),
)


def told(plan: StepPlan) -> StepPlan:
    """What the other ranks learn of a plan."""
    return replace(plan, slices=tuple(told_slice(piece) for piece in plan.slices))


def told_slice(piece: SequenceSlice) -> SequenceSlice:
    sampling = piece.sampling
    if sampling is not None and sampling.grammar is not None:
        sampling = msgspec.structs.replace(sampling, grammar=GrammarSpec(sampling.grammar.kind, ""))
    return msgspec.structs.replace(piece, history=None, grammar=None, sampling=sampling)


@given(st.lists(plans, max_size=8))
def test_decoding_gives_what_was_encoded(run: list[StepPlan]) -> None:
    encoder, decoders = PlanEncoder(), (PlanDecoder(), PlanDecoder())
    decoded = []
    for plan in run:
        frame = encoder.encode(plan)
        for decoder in decoders:
            decoded.append(decoder.decode(frame))
            assert decoded[-1] == told(plan)
    assert decoded == [told(plan) for plan in run for _ in decoders], "a later plan changed an earlier one"


def test_a_table_that_is_changed_in_place_is_sent_as_it_has_become() -> None:
    encoder, decoder = PlanEncoder(), PlanDecoder()
    table = [BlockId(block) for block in range(1000, 3000)]
    sizes = []
    for change in (lambda: None, lambda: None, lambda: table.append(BlockId(7)), lambda: table.__setitem__(1990, BlockId(8)), table.pop):
        change()
        piece = SequenceSlice(
            sequence_id=NAMES[0], tokens=(1,), start=9, block_table=table, sampling=SamplingParameters(max_tokens=9, seed=1)
        )
        frame = encoder.encode(StepPlan(step_number=1, slices=(piece,)))
        assert decoder.decode(frame).slices[0].block_table == table
        sizes.append(len(frame))
    first, same, grown, changed, shrunk = sizes
    assert first > 4000, "the first sight of a table is the table"
    assert max(same, grown, changed, shrunk) < 100, "later only what has changed travels"


def test_a_sequence_that_was_away_for_a_step_begins_anew() -> None:
    encoder = PlanEncoder()
    away = SequenceSlice(sequence_id=NAMES[0], tokens=(1,), start=9, block_table=[BlockId(block) for block in range(100)])
    other = SequenceSlice(sequence_id=NAMES[1], tokens=(1,), start=0, block_table=[BlockId(0)])
    first, _, again = (encoder.encode(StepPlan(step_number=0, slices=(piece,))) for piece in (away, other, away))
    assert first == again
    assert encoder.encode(StepPlan(step_number=0, slices=(away,))) != again
