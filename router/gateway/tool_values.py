"""What an argument's text means: GLM writes strings raw and everything else as JSON, and only the tool's schema tells which.

Knows: JSON schema as far as types go. Does not know tokens, or whether a value satisfies its schema.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

STRING = frozenset({"string"})
MAX_VISITED = 50_000
"""Schemas and values looked at for one request's tools, about 1 us each. Real ones need a few for each argument."""
MAX_DEPTH = 64
"""Of unions and references in each other: a chain of references may be as long as the schema."""
_WORDS = {"true": True, "false": False, "none": None, "null": None}
"""Of other languages, whatever their case: what models write where JSON has true, false and null."""
_SURROGATES = re.compile(
    r"(?P<kept>\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\[^u])|\\u[dD][89a-fA-F][0-9a-fA-F]{2}|[\ud800-\udfff]"
)
"""In JSON's text: pairs and other escapes, which stay, or half a pair."""


def find_types(schema: Any, root: Any = None) -> frozenset[str]:
    """See TypeFinder.find; root is the schema itself where it is None."""
    return TypeFinder().find(schema, schema if root is None else root)


class TooManySchemas(ValueError):
    """The schemas of one request take longer to look at than they may."""


class TypeFinder:
    """Finds types in one request's schemas, looking at each once: references can make a small schema exponentially large.

    The schemas must outlive it.
    """

    def __init__(self) -> None:
        self._num_left = MAX_VISITED
        self._found: dict[int, frozenset[str]] = {}

    def find(self, schema: Any, root: Any, depth: int = 0) -> frozenset[str]:
        """The JSON types that a schema allows, as far as it says; an empty set where it says nothing. root: whose `#/...` are meant.

        Raises TooManySchemas.
        """
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
            return frozenset()
        found = self._found.get(id(schema))
        if found is None:
            self._found[id(schema)] = frozenset()  # what a reference to itself says
            found = self._found[id(schema)] = self._look(schema, root, depth + 1)
        return found

    def _look(self, schema: Mapping[str, Any], root: Any, depth: int) -> frozenset[str]:
        self._spend(1)
        given = schema.get("type")
        if isinstance(given, str):
            return frozenset({given})
        if isinstance(given, list):
            self._spend(len(given))
            return frozenset(item for item in given if isinstance(item, str))
        if "const" in schema:
            return frozenset({type_of(schema["const"])})
        if isinstance(schema.get("enum"), list):
            self._spend(len(schema["enum"]))
            return frozenset(map(type_of, schema["enum"]))
        if isinstance(schema.get("$ref"), str):
            return self.find(follow(schema["$ref"], root), root, depth)
        for union in ("anyOf", "oneOf"):
            if isinstance(schema.get(union), list):
                return _join(self._branches(schema[union], root, depth))
        if isinstance(schema.get("allOf"), list):
            return next(filter(None, self._branches(schema["allOf"], root, depth)), frozenset())
        return frozenset()

    def _branches(self, branches: list[Any], root: Any, depth: int) -> Iterator[frozenset[str]]:
        for branch in branches:
            self._spend(1)
            yield self.find(branch, root, depth)

    def _spend(self, count: int) -> None:
        self._num_left -= count
        if self._num_left < 0:
            raise TooManySchemas


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
    """The types of one tool's arguments. finder: shared by the tools of a request. Raises TooManySchemas."""

    def __init__(self, parameters: Any, finder: TypeFinder | None = None) -> None:
        finder = finder or TypeFinder()
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        named = properties if isinstance(properties, Mapping) else {}
        self._types = {name: finder.find(schema, parameters) or STRING for name, schema in named.items()}

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
    joined: set[str] = set()
    for types in branches:
        if not types:
            return frozenset()
        joined |= types
    return frozenset(joined)


def follow(reference: str, root: Any) -> Any:
    """What a local reference points at; None for any other."""
    if not reference.startswith("#"):
        return None
    place = root
    for step in reference[1:].split("/")[1:]:
        if not isinstance(place, Mapping):
            return None
        place = place.get(step.replace("~1", "/").replace("~0", "~"))
    return place
