"""What a client may ask for: the public API's schema. Everything here is untrusted until it has passed.

Knows: fields, types, ranges, and which known parameters are refused because ignoring them would change the answer. Does not know
tokens or limits of the model (`sampling.py`).
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError

from kv_transfer.errors import InvalidRequest, UnsupportedParameter
from router.gateway.grammar_fields import FIELD_NAMES as GRAMMAR_FIELD_NAMES
from router.gateway.grammar_fields import GrammarFields, OpenModel, find_ignored_grammar_fields

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_LOGPROBS = 20
MAX_BIASED_TOKENS = 1024
MAX_ALLOWED_TOKENS = 16384
MAX_BAD_WORDS = 128

Temperature = Annotated[float, Field(ge=0.0, le=2.0)]
TopP = Annotated[float, Field(gt=0.0, le=1.0)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenIdField = Annotated[int, Field(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
LogprobsCount = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(OpenModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ContentPart(OpenModel):
    type: str
    text: str | None = None


class ToolCallFunction(OpenModel):
    name: str
    arguments: str | dict[str, Any]


class ToolCall(OpenModel):
    id: str | None = None
    type: Literal["function"] | None = None
    function: ToolCallFunction


class ChatMessage(OpenModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class GenerationFields(GrammarFields):
    """What both endpoints share; what the answer must look like is in `grammar_fields.py`."""

    model: str
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenIdField], Field(max_length=256)] | None = None
    ignore_eos: bool | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]], Field(max_length=MAX_BIASED_TOKENS)] | None = None
    allowed_token_ids: Annotated[list[TokenIdField], Field(min_length=1, max_length=MAX_ALLOWED_TOKENS)] | None = None
    bad_words: Annotated[list[StopString], Field(max_length=MAX_BAD_WORDS)] | None = None
    prompt_logprobs: LogprobsCount | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """All stop strings, as one form."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def num_logprobs(self) -> int:
        """How many of the largest log-probabilities to tell beside a token's own; -1 for none at all."""
        return -1

    @property
    def num_prompt_logprobs(self) -> int:
        """The same for the tokens of the prompt."""
        return -1 if self.prompt_logprobs is None else self.prompt_logprobs


