"""Which tokens a constrained output may go on with: masks, one bit per token id, from llguidance.

Knows: where a sequence is in its grammar, that thinking comes before it, and what drafts see. Does not know logits (`sampler.py`), or
which sequence waits for a grammar to be compiled (`grammar_desk.py`). Deterministic: a mask depends on the constraint, the tokenizer and
the tokens before it.
"""

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, get_version
from torch import Tensor

from glm_runtime.checkpoint import TOKENIZER_FILE, tokenizer_digest
from kv_transfer.errors import ConfigError, InvalidRequest
from kv_transfer.grammar import PARSER_LIMITS, GrammarSpec, library_text
from kv_transfer.request_values import SamplingParameters

MAX_CACHED_GRAMMARS = 32
"""Compiling takes a few milliseconds; a hostile grammar may keep 50 MB of lexer states (`PARSER_LIMITS`) until it is pushed out."""
MAX_REASON_LENGTH = 300
_WORD_BITS = 32


class GrammarVocabulary:
    """The tokens of a checkpoint as grammars read them.

    Added tokens are control tokens, never text, whatever their `special` flag says: no string of an answer can hold `</think>`. Ids
    between the tokenizer's size and the model's are never allowed. end_ids: what an answer ends with, allowed where the grammar is
    complete. Raises ConfigError for a tokenizer that is unreadable, or that has ids beyond the model's vocabulary.
    """

    def __init__(self, tokenizer_json: str, *, vocab_size: int, end_ids: Sequence[int], digest: str = "") -> None:
        tree = _read_tree(tokenizer_json)
        for token in tree.get("added_tokens") or ():
            token["special"] = True
        self.vocab_size = vocab_size
        self.num_words = -(-vocab_size // _WORD_BITS)
        self.end_ids = frozenset(end_ids)
        self.digest = digest
        try:
            self.library_tokenizer = LLTokenizer(json.dumps(tree), n_vocab=vocab_size, eos_token=list(end_ids))
        except ValueError as error:
            raise ConfigError(f"is no tokenizer for grammars: {error}", path=TOKENIZER_FILE) from None
        if self.library_tokenizer.vocab_size != vocab_size:
            raise ConfigError(
                f"has {self.library_tokenizer.vocab_size} token ids; the model's vocabulary is {vocab_size}", path=TOKENIZER_FILE
            )
        every = torch.arange(self.num_words * _WORD_BITS) < vocab_size
        end = torch.zeros_like(every)
        end[list(end_ids)] = True
        self.everything = _pack(every)
        self.all_but_end = _pack(every & ~end)
        self.end_only = _pack(end)

    @classmethod
    def load(cls, directory: Path, *, vocab_size: int, end_ids: Sequence[int]) -> "GrammarVocabulary":
        """From a checkpoint. Takes a second for 154,880 tokens."""
        text = (directory / TOKENIZER_FILE).read_text(encoding="utf-8")
        return cls(text, vocab_size=vocab_size, end_ids=end_ids, digest=tokenizer_digest(directory))


class GrammarCompiler:
    """Compiled constraints of one vocabulary, the latest used ones kept. Thread-safe: states renew themselves on the engine thread."""

    def __init__(self, vocabulary: GrammarVocabulary, capacity: int = MAX_CACHED_GRAMMARS) -> None:
        self.vocabulary = vocabulary
        self._capacity = capacity
        self._limits = LLParserLimits(**PARSER_LIMITS)  # type: ignore[arg-type]
        self._compiled: OrderedDict[tuple[bytes, str], LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, sampling: SamplingParameters) -> None:
        """Raise InvalidRequest where a complete output would not end: every end token must stop it."""
        if missing := sorted(self.vocabulary.end_ids - set(sampling.stop_token_ids)):
            raise InvalidRequest(f"under a grammar the end tokens must be among stop_token_ids; {missing} are not", param="stop_token_ids")

    def find(self, spec: GrammarSpec) -> "GrammarState | None":
        """A new state at the constraint's beginning, when it is compiled already."""
        key = (spec.key, self.vocabulary.digest)
        with self._lock:
            matcher = self._compiled.get(key)
            if matcher is None:
                return None
            self._compiled.move_to_end(key)
        return GrammarState(matcher.deep_copy(), self, spec)

    def compile(self, spec: GrammarSpec) -> LLMatcher:
        """Compile, which takes milliseconds and lets go of the interpreter lock; `keep` the result. Raises InvalidRequest."""
        try:
            matcher = LLMatcher(self.vocabulary.library_tokenizer, library_text(spec), log_level=0, limits=self._limits)
        except ValueError as error:
            raise InvalidRequest(f"the grammar cannot be used: {one_line(str(error))}") from None
        if matcher.is_error():
            raise InvalidRequest(f"the grammar cannot be used: {one_line(matcher.get_error())}")
        return matcher

    def keep(self, spec: GrammarSpec, matcher: LLMatcher) -> None:
        """Keep what `compile` has made for `find`."""
        with self._lock:
            self._compiled[spec.key, self.vocabulary.digest] = matcher
            while len(self._compiled) > self._capacity:
                self._compiled.popitem(last=False)

    def start(self, spec: GrammarSpec) -> "GrammarState":
        """A new state at the constraint's beginning, compiled here and now if need be. Raises InvalidRequest."""
        if (state := self.find(spec)) is None:
            matcher = self.compile(spec)
            self.keep(spec, matcher)
            state = GrammarState(matcher.deep_copy(), self, spec)
        return state

    @property
    def num_compiled(self) -> int:
        """Constraints that are kept."""
        return len(self._compiled)


class GrammarState:
    """Where one output is in its grammar. `accept` and `rollback` move it; never two calls at a time.

    `masks` leaves it where it is, but may renew the matcher, and sets `error` where nothing can follow.

    Before the constraint begins (thinking) every token is allowed but those that end an answer: an output that ends there would have
    broken its promise, unless the constraint is optional. From then on the masks are the grammar's; where it is complete the end tokens
    are allowed, and where nothing else can follow only they are. error: why the constraint cannot go on (too complex a place in the
    grammar, or a token that it does not allow); the request has failed then. Until that is seen, masks allow only an end.
    """

    def __init__(self, matcher: LLMatcher, compiler: GrammarCompiler, spec: GrammarSpec) -> None:
        self._matcher = matcher
        self._compiler = compiler
        self._vocabulary = compiler.vocabulary
        self._matched: list[int] = []
        self._is_worn = False
        self._spec = spec
        self._num_accepted = 0
        self._began_at: int | None = 0 if spec.begins_at_once else None
        self._is_triggered = False
        self._ended_at: int | None = None
        self.error: str | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the next token is under the constraint."""
        return self._began_at is not None

    @property
    def num_accepted(self) -> int:
        """Output tokens so far."""
        return self._num_accepted

    @property
    def is_complete(self) -> bool:
        """Whether the output may end here."""
        may_end = self._matcher.is_accepting() if self.has_begun else self._spec.is_optional
        return may_end and self.error is None

    def accept(self, tokens: Sequence[int]) -> bool:
        """Take the next output tokens. False, with `error` set, at one that may not come; those before it are taken."""
        for token in tokens:
            if self._began_at is None and self._ended_at is None and token == self._spec.trigger_token:
                self._began_at, self._is_triggered = self._num_accepted, True
            if self.error is not None or not self._accept(token):
                return False
            self._num_accepted += 1
            if self._began_at is None and token == self._spec.after_token:
                self._began_at = self._num_accepted
        return True

    def _accept(self, token: int) -> bool:
        if self._ended_at is not None or token in self._vocabulary.end_ids:
            if token not in self._vocabulary.end_ids or not self.is_complete:
                self.error = f"token {token} is not allowed here"
            elif self._ended_at is None:
                self._ended_at = self._num_accepted
        elif self.has_begun:
            if self._consume(token):
                self._matched.append(token)
            else:
                self.error = one_line(self._matcher.get_error()) or f"token {token} is not allowed here"
        return self.error is None

    def _consume(self, token: int) -> bool:
        return self._matcher.consume_token(token) or (_is_worn(self._matcher) and self._renew() and self._matcher.consume_token(token))

    def _renew(self) -> bool:
        """Begin with a lexer of its own, and go where this output is; False where that is too much for a new one, too.

        Copies of a compiled grammar share one lexer, whose states are limited: what others have made of it must not end this output.
        """
        matcher = self._compiler.compile(self._spec)
        self._compiler.keep(self._spec, matcher)
        self._matcher, self._is_worn = matcher.deep_copy(), False
        return self._matcher.consume_tokens(self._matched)

    def rollback(self, num_tokens: int) -> None:
        """Take back the last accepted tokens."""
        assert 0 <= num_tokens <= self._num_accepted, f"{self._num_accepted} tokens are accepted, not {num_tokens}"
        assert self.error is None, "a grammar in error stays where it is"
        num_matched = self._num_matched
        self._num_accepted -= num_tokens
        if self._ended_at is not None and self._num_accepted <= self._ended_at:
            self._ended_at = None
        # A trigger is the constraint's first token: without it the constraint has not begun.
        if self._began_at is not None and self._num_accepted < self._began_at + self._is_triggered:
            self._began_at, self._is_triggered = None, False
        num_back = num_matched - self._num_matched
        if num_back:
            is_back = self._matcher.rollback(num_back)
            assert is_back, f"the grammar cannot go back by {num_back} tokens: {self._matcher.get_error()}"
            del self._matched[-num_back:]

    @property
    def _num_matched(self) -> int:
        """Tokens that the matcher has been given: those after thinking, without the end."""
        if self._began_at is None:
            return 0
        return (self._num_accepted if self._ended_at is None else self._ended_at) - self._began_at

    def digest(self) -> bytes:
        """16 bytes that two workers have in common exactly when they read one constraint alike and are equally far in it."""
        parts = (self._spec.key.hex(), self._vocabulary.digest, get_version(), self._num_accepted, self._began_at, self._ended_at)
        return hashlib.sha256(repr(parts).encode()).digest()[:16]

    def masks(self, drafts: Sequence[int] = ()) -> Tensor:
        """[1 + drafts, ceil(V / 32)] int32, new: row j allows what may follow the accepted tokens and drafts 1..j.

        Bit i of word w stands for token 32 w + i. Rows after a draft that may not come, or that ends the answer, allow everything: no
        sample of theirs can stand.
        """
        rows = self._rows(drafts)
        if self._is_worn and self._renew():
            self.error = None
            rows = self._rows(drafts)
        return rows

    def _rows(self, drafts: Sequence[int]) -> Tensor:
        rows = torch.full((1 + len(drafts), self._vocabulary.num_words), -1, dtype=torch.int32)
        matcher = self._matcher.deep_copy() if drafts else self._matcher
        has_begun = self.has_begun
        for row, draft in zip(rows, (*drafts, None), strict=True):
            if has_begun:
                self._fill(matcher, row)
            else:
                row.copy_(self._before_it_begins)
            has_begun = has_begun or (draft is not None and draft == self._spec.trigger_token)
            if draft is None or draft in self._vocabulary.end_ids or (has_begun and not _move_on(matcher, draft)):
                break
            has_begun = has_begun or draft == self._spec.after_token
        self._is_worn = self._is_worn or _is_worn(matcher)
        return rows

    @property
    def _before_it_begins(self) -> Tensor:
        if not self._spec.is_optional:
            return self._vocabulary.all_but_end
        return self._vocabulary.everything if self._ended_at is None else self._vocabulary.end_only

    def _fill(self, matcher: LLMatcher, row: Tensor) -> None:
        if self.error is None and self._ended_at is None:
            try:
                matcher.unsafe_compute_mask_ptr(row.data_ptr(), row.numel() * row.element_size())
            except ValueError:
                row.zero_()
            if not matcher.is_error() and row.any():
                return
            if matcher is self._matcher:
                self.error = one_line(matcher.get_error()) or "nothing can follow"
        row.copy_(self._vocabulary.end_only)


def _is_worn(matcher: LLMatcher) -> bool:
    """Whether the lexer has reached a limit ("too many states", "too many expressions"): the library has no code of its own for it."""
    return matcher.is_error() and matcher.get_error().startswith("lexer error")


def _move_on(matcher: LLMatcher, token: int) -> bool:
    """Give a scratch matcher a draft, if it may come."""
    return matcher.validate_tokens([token]) == 1 and matcher.consume_token(token)


def one_line(text: str) -> str:
    """The library's message for people who see neither its parser nor line numbers of text that we have written."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_REASON_LENGTH else line[: MAX_REASON_LENGTH - 1] + "…"


def _pack(bits: Tensor) -> Tensor:
    """[words] int32 from bits [32 words] bool."""
    weights = torch.tensor([1 << place for place in range(_WORD_BITS)], dtype=torch.int64)
    words = (bits.view(-1, _WORD_BITS) * weights).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _read_tree(tokenizer_json: str) -> dict[str, Any]:
    try:
        tree = json.loads(tokenizer_json)
    except ValueError as error:
        raise ConfigError(f"is not JSON: {error}", path=TOKENIZER_FILE) from None
    if not isinstance(tree, dict):
        raise ConfigError("is not a JSON object", path=TOKENIZER_FILE)
    return tree
