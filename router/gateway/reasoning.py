"""Splits thinking from answer at the `</think>` token.

Knows: a prompt that ends inside `<think>`, as this template's do, has an answer that begins there. Matches token ids, never text:
tags that the model spells out as plain text stay text. Does not know what the tokens say.
"""

from collections.abc import Sequence


def find_think_end(prompt: Sequence[int], start_id: int | None, end_id: int | None) -> int | None:
    """The token that will end the thinking which the prompt has opened; None where it opens none, or has ended it."""
    last_tag = next((token for token in reversed(prompt) if token in (start_id, end_id)), None)
    return end_id if last_tag is not None and last_tag == start_id else None


class ReasoningSplitter:
    """One stream of tokens. Without an end-of-thinking token everything is thinking."""

    __slots__ = ("_end_id", "is_thinking")

    def __init__(self, end_id: int | None) -> None:
        self._end_id = end_id
        self.is_thinking = end_id is not None

    def split(self, tokens: Sequence[int]) -> tuple[Sequence[int], Sequence[int], bool]:
        """(thinking tokens, answer tokens, whether thinking ended in these tokens). The end token is in neither."""
        if not self.is_thinking:
            return (), tokens, False
        if self._end_id not in tokens:
            return tokens, (), False
        self.is_thinking = False
        at = tokens.index(self._end_id)
        return tokens[:at], tokens[at + 1 :], True
