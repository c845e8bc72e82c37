"""Defaults, end tokens, seeds and the context's limit."""

import json
from typing import Any, ClassVar

import pytest

from kv_transfer.errors import InvalidRequest, ModelNotFound, PromptTooLong
from router.gateway.sampling import (
    ServedModel,
    check_context,
    check_prompt_bytes,
    check_prompt_logprobs,
    choice_seed,
    describe_model,
    make_sampling,
    tokenise_bad_words,
)
from router.gateway.schema import CompletionRequest, parse_request
from router.gateway.tokenizer import TextTokenizer

MODEL = ServedModel(name="glm", max_model_len_tokens=100, num_token_ids=50, eos_token_ids=(7, 8), temperature=0.9, top_p=0.95)


def request(**fields: Any) -> CompletionRequest:
    return parse_request(CompletionRequest, json.dumps({"model": "glm", "prompt": "x", **fields}).encode())


def test_the_checkpoints_defaults_are_used(tokenizer: TextTokenizer) -> None:
    model = describe_model("glm", tokenizer, 0)
    assert (model.temperature, model.top_p, model.top_k, model.max_model_len_tokens) == (1.0, 0.95, 0, 8192)
    assert describe_model("glm", tokenizer, 100).max_model_len_tokens == 100
    assert describe_model("glm", tokenizer, 10**9).max_model_len_tokens == 8192


def test_what_is_not_said_is_filled_in() -> None:
    sampling = make_sampling(request(), MODEL, 5)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop_token_ids, sampling.max_tokens) == (0.9, 0.95, 0, (7, 8), 5)
    sampling = make_sampling(request(temperature=0, top_p=0.5, top_k=-1), MODEL, 5)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.5, 0)


def test_a_seed_is_kept_or_minted() -> None:
    assert make_sampling(request(seed=5), MODEL, 1).seed == 5
    assert 0 <= make_sampling(request(seed=-1), MODEL, 1).seed < 2**63
    assert make_sampling(request(), MODEL, 1).seed != make_sampling(request(), MODEL, 1).seed


def test_end_tokens_are_the_models_and_the_clients() -> None:
    assert make_sampling(request(stop_token_ids=[9, 7]), MODEL, 1).stop_token_ids == (7, 8, 9)
    assert make_sampling(request(ignore_eos=True), MODEL, 1).stop_token_ids == ()
    assert make_sampling(request(ignore_eos=True, stop_token_ids=[7]), MODEL, 1).stop_token_ids == (7,)


def test_everything_asked_for_is_passed_on() -> None:
    asked = request(
        min_p=0.1, min_tokens=2, repetition_penalty=1.2, frequency_penalty=-0.5, presence_penalty=1, logit_bias={"9": -100, "5": 1.5},
        allowed_token_ids=[4, 5, 4], logprobs=3, prompt_logprobs=1,
    )  # fmt: skip
    sampling = make_sampling(asked, MODEL, 5, bad_words=[[1, 2]])
    assert (sampling.min_p, sampling.min_tokens, sampling.repetition_penalty) == (0.1, 2, 1.2)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (-0.5, 1.0)
    assert (sampling.logit_bias, sampling.allowed_token_ids, sampling.bad_words) == (((5, 1.5), (9, -100.0)), (4, 5), ((1, 2),))
    assert (sampling.logprobs, sampling.prompt_logprobs) == (3, 1)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_tokens": 6}, "min_tokens"),
        ({"logit_bias": {"50": 1}}, "logit_bias"),
        ({"allowed_token_ids": [50]}, "allowed_token_ids"),
        ({"stop_token_ids": [9, 50]}, "stop_token_ids"),
    ],
)
def test_what_the_models_limits_forbid_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make_sampling(request(**fields), MODEL, 5)
    assert caught.value.param == param
    assert ("6" if param == "min_tokens" else "50") in caught.value.message


def test_each_choice_has_its_own_seed_and_the_first_the_requests() -> None:
    seeds = [choice_seed(5, choice) for choice in range(128)]
    assert seeds == [choice_seed(5, choice) for choice in range(128)]
    assert (seeds[0], len(set(seeds)), min(seeds) >= 0, max(seeds) < 2**63) == (5, 128, True, True)
    assert not set(seeds[1:]) & {choice_seed(6, choice) for choice in range(128)}


def test_bad_words_are_meant_at_a_start_and_after_a_space(tokenizer: TextTokenizer) -> None:
    assert tokenise_bad_words(["river", " river"], tokenizer) == [*tokenizer.encode_runs(["river"]), *tokenizer.encode_runs([" river"])]
    assert tokenise_bad_words(["  "], tokenizer) == []
    (spelled,) = tokenizer.encode_runs(["<|user|>"])
    assert tokenise_bad_words(["<|user|>"], tokenizer)[0] == spelled, "a control spelling is text here as well"


def test_a_prompts_logprobs_have_a_limit() -> None:
    check_prompt_logprobs(10, 4, 50, "prompt")
    check_prompt_logprobs(1000, -1, 50, "prompt")
    with pytest.raises(InvalidRequest, match="together 55"):
        check_prompt_logprobs(11, 4, 50, "prompt")


def test_the_context_is_prompt_and_output() -> None:
    assert check_context(60, 40, 100, "prompt") == 40
    assert check_context(60, None, 100, "prompt") == 40
    assert check_context(100, 0, 100, "prompt") == 0
    with pytest.raises(PromptTooLong, match=r"60 tokens .* 41 more, together 101; .* 100"):
        check_context(60, 41, 100, "prompt")
    with pytest.raises(PromptTooLong, match="100"):
        check_context(100, None, 100, "messages")
    with pytest.raises(InvalidRequest, match="empty"):
        check_context(0, 5, 100, "prompt")


def test_a_hopeless_text_is_refused_before_it_is_read() -> None:
    check_prompt_bytes(1000, 10, 100, "prompt")
    with pytest.raises(PromptTooLong, match="at least 101"):
        check_prompt_bytes(1001, 10, 100, "prompt")


def test_another_model_is_not_found() -> None:
    MODEL.check_name("glm")
    with pytest.raises(ModelNotFound) as caught:
        MODEL.check_name("gpt")
    assert (caught.value.param, caught.value.http_status) == ("model", 404)


def test_a_default_of_zero_is_a_value() -> None:
    class Greedy:
        max_model_len_tokens, num_token_ids, eos_token_ids = 10, 5, (1,)
        generation_defaults: ClassVar[dict[str, Any]] = {"temperature": 0.0, "top_k": 20}

    model = describe_model("glm", Greedy(), 0)  # type: ignore[arg-type]
    assert (model.temperature, model.top_p, model.top_k) == (0.0, 1.0, 20)
