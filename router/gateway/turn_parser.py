"""One assistant turn, token by token: thinking, content and tool calls.

Knows: the tags of GLM's format, as token ids, and what may follow what (`TRANSITIONS`); a tag that has no place where it stands is
text, and so is one that the model spells out. Does not know stop strings, JSON objects or the wire (`answer.py`, `sse.py`). No I/O, and
however the tokens are cut into pieces, the joined result is the same.

    <think> thinking </think> content <tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value></tool_call> ...
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, unique

from router.gateway.detokeniser import Detokeniser
from router.gateway.tool_values import STRING, ArgumentTypes, to_json


@unique
class State(Enum):
    """Where a turn is."""

    REASONING = "reasoning"
    BLANK = "blank"
    """Content may come; so far there were only blanks since thinking or the last call."""
    CONTENT = "content"
    NAME = "name"
    CALL = "call"
    """The name is known; an argument or the end may come."""
    KEY = "key"
    GAP = "gap"
    """Between a key and its value."""
    VALUE = "value"
    ENDED = "ended"


@unique
class Tag(Enum):
    """Tokens that mean something. ROLE: whoever speaks next, the turn is over."""

    THINK_END = "</think>"
    CALL_START = "<tool_call>"
    CALL_END = "</tool_call>"
    KEY_START = "<arg_key>"
    KEY_END = "</arg_key>"
    VALUE_START = "<arg_value>"
    VALUE_END = "</arg_value>"
    ROLE = "role"


CALL_TAGS = tuple(tag for tag in Tag if tag not in (Tag.THINK_END, Tag.ROLE))
ROLE_SPELLINGS = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")

_ROLE_ENDS = {Tag.ROLE: State.ENDED}
TRANSITIONS: dict[State, dict[Tag, State]] = {
    State.REASONING: {Tag.THINK_END: State.BLANK, Tag.CALL_START: State.NAME, **_ROLE_ENDS},
    State.BLANK: {Tag.CALL_START: State.NAME, **_ROLE_ENDS},
    State.CONTENT: {Tag.CALL_START: State.NAME, **_ROLE_ENDS},
    State.NAME: {Tag.KEY_START: State.KEY, Tag.CALL_END: State.BLANK, **_ROLE_ENDS},
    State.CALL: {Tag.KEY_START: State.KEY, Tag.CALL_END: State.BLANK, **_ROLE_ENDS},
    State.KEY: {Tag.KEY_END: State.GAP, **_ROLE_ENDS},
    State.GAP: {Tag.VALUE_START: State.VALUE, **_ROLE_ENDS},
    State.VALUE: {Tag.VALUE_END: State.CALL, Tag.CALL_END: State.BLANK, **_ROLE_ENDS},
    State.ENDED: {},
}
PLAIN_STATES = frozenset({State.REASONING, State.CONTENT})
"""Where everything but a tag is text, whatever it is."""
STRICT_STATES = frozenset({State.NAME, State.CALL, State.KEY, State.GAP})
"""Where a tag without a transition makes the call malformed; in the other states it is text."""
HOLDING_STATES = frozenset({State.NAME, State.KEY, State.GAP})
"""Where tokens are kept that become content if the call turns out to be malformed."""
OPEN_CALL_STATES = frozenset({State.CALL, State.KEY, State.GAP, State.VALUE})
"""Where the client has been told of a call that has not ended."""


def find_tags(control_ids: Mapping[str, int], *, think_end_id: int | None, has_calls: bool, has_roles: bool) -> dict[int, Tag]:
    """The tags of a vocabulary, by token id. Which of them a tokenizer marks as special says nothing."""
    spellings: list[tuple[str, Tag]] = [(tag.value, tag) for tag in CALL_TAGS] if has_calls else []
    spellings += [(spelling, Tag.ROLE) for spelling in ROLE_SPELLINGS] if has_roles else []
    tags = {control_ids[spelling]: tag for spelling, tag in spellings if spelling in control_ids}
    return tags if think_end_id is None else {**tags, think_end_id: Tag.THINK_END}


@dataclass(frozen=True, slots=True)
class CallDelta:
    """More of call number `index`. The first of a call has its id and name and no arguments; the arguments' joined text is JSON."""

    index: int
    call_id: str | None
    name: str | None
    arguments: str


