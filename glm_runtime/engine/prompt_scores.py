"""Log-probabilities of one prompt, as its chunks are computed. Both workers keep them beside the sequence.

Knows: which prompt tokens a chunk can score, and what has been told. Does not know how they are computed or where they go.
"""

from collections.abc import Iterable

from kv_transfer.messages import SamplingParameters, TokenLogprobs


class PromptScores:
    """Of prompt tokens 1, 2 ...; the first follows nothing. num_top: how many of the largest beside each.

    A token is scored by the row before it, so nothing of such a prompt may come from a cache: the router asks under a salt of its own.
    """

    def __init__(self, num_prompt_tokens: int, num_top: int) -> None:
        self.num_top = num_top
        self._num_prompt_tokens = num_prompt_tokens
        self._told: list[TokenLogprobs] = []

    @property
    def told(self) -> tuple[TokenLogprobs, ...]:
        """What is known, from prompt token 1 on."""
        return tuple(self._told)

    @property
    def is_complete(self) -> bool:
        """Whether every token but the first is scored."""
        return len(self._told) == self._num_prompt_tokens - 1

    def positions(self, start: int, end: int) -> range:
        """Positions of the tokens that rows [start, end) score; none where that is done. Raises AssertionError for a gap."""
        if self.is_complete:
            return range(0)
        assert start == len(self._told), f"rows from {start} on, and {len(self._told)} tokens are scored"
        return range(start + 1, min(end + 1, self._num_prompt_tokens))

    def take(self, told: Iterable[TokenLogprobs]) -> None:
        """What a step has told of `positions`."""
        self._told += told


def open_scores(given: SamplingParameters, num_prompt_tokens: int, first_index: int) -> PromptScores | None:
    """None where nobody asks, or an earlier attempt has told: they go out with output token 0."""
    return PromptScores(num_prompt_tokens, given.prompt_logprobs) if given.prompt_logprobs >= 0 and first_index == 0 else None
