"""Whether a prompt leaves thinking open.

Knows: a prompt that ends inside `<think>`, as this template's do, has an answer that begins there; tags of earlier turns say nothing.
Matches token ids, never text. Does not know the answer (`turn_parser.py`).
"""

from collections.abc import Sequence


def find_think_end(prompt: Sequence[int], start_id: int | None, end_id: int | None) -> int | None:
    """The token that will end the thinking which the prompt has opened; None where it opens none, or has ended it."""
    last_tag = next((token for token in reversed(prompt) if token in (start_id, end_id)), None)
    return end_id if last_tag is not None and last_tag == start_id else None
