"""From a TOML file and command-line options to a checked `ServeConfig`, or one error that lists every mistake with its place.

Knows: TOML, pydantic's complaints and how people mistype. Does not know which values make sense together (`config.py`).
"""

import dataclasses
import difflib
import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from cluster.config import SHIPPED_CHECKPOINT, Mistake, ServeConfig, find_mistakes, resolve
from glm_runtime.checkpoint import check_checkpoint
from glm_runtime.config import GlmConfig
from kv_transfer.errors import ConfigError

NO_FILE = "defaults"
"""What mistakes are attributed to when no file was given."""


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """A value from the command line: which field it sets and what the user typed."""

    path: str
    flag: str
    value: object


def load_config(file: Path | None, options: Iterable[Option] = ()) -> tuple[ServeConfig, GlmConfig]:
    """The resolved configuration and the model it serves, from a file (None: all defaults) and options, which win.

    Raises ConfigError: one line per mistake, each naming the file (or option) and the field.
    """
    options = tuple(options)
    tree = {} if file is None else _read_toml(file)
    _apply_defaults_and_options(tree, options, base=Path.cwd() if file is None else file.absolute().parent)
    config = _validate(tree, file, options)
    model = _read_model(config, file, options)
    mistakes = find_mistakes(config, model)
    if mistakes:
        raise _error(mistakes, file, options)
    return resolve(config, model, num_cores=os.cpu_count() or 1), model


def render_config(config: ServeConfig) -> str:
    """The configuration as a TOML file that loads back into the same values; fields without a value are comments."""
    lines: list[str] = []
    for section in dataclasses.fields(config):
        _render_section(section.name, getattr(config, section.name), lines)
    return "\n".join(lines).strip() + "\n"


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror})", path=str(file)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"is no TOML: {error}", path=str(file)) from None


def _apply_defaults_and_options(tree: dict[str, Any], options: Iterable[Option], base: Path) -> None:
    """Fill in what the dataclasses cannot default, read relative paths from the file's folder, and let options win."""
    for option in options:
        *sections, name = option.path.split(".")
        part: Any = tree
        for section in sections:
            part = part.setdefault(section, {}) if isinstance(part, dict) else None
        if isinstance(part, dict):
            part[name] = option.value
    runtime = tree.setdefault("runtime", {})
    if isinstance(runtime, dict):
        checkpoint = runtime.setdefault("checkpoint", str(SHIPPED_CHECKPOINT))
        is_option = any(option.path == "runtime.checkpoint" for option in options)
        if isinstance(checkpoint, str):
            runtime["checkpoint"] = str((Path.cwd() if is_option else base) / checkpoint)


def _validate(tree: dict[str, Any], file: Path | None, options: tuple[Option, ...]) -> ServeConfig:
    """Strict, in JSON mode: a string is no number and true is no 1, yet arrays may be tuples and strings paths."""
    try:
        return TypeAdapter(ServeConfig).validate_json(json.dumps(tree, default=str), strict=True, extra="forbid")
    except ValidationError as error:
        mistakes = [_as_mistake(complaint) for complaint in error.errors(include_url=False)]
        raise _error(mistakes, file, options) from None


def _as_mistake(complaint: Mapping[str, Any]) -> Mistake:
    location = [str(part) for part in complaint["loc"]]
    path = ".".join(location)
    if complaint["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return Mistake(path, f"unknown key{_suggest(location)}")
    if complaint["type"] in ("dataclass_type", "dict_type"):
        return Mistake(path, f"must be a section, [{path}], not {json.dumps(complaint['input'])}")
    message = str(complaint["msg"])
    return Mistake(path, f"{message[0].lower()}{message[1:]}, not {json.dumps(complaint['input'])}")


def _suggest(location: list[str]) -> str:
    part: Any = ServeConfig()
    for name in location[:-1]:
        part = getattr(part, name)
    known = [item.name for item in dataclasses.fields(part)]
    close = difflib.get_close_matches(location[-1], known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known here: {', '.join(known)}"


def _read_model(config: ServeConfig, file: Path | None, options: tuple[Option, ...]) -> GlmConfig:
    """Check the checkpoint. A folder that is not there is the configuration's mistake; what is wrong inside names its own file."""
    if not config.runtime.checkpoint.is_dir():
        raise _error([Mistake("runtime.checkpoint", f"there is no directory {config.runtime.checkpoint}")], file, options)
    return check_checkpoint(config.runtime.checkpoint)


def _error(mistakes: Iterable[Mistake], file: Path | None, options: Iterable[Option]) -> ConfigError:
    flags = {option.path: option.flag for option in options}
    lines = []
    for mistake in mistakes:
        flag = flags.get(mistake.path)
        where = f"{flag} ({mistake.path})" if flag else f"{file or NO_FILE}: {mistake.path}"
        lines.append(f"{where}: {mistake.message}")
    return ConfigError("\n".join(lines), num_mistakes=len(lines))


def _render_section(path: str, part: Any, lines: list[str]) -> None:
    lines += ["", f"[{path}]"]
    nested = []
    for item in dataclasses.fields(part):
        value = getattr(part, item.name)
        if dataclasses.is_dataclass(value):
            nested.append(item.name)
        elif value is None:
            lines.append(f"# {item.name} has no value")
        else:
            lines.append(f"{item.name} = {render_value(value)}")
    for name in nested:
        _render_section(f"{path}.{name}", getattr(part, name), lines)


def render_value(value: object) -> str:
    """TOML of one value. JSON's strings, numbers and booleans are TOML's too."""
    if isinstance(value, tuple):
        return f"[{', '.join(render_value(item) for item in value)}]"
    return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)
