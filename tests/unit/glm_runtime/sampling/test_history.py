"""Counting as tokens come equals counting anew."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from glm_runtime.sampling.history import TokenHistory, open_history
from kv_transfer.identity import pack_tokens
from kv_transfer.messages import SamplingParameters

SETTINGS = settings(max_examples=200, derandomize=True, deadline=None)
TOKENS = st.lists(st.integers(0, 40), max_size=30)
STEPS = st.lists(st.one_of(TOKENS, st.integers(0, 30)), max_size=8)


def counts_of(history: TokenHistory, drafts: list[int]) -> tuple[Counter[int], set[int]]:
    ids, counts, is_prompt = history.counted(drafts)
    assert len(set(ids.tolist())) == len(ids), "each id once, or a store would lose one"
    return Counter({token: count for token, count in zip(ids.tolist(), counts.tolist(), strict=True) if count}), set(
        ids[is_prompt].tolist()
    )


@SETTINGS
@given(prompt=TOKENS, steps=STEPS, drafts=st.lists(st.integers(0, 60), max_size=6))
def test_counts_equal_those_of_counting_anew(prompt: list[int], steps: list[list[int] | int], drafts: list[int]) -> None:
    history = TokenHistory(prompt)
    output: list[int] = []
    for step in steps:
        if isinstance(step, int):
            output = output[:step]
            history.truncate(step)
        else:
            output += step
            history.extend(step)
        assert history.output == output
        assert counts_of(history, drafts) == (Counter(output + drafts), set(prompt))
        assert counts_of(history, []) == (Counter(output), set(prompt)), "drafts leave no trace"
        for length in range(6):
            assert history.tail(length, drafts) == ([*output, *drafts][-length:] if length else [])


def test_tokens_of_earlier_attempts_are_output() -> None:
    given = SamplingParameters(max_tokens=9, seed=1, presence_penalty=1.0)
    history = open_history(pack_tokens([1, 2, 3, 4, 4]), 3, given)
    assert history is not None
    assert counts_of(history, []) == (Counter({4: 2}), {1, 2, 3})
    assert open_history(pack_tokens([1, 2, 3]), 3, SamplingParameters(max_tokens=9, seed=1)) is None
