"""BLAKE3 for what a handshake hashes: inputs of one chunk (1024 bytes), digests of 32 bytes.

Written from the paper's pseudocode (https://github.com/BLAKE3-team/BLAKE3-specs), because an attacker that
used the engine's own code could only do what the engine does.
"""

from __future__ import annotations

import struct

_IV = (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19)
_ORDER = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
_START, _END, _ROOT, _KEYED, _CONTEXT, _MATERIAL = 1, 2, 8, 16, 32, 64
_MASK = 0xFFFFFFFF


def keyed(key: bytes, data: bytes) -> bytes:
    """The hash under a key of 32 bytes."""
    return _hash(struct.unpack("<8I", key), data, _KEYED)


def derived(context: str, data: bytes) -> bytes:
    """The hash, or key, for a context."""
    key = _hash(_IV, context.encode(), _CONTEXT)
    return _hash(struct.unpack("<8I", key), data, _MATERIAL)


def _hash(key: tuple[int, ...], data: bytes, flags: int) -> bytes:
    assert len(data) <= 1024, "one chunk"
    blocks = [data[at : at + 64] for at in range(0, len(data), 64)] or [b""]
    chain = key
    for number, block in enumerate(blocks):
        flag = flags | (_START if number == 0 else 0) | (_END | _ROOT if number == len(blocks) - 1 else 0)
        chain = _compress(chain, block, flag)
    return struct.pack("<8I", *chain)


def _compress(chain: tuple[int, ...], block: bytes, flags: int) -> tuple[int, ...]:
    words = list(struct.unpack("<16I", block.ljust(64, b"\0")))
    state = [*chain, *_IV[:4], 0, 0, len(block), flags]
    for turn in range(7):
        _round(state, words)
        if turn < 6:
            words = [words[at] for at in _ORDER]
    return tuple(state[at] ^ state[at + 8] for at in range(8))


def _round(state: list[int], words: list[int]) -> None:
    columns = ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
    diagonals = ((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14))
    for number, (a, b, c, d) in enumerate((*columns, *diagonals)):
        for word, turn, turn_back in ((words[2 * number], 16, 12), (words[2 * number + 1], 8, 7)):
            state[a] = (state[a] + state[b] + word) & _MASK
            state[d] = _right(state[d] ^ state[a], turn)
            state[c] = (state[c] + state[d]) & _MASK
            state[b] = _right(state[b] ^ state[c], turn_back)


def _right(value: int, by: int) -> int:
    return (value >> by | value << (32 - by)) & _MASK
