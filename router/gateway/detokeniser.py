"""Token ids to text, a few at a time.

Knows: bytes of a character may be spread over tokens, and tokens over frames; however the stream is cut, the text is the same.
Does not know which tokens end an answer.
"""

import codecs
from collections.abc import Collection, Iterable, Sequence


class Detokeniser:
    """Text of one stream of tokens. Invalid UTF-8 becomes U+FFFD, exactly as if the whole stream were decoded at once.

    token_bytes: table of the tokenizer. hidden_ids: tokens that add nothing to the text.
    """

    __slots__ = ("_decoder", "_hidden_ids", "_token_bytes")

    def __init__(self, token_bytes: Sequence[bytes], hidden_ids: Collection[int] = frozenset()) -> None:
        self._token_bytes = token_bytes
        self._hidden_ids = hidden_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, tokens: Iterable[int]) -> str:
        """The text that these tokens complete. The bytes of an unfinished character are held back."""
        table, hidden = self._token_bytes, self._hidden_ids
        size = len(table)
        return self._decoder.decode(b"".join([table[token] for token in tokens if token not in hidden and 0 <= token < size]))

    def flush(self) -> str:
        """What is held back, as U+FFFD; afterwards the detokeniser is as new."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
