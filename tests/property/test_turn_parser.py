"""However the tokens of a turn are cut, the answer is the same; nothing of it is lost, and arguments of a whole call are JSON."""

import itertools
import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.messages import FinishReason
from router.gateway.answer import Answer, CallFormat
from router.gateway.chat_messages import plain_message
from router.gateway.chat_template import ChatEncoder, ChatTemplate, read_pinned_template
from router.gateway.schema import ChatMessage
from router.gateway.tokenizer import TextTokenizer
from router.gateway.tool_values import ArgumentTypes
from router.gateway.turn_parser import CALL_TAGS, ROLE_SPELLINGS, Tag

TINY = Path(__file__).parent.parent.parent / "glm_runtime" / "tiny"
TOKENIZER = TextTokenizer(TINY)
IDS = TOKENIZER.control_ids
PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"}, "n": {"type": "integer"}, "x": {"type": "number"}, "list": {"type": "array"},
        "maybe": {"type": ["string", "null"]}, "yes": {"type": "boolean"},
    },
}  # fmt: skip
TOOLS = {"f": ArgumentTypes(PARAMETERS), "g": ArgumentTypes(None)}
TAG_IDS = [IDS[tag.value] for tag in (*CALL_TAGS, Tag.THINK_END)]
TEXTS = ["f", "g", "text", "n", " ", "\n", "12", "a🙂", "日本", '"', "\\", "{}", "true", "</tool_call>", "[1, 2]", "null", "\x00"]
BYTES = [TOKENIZER.token_bytes.index(bytes([byte])) for byte in (0xE2, 0x82, 0xAC, 0xF0, 0x9F)]


def text_ids(text: str) -> list[int]:
    return TOKENIZER.encode_runs([text])[0] if text else []


noise = st.one_of(
    st.sampled_from(TEXTS).map(text_ids),
    st.sampled_from([[tag] for tag in TAG_IDS]),
    st.sampled_from([[byte] for byte in BYTES]),
    st.sampled_from([[IDS[spelling]] for spelling in ROLE_SPELLINGS]),
    st.integers(0, TOKENIZER.num_token_ids - 1).map(lambda token: [token]),
)
# Half a character beside a tag is where texts of two kinds could run into each other.
texts = st.one_of(st.sampled_from(["", *TEXTS]).map(text_ids), st.sampled_from([[byte] for byte in BYTES]))
argument = st.tuples(st.sampled_from(["text", "n", "maybe", "free"]).map(text_ids), texts).map(
    lambda pair: [IDS["<arg_key>"], *pair[0], IDS["</arg_key>"], IDS["<arg_value>"], *pair[1], IDS["</arg_value>"]]
)
call_tokens = st.tuples(st.sampled_from(["f", "g", " f\n", ""]).map(text_ids), st.lists(argument, max_size=3)).map(
    lambda call: [IDS["<tool_call>"], *call[0], *(token for part in call[1] for token in part), IDS["</tool_call>"]]
)
segments = st.one_of(texts, st.just([IDS["</think>"]]), call_tokens, call_tokens)
mutations = st.lists(st.tuples(st.integers(0, 60), st.booleans(), noise), max_size=2)


def mutate(parts: list[list[int]], changes: list[tuple[int, bool, list[int]]]) -> list[int]:
    """All parts, with some tokens left out and some noise put in."""
    tokens = [token for part in parts for token in part]
    for place, leaves_out, extra in changes:
        place = min(place, len(tokens))
        tokens[place : place + leaves_out] = [] if leaves_out else extra
    return tokens


turns = st.builds(mutate, st.lists(segments, max_size=5), mutations)
cuts = st.lists(st.integers(0, 60), max_size=12)
finishes = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])
stop_lists = st.sampled_from([(), ("a",), ("12 ",), ("</tool_call>",), ("🙂", "f ")])


def run(tokens: list[int], cut_points: list[int], finish: FinishReason, stops: tuple[str, ...] = (), max_calls: int = 0) -> dict[str, Any]:
    """What a client puts together."""
    number = itertools.count()
    answer = Answer(
        TOKENIZER, stops=stops, end_ids=TOKENIZER.eos_token_ids, think_end_id=IDS["</think>"], calls=CallFormat(TOOLS, max_calls),
        has_roles=True, make_call_id=lambda: f"call_{next(number)}",
    )  # fmt: skip
    edges = [0, *sorted(min(point, len(tokens)) for point in cut_points), len(tokens)]
    reasoning, content, calls, used = "", "", [], 0
    for start, end in itertools.pairwise(edges):
        delta = answer.feed(tokens[start:end], None)
        reasoning, content, used = reasoning + delta.reasoning, content + delta.content, used + len(delta.tokens)
        calls += delta.calls
        if delta.finish_reason is not None:
            break
    if answer.finish_reason is None:
        delta = answer.feed([], finish)
        reasoning, content = reasoning + delta.reasoning, content + delta.content
        calls += delta.calls
    whole: list[dict[str, str]] = []
    for call in calls:
        if call.name is not None:
            assert call.index == len(whole)
            assert call.arguments == "", "the name comes first and alone"
            whole.append({"id": call.call_id or "", "name": call.name, "arguments": ""})
        else:
            assert call.index == len(whole) - 1, "a call that has ended gets no more"
            whole[-1]["arguments"] += call.arguments
    counts = (answer.num_tokens, answer.num_reasoning_tokens, used, answer.has_content)
    return {"reasoning": reasoning, "content": content, "calls": whole, "finish": answer.finish_reason, "counts": counts}


