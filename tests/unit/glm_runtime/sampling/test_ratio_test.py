"""The ratio test, draft by draft: what always holds, what never does, and what replaces it."""

from typing import Any

import numpy as np
import pytest
import torch

from glm_runtime.sampling.noise import Stream, uniforms
from glm_runtime.sampling.ratio_test import DraftedRun, DraftSource, propose, verify_runs
from glm_runtime.sampling.rows import SampleRow
from glm_runtime.sampling.sampler import target_scores
from kv_transfer.messages import LogprobsMode, SamplingParameters

EVEN = np.full(4, 0.25, dtype=np.float32)


def make_run(num_drafts: int, drafts: list[int], proposed: list[Any] | None = None, seed: int = 0, **fields: Any) -> DraftedRun:
    given = SamplingParameters(max_tokens=99, seed=seed, **fields)
    rows = [SampleRow(parameters=given, token_index=number, drafts=drafts[:number]) for number in range(num_drafts + 1)]
    return DraftedRun(rows=rows, drafts=drafts, proposed=proposed)


def tokens_of(logits: torch.Tensor, runs: list[DraftedRun]) -> list[tuple[int, ...]]:
    return [tuple(sample.token for sample in run) for run in verify_runs(logits, runs)]


def test_drafts_from_the_same_distribution_all_hold() -> None:
    logits = torch.zeros(300, 4)
    runs = [make_run(2, [seed % 4, seed % 3], [EVEN, EVEN], seed=seed) for seed in range(100)]
    for run, stands in zip(runs, tokens_of(logits, runs), strict=True):
        assert stands[:2] == tuple(run.drafts)
        assert len(stands) == 3


@pytest.mark.parametrize("draft", [-1, 4, 99])
def test_what_is_no_token_never_holds_and_takes_nothing_from_the_target(draft: int) -> None:
    logits = torch.tensor([[0.0, 0.0, -99.0, -99.0]]).repeat(2 * 200, 1)
    for proposed in (None, [EVEN]):
        stands = tokens_of(logits, [make_run(1, [draft], proposed, seed=seed) for seed in range(200)])
        assert {len(each) for each in stands} == {1}
        assert {token for (token,) in stands} == {0, 1}


def test_a_guess_that_the_target_cannot_draw_never_holds() -> None:
    logits = torch.zeros(2 * 200, 4)
    stands = tokens_of(logits, [make_run(1, [2], None, seed=seed, allowed_token_ids=(0, 3)) for seed in range(200)])
    assert {len(each) for each in stands} == {1}
    assert {each[0] for each in stands} == {0, 3}


def test_a_rejected_guess_is_not_drawn_again() -> None:
    logits = torch.zeros(2 * 400, 4)
    stands = tokens_of(logits, [make_run(1, [2], None, seed=seed) for seed in range(400)])
    rejected = [each[0] for each in stands if len(each) == 1]
    assert 250 < len(rejected) < 350
    assert set(rejected) == {0, 1, 3}


def test_a_greedy_row_holds_its_best_token_alone() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [0.0, 1.0, 2.0], [3.0, 1.0, 2.0]])
    assert tokens_of(logits, [make_run(2, [1, 2], temperature=0.0)]) == [(1, 2, 0)]
    assert tokens_of(logits, [make_run(2, [1, 0], temperature=0.0)]) == [(1, 2)]
    assert tokens_of(logits, [make_run(2, [0, 2], temperature=0.0)]) == [(1,)]


def test_a_run_among_others_is_the_run_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5 * 4, 60_000, generator=generator)
    runs = [make_run(3, [7, 8, 9], None, seed=seed, top_k=30) for seed in range(5)]
    together = tokens_of(logits, runs)
    assert together == [tokens_of(logits[4 * number : 4 * number + 4], [run])[0] for number, run in enumerate(runs)]


def test_runs_without_drafts() -> None:
    assert tokens_of(torch.tensor([[0.0, 99.0], [99.0, 0.0]]), [make_run(0, []), make_run(0, [])]) == [(1,), (0,)]


def test_noise_is_by_token_index_and_purpose() -> None:
    streams = {stream: uniforms([5], [7], stream)[0] for stream in Stream}
    assert len(set(streams.values())) == len(Stream)
    assert uniforms([5, 5, 6], [7, 8, 7], Stream.ACCEPT).tolist() == [
        uniforms([seed], [index], Stream.ACCEPT)[0] for seed, index in ((5, 7), (5, 8), (6, 7))
    ]
    many = uniforms([3] * 20_000, range(20_000), Stream.RECOVER)
    assert 0.0 < many.min() < many.max() < 1.0
    assert abs(many.mean() - 0.5) < 0.01
    logits = torch.zeros(1, 50)
    first = propose(logits, [DraftSource(1, 4, 1.0)], 2)[0]
    assert first == propose(logits, [DraftSource(1, 6, 1.0)], 0)[0]


@pytest.mark.parametrize("mode", [LogprobsMode.RAW, LogprobsMode.PROCESSED])
def test_log_probabilities_are_told_of_what_stands(mode: LogprobsMode) -> None:
    logits = torch.tensor([[0.3, 0.1, 0.2, 0.0]]).repeat(3, 1)
    run = make_run(2, [1, 2], [EVEN, EVEN], temperature=0.5, logprobs=1, logprobs_mode=mode)
    for sample in verify_runs(logits, [run])[0]:
        assert sample.logprobs is not None
        scores = logits[0] if mode is LogprobsMode.RAW else torch.from_numpy(target_scores(logits[:1], run.rows[:1])[0])
        assert sample.logprobs.logprob == pytest.approx(float(torch.log_softmax(scores, 0)[sample.token]), abs=1e-6)
