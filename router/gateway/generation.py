"""The answers that one HTTP request is waiting for: one for a chat, one per prompt for completions.

Knows: the relay's outputs and the text made of them. Does not know JSON. Everything is cancelled when it is closed.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kv_transfer.identity import RequestId
from kv_transfer.messages import TokenLogprobs
from router.gateway.answer import Answer, TextDelta
from router.generation_request import GenerationRequest
from router.output import Output, Wakeup
from router.relay import Relay


@dataclass(slots=True)
class Choice:
    """One answer on its way. output is None until it is submitted, and where no token is wanted.

    waiting: the request, while it waits for the first choice of its prompt. leads: whether it is that first choice. num_tokens: taken.
    """

    request_id: RequestId
    num_prompt_tokens: int
    answer: Answer
    output: Output | None
    waiting: GenerationRequest | None
    leads: bool
    num_tokens: int = 0

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Of prompt tokens 1, 2 ... where they were asked for and once the first token has come."""
        return self.output.prompt_logprobs if self.output is not None else ()

    @property
    def is_open(self) -> bool:
        """Whether more may come."""
        return (self.output is not None or self.waiting is not None) and self.answer.finish_reason is None


class Generation:
    """All choices of one HTTP request. Submits on creation; raises Overloaded when they may not enter.

    num_choices: answers per prompt; those of one prompt are adjacent. The first of them is submitted at once, the others when it has
    ended or has its second token, which decode has drawn (the first comes from prefill and may be ahead of the blocks): by then the
    prompt's full blocks are in the caches of both workers, so the prompt is computed and moved once, not n times. Where the first token
    is also its last, the blocks on their way are given up, and the others move again what had not arrived.
    A prompt shorter than a block has nothing to share, and nobody waits, unless it is scored: its scores are told with each answer, and
    come with the first.
    """

    def __init__(self, relay: Relay, requests: Sequence[GenerationRequest], answers: Sequence[Answer], *, num_choices: int = 1) -> None:
        relay.admit(sum(request.sampling.max_tokens > 0 for request in requests))
        self._relay = relay
        self._wakeup = Wakeup()
        self._is_aborted = False
        self._timer: asyncio.TimerHandle | None = None
        self._is_silent = False
        self._last_activity_s = 0.0
        self._num_choices = num_choices
        self.choices = [
            self._begin(request, answer, requests[number - number % num_choices])
            for number, (request, answer) in enumerate(zip(requests, answers, strict=True))
        ]

    def _begin(self, request: GenerationRequest, answer: Answer, leader: GenerationRequest) -> Choice:
        leads = request is leader
        is_wanted = request.sampling.max_tokens > 0
        has_to_share = request.num_prompt_tokens > self._relay.config.block_size_tokens or leader.sampling.prompt_logprobs >= 0
        waits = is_wanted and not leads and has_to_share
        return Choice(
            request_id=request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            answer=answer,
            output=self._relay.submit(request, self._wakeup) if is_wanted and not waits else None,
            waiting=request if waits else None,
            leads=leads,
        )

    def _submit_waiting(self, leader: int) -> None:
        for choice in self.choices[leader + 1 : leader + self._num_choices]:
            if choice.waiting is not None:
                choice.output = self._relay.submit(choice.waiting, self._wakeup)
                choice.waiting = None

    @property
    def is_open(self) -> bool:
        """Whether any choice may get more, and somebody wants it."""
        return not self._is_aborted and any(choice.is_open for choice in self.choices)

    @property
    def is_aborted(self) -> bool:
        """Whether the client is gone."""
        return self._is_aborted

    async def wait(self, silence_s: float | None = None) -> bool:
        """Wait for something to take. False when `silence_s` passed without anything."""
        if silence_s is not None:
            self._watch_silence(silence_s)
        await self._wakeup.wait()
        is_silent, self._is_silent = self._is_silent, False
        self._last_activity_s = asyncio.get_running_loop().time()
        return not is_silent

    def _watch_silence(self, silence_s: float) -> None:
        """One timer that is armed again only when it fires: a token costs no timer."""
        loop = asyncio.get_running_loop()
        if self._timer is None:
            self._last_activity_s = loop.time()
            self._timer = loop.call_later(silence_s, self._silence_passed, silence_s)

    def _silence_passed(self, silence_s: float) -> None:
        loop = asyncio.get_running_loop()
        left_s = self._last_activity_s + silence_s - loop.time()
        if left_s <= 0.0:
            self._is_silent = True
            self._wakeup.set()
            left_s = silence_s
        self._timer = loop.call_later(left_s, self._silence_passed, silence_s)

    def take(self) -> list[tuple[int, TextDelta]]:
        """New text by choice. Raises the error that ended a choice, once all of its text has been taken."""
        taken = []
        failed = None
        for index, choice in enumerate(self.choices):
            output = choice.output
            if output is None or choice.answer.finish_reason is not None:
                continue
            tokens = output.take()
            if tokens or output.finish is not None:
                taken.append((index, self._feed(choice, output, tokens)))
                choice.num_tokens += len(tokens)
                if choice.leads and self._num_choices > 1 and (choice.num_tokens > 1 or not choice.is_open or output.finish is not None):
                    self._submit_waiting(index)
            elif output.error is not None:
                failed = output.error
        if failed is not None and not taken:
            raise failed
        if failed is not None:
            self._wakeup.set()  # the text first, the error with the next take
        return taken

    def _feed(self, choice: Choice, output: Output, tokens: list[int]) -> TextDelta:
        delta = choice.answer.feed(tokens, output.finish)
        logprobs = output.take_logprobs()
        if logprobs:
            delta = replace(delta, logprobs=logprobs[: len(delta.tokens)])
        if delta.finish_reason is not None:
            # Does nothing when the worker itself has finished.
            self._relay.finish(choice.request_id, "stop_string" if choice.answer.is_stopped else "end_of_turn")
        return delta

    def abort(self, reason: str) -> None:
        """Nobody wants the answer any more: cancel everywhere, now."""
        self._is_aborted = True
        for choice in self.choices:
            choice.waiting = None
            self._relay.abort(choice.request_id, reason)
        self._wakeup.set()

    def close(self) -> None:
        """Cancel whatever is not finished, e.g. the other choices when one has failed."""
        if self._timer is not None:
            self._timer.cancel()
        for choice in self.choices:
            self._relay.abort(choice.request_id, "closed")

    def count_usage(self) -> tuple[int, int, int, int]:
        """(prompt, output, cached prompt, reasoning) tokens over all choices so far; each prompt counts once, whatever its choices."""
        leaders = [choice for choice in self.choices if choice.leads]
        return (
            sum(choice.num_prompt_tokens for choice in leaders),
            sum(choice.answer.num_tokens for choice in self.choices),
            sum(choice.output.num_cached_tokens for choice in leaders if choice.output is not None),
            sum(choice.answer.num_reasoning_tokens for choice in self.choices),
        )