@dataclass(slots=True)
class Pieces:
    """What some tokens were, in order within each kind.

    content: runs of tokens; between two of them a call begins, so that no character and no stop string reaches across. num_used: tokens
    that belong to the turn, its end included.
    """

    reasoning: list[int] = field(default_factory=list)
    content: list[list[int]] = field(default_factory=lambda: [[]])
    calls: list[CallDelta] = field(default_factory=list)
    num_used: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnFormat:
    """What is parsed. tags: by token id. tools: arguments' types by tool; max_calls 0 is any number.

    token_bytes, hidden_ids: as `Detokeniser` takes them.
    """

    tags: Mapping[int, Tag]
    token_bytes: Sequence[bytes]
    hidden_ids: Collection[int] = frozenset()
    tools: Mapping[str, ArgumentTypes] = field(default_factory=dict)
    max_calls: int = 0


_NO_TYPES = ArgumentTypes(None)


class TurnParser:
    """One turn. starts_in_reasoning: whether the prompt ended inside `<think>`.

    A malformed call is not lost: before its name is known all of it becomes content; afterwards the call ends there, its arguments
    closed, and what cannot be an argument becomes content. new_call_id: makes an id that no other call has.
    """

    def __init__(self, turn_format: TurnFormat, new_call_id: Callable[[], str], *, starts_in_reasoning: bool) -> None:
        self._format = turn_format
        self._new_call_id = new_call_id
        self._text = Detokeniser(turn_format.token_bytes, turn_format.hidden_ids)
        # Where no call can come blanks need not be held back.
        self._after_reasoning = State.BLANK if Tag.CALL_START in turn_format.tags.values() else State.CONTENT
        self.state = State.REASONING if starts_in_reasoning else self._after_reasoning
        self.has_left_reasoning = not starts_in_reasoning
        self.num_calls = 0
        self._held: list[int] = []
        """Tokens that may still become content: blanks, or a call's that is not known to be one."""
        self._read: list[int] = []
        """Tokens of the name or key that is being read, without its tags; the value's where it is not told piece by piece."""
        self._types: ArgumentTypes = _NO_TYPES
        self._key = ""
        self._keys: set[str] = set()

    @property
    def is_ended(self) -> bool:
        """Whether the turn is over; what comes then is nothing of it."""
        return self.state is State.ENDED

    def feed(self, tokens: Sequence[int]) -> Pieces:
        """Take more tokens, up to the end of the turn."""
        pieces = Pieces()
        tags = self._format.tags
        if self.state in PLAIN_STATES and tags.keys().isdisjoint(tokens):  # nearly always, and several times as fast
            plain = pieces.reasoning if self.state is State.REASONING else pieces.content[-1]
            plain += tokens
            pieces.num_used = len(tokens)
            return pieces
        for token in tokens:
            if self.state is State.ENDED:
                break
            pieces.num_used += 1
            tag = tags.get(token)
            if tag is None:
                self._take_text(token, pieces)
            else:
                self._take_tag(token, tag, pieces)
        return pieces

    def finish(self, *, is_cut_off: bool) -> Pieces:
        """No more tokens will come. A call that was cut off by a limit stays unfinished: its arguments must not look whole."""
        pieces = Pieces()
        if self.state is not State.ENDED:
            self._end(pieces, is_cut_off=is_cut_off)
        return pieces

    # -- text ----------------------------------------------------------------------------------------------------------

    def _take_text(self, token: int, pieces: Pieces) -> None:
        match self.state:
            case State.REASONING:
                pieces.reasoning.append(token)
            case State.CONTENT:
                pieces.content[-1].append(token)
            case State.BLANK if self._is_blank(token):
                self._held.append(token)
            case State.BLANK:
                self._become_content(token, pieces)
            case State.NAME | State.KEY:
                self._held.append(token)
                self._read.append(token)
            case State.VALUE:
                self._take_value(token, pieces)
            case _ if self._is_blank(token):  # CALL, GAP: between tags
                self._hold_in_gap(token)
            case _:
                self._degrade(pieces)
                self._become_content(token, pieces)

    def _is_blank(self, token: int) -> bool:
        table = self._format.token_bytes
        return token in self._format.hidden_ids or not (0 <= token < len(table)) or not table[token].strip()

    def _hold_in_gap(self, token: int) -> None:
        if self.state is State.GAP:
            self._held.append(token)

    def _become_content(self, token: int, pieces: Pieces) -> None:
        self._release(pieces)
        pieces.content[-1].append(token)
        self.state = State.CONTENT

    def _release(self, pieces: Pieces) -> None:
        pieces.content[-1] += self._held
        self._held.clear()
        self._read.clear()

    # -- tags ----------------------------------------------------------------------------------------------------------

    def _take_tag(self, token: int, tag: Tag, pieces: Pieces) -> None:
        following = TRANSITIONS[self.state].get(tag)
        if following is State.ENDED:
            self._end(pieces, is_cut_off=False)
        elif following is None:
            self._take_misplaced(token, pieces)
        elif self._is_accepted(tag, pieces):
            if following in HOLDING_STATES:
                self._held.append(token)
            self.state = self._after_reasoning if tag is Tag.THINK_END else following
            self.has_left_reasoning |= self.state is not State.REASONING
            if tag is Tag.CALL_END and self.num_calls == self._format.max_calls:
                self.state = State.ENDED
        else:
            self._degrade(pieces)
            self._take_tag(token, tag, pieces)

    def _take_misplaced(self, token: int, pieces: Pieces) -> None:
        if self.state in STRICT_STATES:
            self._degrade(pieces)
            self._take_tag(token, self._format.tags[token], pieces)
        elif self.state is State.BLANK:
            self._become_content(token, pieces)
        else:
            self._take_text(token, pieces)

    def _is_accepted(self, tag: Tag, pieces: Pieces) -> bool:
        """Do what the tag says. False, and nothing is done, where what it closes is no name or no new key."""
        if self.state is State.NAME and not self._open_call(pieces):
            return False
        match tag:
            case Tag.CALL_START:
                self._held.clear()  # blanks before a call say nothing
            case Tag.KEY_END:
                return self._close_key()
            case Tag.VALUE_START:
                self._open_value(pieces)
            case Tag.VALUE_END:
                self._close_value(pieces)
            case Tag.CALL_END:
                self._close_call(pieces)
        return True

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._text.feed(tokens) + self._text.flush()

    def _open_call(self, pieces: Pieces) -> bool:
        name = self._decode(self._read).strip()
        if not name:
            return False
        pieces.calls.append(CallDelta(self.num_calls, self._new_call_id(), name, ""))
        pieces.content.append([])
        self.num_calls += 1
        self._types = self._format.tools.get(name, _NO_TYPES)
        self._keys.clear()
        self._held.clear()
        self._read.clear()
        return True

    def _close_key(self) -> bool:
        key = self._types.name_of(self._decode(self._read))
        if key in self._keys:  # a client's JSON would keep only one of them
            return False
        self._key = key
        self._read.clear()
        return True

    def _tell(self, pieces: Pieces, arguments: str) -> None:
        """More arguments of the current call, joined with those just before."""
        index = self.num_calls - 1
        if pieces.calls and pieces.calls[-1].index == index and pieces.calls[-1].name is None:
            arguments = pieces.calls.pop().arguments + arguments
        if arguments:
            pieces.calls.append(CallDelta(index, None, None, arguments))

    @property
    def _is_told_raw(self) -> bool:
        return self._types.of(self._key) == STRING

    def _open_value(self, pieces: Pieces) -> None:
        opening = ", " if self._keys else "{"
        self._keys.add(self._key)
        self._held.clear()
        self._tell(pieces, f"{opening}{_quoted(self._key)}: " + ('"' if self._is_told_raw else ""))

    def _take_value(self, token: int, pieces: Pieces) -> None:
        if self._is_told_raw:
            self._tell(pieces, _quoted(self._text.feed((token,)))[1:-1])
        else:
            self._read.append(token)

    def _close_value(self, pieces: Pieces) -> None:
        if self._is_told_raw:
            self._tell(pieces, _quoted(self._text.flush())[1:-1] + '"')
        else:
            self._tell(pieces, to_json(self._decode(self._read), self._types.of(self._key)))
            self._read.clear()

    def _close_call(self, pieces: Pieces) -> None:
        if self.state is State.VALUE:
            self._close_value(pieces)
        self._tell(pieces, "}" if self._keys else "{}")

    # -- what goes wrong -----------------------------------------------------------------------------------------------

    def _degrade(self, pieces: Pieces) -> None:
        """The call is malformed: close what the client knows of it, and show the rest."""
        if self.state in OPEN_CALL_STATES:
            self._close_call(pieces)
        self._release(pieces)
        self.state = State.CONTENT

    def _end(self, pieces: Pieces, *, is_cut_off: bool) -> None:
        if self.state in OPEN_CALL_STATES and not is_cut_off:
            self._close_call(pieces)
        elif self.state is State.VALUE:
            rest = _quoted(self._text.flush())[1:-1] if self._is_told_raw else self._decode(self._read)
            self._tell(pieces, rest)
            self._read.clear()
        if self.state is not State.BLANK or not self.num_calls:  # blanks behind a call say nothing
            self._release(pieces)
        self.state = State.ENDED


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
