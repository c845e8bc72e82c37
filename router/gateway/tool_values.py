"""What an argument's text means: GLM writes strings raw and everything else as JSON, and only the tool's schema tells which.

Knows: JSON schema as far as types go. Does not know tokens, or whether a value satisfies its schema.
"""

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

STRING = frozenset({"string"})
MAX_VISITED = 256
"""Schemas looked at for one argument: references can make a small schema endless, or exponentially large."""
_WORDS = {"true": True, "false": False, "none": None, "null": None}
"""Of other languages, whatever their case: what models write where JSON has true, false and null."""
_SURROGATES = re.compile(
    r"(?P<kept>\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\[^u])|\\u[dD][89a-fA-F][0-9a-fA-F]{2}|[\ud800-\udfff]"
)
"""In JSON's text: pairs and other escapes, which stay, or half a pair."""


def find_types(schema: Any, root: Any = None) -> frozenset[str]:
    """The JSON types that a schema allows, as far as it says; an empty set where it says nothing. root: whose `#/...` are meant."""
    return _find_types(schema, schema if root is None else root, itertools.count())


def _find_types(schema: Any, root: Any, visits: Iterator[int]) -> frozenset[str]:
    if not isinstance(schema, Mapping) or next(visits) >= MAX_VISITED:
        return frozenset()
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset({given})
    if isinstance(given, list):
        return frozenset(item for item in given if isinstance(item, str))
    if "const" in schema:
        return frozenset({type_of(schema["const"])})
    if isinstance(schema.get("enum"), list):
        return frozenset(map(type_of, schema["enum"]))
    if isinstance(schema.get("$ref"), str):
        return _find_types(_follow(schema["$ref"], root), root, visits)
    for union in ("anyOf", "oneOf"):
        if isinstance(schema.get(union), list):
            return _join([_find_types(branch, root, visits) for branch in schema[union]])
    if isinstance(schema.get("allOf"), list):
        return next((types for branch in schema["allOf"] if (types := _find_types(branch, root, visits))), frozenset())
    return frozenset()


def type_of(value: Any) -> str:
    """The JSON type of a value; a whole number is an integer."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    names = ((float, "number"), (str, "string"), (list, "array"), (dict, "object"))
    return next(name for kind, name in names if isinstance(value, kind))


class ArgumentTypes:
    """The types of one tool's arguments."""

    def __init__(self, parameters: Any) -> None:
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        named = properties if isinstance(properties, Mapping) else {}
        self._types = {name: find_types(schema, parameters) or STRING for name, schema in named.items()}

    def name_of(self, key: str) -> str:
        """The argument that a key means: as it is written, or without the blanks around it."""
        return key if key in self._types else key.strip()

    def of(self, name: str) -> frozenset[str]:
        """What the argument may be; one without a schema is a string."""
        return self._types.get(name, STRING)


def to_json(text: str, types: frozenset[str]) -> str:
    """A value's text as JSON. What is no JSON of these types is read as well as it can be, and as a string where it can't: no text
    is lost but half a surrogate pair, which is no character, and the result is always valid JSON that UTF-8 can hold.
    """
    bare = text.strip()
    try:
        value = json.loads(bare, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(_read_word(text, bare, types), ensure_ascii=False)
    if _allows(types, value):
        return _mend_surrogates(bare)
    if isinstance(value, str) and (unquoted := _read_quoted(value, types)) is not None:
        return _mend_surrogates(unquoted)
    return json.dumps(text, ensure_ascii=False) if "string" in types else _mend_surrogates(bare)


def _mend_surrogates(text: str) -> str:
    """JSON's text with a replacement character for each half of a surrogate pair: many parsers, ours among them, refuse the half."""
    return _SURROGATES.sub(lambda match: match["kept"] or r"\ufffd", text)


def _read_word(text: str, bare: str, types: frozenset[str]) -> Any:
    word = bare.lower()
    if word in _WORDS and type_of(_WORDS[word]) in types:
        return _WORDS[word]
    return text


def _read_quoted(value: str, types: frozenset[str]) -> str | None:
    """A number or the like that was written as a string."""
    try:
        return value if _allows(types - STRING, json.loads(value, parse_constant=_refuse)) else None
    except (ValueError, RecursionError):
        return None


def _allows(types: frozenset[str], value: Any) -> bool:
    kind = type_of(value)
    # Where a bare text may be a string as well, a quoted one is that text, quotes included.
    return (kind in types and kind != "string") or (kind == "string" and types == STRING) or (kind == "integer" and "number" in types)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _join(branches: Iterable[frozenset[str]]) -> frozenset[str]:
    """All of them; nothing when a branch says nothing, since it may then be anything."""
    found = list(branches)
    return frozenset().union(*found) if all(found) else frozenset()


def _follow(reference: str, root: Any) -> Any:
    """What a local reference points at; None for any other."""
    if not reference.startswith("#"):
        return None
    place = root
    for step in reference[1:].split("/")[1:]:
        if not isinstance(place, Mapping):
            return None
        place = place.get(step.replace("~1", "/").replace("~0", "~"))
    return place
