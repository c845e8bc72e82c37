"""Grammars come without anybody waiting for them: at once when known, later when not, replayed for a later attempt."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from glm_runtime.config import GlmConfig
from glm_runtime.engine.grammar_desk import GrammarDesk, load_grammars
from glm_runtime.sampling.grammar import GrammarCompiler, GrammarState
from kv_transfer.errors import InvalidRequest
from kv_transfer.grammar import GrammarKind, GrammarSpec
from kv_transfer.request_values import SamplingParameters

TINY = Path(__file__).parents[4] / "glm_runtime" / "tiny"
CONFIG = GlmConfig.from_checkpoint(TINY)
A, B = 64, 65
"""The tokens of the bytes `a` and `b`."""


def sampling(regex: str) -> SamplingParameters:
    return SamplingParameters(max_tokens=9, seed=1, stop_token_ids=CONFIG.eos_token_ids, grammar=GrammarSpec(GrammarKind.REGEX, regex))


class Asker:
    """Keeps what it was called with."""

    def __init__(self) -> None:
        self.state: GrammarState | None = None
        self.fault = ""
        self._has_come = asyncio.Event()

    def ask(self, desk: GrammarDesk, regex: str, emitted: tuple[int, ...] = ()) -> None:
        desk.request(sampling(regex), emitted, self.on_ready, self.on_fault)

    def on_ready(self, state: GrammarState) -> None:
        self.state = state
        self._has_come.set()

    def on_fault(self, reason: str, now_s: float) -> None:
        assert now_s == 7.0
        self.fault = reason
        self._has_come.set()

    async def answered(self) -> None:
        async with asyncio.timeout(10):
            await self._has_come.wait()


def with_desk(scene: Callable[[GrammarDesk], Awaitable[None]]) -> None:
    async def run() -> None:
        desk = GrammarDesk(load_grammars(TINY, CONFIG), lambda: 7.0)
        try:
            await scene(desk)
        finally:
            desk.close()

    asyncio.run(run())


def test_the_first_waits_and_the_next_does_not() -> None:
    async def scene(desk: GrammarDesk) -> None:
        first, second = Asker(), Asker()
        first.ask(desk, "ab")
        assert first.state is None, "nobody compiles on the control loop"
        await first.answered()
        second.ask(desk, "ab", (A,))
        assert first.state is not None
        assert second.state is not None
        assert (first.state.num_accepted, second.state.num_accepted) == (0, 1)
        assert second.state.accept((B,))
        assert second.state.is_complete
        assert not first.state.is_complete, "each has a state of its own"

    with_desk(scene)


def test_what_was_emitted_is_replayed_or_refused() -> None:
    async def scene(desk: GrammarDesk) -> None:
        good, bad, wrong = Asker(), Asker(), Asker()
        good.ask(desk, "ab", (A,))
        bad.ask(desk, "ab", (B,))
        wrong.ask(desk, "(a")
        for asker in (good, bad, wrong):
            await asker.answered()
        assert good.state is not None
        assert good.state.num_accepted == 1
        assert "break the grammar" in bad.fault
        assert "unclosed group" in wrong.fault

    with_desk(scene)


def test_what_cannot_be_served_is_refused_before_it_waits() -> None:
    async def scene(desk: GrammarDesk) -> None:
        desk.check(sampling("a"))
        desk.check(SamplingParameters(max_tokens=1, seed=1))
        with pytest.raises(InvalidRequest, match="end tokens must be among stop_token_ids"):
            desk.check(SamplingParameters(max_tokens=1, seed=1, grammar=GrammarSpec(GrammarKind.REGEX, "a")))
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            GrammarDesk(None, lambda: 7.0).check(sampling("a"))

    with_desk(scene)


def test_a_checkpoint_whose_tokenizer_does_not_fit_serves_without_grammars(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    assert load_grammars(tmp_path, CONFIG) is None
    assert "no constrained output" in caplog.text
    assert isinstance(load_grammars(TINY, CONFIG), GrammarCompiler)
