"""Where `glm-cluster run` takes its prompts from: the command line, standard input, a file of lines, or JSONL.

A prompt becomes the body of an API request, so that everything the API accepts can stand in a line. Does not know the model.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from kv_transfer.errors import ConfigError

STDIN = "-"


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """place: where it was found, for error messages. body: fields of a request, with messages or prompt among them."""

    place: str
    body: Mapping[str, Any]


def read_prompts(prompt: str | None, file: str | None, *, is_jsonl: bool, stdin: TextIO) -> list[GivenPrompt]:
    """One prompt from `prompt` ("-": all of stdin), or one from each line of `file` ("-": of stdin) that is not blank.

    Lines are text, or JSON objects with messages or prompt when `is_jsonl` or the name ends in .jsonl.
    Raises ConfigError naming file and line: not exactly one source, an unreadable file, no prompt at all, a line that is no object.
    """
    if (prompt is None) == (file is None):
        raise ConfigError("give a prompt, or a file of prompts with --file; - is standard input", path="PROMPT")
    if file is None:
        text = _read(STDIN, stdin) if prompt == STDIN else prompt or ""
        if not text.strip():
            raise ConfigError("is empty", path="PROMPT")
        return [GivenPrompt("PROMPT", {"prompt": text})]
    lines = [(number, line) for number, line in enumerate(_read(file, stdin).splitlines(), start=1) if line.strip()]
    if not lines:
        raise ConfigError("has no prompts: every line is blank", path=_name(file))
    if is_jsonl or file.endswith(".jsonl"):
        return [_parse_line(f"{_name(file)}:{number}", line) for number, line in lines]
    return [GivenPrompt(f"{_name(file)}:{number}", {"prompt": line}) for number, line in lines]


def _read(file: str, stdin: TextIO) -> str:
    try:
        return stdin.read() if file == STDIN else Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror})", path=_name(file)) from None
    except UnicodeDecodeError:
        raise ConfigError("is not UTF-8 text", path=_name(file)) from None


def _parse_line(place: str, line: str) -> GivenPrompt:
    try:
        body = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"is not JSON ({error})", path=place) from None
    if not isinstance(body, dict) or ("messages" in body) == ("prompt" in body):
        raise ConfigError("expected an object with either messages or prompt", path=place)
    return GivenPrompt(place, body)


def _name(file: str) -> str:
    return "standard input" if file == STDIN else file
