"""GLM's own transcripts with tools and thinking: rendered from what a client would send, read, sent back, and rendered as they were."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kv_transfer.messages import FinishReason
from router.gateway.answer import Answer
from router.gateway.chat import whole_calls
from router.gateway.chat_messages import plain_messages
from router.gateway.chat_template import ChatEncoder, ChatTemplate, read_pinned_template
from router.gateway.schema import ChatMessage
from router.gateway.tokenizer import TextTokenizer
from router.gateway.tools import ToolUse, read_tools

TINY = Path(__file__).parent.parent.parent / "glm_runtime" / "tiny"
TOKENIZER = TextTokenizer(TINY)
ENCODER = ChatEncoder(ChatTemplate(read_pinned_template()), TOKENIZER, control_tokens_in_text=False)
RECORDS = [record for line in (TINY / "heldout.jsonl").read_text().splitlines() if (record := json.loads(line))["kind"] == "tool"]


def read_prompt(prompt: str) -> tuple[dict[str, Any], list[dict[str, Any]], ToolUse]:
    """(variables, messages, tools) that the prompt was made of."""
    effort = re.search(r"Reasoning Effort: (\w+)", prompt)
    block = re.search(r"<tools>\n(\{.*\})\n</tools>", prompt, re.DOTALL)
    assert effort is not None
    assert block is not None
    tools = [{"type": "function", "function": json.loads(line)} for line in block[1].splitlines()]
    said = prompt.rsplit("<|user|>", 1)[1].removesuffix("<|assistant|><think>")
    return {"reasoning_effort": effort[1].lower()}, [{"role": "user", "content": said}], read_tools(tools, "auto", None)


def render(variables: dict[str, Any], messages: list[dict[str, Any]], use: ToolUse, *, is_generating: bool) -> list[int]:
    plain = plain_messages([ChatMessage.model_validate(message) for message in messages])
    return ENCODER.encode(ENCODER.render(plain, variables, use.definitions, is_generating=is_generating))


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_transcript_is_read_and_rendered_as_it_was(size: int) -> None:
    assert len(RECORDS) > 40
    for record in RECORDS:
        variables, messages, use = read_prompt(record["prompt"])
        prompt, turn = TOKENIZER.encode_raw(record["prompt"]), TOKENIZER.encode_raw(record["completion"])
        assert render(variables, messages, use, is_generating=True) == prompt
        answer = Answer(
            TOKENIZER,
            stops=(),
            end_ids=TOKENIZER.eos_token_ids,
            think_end_id=TOKENIZER.control_ids["</think>"],
            calls=use.call_format(),
            has_roles=True,
        )
        deltas = [
            answer.feed(turn[at : at + size], FinishReason.STOP if at + size >= len(turn) else None) for at in range(0, len(turn), size)
        ]
        calls = whole_calls([call for delta in deltas for call in delta.calls])
        assert len(calls) == record["completion"].count("<tool_call>")
        assert answer.finish_reason == ("tool_calls" if calls else "stop")
        back = {
            "role": "assistant",
            "reasoning_content": "".join(delta.reasoning for delta in deltas),
            "content": "".join(delta.content for delta in deltas) if answer.has_content else None,
            "tool_calls": calls,
        }
        assert render(variables, [*messages, back], use, is_generating=False) == [*prompt, *turn[:-1]]