class ChatRequest(GenerationFields):
    """tools and tool_choice are checked by `tools.read_tools`: tools stay in the client's own order, which the template prints."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobsCount | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    @property
    def num_logprobs(self) -> int:
        """See GenerationFields."""
        return (self.top_logprobs or 0) if self.logprobs else -1


class CompletionRequest(GenerationFields):
    """prompt is checked by `parse_prompts`: a union of lists would collect an error for each of a hundred thousand ids."""

    prompt: Any
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    """As vLLM's: the choice carries the output's token ids beside its text."""
    logprobs: LogprobsCount | None = None

    @property
    def num_logprobs(self) -> int:
        """See GenerationFields."""
        return -1 if self.logprobs is None else self.logprobs

    @property
    def num_prompt_logprobs(self) -> int:
        """See GenerationFields: an echoed prompt is told about like the answer."""
        return max(super().num_prompt_logprobs, self.num_logprobs if self.echo else -1)


_ANY = object()
"""In the table below: no value of this parameter changes the answer."""

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (None, True),
    "audio": (None,),
    "best_of": (None, 1),
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "include_stop_str_in_output": (None, False),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (_ANY,),
    "skip_special_tokens": (None, True),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
    "web_search_options": (None,),
}
"""Parameters that we know and do not support (there), with the values that leave the answer as it is. Tools are for chats alone."""

RequestT = TypeVar("RequestT", bound=GenerationFields)
ModelT = TypeVar("ModelT", bound=OpenModel)


def parse_model(model_type: type[ModelT], body: bytes) -> ModelT:
    """Validate a body by its type alone. Raises InvalidRequest that names the field."""
    try:
        return model_type.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error, _FIELD_NAMES | frozenset(model_type.model_fields)) from None


def parse_request(request_type: type[RequestT], body: bytes) -> RequestT:
    """Validate a body. Raises InvalidRequest that names the field, UnsupportedParameter for what would change the answer."""
    request = parse_model(request_type, body)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options are for streams; set stream to true or leave them out", param="stream_options")
    _check_together(request)
    for name, value in (request.model_extra or {}).items():
        neutral = NEUTRAL_VALUES.get(name)
        if neutral is not None and not _is_neutral(value, neutral):
            raise UnsupportedParameter(
                f"{name} with this value is not supported by this server and would change the answer; leave it out", param=name
            )
    return request


def _check_together(request: GenerationFields) -> None:
    """Rules between fields. Raises InvalidRequest."""
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequest("prompt_logprobs come with a whole answer; leave out stream", param="prompt_logprobs")
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs are told only where logprobs is true", param="top_logprobs")
    for key in request.logit_bias or ():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequest(f"logit_bias: {key[:32]!r} is no token id", param="logit_bias")


def find_ignored_fields(request: GenerationFields) -> list[str]:
    """Names of the fields that nobody reads, nested ones as paths."""
    ignored = [name for name in request.model_extra or {} if name not in NEUTRAL_VALUES]
    if request.stream_options is not None:
        ignored += [f"stream_options.{name}" for name in request.stream_options.model_extra or {}]
    ignored += find_ignored_grammar_fields(request)
    if isinstance(request, ChatRequest):
        for index, message in enumerate(request.messages):
            if message.model_extra:  # clients send answers back with empty fields that say nothing
                ignored += [f"messages.{index}.{name}" for name, value in message.model_extra.items() if value not in (None, [], "")]
    return ignored


def parse_prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts of a completion, one or many. Raises InvalidRequest."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if isinstance(prompt[0], int):
            return [_check_token_list(prompt, "prompt")]
        if all(isinstance(item, str) for item in prompt):
            return list(prompt)
        if all(isinstance(item, list) for item in prompt):
            return [_check_token_list(item, f"prompt.{index}") for index, item in enumerate(prompt)]
    raise InvalidRequest("prompt must be a string, a list of token ids, or a non-empty list of either", param="prompt")


def _check_token_list(tokens: list[Any], param: str) -> list[int]:
    if not all(type(token) is int for token in tokens):  # bool is an int to isinstance
        raise InvalidRequest(f"{param} must hold token ids only, as integers", param=param)
    return tokens


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    return any(item is _ANY or (value == item and isinstance(value, bool) == isinstance(item, bool)) for item in neutral)


def _explain(error: ValidationError, names: frozenset[str]) -> InvalidRequest:
    """One sentence about the deepest mistake: of a union's branches, that is the one the client meant."""
    details = error.errors(include_url=False, include_context=False, include_input=False)
    if details[0]["type"] == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {details[0]['msg'].removeprefix('Invalid JSON: ')}", body="malformed")
    paths = [_field_path(detail["loc"], names) for detail in details]
    if not any(paths):
        return InvalidRequest("the body must be a JSON object")
    deepest = max(paths, key=len)
    reasons = dict.fromkeys(detail["msg"] for detail, path in zip(details, paths, strict=True) if path == deepest)
    name = ".".join(map(str, deepest))
    return InvalidRequest(f"{name}: {'; or: '.join(reasons)}", param=name)


def _field_path(location: tuple[int | str, ...], names: frozenset[str]) -> tuple[int | str, ...]:
    """The location without the names of union branches, which mean nothing to a client."""
    return tuple(part for part in location if isinstance(part, int) or part in names)


_FIELD_NAMES = (
    frozenset(
        name
        for model in (StreamOptions, ContentPart, ToolCallFunction, ToolCall, ChatMessage, ChatRequest, CompletionRequest)
        for name in model.model_fields
    )
    | GRAMMAR_FIELD_NAMES
)
