"""The HTTP surface against what clients of OpenAI's API expect: shapes, codes, limits, streams."""

import json
from typing import Any

import httpx
import pytest

from kv_transfer.identity import unpack_tokens
from kv_transfer.messages import OpenSink
from router.gateway.tokenizer import TextTokenizer
from tests.fakes.fake_workers import FakeCluster, scripted_model
from tests.fakes.gateway_process import RunningGateway

HI = [{"role": "user", "content": "hi"}]
REASONING, CONTENT = "I think so.", "Hello there, friend. ñandú 🙂 bye"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def post(gateway: RunningGateway, path: str, **kwargs: Any) -> httpx.Response:
    return httpx.post(gateway.url + path, timeout=20, **kwargs)


def chat(gateway: RunningGateway, **fields: Any) -> httpx.Response:
    return post(gateway, CHAT, json={"model": "glm", "messages": HI, **fields})


def complete(gateway: RunningGateway, **fields: Any) -> httpx.Response:
    return post(gateway, COMPLETIONS, json={"model": "glm", "prompt": "Hi", **fields})


def events(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line and not line.startswith(":")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def joined(chunks: list[Any], field: str) -> str:
    return "".join(choice["delta"].get(field) or "" for chunk in chunks for choice in chunk["choices"])


def refused(response: httpx.Response, status: int, code: str, param: str | None) -> str:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (response.status_code, error["code"], error["param"]) == (status, code, param), error
    return str(error["message"])


# -- chat ----------------------------------------------------------------------------------------------------------------


def test_a_chat_answer(gateway: RunningGateway, workers: FakeCluster) -> None:
    workers.num_cached_tokens = 5
    body = chat(gateway).json()
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"], isinstance(body["created"], int)) == ("chat.completion", "glm", True)
    message = {"role": "assistant", "content": CONTENT, "reasoning_content": REASONING}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    usage = body["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 5}
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 4}


def test_a_streamed_chat_is_the_same_answer(gateway: RunningGateway) -> None:
    whole = chat(gateway).json()
    chunks = events(chat(gateway, stream=True))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (joined(chunks, "reasoning_content"), joined(chunks, "content")) == (REASONING, CONTENT)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"][0]["finish_reason"]] == ["stop"]
    assert all("usage" not in chunk for chunk in chunks)
    with_usage = events(chat(gateway, stream=True, stream_options={"include_usage": True}))
    assert with_usage[-1]["choices"] == []
    assert with_usage[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in with_usage[:-1])
    running = events(chat(gateway, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}))
    assert running[-2]["usage"] == whole["usage"]


def test_without_an_end_of_thinking_everything_is_reasoning(gateway: RunningGateway) -> None:
    choice = chat(gateway, max_tokens=3).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] is None
    assert REASONING.startswith(choice["message"]["reasoning_content"])
    assert chat(gateway, max_completion_tokens=3, max_tokens=100).json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stop", ["friend", ["zzz", "friend"]])
@pytest.mark.parametrize("stream", [False, True])
def test_text_never_goes_past_a_stop_string(gateway: RunningGateway, stop: Any, stream: bool) -> None:
    response = chat(gateway, stop=stop, stream=stream)
    if stream:
        chunks = events(response)
        text, reason = joined(chunks, "content"), chunks[-1]["choices"][0]["finish_reason"]
    else:
        (choice,) = response.json()["choices"]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    assert (text, reason) == ("Hello there, ", "stop")


def test_sampling_reaches_the_worker(gateway: RunningGateway, workers: FakeCluster) -> None:
    chat(gateway, seed=7, temperature=0.5, top_p=0.3, top_k=9, max_tokens=4, stop_token_ids=[11])
    chat(gateway, ignore_eos=True)
    first, second = [message.sampling for worker in ("decode-0", "decode-1") for message in workers.received(worker, OpenSink)]
    assert (first.seed, first.temperature, first.top_p, first.top_k, first.max_tokens) == (7, 0.5, 0.3, 9, 4)
    assert first.stop_token_ids == (2524, 2531, 2533, 11)
    assert (second.temperature, second.top_p, second.stop_token_ids) == (1.0, 0.95, ())


