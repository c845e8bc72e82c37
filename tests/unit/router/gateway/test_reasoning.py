"""Whether a prompt leaves thinking open."""

import pytest

from router.gateway.reasoning import find_think_end

USER, ASSISTANT, OPEN, CLOSE = 1, 2, 3, 4


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ([USER, 9, ASSISTANT, OPEN], True),
        ([USER, 9, ASSISTANT, OPEN, 7], True),
        ([USER, 9, ASSISTANT, OPEN, CLOSE], False),
        ([USER, 9, ASSISTANT], False),
        ([USER, 9, ASSISTANT, OPEN, CLOSE, 8, USER, 9, ASSISTANT], False),
        ([USER, 9, ASSISTANT, OPEN, CLOSE, 8, USER, 9, ASSISTANT, OPEN], True),
        ([], False),
    ],
)
def test_thinking_is_open_where_the_last_tag_opens_it(prompt: list[int], is_open: bool) -> None:
    assert find_think_end(prompt, OPEN, CLOSE) == (CLOSE if is_open else None)


def test_a_vocabulary_without_tags_has_no_thinking() -> None:
    assert find_think_end([USER, 9, ASSISTANT], None, None) is None
    assert find_think_end([USER, OPEN], OPEN, None) is None
