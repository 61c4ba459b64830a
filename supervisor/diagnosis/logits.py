"""What a request was for, where its size gives it away."""

from __future__ import annotations

from memtop.supervisor.diagnosis.values import Evidence

_TOLERANCE = 0.02
_TYPES = ((4, "fp32"), (2, "16 bit"))


def requested_for(requested_bytes: int | None, evidence: Evidence) -> str | None:
    """`the logits (B 32 x T 252 x V 40960, fp32)`: the request is what B x T x V numbers take. A program may leave out one
    position or add one, so T - 1 and T + 1 are tried, too."""
    batch, length, vocabulary = evidence.batch, evidence.seq_len, evidence.vocabulary
    if not (requested_bytes and batch and length and vocabulary):
        return None
    fits = []
    for width, name in _TYPES:
        for tokens in (length, length - 1, length + 1):
            expected = batch * tokens * vocabulary * width
            off = abs(requested_bytes - expected) / expected if expected > 0 else 1.0
            if off <= _TOLERANCE:
                # A printed size has two decimals: the length that was given wins unless another fits clearly better.
                fits.append(
                    (off + (0.002 if tokens != length else 0), f"the logits (B {batch} x T {tokens} x V {vocabulary}, {name})")
                )
    return min(fits)[1] if fits else None
