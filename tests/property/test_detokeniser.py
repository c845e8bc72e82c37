"""However the stream of tokens is cut, the text is the same, and it is the text that decoding at once gives."""

import itertools
import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from router.gateway.detokeniser import Detokeniser
from router.gateway.tokenizer import TextTokenizer

TINY = Path(__file__).parent.parent.parent / "glm_runtime" / "tiny"
TOKENIZER = TextTokenizer(TINY)
REFERENCE = Tokenizer.from_file(str(TINY / "tokenizer.json"))
SPECIAL = frozenset(token["id"] for token in json.loads((TINY / "tokenizer.json").read_text())["added_tokens"] if token["special"])
tokens_of_any_kind = st.lists(st.integers(0, TOKENIZER.num_token_ids - 1), max_size=40)
cuts = st.lists(st.integers(0, 40), max_size=10)


def decode_in_pieces(tokens: list[int], cut_points: list[int], hidden: frozenset[int]) -> str:
    detokeniser = Detokeniser(TOKENIZER.token_bytes, hidden)
    edges = [0, *sorted(min(point, len(tokens)) for point in cut_points), len(tokens)]
    pieces = [detokeniser.feed(tokens[start:end]) for start, end in itertools.pairwise(edges)]
    return "".join(pieces) + detokeniser.flush()


@given(tokens_of_any_kind, cuts)
def test_any_cut_gives_the_reference_text(tokens: list[int], cut_points: list[int]) -> None:
    assert decode_in_pieces(tokens, cut_points, frozenset()) == REFERENCE.decode(tokens, skip_special_tokens=False)
    assert decode_in_pieces(tokens, cut_points, SPECIAL) == REFERENCE.decode(tokens, skip_special_tokens=True)


@given(st.text(max_size=60), cuts)
def test_any_text_comes_back(text: str, cut_points: list[int]) -> None:
    (tokens,) = TOKENIZER.encode_runs([text])
    assert decode_in_pieces(tokens, cut_points, frozenset()) == text


@given(st.text(alphabet="aé日🙂", max_size=20))
def test_nothing_that_was_shown_is_taken_back(text: str) -> None:
    (tokens,) = TOKENIZER.encode_runs([text])
    detokeniser = Detokeniser(TOKENIZER.token_bytes)
    shown = ""
    for token in tokens:
        shown += detokeniser.feed([token])
        assert text.startswith(shown)
    assert shown == text


def test_ids_outside_the_vocabulary_add_nothing() -> None:
    detokeniser = Detokeniser(TOKENIZER.token_bytes)
    assert detokeniser.feed([10**6, -1]) == ""
