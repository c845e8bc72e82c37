"""Which drafts hold. Pure.

Every row draws its token as it would without drafts: from the target's logits after all processing, with noise keyed by (seed, token
index). A draft holds iff it is the token that was drawn at its place, so the output does not depend on what was guessed, or whether
anything was.
"""

from collections.abc import Sequence


def accepted_run(drawn: Sequence[int], drafts: Sequence[int]) -> tuple[int, ...]:
    """The tokens that stand: up to and with the first that its draft did not foretell, or the one after the last draft.

    drawn: one more than drafts; drawn[i] is what drafts[i] guessed.
    """
    assert len(drawn) == len(drafts) + 1, f"{len(drafts)} drafts are verified by {len(drawn)} rows"
    for index, (token, draft) in enumerate(zip(drawn, drafts, strict=False)):
        if token != draft:
            return tuple(drawn[: index + 1])
    return tuple(drawn)
