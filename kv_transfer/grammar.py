"""What an output must look like, as it travels: the constraint's text, its limits, and the form that the grammar library reads.

Knows: which kinds there are and how each is written for llguidance. Does not import that library: the gateway's checker and the
workers do, and both must read the very same text under the very same limits, or a grammar that was accepted could fail later.
"""

import hashlib
import json
from enum import Enum, unique
from typing import Any

import msgspec


@unique
class GrammarKind(Enum):
    """How the text is to be read. LARK: llguidance's dialect of Lark; what clients send as GBNF or EBNF is converted before it travels."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


class GrammarSpec(msgspec.Struct, frozen=True, array_like=True):
    """A constraint on one output.

    after_token: the constraint begins after this token has been drawn (the end of thinking). trigger_token: it begins with this token
    (the start of a tool call), which is its first. Whichever comes first; where both are -1 it begins with the first token.
    is_lenient: keywords of a JSON schema that cannot be enforced are left out instead of refused.
    is_optional: the output may end before the constraint has begun.
    """

    kind: GrammarKind
    text: str
    after_token: int = -1
    is_lenient: bool = False
    trigger_token: int = -1
    is_optional: bool = False

    @property
    def begins_at_once(self) -> bool:
        """Whether the first token is under the constraint."""
        return self.after_token < 0 and self.trigger_token < 0

    @property
    def key(self) -> bytes:
        """What tells constraints apart, wherever in the output they begin: 16 bytes."""
        header = f"{self.kind.value} {self.is_lenient} "
        return hashlib.sha256(header.encode() + self.text.encode()).digest()[:16]


MAX_GRAMMAR_BYTES = 65536
"""Longest text. Masks of a regex of twice this length took 0.13 s each (docs/adr/0013)."""

PARSER_LIMITS: dict[str, int | bool] = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 100_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
"""Arguments of llguidance.LLParserLimits: bounds of time and memory for one grammar and for one mask, in the library's units.

About 20 ms to begin and 7 ms a mask at most, and 50 MB of lexer states; real schemas need a hundredth. verbose_errors would put the
state of somebody's parser into messages.
"""

JSON_WHITESPACE = r"\x20|\r?\n[\x20\x09]{0,40}"
"""Between two JSON tokens: one blank, or a line end and its indentation. With any, a model that has lost its way writes only blanks."""


_OPTIONS = '%llguidance {"no_forcing": true}'
"""Behind the grammar, where it wins over a client's own. Without it the library allows one spelling only where the text is forced."""


def library_text(spec: GrammarSpec) -> str:
    """The constraint as llguidance reads it. Raises ValueError for a JSON schema that is neither an object nor true."""
    match spec.kind:
        case GrammarKind.JSON_SCHEMA:
            rules = f"start: %json {json.dumps(with_options(json.loads(spec.text), is_lenient=spec.is_lenient))}"
        case GrammarKind.REGEX:
            rules = f"start: /{inside_slashes(spec.text)}/"
        case GrammarKind.LARK:
            rules = spec.text
    return f"{rules}\n{_OPTIONS}\n"


def with_options(schema: Any, *, is_lenient: bool) -> dict[str, Any]:
    """The schema with the options that we choose; a client's own would decide what is enforced."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError(f"a JSON schema is an object or true, not {json.dumps(schema)[:40]}")
    return {**schema, "x-guidance": {"whitespace_pattern": JSON_WHITESPACE, "lenient": is_lenient, "coerce_one_of": is_lenient}}


def inside_slashes(regex: str) -> str:
    """The regex between Lark's slashes: bare slashes and line ends are written as escapes, escapes stay what they are."""
    pieces = []
    is_escaped = False
    for character in regex:
        if character == "\n":
            pieces.append("n" if is_escaped else r"\n")
        elif character == "/" and not is_escaped:
            pieces.append(r"\/")
        else:
            pieces.append(character)
        is_escaped = character == "\\" and not is_escaped
    return "".join(pieces)
