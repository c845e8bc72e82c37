"""Each processor, and all of them together, against the sampler in plain Python; rows do not know of each other."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_runtime.sampling.history import TokenHistory
from glm_runtime.sampling.rows import SampleRow
from glm_runtime.sampling.sampler import sample_rows, target_scores
from kv_transfer.messages import LogprobsMode, SamplingParameters
from tests.unit.glm_runtime.sampling.plain_sampler import PlainRow, plain_filter, plain_logprob, plain_sample, plain_scores

VOCABULARY = 70
"""No multiple of a mask's word."""
SETTINGS = settings(max_examples=150, derandomize=True, deadline=None)


def asking(**fields: Any) -> SamplingParameters:
    return SamplingParameters(max_tokens=50, **{"seed": 7, "temperature": 0.0, **fields})


def mask_of(allowed: frozenset[int]) -> torch.Tensor:
    bits = np.array([token in allowed for token in range(-(-VOCABULARY // 32) * 32)])
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32).copy())


def row_of(plain: PlainRow, num_drafts: int = 0) -> SampleRow:
    """The same row; the last `num_drafts` tokens of its output as drafts."""
    split = len(plain.output) - num_drafts
    return SampleRow(
        parameters=plain.given,
        token_index=plain.token_index,
        history=TokenHistory(plain.prompt, plain.output[:split]),
        drafts=tuple(plain.output[split:]),
        mask=mask_of(plain.allowed) if plain.allowed is not None else None,
    )


def random_logits(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 4


PROMPT, OUTPUT = (1, 2, 3, 2), (5, 6, 5, 3, 8, 5)

CASES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "bias": {"given": asking(logit_bias=((4, 3.5), (9, -100.0)))},
    "allowed": {"given": asking(allowed_token_ids=(3, 69, 11))},
    "grammar": {"allowed": frozenset({0, 31, 32, 63, 64, 69})},
    "grammar and allowed": {"given": asking(allowed_token_ids=(3, 69, 11)), "allowed": frozenset({11, 69, 12})},
    "min_tokens": {"given": asking(min_tokens=7, stop_token_ids=(3, 4, 10**6)), "token_index": 6},
    "min_tokens reached": {"given": asking(min_tokens=6, stop_token_ids=(3, 4)), "token_index": 6},
    "repetition": {"given": asking(repetition_penalty=1.7)},
    "repetition rewards": {"given": asking(repetition_penalty=0.6)},
    "frequency": {"given": asking(frequency_penalty=1.3)},
    "presence": {"given": asking(presence_penalty=-1.1)},
    "bad word of one": {"given": asking(bad_words=((4,), (7,)))},
    "bad word that has begun": {"given": asking(bad_words=((8, 5, 9), (5, 10), (6, 11)))},
    "bad word longer than the output": {"given": asking(bad_words=((1, 2, 3, 2, 5, 6, 5, 3, 8, 5, 9),))},
    "all": {
        "given": asking(
            logit_bias=((4, 3.5), (9, -2.0)), allowed_token_ids=tuple(range(60)), min_tokens=8, stop_token_ids=(1, 2),
            repetition_penalty=1.2, frequency_penalty=0.4, presence_penalty=0.3, bad_words=((5, 10), (4,)),
        ),
        "allowed": frozenset(range(0, 70, 2)),
    },
}  # fmt: skip


@pytest.mark.parametrize("num_drafts", [0, 1, 4])
@pytest.mark.parametrize("case", CASES)
def test_scores_are_those_of_the_plain_sampler(case: str, num_drafts: int) -> None:
    plain = PlainRow(**{"given": asking(), "token_index": 6, "prompt": PROMPT, "output": OUTPUT, **CASES[case]})
    logits = random_logits(len(case))
    hot = SamplingParameters(**{**{name: getattr(plain.given, name) for name in plain.given.__struct_fields__}, "temperature": 1.0})
    row = row_of(PlainRow(given=hot, token_index=6, prompt=PROMPT, output=OUTPUT, allowed=plain.allowed), num_drafts)
    scores = target_scores(logits, [row])[0]
    expected = plain_scores(logits[0].tolist(), plain)
    assert [score == -math.inf for score in scores] == [score == -math.inf for score in expected]
    assert scores[scores > -math.inf] == pytest.approx([score for score in expected if score > -math.inf], rel=1e-14)
    assert sample_rows(logits, [row_of(plain, num_drafts)])[0].token == plain_sample(logits[0].tolist(), plain)


def test_bias_comes_before_penalties_and_penalties_before_the_temperature() -> None:
    logits = torch.tensor([[1.0, 0.0]])
    given = asking(logit_bias=((0, -2.0),), repetition_penalty=2.0, frequency_penalty=0.5, temperature=2.0)
    row = SampleRow(parameters=given, token_index=1, history=TokenHistory((), (0,)))
    assert target_scores(logits, [row])[0].tolist() == [((1.0 - 2.0) * 2.0 - 0.5) / 2.0, 0.0]


def test_min_p_comes_before_top_k_and_top_k_before_top_p() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()

    def kept(**fields: Any) -> list[int]:
        row = SampleRow(parameters=asking(temperature=1.0, **fields), token_index=0)
        return [token for token, score in enumerate(target_scores(logits, [row])[0]) if score > -math.inf]

    assert kept(top_p=0.7) == [0, 1]
    assert kept(top_p=0.75) == [0, 1, 2]
    assert kept(top_k=3, top_p=0.75) == [0, 1], "0.7 of 0.9 is 0.78"
    assert kept(min_p=0.6, top_p=0.75) == [0, 1], "0.4 of 0.7 is 0.57"
    assert kept(min_p=0.76, top_k=2) == [0]


@pytest.mark.parametrize("fields", [{"bad_words": ((0,), (1,))}, {"min_tokens": 5, "stop_token_ids": (0, 1)}])
def test_a_row_with_nothing_left_lets_the_weaker_rules_go(fields: dict[str, Any]) -> None:
    logits = torch.arange(VOCABULARY, dtype=torch.float32)[None]
    row = SampleRow(parameters=asking(allowed_token_ids=(0, 1), **fields), token_index=0, history=TokenHistory((), ()))
    assert sample_rows(logits, [row])[0].token == 1
    apart = SampleRow(parameters=asking(allowed_token_ids=(0, 1)), token_index=0, mask=mask_of(frozenset({5, 6})))
    assert sample_rows(logits, [apart])[0].token == 6, "the grammar holds"
    assert sample_rows(logits, [SampleRow(parameters=asking(), token_index=0, mask=mask_of(frozenset()))])[0].token == VOCABULARY - 1


PARAMETERS = st.builds(
    SamplingParameters,
    max_tokens=st.just(50),
    seed=st.integers(0, 2**63 - 1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    top_k=st.sampled_from([0, 1, 5, 69]),
    stop_token_ids=st.sampled_from([(), (2, 3), (69,)]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    min_tokens=st.integers(0, 6),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    presence_penalty=st.sampled_from([0.0, -0.7]),
    logit_bias=st.sampled_from([(), ((5, 2.0), (6, -2.0))]),
    allowed_token_ids=st.sampled_from([(), tuple(range(5, 60))]),
    bad_words=st.sampled_from([(), ((5,), (6, 7))]),
    logprobs=st.integers(-1, 3),
    logprobs_mode=st.sampled_from(LogprobsMode),
)
TOKENS = st.lists(st.integers(0, 9), max_size=8).map(tuple)
ROWS = st.builds(
    PlainRow,
    given=PARAMETERS,
    token_index=st.integers(0, 9),
    prompt=TOKENS,
    output=TOKENS,
    allowed=st.one_of(st.none(), st.frozensets(st.integers(0, 69), min_size=30)),
)


@SETTINGS
@given(rows=st.lists(ROWS, min_size=1, max_size=5), seed=st.integers(0, 50), cut=st.integers(0, 3))
def test_any_rows_draw_what_the_plain_sampler_draws_and_the_same_alone(rows: list[PlainRow], seed: int, cut: int) -> None:
    logits = random_logits(seed, len(rows))
    prepared = [row_of(row, min(cut, len(row.output))) for row in rows]
    samples = sample_rows(logits, prepared)
    assert [one.token for one in samples] == [plain_sample(logits[index].tolist(), row) for index, row in enumerate(rows)]
    for index, row in enumerate(prepared):
        assert sample_rows(logits[index : index + 1], [row]) == [samples[index]], "to the last bit, log-probabilities too"
        told = samples[index].logprobs
        assert (told is None) == (row.parameters.logprobs < 0)
        if told is not None:
            assert told.logprob == pytest.approx(expected_logprob(logits[index].tolist(), rows[index], samples[index].token), abs=1e-5)


def expected_logprob(logits: list[float], row: PlainRow, token: int) -> float:
    if row.given.logprobs_mode is LogprobsMode.RAW:
        return plain_logprob(logits, token)
    scores = plain_scores(logits, row)
    if row.given.temperature > 0:
        left = plain_filter(scores, row.given)
        scores = [left.get(other, -math.inf) for other in range(len(scores))]
    return plain_logprob(scores, token)


def test_rows_at_a_real_vocabulary_do_not_depend_on_the_batch() -> None:
    logits = torch.randn(6, 154_880, generator=torch.Generator().manual_seed(3)) * 3
    rows = [
        SampleRow(parameters=asking(temperature=1.0, top_p=0.95, logprobs=5, logprobs_mode=LogprobsMode.PROCESSED), token_index=0),
        SampleRow(parameters=asking(temperature=0.7), token_index=1),
        SampleRow(parameters=asking(repetition_penalty=1.2, logprobs=5), token_index=2, history=TokenHistory(range(1000), range(500, 900))),
        SampleRow(parameters=asking(temperature=1.0, top_k=50, min_p=0.01), token_index=3),
        SampleRow(parameters=asking(), token_index=4),
        SampleRow(parameters=asking(temperature=1.0, top_p=0.5, logit_bias=((7, 5.0),)), token_index=5),
    ]
    together = sample_rows(logits, rows)
    assert together == [sample_rows(logits[index : index + 1], [row])[0] for index, row in enumerate(rows)]
    assert together == list(reversed(sample_rows(logits.flip(0), rows[::-1])))
