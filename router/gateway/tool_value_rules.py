"""What the value of one argument may look like, as rules of llguidance's Lark: strings raw, everything else as JSON.

Knows: JSON schema as far as text can be held to it. Does not know calls or tags (`tool_grammar.py`).
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from kv_transfer.errors import InvalidRequest
from kv_transfer.grammar import inside_slashes, with_options
from router.gateway.tool_values import MAX_DEPTH, STRING, TypeFinder, follow, type_of

ANY_TEXT = "/(?s:.*)/"
MAX_REPETITION = 2000
"""Longest repetition written out: the limits of one grammar would refuse more."""
MAX_VISITED = 20_000
"""Branches of unions looked at for one request, about 1 us each."""
DEFINITIONS = ("$defs", "definitions")
ANNOTATIONS = frozenset({"type", "title", "description", "default", "examples", "deprecated", *DEFINITIONS})
"""Keywords that restrict nothing beyond the type."""
COMBINING = ("$ref", "anyOf", "oneOf", "allOf", "not", "if")
JSON_LIKE = r'/[\s\x1c-\x1f]*(["\[{](?s:.*)|-?[0-9][0-9.eE+\-]*[\s\x1c-\x1f]*)/'
"""Text that could be read as JSON other than a word."""
_FOLDED_END = re.compile(r"(?<!\\)(?:\\\\)*\$\Z")
"""A dollar that is no escaped one."""


class ValueRules:
    """Writes the values of one request's tools. notes: what of a schema is not enforced, since the last `take_notes`."""

    def __init__(self) -> None:
        self._finder = TypeFinder()
        self._references: dict[int, list[str]] = {}
        self._num_left = MAX_VISITED
        self._notes: dict[str, None] = {}

    def take_notes(self) -> list[str]:
        """What could not be enforced, and forget it."""
        notes, self._notes = list(self._notes), {}
        return notes

    def write(self, rule: str, schema: Any, root: Mapping[str, Any], *, is_lenient: bool) -> Iterator[str]:
        """The rule of that name, and what it uses. Raises InvalidRequest where the schema is too large, TooManySchemas."""
        types = self._finder.find(schema, root) or STRING
        if "string" not in types:
            yield f"{rule}: {self._json(schema, root, is_lenient=is_lenient)}"
            return
        leaves = list(self._leaves(schema, root, 0))
        free = [text for leaf in leaves if _choices_of(leaf) is None and _type_of(leaf) == "string" for text in [self._string(leaf)]]
        if [ANY_TEXT] in free:
            free = [[ANY_TEXT]]
        others = [leaf for leaf in leaves if _choices_of(leaf) is not None or _type_of(leaf) != "string"]
        pieces = []
        if free and any(_is_bounded(leaf) for leaf in others):  # what could be read as one of those must not pass for a string
            free = [[*parts, f"~{JSON_LIKE}"] for parts in free]
        for place, parts in enumerate(free):
            if len(parts) == 1:
                pieces.append(parts[0])
                continue
            pieces.append(f"{rule.upper()}_{place}")
            yield f"{pieces[-1]}: {' & '.join(parts)}"
        if pieces != [ANY_TEXT]:  # which is all the others, too
            pieces += [self._other(leaf, root, is_lenient=is_lenient) for leaf in others]
        yield f"{rule}: {' | '.join(dict.fromkeys(pieces)) or ANY_TEXT}"

    # -- unions ------------------------------------------------------------------------------------------------------

    def _leaves(self, schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[Mapping[str, Any]]:
        """The alternatives of which a schema is a union, without references; {} stands for anything."""
        self._num_left -= 1
        if self._num_left < 0:
            raise InvalidRequest("the schemas of these tools have too many branches; use fewer or simpler ones", param="tools")
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
            if schema is not True:
                self.note("a schema that refers to itself" if isinstance(schema, Mapping) else "a reference that leads to no schema")
            yield {}
            return
        if isinstance(schema.get("type"), list) and _choices_of(schema) is None:
            self._note_beside(schema, ())
            yield from ({**schema, "type": kind} for kind in schema["type"])
            return
        combined = next((name for name in COMBINING[:4] if name in schema), None)
        if combined is None or "type" in schema or _choices_of(schema) is not None:
            self._note_beside(schema, ())
            yield schema
            return
        self._note_beside(schema, (combined,))
        yield from self._branches(schema, combined, root, depth + 1)

    def _branches(self, schema: Mapping[str, Any], combined: str, root: Mapping[str, Any], depth: int) -> Iterator[Mapping[str, Any]]:
        given = schema[combined]
        branches = [follow(given, root)] if isinstance(given, str) else given if isinstance(given, list) else []
        if combined == "allOf" and len(branches) > 1:
            self.note("allOf")
            yield {}
            return
        if not branches:
            yield {}
        if combined == "oneOf" and self._may_overlap(branches, root):
            self.note("oneOf of branches that overlap")
        for branch in branches:
            yield from self._leaves(branch, root, depth)

    def _may_overlap(self, branches: list[Any], root: Mapping[str, Any]) -> bool:
        if all(isinstance(branch, Mapping) and _choices_of(branch) is not None for branch in branches):
            return False
        kinds = [kind for branch in branches for kind in self._finder.find(branch, root)]
        return len(set(kinds)) < len(kinds)

    def _note_beside(self, schema: Mapping[str, Any], read: tuple[str, ...]) -> None:
        for name in COMBINING:
            if name in schema and name not in read:
                self.note(f"{name} beside other keywords")
        if read:
            for name in ("pattern", "minLength", "maxLength"):
                if name in schema:
                    self.note(f"{name} beside {read[0]}")

    def note(self, text: str) -> None:
        """Something that is not enforced."""
        self._notes[text] = None

    # -- alternatives --------------------------------------------------------------------------------------------------

    def _string(self, leaf: Mapping[str, Any]) -> list[str]:
        """Regexes that raw text matches, all of them."""
        parts = []
        if isinstance(leaf.get("pattern"), str):
            parts.append(_pattern(leaf["pattern"]))
        least, most = self._bound(leaf, "minLength"), self._bound(leaf, "maxLength")
        if least or most is not None:
            parts.append(f"/(?s:.{{{least or 0},{'' if most is None else most}}})/")
        return parts or [ANY_TEXT]

    def _bound(self, leaf: Mapping[str, Any], name: str) -> int | None:
        value = leaf.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_REPETITION:
            return value
        if value is not None:
            self.note(f"a {name} that is no whole number up to {MAX_REPETITION}")
        return None

    def _other(self, leaf: Mapping[str, Any], root: Mapping[str, Any], *, is_lenient: bool) -> str:
        choices = _choices_of(leaf)
        if choices is not None:
            return " | ".join(literal(choice if isinstance(choice, str) else json.dumps(choice)) for choice in choices)
        simple = {"null": '"null"', "boolean": '"true" | "false"'}.get(_type_of(leaf))
        return simple or self._json(leaf, root, is_lenient=is_lenient)

    def _json(self, schema: Any, root: Mapping[str, Any], *, is_lenient: bool) -> str:
        return json_rule({**self._definitions(schema, root), **schema}, is_lenient=is_lenient)

    def _definitions(self, schema: Any, root: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """What a schema refers to, itself or through others: all of them would be written again with every argument."""
        found: dict[str, dict[str, Any]] = {}
        waiting = list(_references(schema))
        while waiting:
            home, _, rest = waiting.pop().removeprefix("#/").partition("/")
            name = rest.partition("/")[0].replace("~1", "/").replace("~0", "~")
            if home not in DEFINITIONS:
                self.note("a $ref to anything but a definition")
            definitions = root.get(home)
            if home not in DEFINITIONS or not isinstance(definitions, Mapping) or name not in definitions:
                continue
            if name not in found.setdefault(home, {}):
                found[home][name] = definitions[name]
                waiting += self._references_of(definitions[name])
        return found

    def _references_of(self, schema: Any) -> list[str]:
        """Of a definition, which outlives this."""
        known = self._references.get(id(schema))
        if known is None:
            known = self._references[id(schema)] = list(_references(schema))
        return known


def json_rule(schema: Any, *, is_lenient: bool) -> str:
    """A value of that schema, as JSON."""
    return f"%json {json.dumps(with_options(schema, is_lenient=is_lenient))}"


def literal(text: str) -> str:
    """That very text."""
    return json.dumps(text, ensure_ascii=False)


def _references(schema: Any) -> Iterator[str]:
    found, waiting = set(), [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            if isinstance(value.get("$ref"), str) and value["$ref"] not in found:
                found.add(value["$ref"])
                yield value["$ref"]
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _choices_of(leaf: Mapping[str, Any]) -> list[Any] | None:
    """The values that are allowed and no others, those of another type left out; None where it is no such list."""
    choices = [leaf["const"]] if "const" in leaf else leaf.get("enum")
    if not isinstance(choices, list) or not choices:
        return None
    given = leaf.get("type")
    kinds = given if isinstance(given, list) else [given]
    return [choice for choice in choices if type_of(choice) in kinds or (type_of(choice) == "integer" and "number" in kinds)] or choices


def _type_of(leaf: Mapping[str, Any]) -> str:
    kind = leaf.get("type")
    return kind if isinstance(kind, str) else "string"


def _is_bounded(leaf: Mapping[str, Any]) -> bool:
    """Whether some values of its type, other than a string, are not allowed."""
    choices = _choices_of(leaf)
    if choices is not None:
        return not all(isinstance(choice, str) or choice is None for choice in choices)
    return not ANNOTATIONS.issuperset(leaf)


def _pattern(pattern: str) -> str:
    """The whole text that a pattern is found in."""
    has_end = _FOLDED_END.search(pattern) is not None
    before, after = ("" if pattern.startswith("^") else "(?s:.*)"), ("" if has_end else "(?s:.*)")
    return f"/{before}(?:{inside_slashes(pattern.removeprefix('^')[: -1 if has_end else None])}){after}/"
