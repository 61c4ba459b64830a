"""How many tokens get their logits at one time: see train/objective.py."""

from __future__ import annotations

CHUNK_BYTES = 64 << 20
"""fp32 logits that exist at one time where free memory is not known (on a CPU)."""
_STEP, MOST_TOKENS = 128, 4096
"""On a GPU a piece has a multiple of _STEP tokens, at most MOST_TOKENS: more make it no faster."""
_SHARE = 4
"""A piece uses at most this part of the free memory: 1 / _SHARE."""
ROWS = 256
"""Tokens whose logits in 16 bits also exist in 32 bits, twice, at one time."""


def tokens_at_once(free: int | None, vocabulary: int, tokens: int, item: int) -> int:
    """How many of `tokens` tokens get their logits at one time, with `item` bytes for each.

    `free`: bytes that are free on the device, or None. On a GPU, few tokens are slow: each piece
    reads and writes the whole gradient of the head's weight. Pieces of one batch are equally large.
    """
    if free is None:
        return max(1, CHUNK_BYTES // (4 * vocabulary))
    for_logits = free // _SHARE
    if item == 2:
        for_logits = max(0, for_logits - 2 * 4 * ROWS * vocabulary)
    most = min(MOST_TOKENS, max(_STEP, for_logits // (item * vocabulary)))
    # A power of two: free memory that differs a little gives the same pieces, and the same sums.
    most = 1 << (most.bit_length() - 1)
    pieces = -(-max(1, tokens) // most)
    return -(-max(1, tokens) // (pieces * _STEP)) * _STEP
