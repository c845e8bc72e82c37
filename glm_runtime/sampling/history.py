"""The tokens of one sequence as penalties and bad words see them: counted once, when they come, and not again at each step.

Knows: which tokens the prompt has, how often each is in the output, and the output's end. Does not know parameters or logits.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from glm_runtime.sampling.parameters import reads_history
from kv_transfer.request_values import SamplingParameters

Ids = NDArray[np.int64]
Counts = NDArray[np.int64]
Flags = NDArray[np.bool_]


def open_history(packed: bytes | bytearray, num_prompt_tokens: int, given: SamplingParameters) -> "TokenHistory | None":
    """The history of packed tokens, prompt first and then output; None where `given` reads none."""
    if not reads_history(given):
        return None
    tokens = np.frombuffer(bytes(packed), dtype="<i4")
    return TokenHistory(tokens[:num_prompt_tokens], tokens[num_prompt_tokens:].tolist())


class TokenHistory:
    """Prompt and output of one sequence. Grows by `extend`, is rolled back by `truncate`; both cost what they add or remove.

    The prompt is the client's: tokens that earlier attempts have emitted are output. Not thread-safe: whoever extends it does so
    between steps, and `sample_rows` only reads.
    """

    def __init__(self, prompt: Sequence[int] | NDArray[np.int32], output: Iterable[int] = ()) -> None:
        distinct = np.unique(np.asarray(prompt, dtype=np.int64))
        self.output: list[int] = []
        self._ids: Ids = distinct
        self._counts: Counts = np.zeros(len(distinct), dtype=np.int64)
        self._is_prompt: Flags = np.ones(len(distinct), dtype=bool)
        self._num_ids = len(distinct)
        self._place_of = dict(zip(distinct.tolist(), range(len(distinct)), strict=True))
        self.extend(output)

    def extend(self, tokens: Iterable[int]) -> None:
        """Take the next output tokens."""
        for token in tokens:
            self.output.append(token)
            place = self._place(token)  # may replace the arrays
            self._counts[place] += 1

    def truncate(self, num_output_tokens: int) -> None:
        """Forget output tokens from index `num_output_tokens` on."""
        for token in self.output[num_output_tokens:]:
            self._counts[self._place_of[token]] -= 1
        del self.output[num_output_tokens:]

    def counted(self, drafts: Sequence[int] = ()) -> tuple[Ids, Counts, Flags]:
        """(ids, how often each is in the output and `drafts`, whether it is in the prompt); each id once, in no particular order.

        Views of the history's own arrays when there are no drafts: valid until it changes, not to be written.
        """
        end = self._num_ids
        ids, counts, is_prompt = self._ids[:end], self._counts[:end], self._is_prompt[:end]
        if not drafts:
            return ids, counts, is_prompt
        counts = counts.copy()
        new: dict[int, int] = {}
        for token in drafts:
            place = self._place_of.get(token)
            if place is None:
                new[token] = new.get(token, 0) + 1
            else:
                counts[place] += 1
        if not new:
            return ids, counts, is_prompt
        more_ids, more_counts = np.array(list(new), dtype=np.int64), np.array(list(new.values()), dtype=np.int64)
        return (
            np.concatenate([ids, more_ids]),
            np.concatenate([counts, more_counts]),
            np.concatenate([is_prompt, np.zeros(len(new), dtype=bool)]),
        )

    def tail(self, num_tokens: int, drafts: Sequence[int] = ()) -> list[int]:
        """The last output tokens, drafts included; fewer when there are fewer."""
        if num_tokens <= 0:
            return []
        known = [*self.output[max(len(self.output) - num_tokens, 0) :], *drafts]
        return known[-num_tokens:]

    def _place(self, token: int) -> int:
        place = self._place_of.get(token)
        if place is None:
            place = self._num_ids
            if place == len(self._ids):
                self._grow()
            self._ids[place], self._counts[place], self._is_prompt[place] = token, 0, False
            self._place_of[token] = place
            self._num_ids += 1
        return place

    def _grow(self) -> None:
        more = max(len(self._ids), 16)
        self._ids = np.concatenate([self._ids, np.zeros(more, dtype=np.int64)])
        self._counts = np.concatenate([self._counts, np.zeros(more, dtype=np.int64)])
        self._is_prompt = np.concatenate([self._is_prompt, np.zeros(more, dtype=bool)])