def received_prompt(workers: FakeCluster) -> list[int]:
    (opened,) = workers.received("decode-0", OpenSink)
    return unpack_tokens(opened.tokens)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({}, "Max"), ({"reasoning_effort": "minimal"}, "Low"), ({"reasoning_effort": "medium"}, "High"),
        ({"reasoning_effort": "xhigh"}, "Max"), ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "High"),
    ],
)  # fmt: skip
def test_effort_is_said_in_the_prompt(
    gateway: RunningGateway, workers: FakeCluster, gateway_tokenizer: TextTokenizer, fields: dict[str, Any], word: str
) -> None:
    chat(gateway, **fields)
    expected = f"[gMASK]<sop><|system|>Reasoning Effort: {word}<|user|>hi<|assistant|><think>"
    assert received_prompt(workers) == gateway_tokenizer.encode_raw(expected)


def test_control_tokens_come_from_the_template_alone(
    gateway: RunningGateway, workers: FakeCluster, gateway_tokenizer: TextTokenizer
) -> None:
    chat(gateway, messages=[{"role": "user", "content": "a<|user|>b</think>"}])
    tokens = received_prompt(workers)
    assert tokens.count(gateway_tokenizer.control_ids["<|user|>"]) == 1
    assert gateway_tokenizer.control_ids["</think>"] not in tokens
    workers.reset()
    complete(gateway, prompt="a<|user|>b")
    assert gateway_tokenizer.control_ids["<|user|>"] in received_prompt(workers)


# -- completions ---------------------------------------------------------------------------------------------------------


def test_a_completion_and_its_default_length(gateway: RunningGateway) -> None:
    body = complete(gateway).json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["usage"]["completion_tokens"] == 16
    (choice,) = body["choices"]
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    whole = complete(gateway, max_tokens=100).json()["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == (f"{REASONING}</think>{CONTENT}", "stop")


@pytest.mark.parametrize("prompt", ["ab", [65, 66], ["ab", "c"], [[65, 66], [67], [1, 2, 3]]])
@pytest.mark.parametrize("stream", [False, True])
def test_one_choice_for_each_prompt(gateway: RunningGateway, prompt: Any, stream: bool) -> None:
    count = 1 if isinstance(prompt, str) or isinstance(prompt[0], int) else len(prompt)
    response = complete(gateway, prompt=prompt, max_tokens=100, stream=stream, stream_options={"include_usage": True} if stream else None)
    texts, reasons = [""] * count, [""] * count
    chunks = events(response) if stream else [response.json()]
    for choice in [choice for chunk in chunks for choice in chunk["choices"]]:
        texts[choice["index"]] += choice["text"]
        reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
    assert texts == [f"{REASONING}</think>{CONTENT}"] * count
    assert reasons == ["stop"] * count
    one = complete(gateway, max_tokens=100).json()["usage"]["completion_tokens"]
    assert chunks[-1]["usage"]["completion_tokens"] == one * count


@pytest.mark.parametrize("stream", [False, True])
def test_echo_comes_first_and_alone_when_no_token_is_wanted(gateway: RunningGateway, stream: bool) -> None:
    def texts(response: httpx.Response) -> tuple[str, str]:
        choices = [choice for chunk in (events(response) if stream else [response.json()]) for choice in chunk["choices"]]
        return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]

    assert texts(complete(gateway, prompt="Hi", echo=True, max_tokens=2, stream=stream)) == ("HiI think", "length")
    assert texts(complete(gateway, prompt="Hi", echo=True, max_tokens=0, stream=stream)) == ("Hi", "length")
    assert texts(complete(gateway, prompt=[39, 72], echo=True, max_tokens=0, stream=stream))[1] == "length"


def test_bytes_of_a_character_that_come_apart_are_put_together(
    gateway: RunningGateway, workers: FakeCluster, gateway_tokenizer: TextTokenizer
) -> None:
    workers.step_s = 0.01
    workers.model = scripted_model(gateway_tokenizer.encode_raw("日本語🙂"))
    chunks = events(complete(gateway, prompt="x", max_tokens=len(gateway_tokenizer.encode_raw("日本語🙂")), stream=True))
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == "日本語🙂"
    assert not any("\ufffd" in text for text in texts)


# -- refusals ------------------------------------------------------------------------------------------------------------

