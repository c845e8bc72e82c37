"""Masks against brute force over a finite language, and a state that forgets, goes back and is replayed."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from glm_runtime.sampling.grammar import GrammarCompiler, GrammarState, GrammarVocabulary
from kv_transfer.errors import ConfigError, InvalidRequest
from kv_transfer.grammar import PARSER_LIMITS, GrammarKind, GrammarSpec, library_text
from router.gateway.tokenizer import TextTokenizer

TINY = Path(__file__).parents[4] / "glm_runtime" / "tiny"
TOKENIZER = TextTokenizer(TINY)
END_IDS = TOKENIZER.eos_token_ids
VOCAB_SIZE = 2600
"""More than the tokenizer has, and no multiple of 32."""
THINK_END = TOKENIZER.control_ids["</think>"]
CONTROL_IDS = frozenset(TOKENIZER.control_ids.values())

WORDS = ["yes", "yesterday", "no", "nö", "maybe not", "</think>", "/nothink", ""]
CHOICE = GrammarSpec(GrammarKind.LARK, "start: " + " | ".join(json.dumps(word) for word in WORDS))
DIGITS = GrammarSpec(GrammarKind.REGEX, r"a/[0-9]{2}(b|cd)?")
DIGIT_WORDS = [f"a/{number:02}{tail}" for number in range(100) for tail in ("", "b", "cd")]
OBJECT = GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "object", "properties": {"a": {"enum": [1, "</think>"]}}, "required": ["a"]}')


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(GrammarVocabulary.load(TINY, vocab_size=VOCAB_SIZE, end_ids=END_IDS))


def allowed(mask: Tensor) -> set[int]:
    """Token ids of one row."""
    bits = (mask[:, None] >> torch.arange(32, dtype=torch.int32)) & 1
    return set(bits.flatten().nonzero().flatten().tolist())


def by_brute_force(language: Sequence[str], prefix: bytes) -> set[int]:
    """Every token whose bytes lead on to a word of the language; the end where the prefix is one."""
    words = [word.encode() for word in language]
    assert any(word.startswith(prefix) for word in words), "the prefix leads nowhere"
    left = [word[len(prefix) :] for word in words if word.startswith(prefix)]
    texts = {
        token
        for token, text in enumerate(TOKENIZER.token_bytes)
        if text and token not in CONTROL_IDS and any(rest.startswith(text) for rest in left)
    }
    return texts | (set(END_IDS) if b"" in left else set())


@pytest.mark.parametrize(("spec", "language"), [(CHOICE, WORDS), (DIGITS, DIGIT_WORDS)], ids=["choice", "regex"])
def test_masks_are_those_of_brute_force_along_every_word(compiler: GrammarCompiler, spec: GrammarSpec, language: Sequence[str]) -> None:
    for word in language[:12]:
        state = compiler.start(spec)
        prefix = b""
        for token in [*TOKENIZER.encode_runs([word])[0], None]:
            assert allowed(state.masks()[0]) == by_brute_force(language, prefix), (word, prefix)
            if token is not None:
                assert state.accept([token])
                prefix += TOKENIZER.token_bytes[token]
        assert state.is_complete
        assert state.accept([END_IDS[1]])
        assert allowed(state.masks()[0]) == set(END_IDS), "nothing but an end follows an end"


def test_control_tokens_are_no_text(compiler: GrammarCompiler) -> None:
    """The spelling may come as text; the token of that spelling may not, whatever its `special` flag says."""
    state = compiler.start(CHOICE)
    mask = allowed(state.masks()[0])
    assert not mask & (CONTROL_IDS - set(END_IDS))
    assert {TOKENIZER.encode_runs([text])[0][0] for text in ("</think>", "/nothink")} <= mask


def test_the_rows_of_drafts_are_those_of_tokens(compiler: GrammarCompiler) -> None:
    tokens = TOKENIZER.encode_runs(['{"a": 1}'])[0]
    state = compiler.start(OBJECT)
    for start in range(len(tokens)):
        rows = state.masks(tokens[start:])
        one_by_one = compiler.start(OBJECT)
        assert one_by_one.accept(tokens[:start])
        for row, token in zip(rows, [*tokens[start:], None], strict=True):
            assert torch.equal(row, one_by_one.masks()[0])
            if token is not None:
                one_by_one.accept([token])
        assert state.accept([tokens[start]]), "looking at drafts has changed nothing"
    end_row, after_end = state.masks([END_IDS[0]])
    assert allowed(end_row) == set(END_IDS)
    assert bool((after_end == -1).all())


def test_rows_after_a_refused_draft_say_nothing(compiler: GrammarCompiler) -> None:
    state = compiler.start(OBJECT)
    good, bad = TOKENIZER.encode_runs(['{"'])[0][0], TOKENIZER.encode_runs(["z"])[0][0]
    rows = state.masks([good, bad, good])
    assert bad not in allowed(rows[1])
    assert torch.equal(rows[2:], torch.full_like(rows[2:], -1))
    assert torch.equal(rows[0], state.masks()[0])


@pytest.mark.parametrize("after_token", [-1, THINK_END], ids=["at once", "after thinking"])
def test_going_back_and_replaying_are_the_same_as_never_having_gone(compiler: GrammarCompiler, after_token: int) -> None:
    spec = GrammarSpec(OBJECT.kind, OBJECT.text, after_token)
    thinking = [] if after_token < 0 else [*TOKENIZER.encode_runs(["hm {"])[0], THINK_END]
    tokens = [*thinking, *TOKENIZER.encode_runs(['{"a": "</think>"}'])[0], END_IDS[0]]
    state = compiler.start(spec)
    fresh = [compiler.start(spec).masks()[0]]
    for token in tokens:
        assert state.accept([token])
        fresh.append(state.masks()[0])
    for kept in range(len(tokens) + 1):
        state.rollback(state.num_accepted - kept)
        replayed = compiler.start(spec)
        assert replayed.accept(tokens[:kept])
        assert state.has_begun == replayed.has_begun == (kept >= len(thinking))
        assert torch.equal(state.masks()[0], fresh[kept])
        assert torch.equal(replayed.masks()[0], fresh[kept])
        assert state.accept(tokens[kept:])


def test_the_digest_tells_how_far_a_state_is(compiler: GrammarCompiler) -> None:
    tokens = TOKENIZER.encode_runs(['{"a"'])[0]
    state = compiler.start(OBJECT)
    digests = [state.digest()]
    for token in tokens:
        state.accept([token])
        digests.append(state.digest())
    assert len(set(digests)) == len(digests)
    state.rollback(1)
    assert state.digest() == digests[-2]
    assert compiler.start(DIGITS).digest() != compiler.start(OBJECT).digest() == digests[0]


def test_thinking_is_free_but_may_not_end_the_answer(compiler: GrammarCompiler) -> None:
    state = compiler.start(GrammarSpec(OBJECT.kind, OBJECT.text, THINK_END))
    free = set(range(VOCAB_SIZE)) - set(END_IDS)
    rows = state.masks([5, THINK_END, TOKENIZER.encode_runs(['{"'])[0][0]])
    assert [allowed(row) == free for row in rows] == [True, True, False, False]
    constrained = compiler.start(OBJECT)
    assert torch.equal(rows[2], constrained.masks()[0])
    assert not state.has_begun
    assert bool((state.masks([END_IDS[0], 5])[1:] == -1).all())
    assert not state.accept([END_IDS[0]])
    assert state.error is not None


def test_a_token_that_may_not_come_is_an_error_and_ends_it(compiler: GrammarCompiler) -> None:
    state = compiler.start(OBJECT)
    assert not state.accept([5])
    assert state.error
    assert allowed(state.masks()[0]) == set(END_IDS)


def test_a_place_that_is_too_complex_is_an_error_of_the_request(compiler: GrammarCompiler) -> None:
    properties = {f"p{number}": {"type": "string"} for number in range(3000)}
    state = compiler.start(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps({"type": "object", "properties": properties})))
    assert not state.accept(TOKENIZER.encode_runs(['{"'])[0])
    assert allowed(state.masks()[0]) == set(END_IDS)
    assert state.error is not None
    assert "max is 2000" in state.error
    assert "<state>" not in state.error, "nobody's parser is shown to anybody"


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (GrammarKind.REGEX, "(a", "unclosed group"),
        (GrammarKind.REGEX, "(?=a)a", "look-around"),
        (GrammarKind.LARK, "start: nowhere", "unknown name"),
        (GrammarKind.JSON_SCHEMA, '{"type": "txt"}', "Invalid type"),
        (GrammarKind.JSON_SCHEMA, '{"not": {}}', "Unimplemented keys"),
        (GrammarKind.JSON_SCHEMA, "[]", "object or true"),
    ],
)
def test_what_cannot_be_compiled_says_why(compiler: GrammarCompiler, kind: GrammarKind, text: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        compiler.start(GrammarSpec(kind, text))


def test_a_lexer_that_others_have_worn_out_ends_nobody_s_output(compiler: GrammarCompiler) -> None:
    """Each place of a string of limited length is a state of the lexer, which all outputs of a grammar share."""
    limit = int(PARSER_LIMITS["max_lexer_states"])
    spec = GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "string", "maxLength": 1000000}')
    quote, letter = TOKENIZER.encode_runs(['"'])[0][0], TOKENIZER.encode_runs(["a"])[0][0]
    waiting, asking, long = compiler.start(spec), compiler.start(spec), compiler.start(spec)
    for state in (waiting, asking):
        assert state.accept([quote, letter])
    expected = compiler.start(spec)
    assert expected.accept([quote, letter])
    mask = expected.masks([letter])
    assert not long.accept([quote] + [letter] * (2 * limit)), "one output alone can use a lexer up"
    assert long.error is not None
    assert "lexer error" in long.error
    assert torch.equal(asking.masks([letter]), mask)
    assert asking.error is None
    assert waiting.accept([letter] * 10)
    assert compiler.start(spec).accept([quote, letter, quote, END_IDS[0]]), "the next one has a new lexer, too"


def test_compiled_grammars_are_kept_by_use(compiler: GrammarCompiler) -> None:
    small = GrammarCompiler(compiler.vocabulary, capacity=2)
    specs = [GrammarSpec(GrammarKind.REGEX, text) for text in ("a+", "b+", "c+")]
    small.start(specs[0])
    small.start(specs[1])
    assert small.find(GrammarSpec(GrammarKind.REGEX, "a+", after_token=7)) is not None, "where it begins is no part of the grammar"
    small.start(specs[2])
    assert [small.find(spec) is not None for spec in specs] == [True, False, True]
    assert small.num_compiled == 2


def test_a_lenient_schema_is_another_grammar() -> None:
    strict, lenient = (GrammarSpec(GrammarKind.JSON_SCHEMA, '{"uniqueItems": true}', is_lenient=given) for given in (False, True))
    assert strict.key != lenient.key
    assert '"lenient": true' in library_text(lenient)


@pytest.mark.parametrize("schema", ["true", '{"x-guidance": {"lenient": true}, "not": {}}'])
def test_a_schema_cannot_choose_our_options(compiler: GrammarCompiler, schema: str) -> None:
    if schema == "true":
        assert not compiler.start(GrammarSpec(GrammarKind.JSON_SCHEMA, schema)).is_complete
    else:
        with pytest.raises(InvalidRequest, match="Unimplemented keys"):
            compiler.start(GrammarSpec(GrammarKind.JSON_SCHEMA, schema))


def test_json_may_be_indented_but_not_spaced_out(compiler: GrammarCompiler) -> None:
    for text, is_allowed in (('{"a":1}', True), ('{\n    "a": 1\n}', True), ('{  "a": 1}', False), ('{\n\n"a": 1}', False)):
        state = compiler.start(OBJECT)
        assert state.accept(TOKENIZER.encode_runs([text])[0]) == is_allowed, text


@pytest.mark.parametrize("regex", ["a/b", r"a\/b", "a\nb", "a\\\nb", r"a\\/b", "/", r"[/]b\.", ""])
def test_a_regex_survives_its_slashes(compiler: GrammarCompiler, regex: str) -> None:
    texts = {"a/b": "a/b", r"a\/b": "a/b", "a\nb": "a\nb", "a\\\nb": "a\nb", r"a\\/b": "a\\/b", "/": "/", r"[/]b\.": "/b.", "": ""}
    state = compiler.start(GrammarSpec(GrammarKind.REGEX, regex))
    assert state.accept(TOKENIZER.encode_runs([texts[regex]])[0])
    assert state.is_complete


def test_a_tokenizer_that_does_not_fit_is_a_configuration_mistake() -> None:
    text = (TINY / "tokenizer.json").read_text(encoding="utf-8")
    with pytest.raises(ConfigError):
        GrammarVocabulary(text, vocab_size=100, end_ids=[1])
    with pytest.raises(ConfigError):
        GrammarVocabulary("{}", vocab_size=100, end_ids=[1])


def test_the_limits_are_names_that_the_library_knows() -> None:
    from llguidance import LLParserLimits

    limits = LLParserLimits(**PARSER_LIMITS)  # type: ignore[arg-type]
    assert {name: getattr(limits, name) for name in PARSER_LIMITS} == PARSER_LIMITS


def test_a_state_of_a_kept_grammar_is_its_own(compiler: GrammarCompiler) -> None:
    first, second = compiler.start(DIGITS), compiler.start(DIGITS)
    assert first.accept(TOKENIZER.encode_runs(["a/1"])[0])
    assert isinstance(second, GrammarState)
    assert allowed(second.masks()[0]) == by_brute_force(DIGIT_WORDS, b"")


CALL_START = TOKENIZER.control_ids["<tool_call>"]
CALL = "start: <tool_call> /[ab]{2}/ </tool_call>"


@pytest.mark.parametrize("is_optional", [False, True])
def test_a_trigger_begins_the_constraint_and_is_its_first_token(compiler: GrammarCompiler, is_optional: bool) -> None:
    spec = GrammarSpec(GrammarKind.LARK, CALL, trigger_token=CALL_START, is_optional=is_optional)
    state = compiler.start(spec)
    thinking = TOKENIZER.encode_runs(["hm a"])[0]
    tokens = [*thinking, CALL_START, *TOKENIZER.encode_runs(["ab"])[0], TOKENIZER.control_ids["</tool_call>"], END_IDS[0]]
    before = set(range(VOCAB_SIZE)) - (set() if is_optional else set(END_IDS))
    rows = state.masks(tokens)
    fresh = []
    for place, token in enumerate(tokens):
        assert torch.equal(rows[place], state.masks()[0]), "drafts see what tokens see"
        assert (allowed(rows[place]) == before) == (place <= len(thinking))
        assert state.is_complete == (is_optional and place <= len(thinking)) or place == len(tokens) - 1
        fresh.append(state.masks()[0])
        assert state.accept([token])
    for kept in range(len(tokens)):
        state.rollback(state.num_accepted - kept)
        assert state.has_begun == (kept > len(thinking))
        assert torch.equal(state.masks()[0], fresh[kept])
        assert state.accept(tokens[kept:])


def test_an_optional_constraint_lets_the_answer_end(compiler: GrammarCompiler) -> None:
    state = compiler.start(GrammarSpec(GrammarKind.LARK, CALL, trigger_token=CALL_START, is_optional=True))
    assert state.accept([5, END_IDS[1]])
    assert allowed(state.masks()[0]) == set(END_IDS)
    assert not state.accept([CALL_START]), "nothing but an end follows an end"
    assert not compiler.start(GrammarSpec(GrammarKind.LARK, CALL, trigger_token=CALL_START)).accept([5, END_IDS[1]])


def test_thinking_ends_with_a_call_or_its_own_tag(compiler: GrammarCompiler) -> None:
    spec = GrammarSpec(GrammarKind.LARK, CALL, THINK_END, trigger_token=CALL_START)
    for tokens in ([5, CALL_START], [5, THINK_END, CALL_START]):
        state = compiler.start(spec)
        assert state.accept(tokens)
        assert state.has_begun
        assert allowed(state.masks()[0]) == allowed(compiler.start(GrammarSpec(GrammarKind.REGEX, "[ab]{2}")).masks()[0])
    assert not compiler.start(spec).accept([THINK_END, 5])
