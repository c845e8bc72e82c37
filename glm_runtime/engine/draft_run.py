"""The drafts of one step while they are made: which token each row guesses, and who goes on.

Knows: how a token is guessed and when a sequence stops. Does not know the layer (`glm_runtime.mtp`) or whose rows they are.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from glm_runtime.engine.draft_stop import StopRule, is_kept, pays_another_step
from glm_runtime.ops.impl import Impl
from glm_runtime.sampling.ratio_test import DraftSource, Probabilities, propose
from glm_runtime.vocabulary import KnownScores, Scores


class DraftRun:
    """One row a sequence. wanted: most drafts of each, at least one. rule: None makes them all.

    sources: how each row's drafts are drawn, None for the most probable token; empty is that for all. A row that draws its drafts goes on
    as long as a sure one would: how often they hold depends on how much both distributions have in common, not on how sure the layer is.
    """

    def __init__(self, wanted: Sequence[int], rule: StopRule | None, sources: Sequence[DraftSource | None], impl: Impl) -> None:
        self._wanted = wanted
        self._rule = rule
        self._sources = sources
        self._impl = impl
        self._chances = [1.0] * len(wanted)
        self._going = list(range(len(wanted)))
        self._tokens: list[list[int]] = []
        self.num_kept = [0] * len(wanted)
        self.proposals: list[list[Probabilities]] = [[] for _ in wanted]

    def take(self, logits: Tensor) -> Tensor | None:
        """`take_scores` of whole logits, [R, V] fp32."""
        return self.take_scores(Scores(logits, self._impl))

    def take_scores(self, scores: Scores | KnownScores) -> Tensor | None:
        """Guess after every row: [R] int64, or None when nobody goes on. On all ranks the same.

        Rows of sequences that have stopped are computed with the others: a draft step costs about the same with them.
        """
        best, chances = scores.best_with_chances() if self._rule is not None else (scores.best(), None)
        ids = best.ids
        if any(self._sources):
            ids = self._draw(scores.whole(), ids)
        self._tokens.append(ids.tolist())
        going = self._going
        if self._rule is not None and chances is not None:
            probabilities = chances.tolist()
            for row in going:
                if not self._sources or self._sources[row] is None:
                    self._chances[row] *= probabilities[row]
            kept = is_kept(self._rule, [self._chances[row] for row in going])
            going = [row for row, is_verified in zip(going, kept, strict=True) if is_verified]
        for row in going:
            self.num_kept[row] += 1
        self._going = [row for row in going if self.num_kept[row] < self._wanted[row]]
        if self._rule is not None and not pays_another_step(self._rule, [self._chances[row] for row in self._going]):
            return None
        return ids if self._going else None

    def _draw(self, logits: Tensor, ids: Tensor) -> Tensor:
        rows = [row for row in self._going if self._sources[row] is not None]
        sources = [source for row in rows if (source := self._sources[row]) is not None]
        if not rows:
            return ids
        drawn, probabilities = propose(logits[rows], sources, len(self._tokens))
        for row, each in zip(rows, probabilities, strict=True):
            self.proposals[row].append(each)
        return ids.index_copy(0, torch.tensor(rows), torch.from_numpy(drawn))

    def drafts(self) -> list[tuple[int, ...]]:
        """What is to be verified of each row."""
        return [tuple([step[row] for step in self._tokens[:count]]) for row, count in enumerate(self.num_kept)]
