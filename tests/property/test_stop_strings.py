"""However the text is cut, it ends at the same place; nothing of a stop string is ever shown."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from router.gateway.stop_strings import StopStrings

texts = st.text(alphabet="ab\n", max_size=30)
stop_lists = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), min_size=1, max_size=4)
cuts = st.lists(st.integers(0, 30), max_size=10)


def oracle(text: str, stops: list[str]) -> tuple[str, bool]:
    """One character at a time: the first end of a stop string, and of those that end there the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@given(texts, stop_lists, cuts)
def test_any_cut_gives_the_same_text(text: str, stops: list[str], cut_points: list[int]) -> None:
    filtered = StopStrings(stops)
    edges = [0, *sorted(min(point, len(text)) for point in cut_points), len(text)]
    shown = ""
    for start, end in itertools.pairwise(edges):
        shown += filtered.feed(text[start:end])
        expected, _ = oracle(text[:end], stops)
        assert expected.startswith(shown), "something was shown that had to be held back"
    was_stopped = filtered.is_stopped
    assert (shown + filtered.flush(), was_stopped) == oracle(text, stops)


@given(texts, stop_lists)
def test_no_more_is_held_back_than_could_still_become_a_stop_string(text: str, stops: list[str]) -> None:
    filtered = StopStrings(stops)
    shown = filtered.feed(text)
    held = text[len(shown) :]
    if not filtered.is_stopped and held:
        assert any(stop.startswith(held) for stop in stops)


@given(texts)
def test_without_stop_strings_everything_passes_at_once(text: str) -> None:
    assert StopStrings([]).feed(text) == text