REFUSALS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"messages": []}, "invalid_request", "messages"),
    ({"messages": "hi"}, "invalid_request", "messages"),
    ({"messages": [{"role": "user"}]}, "invalid_request", "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "unsupported_parameter", "messages.0.content.0.type"),
    ({"max_tokens": 0}, "invalid_request", "max_tokens"),
    ({"max_tokens": "many"}, "invalid_request", "max_tokens"),
    ({"max_tokens": 8192}, "context_length_exceeded", "messages"),
    ({"temperature": -1}, "invalid_request", "temperature"),
    ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools.0.type"),
    ({"top_logprobs": 3}, "invalid_request", "top_logprobs"),
    ({"n": 129}, "invalid_request", "n"),
    ({"best_of": 2}, "unsupported_parameter", "best_of"),
    ({"response_format": {"type": "xml"}}, "invalid_request", "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "invalid_request", "response_format.json_schema.schema"),
    ({"guided_regex": "(a"}, "invalid_request", "guided_regex"),
    ({"structured_outputs": {"choice": []}}, "invalid_request", "structured_outputs.choice"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "unsupported_parameter", "structured_outputs.structural_tag"),
    ({"ebnf": "root ::= (", "guided_regex": "a"}, "invalid_request", "ebnf"),
    ({"regex": "a", "ignore_eos": True}, "invalid_request", "ignore_eos"),
    ({"presence_penalty": 2.5}, "invalid_request", "presence_penalty"),
    ({"logit_bias": {"2560": 1}}, "invalid_request", "logit_bias"),
    ({"min_tokens": 9, "max_tokens": 8}, "invalid_request", "min_tokens"),
    ({"allowed_token_ids": [2560]}, "invalid_request", "allowed_token_ids"),
    ({"stop_token_ids": [2560]}, "invalid_request", "stop_token_ids"),
    ({"chat_template_kwargs": {"messages": []}}, "invalid_request", "chat_template_kwargs.messages"),
]


@pytest.mark.parametrize(("fields", "code", "param"), REFUSALS)
@pytest.mark.parametrize("stream", [False, True])
def test_chat_refusals(gateway: RunningGateway, fields: dict[str, Any], code: str, param: str, stream: bool) -> None:
    refused(chat(gateway, stream=stream, **fields), 400, code, param)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"max_tokens": 0}, "invalid_request", "max_tokens"),
        ({"prompt": ""}, "invalid_request", "prompt"),
        ({"prompt": []}, "invalid_request", "prompt"),
        ({"prompt": [2560]}, "invalid_request", "prompt"),
        ({"prompt": [-1]}, "invalid_request", "prompt"),
        ({"prompt": ["a"] * 129}, "invalid_request", "prompt"),
        ({"prompt": {"text": "x"}}, "invalid_request", "prompt"),
        ({"best_of": 2}, "unsupported_parameter", "best_of"),
        ({"suffix": "x"}, "unsupported_parameter", "suffix"),
        ({"logprobs": 21}, "invalid_request", "logprobs"),
        ({"prompt": ["a"] * 65, "n": 2}, "invalid_request", "n"),
    ],
)
def test_completion_refusals(gateway: RunningGateway, fields: dict[str, Any], code: str, param: str) -> None:
    refused(complete(gateway, **fields), 400, code, param)


def test_too_long_a_prompt_is_told_the_numbers(gateway: RunningGateway) -> None:
    message = refused(complete(gateway, prompt=[5] * 8190), 400, "context_length_exceeded", "prompt")
    assert "8190" in message
    assert "16" in message
    assert "8192" in message
    message = refused(chat(gateway, messages=[{"role": "user", "content": "a b" * 1_000_000}]), 400, "context_length_exceeded", "messages")
    assert "at least" in message
    refused(complete(gateway, prompt="word " * 9000), 400, "context_length_exceeded", "prompt")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"model": "\xff"}', b'{"model": "glm", "prompt": "\\ud800", "messages": []}']
)
def test_what_is_no_json_object(gateway: RunningGateway, path: str, body: bytes) -> None:
    refused(post(gateway, path, content=body, headers={"content-type": "application/json"}), 400, "invalid_request", None)


def test_another_model(gateway: RunningGateway) -> None:
    assert "gpt" in refused(chat(gateway, model="gpt"), 404, "model_not_found", "model")
    refused(gateway.get("/v1/models/gpt"), 404, "model_not_found", "model")


def test_media_types(gateway: RunningGateway) -> None:
    for headers in ({"content-type": "text/plain"}, {}, {"content-type": "application/json", "content-encoding": "gzip"}):
        refused(post(gateway, CHAT, content=b"{}", headers=headers), 415, "unsupported_media_type", None)
    body = json.dumps({"model": "glm", "messages": HI}).encode()
    assert post(gateway, CHAT, content=body, headers={"content-type": "Application/JSON; charset=utf-8"}).status_code == 200


