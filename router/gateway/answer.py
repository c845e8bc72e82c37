"""One choice of an answer: tokens in, thinking, content, tool calls and the finish reason out.

Knows: how parsing, detokenising and stop strings follow each other. Does not know JSON or HTTP. However the tokens are cut into
pieces, texts and counts are the same.
"""

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from kv_transfer.messages import FinishReason, SamplingParameters, TokenLogprobs
from router.gateway.detokeniser import Detokeniser
from router.gateway.stop_strings import StopStrings
from router.gateway.tokenizer import TextTokenizer
from router.gateway.tool_values import ArgumentTypes
from router.gateway.turn_parser import CallDelta, Pieces, TurnFormat, TurnParser, find_tags

TOOL_CALLS = "tool_calls"
"""The finish reason of a turn that has called tools and ended by itself."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text and the tokens it was made from, hidden ones included. finish_reason is set in the last one.

    logprobs: of each of `tokens`, or none at all.
    """

    reasoning: str
    content: str
    finish_reason: str | None
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    calls: tuple[CallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How tool calls are read. tools: arguments' types by tool. max_calls: the turn ends with so many; 0 is any number."""

    tools: Mapping[str, ArgumentTypes]
    max_calls: int = 0


def new_call_id() -> str:
    """An id that no other call has."""
    return f"call_{secrets.token_hex(12)}"


class _Channel:
    """Text of one kind: tokens through the detokeniser and the stop strings."""

    __slots__ = ("_detokeniser", "_stops")

    def __init__(self, turn_format: TurnFormat, stops: Sequence[str]) -> None:
        self._detokeniser = Detokeniser(turn_format.token_bytes, turn_format.hidden_ids)
        self._stops = StopStrings(stops)

    def feed(self, tokens: Sequence[int], *, may_stop: bool) -> str:
        if not tokens:
            return ""
        text = self._detokeniser.feed(tokens)
        return self._stops.feed(text) if may_stop else text

    def flush(self) -> str:
        return self._stops.feed(self._detokeniser.flush()) + self._stops.flush()

    @property
    def is_stopped(self) -> bool:
        return self._stops.is_stopped


class Answer:
    """The text of one choice as it grows.

    end_ids: tokens that end the output and are not shown. think_end_id: the token that ends thinking; None where nothing is split off.
    calls: None where tags of tool calls are text. has_roles: whether a role token, too, ends the turn.
    A stop string ends the answer in thinking as well as in content, as other servers of this field do, but not inside a call.
    min_tokens: the text of so many tokens is not searched for stop strings.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        stops: Sequence[str],
        end_ids: Collection[int],
        think_end_id: int | None,
        min_tokens: int = 0,
        calls: CallFormat | None = None,
        has_roles: bool = False,
        make_call_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._end_ids = end_ids
        self._min_tokens = min_tokens
        self._has_stops = bool(stops)
        tags = find_tags(tokenizer.control_ids, think_end_id=think_end_id, has_calls=calls is not None, has_roles=has_roles)
        turn_format = TurnFormat(
            tags=tags,
            token_bytes=tokenizer.token_bytes,
            hidden_ids=tokenizer.special_ids - tags.keys(),
            tools=calls.tools if calls else {},
            max_calls=calls.max_calls if calls else 0,
        )
        self._parser = TurnParser(turn_format, make_call_id, starts_in_reasoning=think_end_id is not None)
        self._thinking = _Channel(turn_format, stops)
        self._content = _Channel(turn_format, stops)
        self._has_thought_open = think_end_id is not None
        self._has_said = False
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.finish_reason: str | None = None

    @property
    def has_content(self) -> bool:
        """Whether content exists, however empty: thinking has ended, and the answer is not in its calls."""
        return self._has_said or (self._parser.has_left_reasoning and not self._parser.num_calls)

    def feed(self, tokens: Sequence[int], finish: FinishReason | None) -> TextDelta:
        """Take more tokens; `finish` says that the last of them ends the output. Nothing may come after a finish reason."""
        assert self.finish_reason is None, "the answer is finished"
        shown = tokens[:-1] if finish is FinishReason.STOP and tokens and tokens[-1] in self._end_ids else tokens
        # With stop strings one token at a time, so that counts do not depend on how tokens arrive.
        parts = [(token,) for token in shown] if self._has_stops else [shown]
        delta = _Growing()
        for part in parts:
            self._take(self._parser.feed(part), delta)
            if self.is_stopped or self._parser.is_ended:
                self._end_early(delta)
                return delta.freeze(self.finish_reason, tuple(shown[: delta.num_used]))
        self.num_tokens += len(tokens) - len(shown)
        if finish is not None:
            self._finish(finish, delta)
        return delta.freeze(self.finish_reason, tuple(tokens))

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended it."""
        return self._thinking.is_stopped or self._content.is_stopped

    def _take(self, pieces: Pieces, delta: "_Growing") -> None:
        self.num_tokens += pieces.num_used
        self.num_reasoning_tokens += len(pieces.reasoning)
        may_stop = self.num_tokens > self._min_tokens
        delta.num_used += pieces.num_used
        delta.reasoning.append(self._thinking.feed(pieces.reasoning, may_stop=may_stop))
        if self._has_thought_open and self._parser.has_left_reasoning:
            self._has_thought_open = False
            delta.reasoning.append(self._thinking.flush())
        for number, run in enumerate(pieces.content):
            if number:
                self._say(self._content.flush(), delta)
            self._say(self._content.feed(run, may_stop=may_stop), delta)
        delta.calls += pieces.calls

    def _say(self, text: str, delta: "_Growing") -> None:
        self._has_said |= bool(text)
        delta.content.append(text)

    def _end_early(self, delta: "_Growing") -> None:
        """The turn is over before the workers say so."""
        if not self.is_stopped:
            self._flush(delta)
        self.finish_reason = self._ended_by(FinishReason.STOP)

    def _finish(self, finish: FinishReason, delta: "_Growing") -> None:
        self._take(self._parser.finish(is_cut_off=finish is FinishReason.LENGTH), delta)
        self._flush(delta)
        self.finish_reason = self._ended_by(finish)

    def _flush(self, delta: "_Growing") -> None:
        if not self._parser.has_left_reasoning:
            delta.reasoning.append(self._thinking.flush())
        self._say(self._content.flush(), delta)

    def _ended_by(self, finish: FinishReason) -> str:
        if self.is_stopped:
            return FinishReason.STOP.value
        return TOOL_CALLS if finish is FinishReason.STOP and self._parser.num_calls else finish.value


def make_answer(
    tokenizer: TextTokenizer,
    sampling: SamplingParameters,
    *,
    stops: Sequence[str],
    think_end_id: int | None,
    calls: CallFormat | None = None,
    has_roles: bool = False,
) -> Answer:
    """The text side of a choice whose tokens are drawn with `sampling`."""
    return Answer(
        tokenizer,
        stops=stops,
        end_ids=frozenset(sampling.stop_token_ids),
        think_end_id=think_end_id,
        min_tokens=sampling.min_tokens,
        calls=calls,
        has_roles=has_roles,
    )


class _Growing:
    """A delta while it is put together."""

    __slots__ = ("calls", "content", "num_used", "reasoning")

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.content: list[str] = []
        self.calls: list[CallDelta] = []
        self.num_used = 0

    def freeze(self, finish_reason: str | None, tokens: tuple[int, ...]) -> TextDelta:
        return TextDelta("".join(self.reasoning), "".join(self.content), finish_reason, tokens, calls=tuple(self.calls))
