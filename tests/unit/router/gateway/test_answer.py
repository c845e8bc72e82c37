"""Tokens to thinking, content and finish reason."""

import pytest

from kv_transfer.messages import FinishReason
from router.gateway.answer import Answer, TextDelta
from router.gateway.tokenizer import TextTokenizer

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def said(delta: TextDelta) -> tuple[str, str, str | None]:
    return delta.reasoning, delta.content, delta.finish_reason


def make(tokenizer: TextTokenizer, *stops: str, thinks: bool = True) -> Answer:
    think_end_id = tokenizer.control_id("</think>") if thinks else None
    return Answer(tokenizer, stops=stops, end_ids=frozenset(tokenizer.eos_token_ids), think_end_id=think_end_id)


def test_thinking_ends_at_the_token_and_the_end_token_is_not_shown(tokenizer: TextTokenizer) -> None:
    answer = make(tokenizer)
    tokens = tokenizer.encode_raw("Let me see.</think>It is 4.<|user|>")
    assert said(answer.feed(tokens, STOP)) == ("Let me see.", "It is 4.", "stop")
    assert (answer.num_tokens, answer.num_reasoning_tokens, answer.has_content) == (len(tokens), 4, True)


def test_tags_that_are_spelt_out_as_text_are_text(tokenizer: TextTokenizer) -> None:
    answer = make(tokenizer)
    (spelt,) = tokenizer.encode_runs(["a</think>b"])
    assert said(answer.feed(spelt, LENGTH)) == ("a</think>b", "", "length")
    assert not answer.has_content


def test_without_the_token_everything_is_thinking(tokenizer: TextTokenizer) -> None:
    answer = make(tokenizer)
    assert said(answer.feed(tokenizer.encode_raw("Still thinking"), LENGTH)) == ("Still thinking", "", "length")
    assert not answer.has_content


def test_an_empty_answer_after_thinking_is_content_all_the_same(tokenizer: TextTokenizer) -> None:
    answer = make(tokenizer)
    assert said(answer.feed(tokenizer.encode_raw("x</think><|user|>"), STOP)) == ("x", "", "stop")
    assert answer.has_content


def test_raw_completions_show_the_tags(tokenizer: TextTokenizer) -> None:
    answer = make(tokenizer, thinks=False)
    assert answer.feed(tokenizer.encode_raw("x</think>y<|user|>"), STOP).content == "x</think>y"


def test_end_tokens_that_do_not_end_are_hidden_too(tokenizer: TextTokenizer) -> None:
    answer = make(tokenizer, thinks=False)
    assert answer.feed(tokenizer.encode_raw("a<|user|>b<|endoftext|>c"), LENGTH).content == "abc"


def test_a_stop_string_ends_the_answer_before_itself(tokenizer: TextTokenizer) -> None:
    answer = make(tokenizer, "is 4")
    tokens = tokenizer.encode_raw("Let me see.</think>It is 4. And so on")
    delta = answer.feed(tokens, None)
    assert said(delta) == ("Let me see.", "It ", "stop")
    assert answer.num_tokens == len(delta.tokens) < len(tokens)


def test_stop_strings_are_not_looked_for_in_the_least_tokens(tokenizer: TextTokenizer) -> None:
    tokens = tokenizer.encode_raw("so and so and so on")
    first = len(tokenizer.encode_raw("so"))
    answer = Answer(tokenizer, stops=["so"], end_ids=(), think_end_id=None, min_tokens=first)
    assert said(answer.feed(tokens, None)) == ("", "so and ", "stop")


def test_a_stop_string_ends_thinking_as_well_and_does_not_reach_across(tokenizer: TextTokenizer) -> None:
    assert said(make(tokenizer, "me").feed(tokenizer.encode_raw("Let me see.</think>It"), None)) == ("Let ", "", "stop")
    assert said(make(tokenizer, "see.It").feed(tokenizer.encode_raw("Let me see.</think>It"), LENGTH)) == ("Let me see.", "It", "length")


def test_what_was_held_back_is_shown_at_the_end(tokenizer: TextTokenizer) -> None:
    answer = make(tokenizer, "4.never", thinks=False)
    assert answer.feed(tokenizer.encode_raw("It is 4."), None).content == "It is "
    assert said(answer.feed([], LENGTH)) == ("", "4.", "length")


def test_half_a_character_at_the_end_is_shown_as_a_replacement(tokenizer: TextTokenizer) -> None:
    answer = make(tokenizer, thinks=False)
    smile = tokenizer.encode_raw("🙂")
    assert len(smile) > 1
    assert answer.feed(smile[:-1], None).content == ""
    assert answer.feed([], LENGTH).content == "\ufffd"


@pytest.mark.parametrize("stops", [(), ("so",), ("friend",), ("o th", "!!")])
def test_texts_and_counts_do_not_depend_on_how_tokens_arrive(tokenizer: TextTokenizer, stops: tuple[str, ...]) -> None:
    tokens = tokenizer.encode_raw("I think so 🙂.</think>Hello there, friend. ñ<|user|>")
    outcomes = set()
    for size in range(1, len(tokens) + 1):
        answer = make(tokenizer, *stops)
        reasoning = content = ""
        for start in range(0, len(tokens), size):
            delta = answer.feed(tokens[start : start + size], STOP if start + size >= len(tokens) else None)
            reasoning, content = reasoning + delta.reasoning, content + delta.content
            if delta.finish_reason is not None:
                break
        outcomes.add((reasoning, content, answer.finish_reason, answer.num_tokens, answer.num_reasoning_tokens))
    assert len(outcomes) == 1
