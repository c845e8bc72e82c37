"""Three tokens drawn with speculation have the joint distribution of three tokens drawn one by one, however drafts are made and verified.

The target and the MTP layer are tables here, of logits after the last token; everything else is what serves: `DraftRun`, `draw`, the
sampler. One request a seed. Keyed noise gives the same draws in every run, so a bound at p = 1e-4 does not flake.
"""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from glm_runtime.engine.draft_run import DraftRun
from glm_runtime.engine.draft_stop import StopRule
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan
from glm_runtime.engine.step_sampling import Proposals, draw
from glm_runtime.ops.vocab_argmax import Best, vocab_argmax
from glm_runtime.runtime_config import VerificationChoice
from glm_runtime.sampling.history import TokenHistory
from glm_runtime.sampling.ratio_test import DraftSource
from glm_runtime.sampling.rows import SampleRow
from glm_runtime.sampling.sampler import target_scores
from kv_transfer.identity import SequenceId
from kv_transfer.messages import SamplingParameters

NUM_REQUESTS = 50_000
NUM_PROCESSED = 12_000
"""Where penalties and filters, row by row, take most of the time."""
LEAST_P = 1e-4
LENGTH, MAX_DRAFTS, VOCABULARY = 3, 2, 4
TARGET = torch.tensor([[1.0, 0.4, -0.3, 0.1], [-0.5, 0.9, 0.7, -0.2], [0.2, 0.1, 0.0, 1.1], [0.6, -1.0, 0.5, 0.3]])
LAYER = torch.tensor([[0.1, 1.6, -0.3, 0.1], [0.5, 0.4, 1.7, -1.2], [0.9, -0.4, 0.3, 0.2], [0.0, 0.3, -0.5, 2.5]])
"""Rows: the last token. The layer is sure after 3 and 1, hardly after 2, and always wrong about something."""
STOPS = StopRule(row=0.45)
"""Ends drafting after tokens 0 and 2, and goes on after 1 and 3."""
PLAIN = {"temperature": 0.9}
PROCESSED = {"temperature": 1.2, "frequency_penalty": 0.8, "repetition_penalty": 1.3, "top_p": 0.9}


def parameters(seed: int, fields: dict[str, float]) -> SamplingParameters:
    return SamplingParameters(max_tokens=LENGTH, seed=seed, **fields)


def logits_of(last_tokens: Tensor, is_whole: bool) -> tuple[Tensor, Best]:
    logits = TARGET[last_tokens[:, 0]]
    return logits, vocab_argmax(logits)


class Requests:
    """All requests side by side; those that are done leave."""

    def __init__(self, fields: dict[str, float], verification: VerificationChoice, rule: StopRule | None, num_drafts: int) -> None:
        self.num_requests = NUM_PROCESSED if "frequency_penalty" in fields else NUM_REQUESTS
        numbers = range(self.num_requests)
        self.outputs: list[list[int]] = [[] for _ in numbers]
        self.sampling = [parameters(seed, fields) for seed in numbers]
        self.histories = [TokenHistory((0,)) if "frequency_penalty" in fields else None for _ in numbers]
        self.verification, self.rule, self.num_drafts = verification, rule, num_drafts
        self.num_drafted = self.num_held = 0

    def run(self) -> list[tuple[int, ...]]:
        while going := [number for number, output in enumerate(self.outputs) if len(output) < LENGTH]:
            self.step(going)
        return [tuple(output) for output in self.outputs]

    def last_token(self, number: int) -> int:
        return self.outputs[number][-1] if self.outputs[number] else 0

    def draft(self, going: list[int]) -> tuple[dict[int, tuple[int, ...]], Proposals]:
        """Of one request in four nobody knows any more what its drafts were drawn from."""
        wanted = {number: min(self.num_drafts, LENGTH - 1 - len(self.outputs[number])) for number in going}
        drafting = [number for number in going if wanted[number] > 0]
        if not drafting:
            return {}, {}
        sources: list[DraftSource | None] = []
        if self.verification == "ratio":
            sources += [
                DraftSource(number, len(self.outputs[number]), temperature=self.sampling[number].temperature) for number in drafting
            ]
        run = DraftRun([wanted[number] for number in drafting], self.rule, sources, "cpu")
        tokens: Tensor | None = torch.tensor([self.last_token(number) for number in drafting])
        while tokens is not None:
            tokens = run.take(LAYER[tokens])
        proposals = {
            SequenceId(str(number)): proposed[:kept]
            for number, proposed, kept in zip(drafting, run.proposals, run.num_kept, strict=True)
            if proposed and number % 4
        }
        return dict(zip(drafting, run.drafts(), strict=True)), proposals

    def step(self, going: list[int]) -> None:
        drafts, proposals = self.draft(going)
        slices = []
        for number in going:
            guessed = drafts.get(number, ())
            slices.append(
                SequenceSlice(
                    sequence_id=SequenceId(str(number)),
                    tokens=(self.last_token(number), *guessed),
                    start=0,
                    block_table=(),
                    sampling=self.sampling[number],
                    token_index=len(self.outputs[number]),
                    history=self.histories[number],
                    num_drafts=len(guessed),
                )
            )
        hidden = torch.tensor([token for piece in slices for token in piece.tokens])[:, None]
        drawn = draw(StepPlan(step_number=0, slices=tuple(slices)), hidden, logits_of, self.verification, proposals)
        for number, piece in zip(going, slices, strict=True):
            run = [sample.token for sample in drawn[piece.sequence_id]]
            self.num_drafted += piece.num_drafts
            self.num_held += len(run) - 1
            self.outputs[number] += run
            history = self.histories[number]
            if history is not None:
                history.extend(run)