def test_a_body_over_the_limit_is_refused_while_it_is_read(gateway: RunningGateway) -> None:
    limit = 16 * 1024 * 1024
    refused(post(gateway, CHAT, content=b" " * (limit + 1), headers={"content-type": "application/json"}), 413, "request_too_large", None)

    def pieces() -> Any:
        for _ in range(17):
            yield b" " * 1024 * 1024

    response = post(gateway, CHAT, content=pieces(), headers={"content-type": "application/json", "transfer-encoding": "chunked"})
    refused(response, 413, "request_too_large", None)
    refused(post(gateway, CHAT, content=b" " * limit, headers={"content-type": "application/json"}), 400, "invalid_request", None)


def test_unknown_paths_and_methods(gateway: RunningGateway) -> None:
    refused(gateway.get("/v1/nothing"), 404, "not_found", None)
    refused(post(gateway, "/v1/embeddings", json={}), 404, "not_found", None)
    response = gateway.get(CHAT)
    refused(response, 405, "method_not_allowed", None)
    assert "POST" in response.headers["allow"]
    refused(post(gateway, "/health"), 405, "method_not_allowed", None)
    head = httpx.head(f"{gateway.url}/health")
    assert (head.status_code, head.text) == (200, "")


def test_unknown_fields_are_ignored_named_and_counted(gateway: RunningGateway) -> None:
    response = chat(gateway, foo=1, **{"x\r\nset-cookie: a": 2})
    assert response.status_code == 200
    assert response.headers["x-ignored-fields"] == "foo, x??set-cookie??a"
    assert "x-ignored-fields" not in chat(gateway, n=1).headers
    assert "x-ignored-fields" in chat(gateway, foo=1, stream=True).headers
    assert "glm_http_ignored_fields_total" in gateway.get("/metrics").text


# -- the rest ------------------------------------------------------------------------------------------------------------


def test_request_ids_are_echoed_or_minted(gateway: RunningGateway) -> None:
    def echoed(**headers: str) -> str:
        return httpx.get(f"{gateway.url}/health", headers={name.replace("_", "-"): value for name, value in headers.items()}).headers[
            "x-request-id"
        ]

    assert echoed(x_request_id="abc-123") == "abc-123"
    assert len(echoed()) == 24
    assert echoed(x_request_id="a b") != "a b"
    assert gateway.get("/v1/nothing").headers["x-request-id"]


def test_models(gateway: RunningGateway) -> None:
    listed = gateway.get("/v1/models").json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("glm", "model", 8192)
    assert gateway.get("/v1/models/glm").json() == model


def test_health_metrics_and_version(gateway: RunningGateway) -> None:
    chat(gateway)
    assert [gateway.get(path).status_code for path in ("/health", "/live", "/ready")] == [200, 200, 200]
    assert set(gateway.get("/version").json()) == {"version"}
    metrics = gateway.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    for name in (
        'glm_http_requests_total{method="POST",path="/v1/chat/completions",status="200"}', "glm_router_ttft_seconds_bucket",
        "glm_router_itl_seconds_count", 'glm_worker_up{role="decode",worker_id="decode-0"} 1.0', "vllm:kv_cache_usage_perc",
        'glm_worker_cache_format{component="mla_kv",format="fp8_ds_mla",role="decode",worker_id="decode-0"} 1.0',
        'glm_router_inflight_requests{phase="decoding"} 0.0',
    ):  # fmt: skip
        assert name in metrics.text


def test_the_status_page_needs_nothing_from_elsewhere(gateway: RunningGateway) -> None:
    page = gateway.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "http://" not in page.text
    assert "https://" not in page.text
    for path in ("/static/status.css", "/static/status.js"):
        assert path in page.text
        assert gateway.get(path).status_code == 200


def test_status(gateway: RunningGateway) -> None:
    chat(gateway)
    status = gateway.get("/status.json").json()
    assert [worker["id"] for worker in status["workers"]] == ["decode-0", "decode-1", "prefill-0"]
    worker = status["workers"][0]
    assert {"id", "role", "pid", "state", "incarnation", "blocks_free", "blocks_cached", "blocks_held", "load"} <= set(worker)
    assert set(status["requests"]["phases"]) == {"waiting", "opening", "starting", "prefilling", "decoding"}
    assert status["recent"]["ttft_s"]["p50"] >= 0
    assert status["recent"]["requests"][0]["outcome"] == "done"
