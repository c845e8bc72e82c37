"""The generating endpoints over a real relay whose workers are played by the test: what is sent, and in which order."""

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from starlette.types import Message as AsgiMessage

from kv_transfer.block_keys import block_keys
from kv_transfer.errors import InvalidRequest, PromptTooLong
from kv_transfer.identity import PackedTokens, pack_tokens
from kv_transfer.messages import FinishReason, OpenSink, SinkReady, TokenDelta, TokenLogprobs, Tokens
from router import relay
from router.config import GatewayConfig, RouterConfig
from router.gateway import surface
from router.gateway.chat import ChatEndpoint
from router.gateway.chat_template import ChatEncoder, ChatTemplate, read_pinned_template
from router.gateway.completions import CompletionEndpoint
from router.gateway.detokeniser import Detokeniser
from router.gateway.grammar_checker import GrammarChecker
from router.gateway.logprobs import TokenTexts
from router.gateway.metrics import GatewayMetrics
from router.gateway.sampling import describe_model
from router.gateway.surface import GatewayParts
from router.gateway.token_endpoints import DetokenizeEndpoint, TokenizeEndpoint
from router.gateway.tokenizer import TextTokenizer
from tests.unit.router.test_relay import DECODE, PREFILL, Scene

HI = [{"role": "user", "content": "hi"}]
Endpoint = type[ChatEndpoint] | type[CompletionEndpoint] | type[TokenizeEndpoint] | type[DetokenizeEndpoint]


class Served:
    """Endpoints in this process. Every message to a worker is in `scene.posted`; nothing answers unless the test does."""

    def __init__(self, tokenizer: TextTokenizer, **gateway: Any) -> None:
        self.scene = Scene(RouterConfig(block_size_tokens=64))
        self.scene.up(PREFILL, DECODE)
        self.tokenizer = tokenizer
        self.parts = GatewayParts(
            config=GatewayConfig(**{"tokenizer_dir": "", "directory_port": 1, "secret_file": "", **gateway}),
            model=describe_model("glm", tokenizer, 0),
            tokenizer=tokenizer,
            chat_encoder=ChatEncoder(ChatTemplate(read_pinned_template()), tokenizer, control_tokens_in_text=False),
            grammar_checker=GrammarChecker(1.0),
            relay=self.scene.relay,
            metrics=GatewayMetrics(),
        )
        self.sent: list[AsgiMessage] = []
        self.num_said: dict[int, int] = {}
        self.gone = asyncio.Event()

    async def post(self, body: dict[str, Any], endpoint: Endpoint = CompletionEndpoint) -> None:
        given = [{"type": "http.request", "body": json.dumps({"model": "glm", **body}).encode()}]

        async def receive() -> AsgiMessage:
            if given:
                return given.pop()
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: AsgiMessage) -> None:
            self.sent.append(message)

        scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
        await endpoint(self.parts)(scope, receive, send)

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()

    @property
    def opened(self) -> list[OpenSink]:
        return [message for _, message in self.scene.posted if isinstance(message, OpenSink)]

    def say(self, number: int, tokens: tuple[int, ...], finish: FinishReason | None = None, *, has_scores: bool = False) -> None:
        """Tokens of the request that was opened as the `number`th."""
        opened = self.opened[number]
        self.scene.relay.on_message(DECODE, SinkReady(opened.transfer, 0, 1))
        own = tuple(TokenLogprobs(-0.5, 1, ()) for _ in tokens) if opened.sampling.logprobs >= 0 else ()
        prompt = tuple(TokenLogprobs(-1.5, 1, ()) for _ in range(opened.num_prompt_tokens - 1)) if has_scores else ()
        first_index = opened.first_index + self.num_said.get(number, 0)
        self.num_said[number] = self.num_said.get(number, 0) + len(tokens)
        delta = TokenDelta(opened.transfer, first_index, tokens, finish, logprobs=own, prompt_logprobs=prompt)
        self.scene.relay.on_message(DECODE, Tokens((delta,)))

    async def opened_are(self, number: int) -> None:
        async with asyncio.timeout(5):
            while len(self.opened) < number:  # noqa: ASYNC110 - the relay has no event for it
                await asyncio.sleep(0.001)