def expected_joint(fields: dict[str, float]) -> dict[tuple[int, ...], float]:
    """By enumeration, token after token."""
    joint = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for before, share in joint.items():
            row = SampleRow(parameters=parameters(0, fields), token_index=len(before), history=TokenHistory((0,), before))
            scores = target_scores(TARGET[before[-1] if before else 0][None], [row])[0]
            chances = np.exp(scores - scores.max())
            for token, chance in enumerate(chances / chances.sum()):
                longer[(*before, token)] = share * float(chance)
        joint = longer
    return joint


def p_value(outputs: list[tuple[int, ...]], fields: dict[str, float]) -> float:
    joint = expected_joint(fields)
    counts = Counter(outputs)
    assert {output for output, share in joint.items() if share == 0.0}.isdisjoint(counts), "what cannot be drawn was put out"
    expected = {output: share * len(outputs) for output, share in joint.items() if share > 0.0}
    assert min(expected.values()) > 5
    chi_square = sum((counts[output] - number) ** 2 / number for output, number in expected.items())
    half_freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_freedom, torch.tensor(chi_square / 2, dtype=torch.float64)))


@pytest.fixture(scope="module")
def plain_outputs() -> list[tuple[int, ...]]:
    return Requests(PLAIN, "exact", None, 0).run()


def test_without_speculation(plain_outputs: list[tuple[int, ...]]) -> None:
    assert p_value(plain_outputs, PLAIN) > LEAST_P


def test_exact_verification_gives_every_request_the_same_tokens(plain_outputs: list[tuple[int, ...]]) -> None:
    requests = Requests(PLAIN, "exact", STOPS, MAX_DRAFTS)
    assert requests.run() == plain_outputs
    assert requests.num_held > 0


@pytest.mark.parametrize(
    ("verification", "rule", "fields"),
    [
        ("ratio_greedy", None, PLAIN), ("ratio", None, PLAIN), ("ratio_greedy", STOPS, PROCESSED), ("ratio", STOPS, PROCESSED),
    ],
    ids=["greedy", "drawn", "greedy-stops-processed", "drawn-stops-processed"],
)  # fmt: skip
def test_the_ratio_test_keeps_the_distribution(verification: VerificationChoice, rule: StopRule | None, fields: dict[str, float]) -> None:
    requests = Requests(fields, verification, rule, MAX_DRAFTS)
    outputs = requests.run()
    assert p_value(outputs, fields) > LEAST_P
    assert 0 < requests.num_held < requests.num_drafted
    assert requests.num_drafted >= requests.num_requests * MAX_DRAFTS or rule is not None, "all of the first step and more of later ones"


def test_the_bound_sees_a_distribution_that_is_a_little_off(plain_outputs: list[tuple[int, ...]]) -> None:
    """One output in twenty-five is drawn from all of them."""
    every = itertools.cycle(itertools.product(range(VOCABULARY), repeat=LENGTH))
    others = list(itertools.islice(every, NUM_REQUESTS // 25))
    assert p_value([*others, *plain_outputs[len(others) :]], PLAIN) < LEAST_P
