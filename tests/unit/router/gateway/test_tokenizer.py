"""Two readings of one vocabulary, and what a broken tokenizer says."""

import json
from pathlib import Path
from typing import Any

import pytest

from kv_transfer.errors import ConfigError
from router.gateway.detokeniser import Detokeniser
from router.gateway.tokenizer import TextTokenizer
from tests.unit.router.gateway.conftest import TINY

STRIPPING = {
    "id": 2524, "content": "<x>", "single_word": False, "lstrip": True, "rstrip": False, "normalized": False, "special": True,
}  # fmt: skip


def test_raw_text_has_control_tokens_and_runs_have_none(tokenizer: TextTokenizer) -> None:
    user_id = tokenizer.control_ids["<|user|>"]
    assert tokenizer.encode_raw("<|user|>Hi")[0] == user_id
    (run,) = tokenizer.encode_runs(["<|user|>Hi"])
    assert user_id not in run
    assert b"".join(tokenizer.token_bytes[token] for token in run) == b"<|user|>Hi"


def test_the_checkpoint_says_what_ends_an_answer(tokenizer: TextTokenizer) -> None:
    assert tokenizer.eos_token_ids == (2524, 2531, 2533)
    assert set(tokenizer.eos_token_ids) <= tokenizer.special_ids
    assert (tokenizer.num_token_ids, tokenizer.max_model_len_tokens) == (2560, 8192)
    assert tokenizer.control_id("</think>") not in tokenizer.special_ids
    assert tokenizer.control_id("nothing like it") is None


@pytest.mark.parametrize("text", ["Hello, world", "ñandú 🙂 日本語", "\x00\x7f\u200b", "a" * 1000, "  \n\n\t x", "\U0010ffff"])
def test_every_text_comes_back(tokenizer: TextTokenizer, text: str) -> None:
    detokeniser = Detokeniser(tokenizer.token_bytes)
    assert detokeniser.feed(tokenizer.encode_raw(text)) + detokeniser.flush() == text


def _copy(folder: Path, **changes: Any) -> Path:
    for name in ("tokenizer.json", "config.json", "generation_config.json"):
        tree = json.loads((TINY / name).read_text())
        tree.update(changes.get(name.split(".")[0], {}))
        (folder / name).write_text(json.dumps(tree))
    return folder


def test_the_end_tokens_may_be_in_the_model_config(tmp_path: Path) -> None:
    folder = _copy(tmp_path, config={"eos_token_id": 7})
    (folder / "generation_config.json").unlink()
    assert TextTokenizer(folder).eos_token_ids == (7,)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer": {"decoder": None}}, "byte-level BPE"),
        ({"tokenizer": {"added_tokens": [STRIPPING]}}, "strips"),
        ({"tokenizer": {"model": {"type": "BPE"}}}, "tokenizer.json"),
        ({"config": {"eos_token_id": None}, "generation_config": {"eos_token_id": None}}, "eos_token_id"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TextTokenizer(_copy(tmp_path, **changes))
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_missing_and_broken_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        TextTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        TextTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        TextTokenizer(tmp_path)
