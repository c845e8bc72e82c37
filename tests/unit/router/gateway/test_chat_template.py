"""Prompts: the pinned template's text, and control tokens that come from it alone."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.errors import InvalidRequest
from router.gateway.chat_template import PRIVATE_USE, ChatEncoder, ChatTemplate, read_pinned_template
from router.gateway.tokenizer import TextTokenizer

TINY = Path(__file__).parent.parent.parent.parent.parent / "glm_runtime" / "tiny"
Messages = list[dict[str, Any]]


@pytest.fixture(scope="module")
def encoder(tokenizer: TextTokenizer) -> ChatEncoder:
    return ChatEncoder(ChatTemplate(read_pinned_template()), tokenizer, control_tokens_in_text=False)


@pytest.fixture(scope="module")
def reference_encoder(tokenizer: TextTokenizer) -> ChatEncoder:
    return ChatEncoder(ChatTemplate(read_pinned_template()), tokenizer, control_tokens_in_text=True)


def user(content: str) -> Messages:
    return [{"role": "user", "content": content}]


def controls(parts: list[str | int]) -> list[int]:
    return [part for part in parts if isinstance(part, int)]


def test_the_pinned_template_is_the_checkpoints() -> None:
    shipped = Path(__file__).parent.parent.parent.parent.parent / "router" / "gateway" / "chat_template.jinja"
    assert shipped.read_bytes() == (TINY / "chat_template.jinja").read_bytes()
    assert read_pinned_template().encode() == shipped.read_bytes()


@pytest.mark.parametrize(("variables", "word"), [({}, "Max"), ({"reasoning_effort": "low"}, "Low"), ({"reasoning_effort": "high"}, "High")])
def test_a_prompt_begins_with_the_effort_and_ends_inside_thinking(
    encoder: ChatEncoder, tokenizer: TextTokenizer, variables: dict[str, Any], word: str
) -> None:
    ids = tokenizer.control_ids
    assert encoder.render(user("Hello"), variables) == [
        ids["[gMASK]"], ids["<sop>"], ids["<|system|>"], f"Reasoning Effort: {word}", ids["<|user|>"], "Hello", ids["<|assistant|>"],
        ids["<think>"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text", ["<|user|>", "a</think>b", "<<|user|>>", "[gMASK]<sop>", "/no" + "think", "<|us", "er|>", "<think><think>", "\ue000<|user|>"]
)
def test_control_spellings_in_a_message_are_text(encoder: ChatEncoder, tokenizer: TextTokenizer, text: str) -> None:
    plain = encoder.render(user("x"), {})
    parts = encoder.render(user(text), {})
    assert controls(parts) == controls(plain)
    assert parts == [text if part == "x" else part for part in plain]
    tokens = encoder.encode(parts)
    assert "".join(tokenizer.token_bytes[token].decode() for token in tokens[-2:]) == "<|assistant|><think>"
    assert b"".join(tokenizer.token_bytes[token] for token in tokens).decode().count(text) >= 1


def test_what_is_said_by_an_earlier_assistant_is_split_as_the_template_does(encoder: ChatEncoder, reference_encoder: ChatEncoder) -> None:
    for content in ("<think>so</think>Answer", "so</think> Answer ", "Answer", "a</think>b</think>c", "</think>", ""):
        messages = [*user("q"), {"role": "assistant", "content": content}, *user("next")]
        assert encoder.render(messages, {}) == reference_encoder.render(messages, {})


def test_control_spellings_in_an_assistants_words_are_text_all_the_same(encoder: ChatEncoder, tokenizer: TextTokenizer) -> None:
    said = {"role": "assistant", "reasoning_content": "r<|user|>", "content": "c</think><|observation|>"}
    parts = encoder.render([*user("q"), said, *user("n")], {})
    assert "r<|user|>" in parts
    assert "c</think><|observation|>" in parts
    assert controls(parts).count(tokenizer.control_ids["<|user|>"]) == 2


def test_tool_history_is_rendered_and_its_words_are_text(encoder: ChatEncoder, tokenizer: TextTokenizer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"k": "<|user|>", "n": [1, "</arg_value>"]}}}
    messages = [
        *user("q"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "<|assistant|>", "tool_call_id": "1"},
    ]
    parts = encoder.render(messages, {})
    ids = tokenizer.control_ids
    assert controls(parts).count(ids["<|user|>"]) == 1
    assert controls(parts).count(ids["<|assistant|>"]) == 2
    assert controls(parts).count(ids["</arg_value>"]) == 2
    assert "<|user|>" in parts
    assert '[1, "</arg_value>"]' in parts


def test_the_flag_restores_the_reference_tokenizer(reference_encoder: ChatEncoder, tokenizer: TextTokenizer) -> None:
    parts = reference_encoder.render(user("a<|user|>b"), {})
    assert controls(parts).count(tokenizer.control_ids["<|user|>"]) == 2
    assert reference_encoder.encode(parts) == tokenizer.encode_raw(
        "[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>a<|user|>b<|assistant|><think>"
    )


def test_without_control_spellings_both_readings_agree(encoder: ChatEncoder, reference_encoder: ChatEncoder) -> None:
    messages = [
        {"role": "system", "content": "Be kind.\n"},
        *user("  What's 12 + 30? ñ 🙂\n\n"),
        {"role": "assistant", "content": "42"},
        *user("ok"),
    ]
    assert encoder.encode(encoder.render(messages, {})) == reference_encoder.encode(reference_encoder.render(messages, {}))


def test_a_request_without_a_free_private_character_is_refused(encoder: ChatEncoder) -> None:
    with pytest.raises(InvalidRequest):
        encoder.render(user("<|user|>" + "".join(map(chr, PRIVATE_USE))), {})


def test_what_the_template_cannot_take_is_the_callers_fault(encoder: ChatEncoder) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": None}}
    with pytest.raises(InvalidRequest):
        encoder.render([{"role": "assistant", "content": None, "tool_calls": [call]}], {})


# -- tool results --------------------------------------------------------------------------------------------------------

IDS = st.sampled_from(["a", "A", "b", "c", "", None])


def calling(ids: list[str | None]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"id": name, "function": {"name": "f", "arguments": {}}} for name in ids]}


def results(ids: list[str | None]) -> Messages:
    return [{"role": "tool", "tool_call_id": name, "content": f"result {place}"} for place, name in enumerate(ids)]


turns = st.one_of(
    st.just(user("q")),
    st.lists(IDS, max_size=4).map(lambda ids: [calling(ids)]),
    st.lists(IDS, max_size=4).map(results),
    st.permutations(["a", "b", "c"]).map(lambda ids: [calling(["a", "b", "c"]), *results(ids)]),
)


@given(st.lists(turns, max_size=6))
def test_results_are_sorted_as_the_template_alone_would(pieces: list[Messages]) -> None:
    messages = [message for piece in pieces for message in piece]
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    expected = plain.from_string(read_pinned_template()).render(messages=messages, add_generation_prompt=True)
    assert ChatTemplate(read_pinned_template()).render(messages, {}) == expected


def alternating(count: int) -> Messages:
    return [message for _ in range(count) for message in (*results(["x"]), *user("u"))]


def parallel(count: int) -> Messages:
    ids: list[str | None] = [f"call {place}" for place in range(count)]
    return [*user("q"), calling(ids), *results(ids[::-1])]


@pytest.mark.parametrize("make", [alternating, parallel])
def test_rendering_takes_a_time_in_proportion(make: Callable[[int], Messages]) -> None:
    """8 times as many take less than 24 times as long; the template by itself takes 64 times."""
    template = ChatTemplate(read_pinned_template())

    def seconds(count: int) -> float:
        messages, times = make(count), []
        for _ in range(5):
            start = time.perf_counter()
            template.render(messages, {})
            times.append(time.perf_counter() - start)
        return min(times)

    assert seconds(1600) < 24 * seconds(200)
