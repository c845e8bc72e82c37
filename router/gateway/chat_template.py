"""Messages to prompt tokens, with GLM-5.3's pinned template.

Knows: how the template is rendered, and that control tokens come from it alone: what a user writes is text, even where it spells
`<|user|>`. Does not know the API's schema (`schema.py`) or limits.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from typing import Any

import jinja2.ext
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kv_transfer.errors import InvalidRequest
from router.gateway.tokenizer import TextTokenizer

PINNED_TEMPLATE = "chat_template.jinja"
"""Byte-identical to the checkpoint's: another revision of it has other defaults, so it is shipped and not fetched."""

END_OF_THINKING = "</think>"
START_OF_THINKING = "<think>"
PRIVATE_USE = range(0xE000, 0xF900)
RESERVED_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt"})


def read_pinned_template() -> str:
    """The shipped template's text."""
    return resources.files("router.gateway").joinpath(PINNED_TEMPLATE).read_text(encoding="utf-8")


class ChatTemplate:
    """A compiled chat template, rendered as the reference implementation (transformers) does."""

    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, autoescape=False, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        self._template = environment.from_string(source)

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        variables: dict[str, Any],
        tools: Sequence[dict[str, Any]] = (),
        *,
        is_generating: bool = True,
    ) -> str:
        """The prompt's text, up to the point where the assistant begins if it is_generating. Raises InvalidRequest when the template
        cannot take it.
        """
        fixed = {"messages": _Messages(order_results(messages)), "tools": tools or None, "add_generation_prompt": is_generating}
        try:
            return self._template.render({**variables, **fixed})
        except (TemplateError, TypeError, AttributeError, KeyError) as error:
            raise InvalidRequest(f"the chat template cannot render these messages: {error}", param="messages") from None


class _Messages(list[dict[str, Any]]):
    """Messages whose tail ends with the first that is no tool's, which is as far as the template reads one: at every block of tool
    messages it goes through all that follows, a time that grows with the square of the messages.
    """

    def __getitem__(self, place: Any) -> Any:
        if not isinstance(place, slice) or place.stop is not None or place.step is not None:
            return super().__getitem__(place)
        start = place.indices(len(self))[0]
        return super().__getitem__(slice(start, _end_of_block(self, start) + 1))


def _end_of_block(messages: Sequence[dict[str, Any]], start: int) -> int:
    return next((place for place in range(start, len(messages)) if messages[place]["role"] != "tool"), len(messages))


def order_results(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put tool messages into the order of their calls, as the template would, and leave out their ids, which it uses for that alone:
    it compares every call with every message.
    """
    ordered: list[dict[str, Any]] = []
    while len(ordered) < len(messages):
        start = len(ordered)
        block = messages[start : _end_of_block(messages, start)]
        if not block:
            ordered.append(messages[start])
            continue
        before = messages[start - 1] if start else {"role": None}
        calls = (before.get("tool_calls") or []) if before["role"] == "assistant" else []
        ordered += _in_call_order(block, [call.get("id") for call in calls])
    return ordered


def _in_call_order(block: Sequence[dict[str, Any]], calls: Sequence[str | None]) -> list[dict[str, Any]]:
    """Sorted where each message has an id of its own, that of a call; else as they are. The template's `unique` ignores case."""
    ids = [message.get("tool_call_id") for message in block]
    places = {name: place for place, name in enumerate(calls)}
    is_unique = all(len({name.lower() if name else name for name in names}) == len(names) for names in (ids, calls))
    if is_unique and all(name and name in places for name in ids):
        block = sorted(block, key=lambda message: places[message["tool_call_id"]])
    return [{name: value for name, value in message.items() if name != "tool_call_id"} for message in block]


class ChatEncoder:
    """Renders messages and turns them into prompt tokens.

    control_tokens_in_text: read control spellings inside messages as control tokens, as the reference tokenizer does.
    """

    def __init__(self, template: ChatTemplate, tokenizer: TextTokenizer, *, control_tokens_in_text: bool) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._control_tokens_in_text = control_tokens_in_text

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        variables: dict[str, Any],
        tools: Sequence[dict[str, Any]] = (),
        *,
        is_generating: bool = True,
    ) -> list[str | int]:
        """The prompt as runs of text and ids of control tokens between them. Raises InvalidRequest."""
        if self._control_tokens_in_text:
            return self._split(self._template.render(messages, variables, tools, is_generating=is_generating))
        messages = [_split_history_reasoning(message) for message in messages]
        guard = self._choose_guard([*_texts(messages), *_texts(variables), *_texts(tools)])
        if not guard:
            return self._split(self._template.render(messages, variables, tools, is_generating=is_generating))
        said, given, offered = (_map_texts(value, lambda text: self._break_up(text, guard)) for value in (messages, variables, tools))
        parts = self._split(self._template.render(said, given, offered, is_generating=is_generating))
        return [part.replace(guard, "") if isinstance(part, str) else part for part in parts]

    def encode(self, parts: Sequence[str | int]) -> list[int]:
        """Token ids of a rendered prompt. Lets go of the interpreter lock while it works."""
        runs = iter(self._tokenizer.encode_runs([part for part in parts if isinstance(part, str)]))
        tokens: list[int] = []
        for part in parts:
            if isinstance(part, str):
                tokens.extend(next(runs))
            else:
                tokens.append(part)
        return tokens

    def _split(self, text: str) -> list[str | int]:
        control_ids = self._tokenizer.control_ids
        pieces = self._tokenizer.control_pattern.split(text)  # text, control, text, control, ... text
        return [control_ids[piece] if index % 2 else piece for index, piece in enumerate(pieces) if piece]

    def _choose_guard(self, texts: Sequence[str]) -> str:
        """A character that occurs in no text, to break control spellings up with; "" when there is none to break up."""
        pattern = self._tokenizer.control_pattern
        if not any(pattern.search(text) for text in texts):
            return ""
        used = set().union(*texts)
        for code in PRIVATE_USE:
            if chr(code) not in used:
                return chr(code)
        raise InvalidRequest("the messages use every private-use character; leave one out", param="messages")

    def _break_up(self, text: str, guard: str) -> str:
        pattern = self._tokenizer.control_pattern
        while pattern.search(text):  # again, since spellings may overlap
            text = pattern.sub(lambda match: match[0][0] + guard + match[0][1:], text)
        return text


def _split_history_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Do what the template does with `</think>` in an assistant's content, before that spelling is broken up."""
    content = message.get("content")
    if message["role"] != "assistant" or isinstance(message.get("reasoning_content"), str):
        return message
    if not isinstance(content, str) or END_OF_THINKING not in content:
        return message
    reasoning = content.split(END_OF_THINKING)[0].split(START_OF_THINKING)[-1]
    return {**message, "reasoning_content": reasoning, "content": content.split(END_OF_THINKING)[-1]}


def _texts(value: Any) -> Iterator[str]:
    """Every string inside a JSON-like value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """The same value with every string changed, new."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_texts(item, change) for item in value]
    return value


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
