"""What the answer must look like, from the client's field to what workers are told. The fake workers say what they are told to."""

import json
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from kv_transfer.grammar import GrammarKind, GrammarSpec
from kv_transfer.messages import OpenSink, StartSource
from router.gateway.tokenizer import TextTokenizer
from tests.fakes.fake_workers import FakeCluster, scripted_model
from tests.fakes.gateway_process import RunningGateway

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"], "additionalProperties": False}


class Person(BaseModel):
    name: str
    age: int


def told(workers: FakeCluster) -> list[GrammarSpec | None]:
    """What each worker was told, prefill and decode alike."""
    messages = [message for worker in workers.workers.values() for message in worker.received]
    return [message.sampling.grammar for message in messages if isinstance(message, OpenSink | StartSource)]


def post(gateway: RunningGateway, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{gateway.url}{path}", json={"model": "glm", **fields}, timeout=20)


def chat(gateway: RunningGateway, **fields: Any) -> httpx.Response:
    return post(gateway, "/v1/chat/completions", messages=HI, **fields)


def test_a_pydantic_model_comes_back_parsed(gateway: RunningGateway, workers: FakeCluster, gateway_tokenizer: TextTokenizer) -> None:
    script = 'Who?</think>{"name": "Ada", "age": 36}<|user|>'
    workers.model = scripted_model(gateway_tokenizer.encode_raw(script))
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0, timeout=20) as client:
        answer = client.chat.completions.parse(model="glm", messages=HI, response_format=Person)  # type: ignore[arg-type]
    assert answer.choices[0].message.parsed == Person(name="Ada", age=36)
    assert answer.choices[0].finish_reason == "stop"
    specs = told(workers)
    assert len(specs) == 2, "prefill and decode are told the same"
    assert len(set(specs)) == 1
    assert specs[0] is not None
    assert specs[0].after_token == gateway_tokenizer.control_ids["</think>"]
    assert not specs[0].is_lenient, "the client library asks for strict"
    assert json.loads(specs[0].text)["required"] == ["name", "age"]


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"response_format": {"type": "json_object"}}, GrammarKind.JSON_SCHEMA),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}, GrammarKind.JSON_SCHEMA),
        ({"guided_json": SCHEMA}, GrammarKind.JSON_SCHEMA),
        ({"structured_outputs": {"regex": "a+"}}, GrammarKind.REGEX),
        ({"guided_choice": ["a", "b"]}, GrammarKind.LARK),
        ({"ebnf": 'root ::= "a" | "b"'}, GrammarKind.LARK),
    ],
)
def test_a_completion_is_constrained_from_its_first_token(
    gateway: RunningGateway, workers: FakeCluster, fields: dict[str, Any], kind: GrammarKind
) -> None:
    reply = post(gateway, "/v1/completions", prompt="a", max_tokens=3, **fields)
    assert reply.status_code == 200, reply.text
    assert [(spec.kind, spec.after_token) for spec in told(workers) if spec is not None] == [(kind, -1)] * 2


def test_text_is_not_constrained(gateway: RunningGateway, workers: FakeCluster) -> None:
    assert chat(gateway, max_tokens=3, response_format={"type": "text"}).status_code == 200
    assert told(workers) == [None, None]


def test_what_is_not_enforced_is_named(gateway: RunningGateway, workers: FakeCluster) -> None:
    schema = {"type": "array", "uniqueItems": True}
    format_ = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    reply = chat(gateway, max_tokens=3, response_format=format_)
    assert reply.status_code == 200
    assert "uniqueItems" in reply.headers["x-grammar-warnings"]
    format_["json_schema"]["strict"] = True  # type: ignore[index]
    refused = chat(gateway, max_tokens=3, response_format=format_)
    assert refused.status_code == 400
    assert "uniqueItems" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"guided_json": {"type": "txt"}}, "guided_json", "Invalid type"),
        ({"guided_json": {"type": "integer", "multipleOf": 99999989}}, "guided_json", "takes longer than 1 s"),
        ({"regex": "(" * 65000}, "regex", "invalid regex"),
        ({"regex": "x" * 70000}, "regex", "65536"),
        ({"guided_grammar": "start: nowhere"}, "guided_grammar", "unknown name"),
        ({"json_schema": "{"}, "json_schema", "not valid JSON"),
    ],
)
def test_a_bad_constraint_is_refused_before_any_worker_hears_of_it(
    gateway: RunningGateway, workers: FakeCluster, fields: dict[str, Any], param: str, reason: str
) -> None:
    reply = chat(gateway, max_tokens=3, **fields)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_request", param)
    assert reason in error["message"]
    assert told(workers) == []
    assert chat(gateway, max_tokens=3, guided_choice=["a"]).status_code == 200, "the next one is served"
