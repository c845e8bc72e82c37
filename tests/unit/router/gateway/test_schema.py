"""What a client may send. Every refusal names the field."""

import json
from typing import Any

import pytest

from kv_transfer.errors import InvalidRequest, UnsupportedParameter
from router.gateway.schema import NEUTRAL_VALUES, ChatRequest, CompletionRequest, find_ignored_fields, parse_prompts, parse_request

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatRequest:
    return parse_request(ChatRequest, json.dumps({"model": "glm", "messages": MESSAGES, **fields}).encode())


def refuse(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 2**63}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": False, "stream_options": {}}, "stream_options"),
        ({"stop": 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ["a", 5]}, "stop.1"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
        ({"min_p": 1.1}, "min_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"presence_penalty": "much"}, "presence_penalty"),
        ({"logit_bias": {"5": 100.5}}, "logit_bias"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"-5": 1}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids.0"),
        ({"bad_words": [""]}, "bad_words.0"),
        ({"bad_words": "no"}, "bad_words"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"user": 5}, "user"),
        ({"metadata": "x"}, "metadata"),
        ({"model": 5}, "model"),
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [5]}, "messages.0"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [*MESSAGES, {"role": "user", "content": [{"text": "x"}]}]}, "messages.1.content.0.type"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]}, "messages.0.tool_calls.0.function.name"),
    ],
)
def test_wrong_values_are_named(fields: dict[str, Any], param: str) -> None:
    error = refuse(**fields)
    assert error.param == param
    assert param in error.message


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"5", b'{"model": "\xff"}', b'{"model": "glm", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b"[" * 100_000, b'{"model": "glm",}', b"\x00",
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_request(ChatRequest, body)


def test_nan_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_request(ChatRequest, b'{"model": "glm", "temperature": NaN, "messages": [{"role": "user", "content": "x"}]}')
    assert caught.value.param == "temperature"


TOOL_FIELDS = {"tools", "tool_choice", "parallel_tool_calls"}


def test_a_completion_has_no_tools() -> None:
    for field in ({"tools": ["something"]}, {"tool_choice": "required"}):
        with pytest.raises(UnsupportedParameter):
            parse_request(CompletionRequest, json.dumps({"model": "glm", "prompt": "a", **field}).encode())


@pytest.mark.parametrize("name", sorted(set(NEUTRAL_VALUES) - TOOL_FIELDS))
def test_known_parameters_are_taken_with_values_that_change_nothing_and_refused_otherwise(name: str) -> None:
    for value in NEUTRAL_VALUES[name]:
        assert find_ignored_fields(chat(**{name: value})) == []
    error = refuse(**{name: ["something"]})
    assert isinstance(error, UnsupportedParameter)
    assert error.param == name


def test_zero_and_false_are_not_confused() -> None:
    assert refuse(n=True).param == "n"
    assert refuse(logprobs=0).param == "logprobs"
    assert refuse(use_beam_search=0).param == "use_beam_search"
    assert find_ignored_fields(chat(presence_penalty=0.0, n=1)) == []


def test_null_is_the_same_as_absent() -> None:
    names = [name for name, field in ChatRequest.model_fields.items() if not field.is_required()]
    request = chat(**dict.fromkeys(names))
    assert request.stop_strings == ()
    assert find_ignored_fields(request) == []


def test_unknown_fields_are_named_with_their_path() -> None:
    request = chat(
        foo=1,
        stream=True,
        stream_options={"bar": 1},
        messages=[{"role": "user", "content": "x", "name": "bob", "refusal": None, "annotations": []}],
    )
    assert find_ignored_fields(request) == ["foo", "stream_options.bar", "messages.0.name"]


def test_stop_comes_in_one_form() -> None:
    assert chat(stop="x").stop_strings == ("x",)
    assert chat(stop=["x", "y"]).stop_strings == ("x", "y")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ([[]], [[]])],
)
def test_prompts_come_in_four_forms(prompt: Any, expected: list[Any]) -> None:
    assert parse_prompts(prompt) == expected


@pytest.mark.parametrize("prompt", [None, 5, [], {}, [True], [1, "a"], ["a", 1], [["a"]], [[1], "a"], [1.5]])
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_prompts(prompt)
    assert caught.value.param is not None
    assert caught.value.param.startswith("prompt")


def test_logprobs_in_both_forms_are_one_number() -> None:
    assert (chat().num_logprobs, chat(logprobs=False).num_logprobs, chat(logprobs=True).num_logprobs) == (-1, -1, 0)
    assert chat(logprobs=True, top_logprobs=4).num_logprobs == 4

    def completion(**fields: Any) -> tuple[int, int]:
        request = parse_request(CompletionRequest, json.dumps({"model": "glm", "prompt": "x", **fields}).encode())
        return request.num_logprobs, request.num_prompt_logprobs

    assert (completion(), completion(logprobs=0), completion(logprobs=3)) == ((-1, -1), (0, -1), (3, -1))
    assert (completion(echo=True), completion(echo=True, logprobs=2), completion(prompt_logprobs=1)) == ((-1, -1), (2, 2), (-1, 1))


def test_completions_may_ask_for_no_tokens() -> None:
    assert parse_request(CompletionRequest, b'{"model": "glm", "prompt": "x", "max_tokens": 0}').max_tokens == 0
