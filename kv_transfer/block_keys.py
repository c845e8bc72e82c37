"""Names of full blocks by content: a chain of hashes over the tokens.

Knows: how a key is made. Used by pools and by the router, so it needs the standard library only. Two prompts share exactly
the keys of their common whole blocks; with `looks_one_token_ahead` a block that parts at its very edge is not shared.
"""

import hashlib

from kv_transfer.identity import TOKEN_BYTES, PackedTokens, count_tokens

BLOCK_KEY_BYTES = 16


def block_keys(tokens: PackedTokens, salt: bytes, block_size_tokens: int, looks_one_token_ahead: bool) -> list[bytes]:
    """Keys of the full blocks of `tokens`, 16 bytes each, new list.

    key_i = SHA-256(key_{i-1} or SHA-256(salt), the block's tokens[, the next token]), cut to 16 bytes. With
    `looks_one_token_ahead` a last block that is full but has no next token yet has no key yet.
    """
    return extend_block_keys([], tokens, salt, block_size_tokens, looks_one_token_ahead)


def extend_block_keys(
    known: list[bytes], tokens: PackedTokens | bytearray, salt: bytes, block_size_tokens: int, looks_one_token_ahead: bool
) -> list[bytes]:
    """The keys of `tokens` when those of its first `len(known)` blocks are known already: all of them, new list.

    tokens: packed; also where they still grow, since copying a long context costs more than the key of its newest block.
    """
    num_full = max(count_tokens(tokens) - looks_one_token_ahead, 0) // block_size_tokens
    keys = known[:num_full]
    append_block_keys(keys, tokens, salt, block_size_tokens, looks_one_token_ahead)
    return keys


def append_block_keys(
    keys: list[bytes], tokens: PackedTokens | bytearray, salt: bytes, block_size_tokens: int, looks_one_token_ahead: bool
) -> None:
    """Add to the keys of the first blocks of `tokens` those of its other full blocks. Costs what it adds, however long the context."""
    num_full = max(count_tokens(tokens) - looks_one_token_ahead, 0) // block_size_tokens
    if len(keys) >= num_full:
        return
    parent = keys[-1] if keys else hashlib.sha256(salt).digest()
    stride, extra_bytes = block_size_tokens * TOKEN_BYTES, looks_one_token_ahead * TOKEN_BYTES
    view = memoryview(tokens)
    for start in range(len(keys) * stride, num_full * stride, stride):
        digest = hashlib.sha256(parent)
        digest.update(view[start : start + stride + extra_bytes])
        parent = digest.digest()[:BLOCK_KEY_BYTES]
        keys.append(parent)
