"""Running text cut into samples of at most T tokens. A sample never spans two documents.

The tail of a document is shorter than T, so samples differ in length and losses must be weighted by tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.utils.data import Dataset

from memtop.train.order import Key, Table

Sample = tuple[torch.Tensor, torch.Tensor]
"""Input ids [t] and labels [t], dtype int64."""


class PackedText(Dataset[Sample]):
    """A flat array of tokens with the documents' boundaries [documents + 1]. A sample's id is the offset of its first token."""

    recut = True

    def __init__(self, tokens: np.ndarray, boundaries: np.ndarray) -> None:
        self._tokens = tokens
        self._boundaries = boundaries

    @classmethod
    def of(cls, documents: Sequence[np.ndarray]) -> PackedText:
        """From documents in memory."""
        if not documents:
            return cls(np.empty(0, np.int32), np.zeros(1, np.int64))
        return cls(np.concatenate(documents), np.cumsum([0, *map(len, documents)]))

    def table(self, seq_len: int) -> Table:
        return _cut(self._boundaries[:-1], np.diff(self._boundaries), seq_len)

    def cut_again(self, rest: Table, seq_len: int) -> Table:
        """The same tokens, those that lie side by side in one document joined first."""
        if not len(rest):
            return rest
        order = np.argsort(rest.ids)
        starts, lengths = rest.ids[order], rest.lengths[order]
        documents = np.searchsorted(self._boundaries, starts, side="right")
        joined = (starts[1:] == starts[:-1] + lengths[:-1]) & (documents[1:] == documents[:-1])
        first = np.flatnonzero(np.concatenate(([True], ~joined)))
        return _cut(starts[first], np.add.reduceat(lengths, first), seq_len)

    def shuffled(self, count: int, generator: np.random.Generator) -> np.ndarray:
        return generator.permutation(count)

    def __getitem__(self, key: Key) -> Sample:
        start, length = key
        ids = torch.from_numpy(self._tokens[start : start + length].astype(np.int64))
        return ids, ids


def _cut(starts: np.ndarray, lengths: np.ndarray, seq_len: int) -> Table:
    """Cut stretches of text into pieces of at most `seq_len`; a last piece of one token predicts nothing and is left out."""
    pieces = np.maximum(0, -(-(lengths - 1) // seq_len))
    # 0, 1, 2, ... within each stretch.
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offsets = number * seq_len
    ids = np.repeat(starts, pieces) + offsets
    return Table(ids.astype(np.int64), np.minimum(seq_len, np.repeat(lengths, pieces) - offsets).astype(np.int64))