def play(tokenizer: TextTokenizer, scene: Callable[[Served], Awaitable[None]], **gateway: Any) -> Served:
    async def run() -> Served:
        served = Served(tokenizer, **gateway)
        await asyncio.wait_for(scene(served), 10)
        return served

    return asyncio.run(run())


# -- streams -------------------------------------------------------------------------------------------------------------


def test_text_that_comes_together_with_the_keepalive_timer_is_sent(tokenizer: TextTokenizer) -> None:
    tokens = tuple(tokenizer.encode_raw("Hello"))

    async def scene(served: Served) -> None:
        answering = asyncio.create_task(served.post({"prompt": "x", "stream": True, "max_tokens": len(tokens)}))
        await served.opened_are(1)
        asyncio.get_running_loop().call_later(0.06, served.say, 0, tokens, FinishReason.LENGTH)
        time.sleep(0.1)  # noqa: ASYNC251 - both timers are due in one turn of the loop, that of silence first
        await asyncio.wait_for(answering, 5)

    text = play(tokenizer, scene, keepalive_s=0.05).text
    assert '"text":"Hello"' in text
    assert '"finish_reason":"length"' in text


# -- several answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_other_answers_wait_for_the_scores_of_a_short_prompt(tokenizer: TextTokenizer, is_streamed: bool) -> None:
    async def scene(served: Served) -> None:
        asked = {"prompt": [65, 66], "n": 2, "max_tokens": 1, "echo": True, "logprobs": 0, "stream": is_streamed}
        answering = asyncio.create_task(served.post(asked))
        await served.opened_are(1)
        await asyncio.sleep(0.02)
        if len(served.opened) > 1:  # the first is late
            served.say(1, (68,), FinishReason.LENGTH)
            await asyncio.sleep(0.02)
        served.say(0, (67,), FinishReason.LENGTH, has_scores=True)
        await served.opened_are(2)
        served.say(1, (68,), FinishReason.LENGTH)
        await asyncio.wait_for(answering, 5)

    text = play(tokenizer, scene).text
    assert text.count("-1.5") >= 2, "the prompt's scores are told with each answer"
    assert text.count('"finish_reason":"length"') == 2


def test_nothing_is_submitted_for_a_client_that_has_gone(tokenizer: TextTokenizer) -> None:
    async def scene(served: Served) -> None:
        answering = asyncio.create_task(served.post({"prompt": [65] * 100, "n": 3, "max_tokens": 4}))
        await served.opened_are(1)
        served.gone.set()
        served.say(0, (67,))  # in the turn in which the client goes
        await asyncio.wait_for(answering, 5)
        assert served.scene.relay.num_live == 0

    assert len(play(tokenizer, scene).opened) == 1


def test_how_an_answer_was_ended_is_told(tokenizer: TextTokenizer) -> None:
    role = tokenizer.control_ids["<|user|>"]

    async def scene(served: Served) -> None:
        by_text = asyncio.create_task(served.post({"prompt": "x", "max_tokens": 50, "stop": "A"}))
        await served.opened_are(1)
        served.say(0, tuple(tokenizer.encode_raw("A")))
        await by_text
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 50}
        by_role = asyncio.create_task(served.post(chat, ChatEndpoint))
        await served.opened_are(2)
        served.say(1, (role,))  # a worker to which it ends nothing
        await by_role

    records = play(tokenizer, scene).scene.records
    assert [record.reason for record in records] == ["stop_string", "end_of_turn"]


# -- what a large request costs ------------------------------------------------------------------------------------------


