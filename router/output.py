"""Where a request's tokens wait for the client's coroutine.

Knows: tokens coalesce while the client is slow, so that it holds up nobody and takes no more memory than its own answer.
Does not know text. One `Wakeup` may serve several outputs (one HTTP request with several prompts).
"""

import asyncio
from array import array
from collections.abc import Sequence

from kv_transfer.errors import ServingError
from kv_transfer.messages import FinishReason, TokenLogprobs


class Wakeup:
    """Wakes the one coroutine that waits for it. Setting it twice is setting it once."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Let the waiter go on, now or when it next waits."""
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Return when it was set since the last wait."""
        if not self._is_set:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_set = False


class Output:
    """What one request has produced and its consumer has not yet taken."""

    __slots__ = ("_logprobs", "_tokens", "_wakeup", "error", "finish", "is_over", "num_cached_tokens", "prompt_logprobs")

    def __init__(self, wakeup: Wakeup) -> None:
        self._wakeup = wakeup
        self._tokens = array("i")
        self._logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self.finish: FinishReason | None = None
        self.error: ServingError | None = None
        self.is_over = False
        self.num_cached_tokens = 0

    def put(self, tokens: Sequence[int], finish: FinishReason | None, logprobs: Sequence[TokenLogprobs] = ()) -> None:
        """Add tokens, and of each its log-probabilities or none at all; `finish` says that they are the last."""
        self._tokens.extend(tokens)
        if logprobs:
            self._logprobs.extend(logprobs)
        if finish is not None:
            self.finish = finish
        self._wakeup.set()

    def end(self, error: ServingError | None) -> None:
        """Nothing more will come."""
        self.is_over = True
        self.error = error
        self._wakeup.set()

    def take(self) -> list[int]:
        """All tokens since the last take, which may be none."""
        if not self._tokens:
            return []
        tokens = self._tokens.tolist()
        del self._tokens[:]
        return tokens

    def take_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the tokens that the last take gave; called after it, before more can come."""
        taken = tuple(self._logprobs)
        self._logprobs.clear()
        return taken

    @property
    def has_more(self) -> bool:
        """Whether tokens are waiting or may still come."""
        return bool(self._tokens) or not self.is_over
