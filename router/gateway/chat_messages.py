"""A chat's messages and variables as the template wants them.

Knows: roles, content parts, earlier calls and thinking, effort levels. Does not know the template (`chat_template.py`) or tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from kv_transfer.errors import InvalidRequest, UnsupportedParameter
from router.gateway.chat_template import RESERVED_VARIABLES
from router.gateway.schema import ChatMessage, ContentPart, ToolCall

EFFORT_LEVELS = {"none": "low", "minimal": "low", "low": "low", "medium": "high", "high": "high"}
"""OpenAI's levels in the template's words; the others, and none at all, are its maximum."""
MAX_MESSAGES = 8192
MAX_CALLS = 1024
"""Of one message. Rendering takes about 30 us a message or call; a block of results also takes the square of a pointer's copy."""


def plain_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """All messages. Raises InvalidRequest, UnsupportedParameter naming the field."""
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"{len(messages)} messages in one chat; at most {MAX_MESSAGES}", param="messages")
    return [plain_message(message, f"messages.{index}") for index, message in enumerate(messages)]


def template_variables(reasoning_effort: str | None, template_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The template's variables: the mapped effort, and whatever the client passes raw, which wins."""
    variables: dict[str, Any] = {}
    effort = EFFORT_LEVELS.get(reasoning_effort or "")
    if effort is not None:
        variables["reasoning_effort"] = effort
    for name, value in (template_kwargs or {}).items():
        if name in RESERVED_VARIABLES:
            raise InvalidRequest(f"chat_template_kwargs may not set {name!r}", param=f"chat_template_kwargs.{name}")
        variables[name] = value
    return variables


def plain_message(message: ChatMessage, path: str) -> dict[str, Any]:
    """A message as the template wants it. Raises InvalidRequest, UnsupportedParameter."""
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": _plain_content(message, path)}
    if role == "tool":
        plain["tool_call_id"] = message.tool_call_id
    if role == "assistant":
        reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
        if reasoning is not None:
            plain["reasoning_content"] = reasoning
        if message.tool_calls:
            if len(message.tool_calls) > MAX_CALLS:
                raise InvalidRequest(f"{len(message.tool_calls)} calls in one message; at most {MAX_CALLS}", param=f"{path}.tool_calls")
            plain["tool_calls"] = [_plain_call(call, f"{path}.tool_calls.{index}") for index, call in enumerate(message.tool_calls)]
    return plain


def _plain_content(message: ChatMessage, path: str) -> str | None:
    """Text parts as one string: the template would join them without a seam, and a control spelling could hide in the seam."""
    content = message.content
    if content is None:
        if message.role != "assistant":
            raise InvalidRequest(f"a {message.role} message needs content", param=f"{path}.content")
        return None
    if isinstance(content, str):
        return content
    return "".join(_part_text(part, f"{path}.content.{index}") for index, part in enumerate(content))


def _part_text(part: ContentPart, path: str) -> str:
    if part.type != "text":
        raise UnsupportedParameter(f"content parts of type {part.type[:32]!r} are not supported; send text", param=f"{path}.type")
    if part.text is None:
        raise InvalidRequest("a text part needs text", param=f"{path}.text")
    return part.text


def _plain_call(call: ToolCall, path: str) -> dict[str, Any]:
    """A tool call of the history; the template wants its arguments as an object, and refuses "" as it stands."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            # The body's own parser, and so its rules: what is nested deeper than 200, or holds half a surrogate pair, is no JSON.
            arguments = from_json(arguments)
        except ValueError:
            arguments = None  # type: ignore[assignment]
    if not isinstance(arguments, dict):
        raise InvalidRequest("arguments must be a JSON object", param=f"{path}.function.arguments")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
