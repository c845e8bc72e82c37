"""Block keys: a chain over tokens and salt, whole blocks only."""

import hashlib

from kv_transfer.block_keys import BLOCK_KEY_BYTES, block_keys, extend_block_keys
from kv_transfer.identity import PackedTokens, pack_tokens

TOKENS = list(range(100, 110))


def keys(tokens: list[int], salt: bytes = b"", ahead: bool = False) -> list[bytes]:
    return block_keys(pack_tokens(tokens), salt, 4, ahead)


def test_only_full_blocks_have_keys() -> None:
    assert [len(keys(TOKENS[:n])) for n in (0, 3, 4, 7, 8, 10)] == [0, 0, 1, 1, 2, 2]
    assert all(len(key) == BLOCK_KEY_BYTES for key in keys(TOKENS))


def test_looking_ahead_needs_the_next_token() -> None:
    assert [len(keys(TOKENS[:n], ahead=True)) for n in (0, 4, 5, 8, 9)] == [0, 0, 1, 1, 2]
    same_block_other_next = [*TOKENS[:4], 7]
    assert keys(same_block_other_next, ahead=True) != keys(TOKENS[:5], ahead=True)
    assert keys(same_block_other_next) == keys(TOKENS[:5])


def test_a_key_names_the_whole_prefix() -> None:
    changed_first = [1, *TOKENS[1:]]
    assert keys(changed_first)[1] != keys(TOKENS)[1]
    assert keys([*TOKENS[:8], 1])[:2] == keys(TOKENS)[:2]


def test_salts_part_the_worlds() -> None:
    assert not set(keys(TOKENS, b"tenant")) & set(keys(TOKENS))


def test_the_bytes_are_what_the_protocol_says() -> None:
    parent = hashlib.sha256(b"salt").digest()
    assert keys(TOKENS, b"salt")[0] == hashlib.sha256(parent + pack_tokens(TOKENS[:4])).digest()[:16]


def test_extending_known_keys_gives_the_same_chain() -> None:
    packed = pack_tokens(TOKENS)
    whole = block_keys(packed, b"s", 4, False)
    for count in range(len(whole) + 1):
        assert extend_block_keys(whole[:count], packed, b"s", 4, False) == whole
    assert extend_block_keys(whole, PackedTokens(packed[: 5 * 4]), b"s", 4, False) == whole[:1]
