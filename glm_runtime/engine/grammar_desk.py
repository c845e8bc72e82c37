"""Where a worker's sequences get their grammars: compiled on a thread of their own, so that neither steps nor messages wait.

Knows: who waits for which grammar, and that a later attempt begins where the tokens before it have left off. Does not know masks
(`glm_runtime.sampling.grammar`) or what a worker does with a request that has failed.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from llguidance import LLMatcher

from glm_runtime.config import GlmConfig
from glm_runtime.engine.loop import EngineThread
from glm_runtime.sampling.grammar import GrammarCompiler, GrammarState, GrammarVocabulary
from kv_transfer.errors import ConfigError, InvalidRequest
from kv_transfer.request_values import SamplingParameters

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 1.0

OnFault = Callable[[str, float], None]
"""Called with the reason, for the client, and the time."""


def load_grammars(directory: Path, config: GlmConfig) -> GrammarCompiler | None:
    """The compiler for a checkpoint's vocabulary; None, and a line in the log, when its tokenizer does not fit (random checkpoints)."""
    try:
        vocabulary = GrammarVocabulary.load(Path(directory), vocab_size=config.vocab_size, end_ids=config.eos_token_ids)
    except ConfigError as error:
        logger.warning("no constrained output: %s", error)
        return None
    return GrammarCompiler(vocabulary)


class GrammarDesk:
    """Grammars for the sequences of one worker. Made and called on the control loop; the thread starts with the first grammar."""

    def __init__(self, compiler: GrammarCompiler | None, clock: Callable[[], float]) -> None:
        self._compiler = compiler
        self._clock = clock
        self._thread: EngineThread | None = None

    def now_s(self) -> float:
        """The worker's clock."""
        return self._clock()

    def check(self, sampling: SamplingParameters) -> None:
        """Raise InvalidRequest for a grammar that this worker cannot serve at all."""
        if sampling.grammar is None:
            return
        if self._compiler is None:
            raise InvalidRequest("this worker's checkpoint has no tokenizer that grammars can be read with")
        self._compiler.check(sampling)

    def request(
        self,
        sampling: SamplingParameters,
        emitted: Sequence[int],
        on_ready: Callable[[GrammarState], None],
        on_fault: OnFault,
    ) -> None:
        """Call one of both with the state after `emitted`: at once when the grammar is known, from the control loop later otherwise.

        `check` has passed. The caller sees to it that the request still lives when it is called.
        """
        assert self._compiler is not None, "the request was not checked"
        assert sampling.grammar is not None, "the request has no grammar"
        compiler, spec = self._compiler, sampling.grammar
        if (state := compiler.find(spec)) is not None:
            self._give(state, emitted, on_ready, on_fault)
            return
        if self._thread is None:
            self._thread = EngineThread("grammars")

        def compiled(done: "asyncio.Future[LLMatcher]") -> None:
            if done.cancelled():
                return
            error = done.exception()
            if error is not None:
                reason = error.message if isinstance(error, InvalidRequest) else f"the grammar cannot be used: {type(error).__name__}"
                on_fault(reason, self._clock())
                return
            compiler.keep(spec, done.result())
            self._give(compiler.start(spec), emitted, on_ready, on_fault)

        self._thread.submit(compiler.compile, spec).add_done_callback(compiled)

    def _give(self, state: GrammarState, emitted: Sequence[int], on_ready: Callable[[GrammarState], None], on_fault: OnFault) -> None:
        """Replay what earlier attempts have emitted, then hand over."""
        if state.accept(emitted):
            on_ready(state)
        else:
            on_fault(f"the tokens emitted so far break the grammar: {state.error}", self._clock())

    def close(self) -> None:
        """Let the thread end; one that still compiles does not keep the process alive."""
        if self._thread is not None:
            self._thread.stop(STOP_TIMEOUT_S)
