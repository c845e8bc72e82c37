"""Log-probabilities in the shapes of OpenAI's objects, and of vLLM's for prompts.

Knows: how a token is written, and which fields each API has. Does not know how answers are driven.
"""

import codecs
from collections.abc import Collection, Sequence
from typing import Any

from kv_transfer.messages import TokenLogprobs

SMALLEST = -9999.0
"""Stands for the logarithm of 0, which JSON cannot write; OpenAI and vLLM use the same number."""


class TokenTexts:
    """Tokens as clients read them. token_bytes: by id, what each adds to a text. special_ids: those that an answer does not show."""

    def __init__(self, token_bytes: Sequence[bytes], special_ids: Collection[int]) -> None:
        self._token_bytes = token_bytes
        self._special_ids = special_ids

    def bytes_of(self, token: int) -> bytes:
        """What the token adds to a text; nothing for an id that the vocabulary leaves out."""
        return self._token_bytes[token] if token < len(self._token_bytes) else b""

    def readable(self, token: int) -> str:
        """The token's text; parts of a character become U+FFFD."""
        return self.bytes_of(token).decode("utf-8", "replace")

    def distinct(self, token: int) -> str:
        """The token's text, or its bytes as "bytes:\\xe2\\x82" when they are no text: two tokens never look the same for that."""
        raw = self.bytes_of(token)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def is_special(self, token: int) -> bool:
        """Whether an answer does not show it."""
        return token in self._special_ids


def chat_logprobs(texts: TokenTexts, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """`logprobs` of a chat choice: an entry for each token, thinking and the end token included."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = texts.bytes_of(token)
        return {"token": texts.readable(token), "logprob": max(logprob, SMALLEST), "bytes": list(raw)}

    content = [
        {**entry(token, told.logprob), "top_logprobs": [entry(*pair) for pair in told.top]}
        for token, told in zip(tokens, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """`logprobs` of one completion choice, which may come in pieces: offsets count the characters of the choice's text so far.

    `top_logprobs` always has the token itself, so it may have one entry more than was asked for.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def prompt(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Of an echoed prompt, whose first token follows nothing; control tokens are part of its text."""
        return self._piece(tokens, (None, *logprobs), is_prompt=True)

    def answer(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Of more tokens of the answer."""
        return self._piece(tokens, logprobs, is_prompt=False)

    def _piece(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None], *, is_prompt: bool) -> dict[str, Any]:
        piece: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, told in zip(tokens, logprobs, strict=True):
            piece["tokens"].append(self._texts.distinct(token))
            piece["token_logprobs"].append(None if told is None else max(told.logprob, SMALLEST))
            piece["top_logprobs"].append(None if told is None else self._top(token, told))
            piece["text_offset"].append(self._offset)
            if is_prompt or not self._texts.is_special(token):
                self._offset += len(self._decoder.decode(self._texts.bytes_of(token)))
        return piece

    def _top(self, token: int, told: TokenLogprobs) -> dict[str, float]:
        top = {self._texts.distinct(each): max(logprob, SMALLEST) for each, logprob in told.top}
        top.setdefault(self._texts.distinct(token), max(told.logprob, SMALLEST))
        return top


def join_completion_logprobs(pieces: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Several pieces of one choice as one."""
    if not pieces:
        return None
    return {name: [value for piece in pieces for value in piece[name]] for name in pieces[0]}


def prompt_logprobs(texts: TokenTexts, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: by position, token id -> logprob, rank and text; null for the first token, which follows nothing."""

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": max(logprob, SMALLEST), "rank": rank, "decoded_token": texts.readable(token)}

    told: list[dict[str, Any] | None] = [None]
    for token, one in zip(tokens[1:], logprobs, strict=True):
        place = {str(token): entry(token, one.logprob, one.rank)}
        for rank, (other, logprob) in enumerate(one.top, start=1):
            place.setdefault(str(other), entry(other, logprob, rank))
        told.append(place)
    return told
