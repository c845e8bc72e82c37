"""Constraints over the toy model's fifty tokens: 48 characters, a tag that ends thinking, and an end token."""

import functools
import json
import string

import torch
from torch import Tensor

from glm_runtime.sampling.grammar import GrammarCompiler, GrammarVocabulary
from kv_transfer.grammar import GrammarKind, GrammarSpec

CHARACTERS = string.ascii_lowercase + string.digits + string.ascii_uppercase[:12]
THINK_END, END = 48, 49
VOCAB_SIZE = 50

TOY_GRAMMARS = (
    *(
        GrammarSpec(GrammarKind.REGEX, regex, after_token)
        for regex in ("([a-f]{2}[0-3])*", "(ab|ba|c[0-9]{3}){2,9}", "[a-z]{3,30}")
        for after_token in (-1, THINK_END)
    ),
    # As tool calls begin: with their own tag, which the model may leave out if it likes.
    *(
        GrammarSpec(GrammarKind.LARK, "start: </think> /([a-f]{2}[0-3])*/", trigger_token=THINK_END, is_optional=is_optional)
        for is_optional in (False, True)
    ),
)


@functools.cache
def toy_grammars() -> GrammarCompiler:
    """All of them compiled: nobody waits, so that a bench needs no thread."""
    added = [
        {"id": number, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for number, text in ((THINK_END, "</think>"), (END, "<end>"))
    ]
    tree = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "vocab": {character: number for number, character in enumerate(CHARACTERS)}, "merges": []},
    }
    compiler = GrammarCompiler(GrammarVocabulary(json.dumps(tree), vocab_size=VOCAB_SIZE, end_ids=(END,), digest="toy"))
    for spec in TOY_GRAMMARS:
        compiler.start(spec)
    return compiler


def allowed_tokens(mask: Tensor) -> list[int]:
    """Token ids of one row of masks."""
    bits = (mask[:, None] >> torch.arange(32, dtype=torch.int32)) & 1
    return [token for token in bits.flatten().nonzero().flatten().tolist() if token < VOCAB_SIZE]
