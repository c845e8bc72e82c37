"""What is measured, and which ratios are goals: data and pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, unique

TRANSFORMERS = "transformers"
LLAMA_CPP = "llama.cpp"
OURS = "ours"


@unique
class Kind(Enum):
    """What an engine's best variant is chosen for."""

    DECODE_ONE = "decode, batch 1"
    DECODE_MANY = "decode, larger batches"
    PREFILL = "prefill"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One measurement. batch: 0 for a prefill of `context` tokens, else sequences that each have `context` tokens and decode.

    goals: by peer, the least ratio of our speed to its. peers: who takes part; without any, only our own speed is reported.
    steps: decode steps of a repeat, by system; a system that is not named takes `OUR_STEPS`. expected_s: of the whole case, for the
    progress line, measured on two cores of a 2025 server.
    """

    context: int
    batch: int = 0
    peers: tuple[str, ...] = (TRANSFORMERS, LLAMA_CPP)
    goals: Mapping[str, float] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)
    repeats: int = 3
    has_roofline_goal: bool = False
    expected_s: float = 5.0

    @property
    def kind(self) -> Kind:
        if self.batch == 0:
            return Kind.PREFILL
        return Kind.DECODE_ONE if self.batch == 1 else Kind.DECODE_MANY

    @property
    def name(self) -> str:
        return f"prefill {self.context}" if self.batch == 0 else f"decode, context {self.context}, batch {self.batch}"

    @property
    def tokens_per_call(self) -> int:
        """Tokens of what one time stands for: a step of the batch, or the whole prompt."""
        return self.batch or self.context

    def steps_of(self, system: str) -> int:
        """Decode steps of one repeat."""
        return self.steps.get(system, OUR_STEPS)


OUR_STEPS = 12

FULL_CASES: Sequence[Case] = (
    Case(context=128, batch=1, goals={LLAMA_CPP: 0.8}, repeats=5, expected_s=10),
    Case(context=128, batch=8, goals={LLAMA_CPP: 1.0}, repeats=5, steps={TRANSFORMERS: 6}, expected_s=15),
    Case(context=128, batch=16, goals={LLAMA_CPP: 1.0}, repeats=5, steps={TRANSFORMERS: 5}, has_roofline_goal=True, expected_s=25),
    Case(context=1024, batch=1, goals={TRANSFORMERS: 5.0, LLAMA_CPP: 0.8}, repeats=5, steps={TRANSFORMERS: 6}, expected_s=25),
    Case(context=1024, batch=8, goals={LLAMA_CPP: 1.0}, steps={TRANSFORMERS: 3}, expected_s=50),
    Case(
        context=1024,
        batch=16,
        goals={TRANSFORMERS: 25.0, LLAMA_CPP: 1.0},
        steps={TRANSFORMERS: 3},
        has_roofline_goal=True,
        expected_s=90,
    ),
    Case(context=8192, batch=1, peers=(TRANSFORMERS,), goals={TRANSFORMERS: 100.0}, steps={TRANSFORMERS: 3}, expected_s=120),
    Case(context=8192, batch=8, peers=(), expected_s=35),
    Case(context=8192, batch=16, peers=(), expected_s=40),
    Case(context=128, repeats=5, expected_s=8),
    Case(context=512, goals={TRANSFORMERS: 1.0}, repeats=5, expected_s=20),
    Case(context=1024, goals={LLAMA_CPP: 1.5}, expected_s=30),
    Case(context=2048, goals={TRANSFORMERS: 3.0}, expected_s=70),
)

QUICK_CASES: Sequence[Case] = (
    Case(context=100, batch=1, repeats=1, steps={TRANSFORMERS: 4}),
    Case(context=100, batch=4, repeats=1, steps={TRANSFORMERS: 4}, has_roofline_goal=True),
    Case(context=128, repeats=1),
)
"""The kinds of the full run on the small model: to see that everything works."""

PILOT_CASES: Mapping[Kind, Case] = {
    Kind.DECODE_ONE: Case(context=128, batch=1, repeats=2, steps={TRANSFORMERS: 6}),
    Kind.DECODE_MANY: Case(context=128, batch=16, repeats=2, steps={TRANSFORMERS: 3}),
    Kind.PREFILL: Case(context=512, repeats=2),
}
"""What an engine's best variant is chosen by."""

CHECK_TOLERANCE = 0.05


def check_lengths(index_topk: int) -> tuple[int, ...]:
    """Lengths of the prompts after which log-probabilities are compared: none so long that an indexer would choose."""
    return (3, index_topk // 8, index_topk - 12)
