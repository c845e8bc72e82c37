"""The status page: pools, requests and a chat, by keyboard, on a phone."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from router.gateway.tokenizer import TextTokenizer
from tests.browser.chromium import PROGRAM, Page
from tests.fakes.fake_workers import FakeCluster, scripted_model
from tests.fakes.gateway_process import TINY, RunningGateway, running_gateway, wait_for

pytestmark = [pytest.mark.browser, pytest.mark.skipif(PROGRAM is None, reason="Chromium is not installed (Debian: apt install chromium)")]

ANSWER = "A greeting, so I greet <b>back</b>.</think>Hello there, friend.<|user|>"


@pytest.fixture(scope="module")
def cluster() -> Iterator[FakeCluster]:
    cluster = FakeCluster(scripted_model(TextTokenizer(TINY).encode_raw(ANSWER)), num_decode=2)
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def running(cluster: FakeCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    with running_gateway(tmp_path_factory.mktemp("gateway"), cluster.directory_port) as gateway:
        gateway.wait_until_ready()
        yield gateway


@pytest.fixture
def page(cluster: FakeCluster, running: RunningGateway, tmp_path: Path) -> Iterator[Page]:
    cluster.reset()
    with Page(tmp_path) as page:
        page.call("Page.navigate", url=running.url)
        page.wait_for("document.querySelector('#ready')?.innerText === 'ready'")
        yield page
        assert page.problems == []


def ask(page: Page, text: str) -> None:
    page.evaluate("document.getElementById('prompt').focus()")
    page.type(text)
    page.press("Enter", 13, "\r")


def test_pools_and_requests_are_shown(page: Page) -> None:
    pools = page.text("#pools")
    for words in ("prefill · 1 worker", "decode · 2 workers", "decode-1", "serving", "1,024 free of 1,024 blocks"):
        assert words in pools
    ask(page, "Hello")
    page.wait_for("document.querySelector('#recent').innerText.includes('prefill-0 → decode-')")


def test_a_chat_streams_its_thinking_and_then_its_answer(page: Page, cluster: FakeCluster) -> None:
    cluster.step_s = 0.05
    ask(page, "<i>Hello</i>")
    page.wait_for("document.querySelector('details')?.open && document.querySelector('details').innerText.includes('so I greet')")
    page.wait_for("document.querySelector('#messages').innerText.includes('Hello there, friend.')")
    page.wait_for("!document.querySelector('details').open")
    page.evaluate("document.querySelector('details').open = true")
    said = page.text("#messages")
    assert "<i>Hello</i>" in said
    assert "I greet <b>back</b>." in said, "what the model says is text, never markup"
    page.wait_for("document.activeElement.id === 'prompt'")


def test_escape_stops_an_answer_everywhere(page: Page, cluster: FakeCluster) -> None:
    cluster.step_s = 0.2
    ask(page, "Hello")
    page.wait_for("document.querySelector('details')?.innerText.includes('A')")
    page.press("Escape", 27)
    page.wait_for("document.querySelector('#messages').innerText.includes('stopped')")
    wait_for(lambda: cluster.num_live() == 0, what="the workers have dropped it")


def test_an_error_is_shown_in_its_own_words(page: Page) -> None:
    page.evaluate("document.getElementById('max-tokens').value = 100000")
    ask(page, "Hello")
    page.wait_for("document.querySelector('.error')?.innerText.includes('context is 8192')")
    page.problems.clear()  # the browser logs the 400


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_in_both_schemes(page: Page, scheme: str) -> None:
    page.call("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=2, mobile=True)
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(16, 18, 22)") == (scheme == "dark")


def test_the_keyboard_reaches_everything(page: Page) -> None:
    page.evaluate("document.body.focus()")
    reached = []
    for _ in range(14):
        page.press("Tab", 9)
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.getAttribute('href')"))
    assert {"#prompt", "clear", "prompt", "effort", "temperature", "max-tokens", "send", "/metrics"} <= set(reached)
