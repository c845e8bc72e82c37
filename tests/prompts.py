"""Prompts of any length from the shipped checkpoint's held-out texts, as token ids."""

import functools
import itertools
import json

from tokenizers import Tokenizer

from cluster.config import SHIPPED_CHECKPOINT

STRIDE = 7919
"""Where prompt `number` starts in the tokens of all texts, times `number`: a prime, so that few prompts share a beginning."""


@functools.cache
def held_out_tokens() -> tuple[int, ...]:
    """All held-out texts one after the other."""
    tokenizer = Tokenizer.from_file(str(SHIPPED_CHECKPOINT / "tokenizer.json"))
    lines = (SHIPPED_CHECKPOINT / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [record["prompt"] + record["completion"] for record in map(json.loads, lines)]
    return tuple(itertools.chain.from_iterable(encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)))


def make_prompt(num_tokens: int, number: int) -> list[int]:
    """`num_tokens` tokens of running text; another `number` is another text."""
    tokens = held_out_tokens()
    start = number * STRIDE % len(tokens)
    return list(itertools.islice(itertools.cycle(tokens), start, start + num_tokens))