@given(turns, cuts, finishes, stop_lists, st.sampled_from([0, 1]))
def test_any_cut_gives_the_same_answer(
    tokens: list[int], cut_points: list[int], finish: FinishReason, stops: tuple[str, ...], max_calls: int
) -> None:
    whole = run(tokens, [], finish, stops, max_calls)
    assert run(tokens, cut_points, finish, stops, max_calls) == whole
    assert run(tokens, list(range(len(tokens))), finish, stops, max_calls) == whole


@given(turns)
def test_arguments_of_a_turn_that_ended_are_json_objects_and_ids_are_unique(tokens: list[int]) -> None:
    answer = run(tokens, [], FinishReason.STOP)
    for call in answer["calls"]:
        pairs = json.loads(call["arguments"], object_pairs_hook=list)
        assert len({key for key, _ in pairs}) == len(pairs)
        assert call["name"].strip() == call["name"] != ""
        types = {key: value for key, value in pairs if call["name"] == "f"}
        assert isinstance(types.get("text", ""), str)
        assert isinstance(types.get("maybe"), str | None), "text that is no null is a string"
    assert len({call["id"] for call in answer["calls"]}) == len(answer["calls"])
    assert answer["finish"] == ("tool_calls" if answer["calls"] else "stop")


@given(turns, finishes)
def test_no_text_is_lost(tokens: list[int], finish: FinishReason) -> None:
    """Every letter and digit that was said is somewhere in the answer, as often as it was said."""
    tokens = [token for token in tokens if token not in TOKENIZER.special_ids]
    answer = run(tokens, [], finish)
    said = "".join(TOKENIZER.token_bytes[token].decode("utf-8", "ignore") for token in tokens if token not in TAG_IDS)
    told = answer["reasoning"] + answer["content"] + "".join(call["name"] + call["arguments"] for call in answer["calls"])
    for character in "fg12日":
        assert told.count(character) >= said.count(character), character


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
plain_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": plain_text, "n": st.integers(), "x": st.floats(allow_nan=False, allow_infinity=False),
        "list": st.lists(json_values, max_size=3), "yes": st.booleans(), "free": plain_text,
    },
)  # fmt: skip


@given(st.lists(arguments, max_size=3), cuts, plain_text)
def test_what_was_written_is_read(calls: list[dict[str, Any]], cut_points: list[int], thinking: str) -> None:
    tokens = TOKENIZER.encode_runs([thinking])[0] + [IDS["</think>"]]
    for call in calls:
        tokens += [IDS["<tool_call>"], *TOKENIZER.encode_runs(["f"])[0]]
        for key, value in call.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for start, inside, end in (("<arg_key>", key, "</arg_key>"), ("<arg_value>", text, "</arg_value>")):
                tokens += [IDS[start], *TOKENIZER.encode_runs([inside])[0], IDS[end]]
        tokens.append(IDS["</tool_call>"])
    answer = run(tokens, cut_points, FinishReason.STOP)
    assert answer["reasoning"] == thinking
    assert [json.loads(call["arguments"]) for call in answer["calls"]] == calls
    assert answer["counts"][3] == (not calls), "content is null where there are calls alone"


ENCODER = ChatEncoder(ChatTemplate(read_pinned_template()), TOKENIZER, control_tokens_in_text=False)
contents = st.one_of(st.none(), plain_text.map(str.strip))


def render(said: dict[str, Any]) -> list[int]:
    """Tokens of a conversation that ends with what the assistant has said."""
    messages = [{"role": "user", "content": "q"}, plain_message(ChatMessage.model_validate(said), "messages.1")]
    return ENCODER.encode(ENCODER.render(messages, {}, is_generating=False))


@given(plain_text, contents, st.lists(arguments, max_size=3), cuts)
def test_a_turn_that_is_read_and_sent_back_is_rendered_as_it_was(
    thinking: str, content: str | None, calls: list[dict[str, Any]], cut_points: list[int]
) -> None:
    made = [{"id": f"{index}", "function": {"name": "f", "arguments": json.dumps(call)}} for index, call in enumerate(calls)]
    tokens = render({"role": "assistant", "reasoning_content": thinking, "content": content, "tool_calls": made})
    turn = tokens[tokens.index(IDS["<think>"]) + 1 :]
    answer = run(turn, cut_points, FinishReason.STOP)
    read = [{"id": call["id"], "function": {"name": call["name"], "arguments": call["arguments"]}} for call in answer["calls"]]
    again = {"role": "assistant", "reasoning_content": answer["reasoning"], "content": answer["content"] or None, "tool_calls": read}
    assert render(again) == tokens
