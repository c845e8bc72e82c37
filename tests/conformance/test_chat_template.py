"""Our rendering and tokens of a prompt equal transformers', on every kind of message."""

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from router.gateway.chat_template import ChatEncoder, ChatTemplate, read_pinned_template
from router.gateway.tokenizer import TextTokenizer

TINY = Path(__file__).parent.parent.parent / "glm_runtime" / "tiny"
CALL = {"id": "b", "type": "function", "function": {"name": "f", "arguments": {"city": "Zürich", "n": 3, "list": [1, {"x": None}]}}}
CASES: list[Any] = [
    pytest.param([{"role": "user", "content": "Hello"}], {}, id="user"),
    pytest.param([{"role": "system", "content": "Be kind.\n"}, {"role": "user", "content": " 1 + 1 = ? \n\n"}], {}, id="system"),
    pytest.param([{"role": "user", "content": "ñ 🙂 日本"}], {"reasoning_effort": "low"}, id="low"),
    pytest.param([{"role": "user", "content": ""}], {"reasoning_effort": "high"}, id="empty"),
    pytest.param(
        [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "<think>why</think>  because  "},
            {"role": "user", "content": "and?"},
        ],
        {},
        id="history split by the template",
    ),
    pytest.param(
        [
            {"role": "user", "content": "q"},
            {"role": "assistant", "reasoning_content": "why", "content": "because"},
            {"role": "user", "content": "and?"},
        ],
        {"clear_thinking": True},
        id="history without its thinking",
    ),
    pytest.param(
        [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "tool_calls": [CALL, {**CALL, "id": "a"}]},
            {"role": "tool", "content": "second", "tool_call_id": "a"},
            {"role": "tool", "content": "first", "tool_call_id": "b"},
        ],
        {},
        id="tool results in call order",
    ),
]


@pytest.fixture(scope="module")
def theirs() -> Any:
    return PreTrainedTokenizerFast(tokenizer_file=str(TINY / "tokenizer.json"))


@pytest.fixture(scope="module")
def ours() -> TextTokenizer:
    return TextTokenizer(TINY)


@pytest.mark.parametrize(("messages", "variables"), CASES)
@pytest.mark.parametrize("control_tokens_in_text", [False, True])
def test_prompts_are_the_references(
    theirs: Any, ours: TextTokenizer, messages: list[dict[str, Any]], variables: dict[str, Any], control_tokens_in_text: bool
) -> None:
    expected = theirs.apply_chat_template(
        messages, chat_template=read_pinned_template(), add_generation_prompt=True, tokenize=True, return_dict=False, **variables
    )
    encoder = ChatEncoder(ChatTemplate(read_pinned_template()), ours, control_tokens_in_text=control_tokens_in_text)
    assert encoder.encode(encoder.render(messages, variables)) == list(expected)
