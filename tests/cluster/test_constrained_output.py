"""Constrained output through separate workers: what one process gives, through a hand-off and after a killed worker."""

import json
import os
import signal
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from cluster.config import SHIPPED_CHECKPOINT
from kv_transfer.messages import GrammarKind, GrammarSpec, SamplingParameters
from router.gateway.tokenizer import TextTokenizer
from tests.chaos.test_lost_processes import Streaming
from tests.prompts import make_prompt
from tests.reference import Reference
from tests.running_cluster import RunningCluster, token_ids, wait_until

pytestmark = pytest.mark.cluster

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colour": {"enum": ["red", "green", "blue"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "colour", "tags"],
    "additionalProperties": False,
}
LONG_SCHEMA = {"type": "array", "items": {"enum": ["one", "two", "three"]}, "minItems": 150, "maxItems": 150}
TOKENIZER = TextTokenizer(SHIPPED_CHECKPOINT)


def text_of(tokens: list[int]) -> str:
    return b"".join(TOKENIZER.token_bytes[token] for token in tokens if token not in TOKENIZER.eos_token_ids).decode()


def sampling(schema: Any, **parameters: Any) -> SamplingParameters:
    spec = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    given = {"seed": 0, "temperature": 0.0, "stop_token_ids": TOKENIZER.eos_token_ids, "max_tokens": 500, **parameters}
    return SamplingParameters(grammar=spec, **given)


@pytest.mark.parametrize("drawn", [{"temperature": 0.0}, {"temperature": 1.3, "seed": 11}], ids=["greedy", "drawn"])
def test_two_workers_give_what_one_process_gives(cluster: RunningCluster, reference: Reference, drawn: dict[str, Any]) -> None:
    prompt = make_prompt(130, 400)
    tokens = token_ids(cluster.complete(prompt, 500, ignore_eos=False, guided_json=SCHEMA, top_p=1.0, top_k=0, **drawn))
    assert [tokens] == reference.draw([prompt], sampling(SCHEMA, **drawn))
    assert tokens[-1] in TOKENIZER.eos_token_ids
    jsonschema.validate(json.loads(text_of(tokens)), SCHEMA)


def test_a_killed_decode_worker_leaves_the_answer_whole(cluster: RunningCluster, reference: Reference) -> None:
    prompt = make_prompt(100, 401)
    pid = cluster.worker("decode-0")["pid"]
    streaming = Streaming(cluster, prompt, 3000, ignore_eos=False, guided_json=LONG_SCHEMA)
    wait_until(lambda: len(streaming.tokens) >= 10, 60, lambda: "ten tokens did not come")
    os.kill(pid, signal.SIGKILL)
    assert len(streaming.tokens) < 450, "it must die before the answer is done"
    tokens = streaming.finish()
    assert [tokens] == reference.draw([prompt], sampling(LONG_SCHEMA, max_tokens=3000))
    jsonschema.validate(json.loads(text_of(tokens)), LONG_SCHEMA)
    cluster.wait_until_serving()
    assert cluster.worker("decode-0")["pid"] != pid


class Answer(BaseModel):
    is_right: bool
    letter: Literal["r", "i", "v", "e"]


def test_the_client_parses_what_comes_after_thinking(cluster: RunningCluster) -> None:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0, timeout=120) as client:
        answer = client.chat.completions.parse(
            model="glm",
            messages=[{"role": "user", "content": "Spell the word river."}],
            response_format=Answer,
            temperature=0,
            max_tokens=800,
            reasoning_effort="low",
        )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Answer)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"guided_choice": ["positive", "negative"]}, {"positive", "negative"}),
        ({"structured_outputs": {"regex": "(a|b)-[01]"}}, {"a-0", "a-1", "b-0", "b-1"}),
        ({"ebnf": 'root ::= "x" ("y" | "z")'}, {"xy", "xz"}),
    ],
    ids=["choice", "regex", "grammar"],
)
def test_other_constraints(cluster: RunningCluster, fields: dict[str, Any], expected: set[str]) -> None:
    tokens = token_ids(cluster.complete(make_prompt(70, 402), 50, ignore_eos=False, temperature=1.0, seed=3, **fields))
    assert text_of(tokens) in expected


def test_a_bad_schema_is_a_400(cluster: RunningCluster) -> None:
    body = {"model": "glm", "prompt": "a", "guided_json": {"type": "txt"}}
    reply = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "guided_json"


TOOL = {
    "type": "function",
    "function": {
        "name": "set_light",
        "parameters": {
            "type": "object",
            "properties": {
                "room": {"type": "string", "enum": ["kitchen", "hall"]},
                "level": {"type": "integer", "minimum": 0, "maximum": 100},
                "is_on": {"type": "boolean"},
                "label": {"type": "string", "maxLength": 6},
            },
            "required": ["room", "level", "is_on", "label"],
            "additionalProperties": False,
        },
    },
}


STRICT_TOOL = {"type": "function", "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [TOOL], "tool_choice": "required"},
        # Left free, the model would not call here: a bias makes it begin, and from there on the schema holds.
        {"tools": [STRICT_TOOL], "logit_bias": {str(TOKENIZER.control_ids["<tool_call>"]): 100}},
    ],
    ids=["required", "strict"],
)
def test_a_call_satisfies_its_schema_streamed_and_not(cluster: RunningCluster, fields: dict[str, Any]) -> None:
    request: dict[str, Any] = {
        "model": "glm", "messages": [{"role": "user", "content": "Light."}], "parallel_tool_calls": False, "temperature": 0,
        "max_tokens": 1000, "reasoning_effort": "low", **fields,
    }  # fmt: skip
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0, timeout=120) as client:
        (whole,) = client.chat.completions.create(**request).choices
        pieces = [chunk.choices[0] for chunk in client.chat.completions.create(**request, stream=True) if chunk.choices]
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    (call,) = whole.message.tool_calls
    assert call.function.name == "set_light"
    jsonschema.validate(json.loads(call.function.arguments), TOOL["function"]["parameters"])  # type: ignore[index]
    streamed = [entry.function for piece in pieces for entry in piece.delta.tool_calls or ()]
    assert "".join(function.arguments for function in streamed) == call.function.arguments
    assert pieces[-1].finish_reason == "tool_calls"


def test_the_model_calls_a_tool_by_itself(cluster: RunningCluster) -> None:
    """The shipped model has learnt to: thinking, then one call with the city of the question."""
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    weather = {"type": "function", "function": {"name": "get_weather", "description": "Get the weather in a city", "parameters": city}}
    request: dict[str, Any] = {
        "model": "glm", "messages": [{"role": "user", "content": "Is it cold in Havana?"}], "tools": [weather], "temperature": 0,
        "max_tokens": 200,
    }  # fmt: skip
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0, timeout=120) as client:
        (choice,) = client.chat.completions.create(**request).choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city"}
