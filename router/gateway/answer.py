"""One choice of an answer: tokens in, thinking, content and the finish reason out.

Knows: how detokenising, thinking and stop strings follow each other. Does not know JSON or HTTP. However the tokens are cut into
pieces, texts and counts are the same.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kv_transfer.messages import FinishReason, TokenLogprobs
from router.gateway.detokeniser import Detokeniser
from router.gateway.reasoning import ReasoningSplitter
from router.gateway.stop_strings import StopStrings
from router.gateway.tokenizer import TextTokenizer


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


class _Channel:
    """Text of one kind: tokens through the detokeniser and the stop strings."""

    __slots__ = ("_detokeniser", "_stops")

    def __init__(self, tokenizer: TextTokenizer, stops: Sequence[str]) -> None:
        self._detokeniser = Detokeniser(tokenizer.token_bytes, tokenizer.special_ids)
        self._stops = StopStrings(stops)

    def feed(self, tokens: Sequence[int], *, may_stop: bool = True) -> str:
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
    A stop string ends the answer in thinking as well as in content, as other servers of this field do. min_tokens: the text of so many
    tokens is not searched for stop strings.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        stops: Sequence[str],
        end_ids: Collection[int],
        think_end_id: int | None,
        min_tokens: int = 0,
    ) -> None:
        self._end_ids = end_ids
        self._min_tokens = min_tokens
        self._has_stops = bool(stops)
        self._splitter = ReasoningSplitter(think_end_id)
        self._thinking = _Channel(tokenizer, stops)
        self._content = _Channel(tokenizer, stops)
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.finish_reason: str | None = None

    @property
    def has_content(self) -> bool:
        """Whether thinking has ended, so that content exists, however empty."""
        return not self._splitter.is_thinking

    def feed(self, tokens: Sequence[int], finish: FinishReason | None) -> TextDelta:
        """Take more tokens; `finish` says that the last of them ends the output. Nothing may come after a finish reason."""
        assert self.finish_reason is None, "the answer is finished"
        shown = tokens[:-1] if finish is FinishReason.STOP and tokens and tokens[-1] in self._end_ids else tokens
        # With stop strings one token at a time, so that counts do not depend on how tokens arrive.
        pieces = [(token,) for token in shown] if self._has_stops else [shown]
        reasoning, content = [], []
        for position, piece in enumerate(pieces, start=1):
            thought, said = self._feed_piece(piece)
            reasoning.append(thought)
            content.append(said)
            if self._thinking.is_stopped or self._content.is_stopped:
                self.finish_reason = FinishReason.STOP.value
                return TextDelta("".join(reasoning), "".join(content), self.finish_reason, tuple(shown[:position]))
        self.num_tokens += len(tokens) - len(shown)
        if finish is not None:
            self._finish(finish, reasoning, content)
        return TextDelta("".join(reasoning), "".join(content), self.finish_reason, tuple(tokens))

    def _feed_piece(self, tokens: Sequence[int]) -> tuple[str, str]:
        thinking, answer, has_ended = self._splitter.split(tokens)
        self.num_tokens += len(tokens)
        self.num_reasoning_tokens += len(thinking)
        may_stop = self.num_tokens > self._min_tokens
        reasoning = self._thinking.feed(thinking, may_stop=may_stop)
        if has_ended:
            reasoning += self._thinking.flush()
        return reasoning, self._content.feed(answer, may_stop=may_stop)

    def _finish(self, finish: FinishReason, reasoning: list[str], content: list[str]) -> None:
        channel, texts = (self._thinking, reasoning) if self._splitter.is_thinking else (self._content, content)
        texts.append(channel.flush())
        self.finish_reason = FinishReason.STOP.value if channel.is_stopped else finish.value
