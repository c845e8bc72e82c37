"""docs/configuration.md lists every field with its default, and nothing else; the shipped example is the default."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from cluster.config import ServeConfig
from cluster.config_file import load_config, render_value

ROOT = Path(__file__).parent.parent.parent.parent
ROW = re.compile(r"^\| `(?P<path>[a-z_.]+)` \| `?(?P<default>[^|]*?)`? \| (?P<meaning>[^|]+) \|$", re.MULTILINE)
DEFAULT_IN_WORDS = {"runtime.checkpoint": "the shipped one"}


def _fields(part: object, path: str) -> Iterator[tuple[str, str]]:
    for item in dataclasses.fields(part):  # type: ignore[arg-type]
        value, below = getattr(part, item.name), f"{path}{item.name}"
        if dataclasses.is_dataclass(value):
            yield from _fields(value, f"{below}.")
        else:
            yield below, DEFAULT_IN_WORDS.get(below) or ("none" if value is None else render_value(value))


def test_the_page_lists_every_field_with_its_default() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    listed = {row["path"]: row["default"] for row in ROW.finditer(page)}
    assert listed == dict(_fields(ServeConfig(), ""))


def test_the_shipped_example_is_the_default_configuration() -> None:
    assert load_config(ROOT / "deploy" / "configs" / "local.toml") == load_config(None)