def test_bad_words_are_tokenised_once_and_on_a_thread_when_long(tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []
    encode_runs = tokenizer.encode_runs

    def watch(runs: Sequence[str]) -> list[list[int]]:
        threads.append(threading.current_thread() is threading.main_thread())
        return encode_runs(runs)

    monkeypatch.setattr(tokenizer, "encode_runs", watch)

    async def scene(served: Served) -> None:
        for body, endpoint in (({"prompt": ["a", "b", "c"]}, CompletionEndpoint), ({"messages": HI}, ChatEndpoint)):
            before = len(served.opened)
            asked = asyncio.create_task(served.post({**body, "max_tokens": 1, "bad_words": ["x" * 30, "word"]}, endpoint))
            await served.opened_are(before + 1)
            assert len({message.sampling.bad_words for message in served.opened[before:]}) == 1
            asked.cancel()

    play(tokenizer, scene, tokenize_inline_below_characters=20)
    assert threads.count(False) == 3, "once for each request, and the chat's messages"
    assert len(threads) == 3


def test_a_prompt_is_packed_and_hashed_once_however_many_answers_it_gets(tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def watch(tokens: PackedTokens, *rest: Any) -> list[bytes]:
        calls.append(len(tokens))
        return block_keys(tokens, *rest)

    monkeypatch.setattr(relay, "block_keys", watch)
    packed: list[int] = []

    def pack(tokens: Sequence[int]) -> PackedTokens:
        packed.append(len(tokens))
        return pack_tokens(tokens)

    monkeypatch.setattr(surface, "pack_tokens", pack)

    async def scene(served: Served) -> None:
        asked = asyncio.create_task(served.post({"prompt": [65] * 200, "max_tokens": 3, "n": 3}))
        await served.opened_are(1)
        served.say(0, (67,))  # prefill's: the prompt's last blocks may still be under way
        await asyncio.sleep(0.05)
        assert len(served.opened) == 1
        served.say(0, (68,))
        await served.opened_are(3)
        assert len({message.tokens for message in served.opened}) == 1
        asked.cancel()

    play(tokenizer, scene)
    assert (len(calls), len(packed)) == (1, 1)


def test_log_probabilities_of_prompts_are_limited_over_the_request(tokenizer: TextTokenizer) -> None:
    async def scene(served: Served) -> None:
        asked = {"max_tokens": 1, "prompt_logprobs": 1}
        with pytest.raises(InvalidRequest, match="together 120; this server tells at most 100") as caught:
            await served.post({**asked, "prompt": [[65] * 10] * 3, "n": 2})
        assert caught.value.param == "prompt_logprobs"
        with pytest.raises(InvalidRequest, match="at most 100") as caught:
            await served.post({"prompt": [[65] * 51] * 2, "max_tokens": 0, "echo": True, "logprobs": 0})
        assert caught.value.param == "logprobs"
        with pytest.raises(InvalidRequest, match="at most 100") as caught:
            await served.post({"messages": [{"role": "user", "content": "x" * 200}], "prompt_logprobs": 9}, ChatEndpoint)
        assert caught.value.param == "prompt_logprobs"
        assert served.opened == []
        fits = asyncio.create_task(served.post({**asked, "prompt": [[65] * 10] * 2, "n": 2}))
        await served.opened_are(2)
        fits.cancel()

    play(tokenizer, scene, max_prompt_logprobs=100)


@pytest.mark.parametrize(
    ("body", "endpoint"),
    [
        ({"tokens": [65] * 8193}, DetokenizeEndpoint),
        ({"prompt": "<|user|>" * 8193, "return_token_strs": True}, TokenizeEndpoint),
    ],
)
def test_no_more_tokens_are_spelt_out_than_a_context_holds(tokenizer: TextTokenizer, body: dict[str, Any], endpoint: Endpoint) -> None:
    async def scene(served: Served) -> None:
        with pytest.raises(PromptTooLong, match="8193 tokens"):
            await served.post(body, endpoint)

    play(tokenizer, scene)


def test_long_texts_are_spelt_out_on_a_thread(tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []

    def watch(texts: TokenTexts, token: int) -> bytes:
        threads.append(threading.current_thread() is threading.main_thread())
        return bytes_of(texts, token)

    bytes_of = TokenTexts.bytes_of
    monkeypatch.setattr(TokenTexts, "bytes_of", watch)
    feed = Detokeniser.feed

    def watch_feed(self: Detokeniser, tokens: Sequence[int]) -> str:
        threads.append(threading.current_thread() is threading.main_thread())
        return feed(self, tokens)

    monkeypatch.setattr(Detokeniser, "feed", watch_feed)

    async def scene(served: Served) -> None:
        await served.post({"tokens": [65] * 100}, DetokenizeEndpoint)
        await served.post({"prompt": "x" * 100, "return_token_strs": True}, TokenizeEndpoint)

    assert '"token_strs":["' in play(tokenizer, scene, tokenize_inline_below_characters=50).text
    assert threads
    assert not any(threads)
