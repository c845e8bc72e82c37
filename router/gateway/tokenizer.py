"""Text to token ids, with and without control tokens, and the bytes that each id stands for.

Knows: the checkpoint's tokenizer.json (byte-level BPE) and end tokens. Does not know messages (`chat_template.py`) or streams
(`detokeniser.py`).
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kv_transfer.errors import ConfigError

TEXT_ONLY_FLAGS = ("single_word", "lstrip", "rstrip")
"""An added token that eats neighbouring spaces or needs word boundaries cannot be told from text by its spelling alone."""


class TextTokenizer:
    """Two tokenizers of one vocabulary: one that reads control spellings as control tokens, and one to which all is text.

    control_ids: spelling -> id of the added tokens. special_ids: those that are never shown. eos_token_ids: those that end an answer.
    num_token_ids: every id below is valid in a prompt. token_bytes[id]: what the id adds to the text.
    Raises ConfigError for a directory without a usable tokenizer.json.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        tree = _read_json(path)
        _check_is_byte_level(tree, path)
        self._full = _build(tree, path)
        self._plain = _build({**tree, "added_tokens": []}, path)
        added = tree.get("added_tokens") or []
        for token in added:
            if any(token.get(flag) for flag in TEXT_ONLY_FLAGS):
                raise ConfigError(f"added token {token['content']!r} strips or needs word boundaries", path=f"{path}:added_tokens")
        self.control_ids: dict[str, int] = {token["content"]: token["id"] for token in added}
        longest_first = sorted(self.control_ids, key=lambda spelling: (-len(spelling), spelling))
        self.control_pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")" if added else r"(?!)")
        model_config = _read_json(directory / "config.json")
        self.generation_defaults = _read_json(directory / "generation_config.json", is_optional=True)
        self.eos_token_ids = _find_eos(self.generation_defaults, model_config, directory)
        self.max_model_len_tokens = int(model_config.get("max_position_embeddings", 0))
        self.special_ids = frozenset(token["id"] for token in added if token.get("special")) | frozenset(self.eos_token_ids)
        self.token_bytes = _make_token_bytes(tree, self.control_ids)
        self.num_token_ids = max(len(self.token_bytes), int(model_config.get("vocab_size", 0)))
        self.max_token_bytes = max(map(len, self.token_bytes))

    def encode_raw(self, text: str) -> list[int]:
        """Token ids of a raw prompt, in which control spellings are control tokens, as the reference tokenizer reads them."""
        ids: list[int] = self._full.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def encode_runs(self, runs: Sequence[str]) -> list[list[int]]:
        """Token ids of each run of text, in which nothing is a control token."""
        # The batch call lets go of the interpreter lock; the single one would hold every stream up.
        return [encoding.ids for encoding in self._plain.encode_batch_fast(list(runs), add_special_tokens=False)]

    def control_id(self, spelling: str) -> int | None:
        """The id of a control token, or None when this vocabulary has no such token."""
        return self.control_ids.get(spelling)


def _read_json(path: Path, *, is_optional: bool = False) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if is_optional:
            return {}
        raise ConfigError("file is missing", path=str(path)) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot be read: {error}", path=str(path)) from None
    if not isinstance(tree, dict):
        raise ConfigError("is not a JSON object", path=str(path))
    return tree


def _build(tree: dict[str, Any], path: Path) -> Any:
    try:
        return Tokenizer.from_str(json.dumps(tree))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"is no tokenizer: {error}", path=str(path)) from None


def _check_is_byte_level(tree: dict[str, Any], path: Path) -> None:
    model_type = (tree.get("model") or {}).get("type")
    decoder_type = (tree.get("decoder") or {}).get("type")
    if model_type != "BPE" or decoder_type != "ByteLevel":
        raise ConfigError(f"expected byte-level BPE, found model {model_type} with decoder {decoder_type}", path=f"{path}:decoder.type")


def _find_eos(generation_config: dict[str, Any], model_config: dict[str, Any], directory: Path) -> tuple[int, ...]:
    for config in (generation_config, model_config):
        value = config.get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
            return tuple(value)
    raise ConfigError("neither generation_config.json nor config.json names an end token", path=f"{directory / 'config.json'}:eos_token_id")


def _make_token_bytes(tree: dict[str, Any], control_ids: dict[str, int]) -> list[bytes]:
    """Table id -> bytes; an id that the vocabulary leaves out stands for nothing."""
    byte_of = {character: byte for byte, character in _byte_characters().items()}
    vocabulary: dict[str, int] = {**tree["model"]["vocab"], **control_ids}
    table = [b""] * (max(vocabulary.values()) + 1)
    for spelling, token_id in vocabulary.items():
        is_bytes = all(character in byte_of for character in spelling)
        table[token_id] = bytes(byte_of[character] for character in spelling) if is_bytes else spelling.encode()
    return table


def _byte_characters() -> dict[int, str]:
    """The 256 printable characters that byte-level BPE writes bytes with (GPT-2's table).

    Printable Latin-1 bytes stand for themselves; the others are moved to U+0100 and up, in order.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    characters = {byte: chr(byte) for byte in printable}
    moved = 0
    for byte in range(256):
        if byte not in characters:
            characters[byte] = chr(0x100 + moved)
            moved += 1
    return characters
