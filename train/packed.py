"""What the order shuffles: running text cut into samples of at most T tokens, or the rows of a table.

A sample of running text never spans two documents. The tail of a document is shorter than T, so samples differ in length and
losses must be weighted by tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import Dataset

from memtop.train.corpus import Sample, TokenStore, window_order
from memtop.train.corpus.pairs import PromptResponse, Seq2SeqPairs
from memtop.train.order import Key, Table

WINDOW = 4
"""Row groups that are shuffled into one another: their rows come together, so that each group is read once in an epoch."""


class PackedText(Dataset[Sample]):
    """A flat array of tokens with its documents' boundaries. A sample's id is the offset of its first token."""

    recut = True

    def __init__(self, store: TokenStore) -> None:
        self._store = store

    def table(self, seq_len: int) -> Table:
        boundaries = np.asarray(self._store.boundaries)
        return _cut(boundaries[:-1], np.diff(boundaries), seq_len)

    def cut_again(self, rest: Table, seq_len: int) -> Table:
        """The same tokens, those that lie side by side in one document joined first."""
        if not len(rest):
            return rest
        order = np.argsort(rest.ids)
        starts, lengths = rest.ids[order], rest.lengths[order]
        documents = np.searchsorted(self._store.boundaries, starts, side="right")
        joined = (starts[1:] == starts[:-1] + lengths[:-1]) & (documents[1:] == documents[:-1])
        first = np.flatnonzero(np.concatenate(([True], ~joined)))
        return _cut(starts[first], np.add.reduceat(lengths, first), seq_len)

    def shuffled(self, count: int, generator: np.random.Generator) -> np.ndarray:
        return generator.permutation(count)

    def __getitem__(self, key: Key) -> Sample:
        start, length = key
        ids = torch.from_numpy(self._store.tokens[start : start + length].astype(np.int64))
        return ids, ids


class RowSamples(Dataset[Sample]):
    """Pairs of prompt and response, one row a sample. Their ids are the rows' numbers, whatever T cuts off."""

    recut = False

    def __init__(self, pairs: PromptResponse | Seq2SeqPairs) -> None:
        self.pairs = pairs

    def table(self, seq_len: int) -> Table:
        return Table(np.arange(len(self.pairs)), np.zeros(len(self.pairs), np.int64))

    def cut_again(self, rest: Table, seq_len: int) -> Table:
        return rest

    def shuffled(self, count: int, generator: np.random.Generator) -> np.ndarray:
        return window_order(self.pairs.rows.group_sizes(), WINDOW, generator)

    def __getitem__(self, key: Key) -> Sample:
        return self.pairs[key[0]]


def _cut(starts: np.ndarray, lengths: np.ndarray, seq_len: int) -> Table:
    """Cut stretches of text into pieces of at most `seq_len`; a last piece of one token predicts nothing and is left out."""
    pieces = np.maximum(0, -(-(lengths - 1) // seq_len))
    # 0, 1, 2, ... within each stretch.
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offsets = number * seq_len
    ids = np.repeat(starts, pieces) + offsets
    return Table(ids.astype(np.int64), np.minimum(seq_len, np.repeat(lengths, pieces) - offsets).astype(np.int64))
