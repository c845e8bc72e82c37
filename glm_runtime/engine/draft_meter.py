"""Counts drafts and how many of them held, by their position in a step."""

from glm_runtime.runtime_config import MOST_DRAFTS


class DraftMeter:
    """drafted[i], accepted[i]: over all steps so far, drafts at position i of their step, and those of them that held."""

    def __init__(self) -> None:
        self.drafted = [0] * MOST_DRAFTS
        self.accepted = [0] * MOST_DRAFTS

    def count(self, *, num_drafted: int, num_accepted: int) -> None:
        """One sequence's part of one step."""
        for position in range(num_drafted):
            self.drafted[position] += 1
        for position in range(num_accepted):
            self.accepted[position] += 1
