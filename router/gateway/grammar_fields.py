"""The fields by which a client says what its answer must look like: OpenAI's, vLLM's and SGLang's. Untrusted.

Knows: the fields' shapes, and how all of them become one constraint. Does not know whether it is a good one (`grammar_checker.py`).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, unique
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kv_transfer.errors import InvalidRequest, UnsupportedParameter
from kv_transfer.grammar import MAX_GRAMMAR_BYTES

MAX_CHOICES = 1024
ANY_OBJECT = {"type": "object"}

GrammarText = Annotated[str, Field(max_length=MAX_GRAMMAR_BYTES)]
Schema = dict[str, Any] | bool
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]


class OpenModel(BaseModel):
    """Unknown fields are kept aside, so that they can be named; types are not coerced."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())


class NamedSchema(OpenModel):
    """OpenAI's wrapper of a schema. name and description are for the client's own use."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(OpenModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(OpenModel):
    """vLLM's; exactly one of them."""

    json_: Annotated[Schema | GrammarText | None, Field(alias="json")] = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None


class GrammarFields(OpenModel):
    """One of them at most may say something. guided_*: vLLM's former names; regex, ebnf, json_schema: SGLang's."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | GrammarText | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    regex: GrammarText | None = None
    ebnf: GrammarText | None = None
    json_schema: GrammarText | None = None


FIELD_NAMES = frozenset(
    field.alias or name
    for model in (NamedSchema, ResponseFormat, StructuredOutputs, GrammarFields)
    for name, field in model.model_fields.items()
)


@unique
class Notation(Enum):
    """How a text is to be read. GRAMMAR: Lark, or GBNF (llama.cpp's and xgrammar's EBNF). CALLS: our own, with tags as special tokens."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CALLS = "calls"


@dataclass(frozen=True, slots=True)
class AskedGrammar:
    """The one constraint of a request, as the client wrote it. param: the field that holds it.

    notes: what of it is known not to be enforced.
    """

    param: str
    notation: Notation
    text: str
    is_lenient: bool = False
    notes: tuple[str, ...] = ()


def find_ignored_grammar_fields(fields: GrammarFields) -> list[str]:
    """Paths of the fields that nobody reads."""
    given = fields.response_format
    if given is None:
        return []
    ignored = [f"response_format.{name}" for name in given.model_extra or {}]
    if given.json_schema is not None:
        ignored += [f"response_format.json_schema.{name}" for name in given.json_schema.model_extra or {}]
    return ignored


def find_grammar(fields: GrammarFields) -> AskedGrammar | None:
    """The request's constraint, if it has one. Raises InvalidRequest, UnsupportedParameter naming the field."""
    asked = list(_asked(fields))
    if len(asked) > 1:
        raise InvalidRequest(f"{asked[0].param} and {asked[1].param} both constrain the answer; give one of them", param=asked[1].param)
    if not asked:
        return None
    if len(asked[0].text.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"{asked[0].param} is longer than {MAX_GRAMMAR_BYTES} bytes; shorten it", param=asked[0].param)
    return asked[0]


def _asked(fields: GrammarFields) -> Iterator[AskedGrammar]:
    if fields.response_format is not None:
        yield from _from_response_format(fields.response_format)
    if fields.structured_outputs is not None:
        yield _from_structured_outputs(fields.structured_outputs)
    for param, schema in (("guided_json", fields.guided_json), ("json_schema", fields.json_schema)):
        if schema is not None:
            yield _of_schema(param, schema)
    for param, regex in (("guided_regex", fields.guided_regex), ("regex", fields.regex)):
        if regex is not None:
            yield AskedGrammar(param, Notation.REGEX, regex)
    if fields.guided_choice is not None:
        yield _of_choices("guided_choice", fields.guided_choice)
    for param, grammar in (("guided_grammar", fields.guided_grammar), ("ebnf", fields.ebnf)):
        if grammar is not None:
            yield AskedGrammar(param, Notation.GRAMMAR, grammar)


def _from_response_format(given: ResponseFormat) -> Iterator[AskedGrammar]:
    """Without `strict` keywords that cannot be enforced are left out, as with OpenAI."""
    if given.type == "json_object":
        yield _of_schema("response_format", ANY_OBJECT)
    elif given.type == "json_schema":
        if given.json_schema is None or given.json_schema.schema_ is None:
            raise InvalidRequest("json_schema.schema is missing", param="response_format.json_schema.schema")
        yield _of_schema("response_format.json_schema.schema", given.json_schema.schema_, is_lenient=not given.json_schema.strict)


def _from_structured_outputs(given: StructuredOutputs) -> AskedGrammar:
    for name, value in (given.model_extra or {}).items():
        if value not in (None, False):
            path = f"structured_outputs.{name[:64]}"
            raise UnsupportedParameter(f"{path} is not supported by this server and would change the answer; leave it out", param=path)
    asked = []
    if given.json_ is not None:
        asked.append(_of_schema("structured_outputs.json", given.json_))
    if given.regex is not None:
        asked.append(AskedGrammar("structured_outputs.regex", Notation.REGEX, given.regex))
    if given.choice is not None:
        asked.append(_of_choices("structured_outputs.choice", given.choice))
    if given.grammar is not None:
        asked.append(AskedGrammar("structured_outputs.grammar", Notation.GRAMMAR, given.grammar))
    if given.json_object:
        asked.append(_of_schema("structured_outputs.json_object", ANY_OBJECT))
    if len(asked) != 1:
        raise InvalidRequest(
            f"exactly one of json, regex, choice, grammar and json_object is needed, not {len(asked)}", param="structured_outputs"
        )
    return asked[0]


def _of_schema(param: str, schema: Schema | str, *, is_lenient: bool = False) -> AskedGrammar:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise InvalidRequest(f"{param} is not valid JSON: {reason}", param=param) from None
    if schema is not True and not isinstance(schema, dict):
        raise InvalidRequest(f"{param} must be a JSON schema: an object, or true", param=param)
    return AskedGrammar(param, Notation.JSON_SCHEMA, json.dumps(schema), is_lenient)


def _of_choices(param: str, choices: list[str]) -> AskedGrammar:
    return AskedGrammar(param, Notation.GRAMMAR, "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices))
