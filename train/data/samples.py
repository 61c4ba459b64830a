"""Samples: pieces of text of at most T tokens, or rows of prompt and response; and their batches.

A piece of running text never spans two documents. The last piece of a document is shorter than T,
so samples differ in length and losses are weighted by tokens. Rows longer than T are cut;
`cut_report` counts how many and how much is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from memtop.train.data.rows import Rows, window_order
from memtop.train.data.tokens import Tokens, TokenStore, token_cache
from memtop.train.objective import IGNORED
from memtop.train.order import Key, Table

Sample = tuple[torch.Tensor, torch.Tensor]
"""Input ids [t] and labels [u], int64; u = t for causal models, where labels are not shifted."""
_STRETCH = 32


class _Pairs(Dataset[Sample]):
    """Pairs of prompt and response; `columns` are the names of the two columns.

    Texts become tokens when a sample is read, or once, if they are cached.
    """

    def __init__(self, rows: Rows, tokens: Tokens, seq_len: int, columns: tuple[str, str] = ("prompt", "response")) -> None:
        self.rows = rows
        self._tokens = tokens
        self._seq_len = seq_len
        self._columns = columns
        self._store: TokenStore | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def cache(self, folder: Path, key: str) -> None:
        """Read the tokens from a cache in the folder, built now if there is none.

        `key` must change with the rows. The cache does not depend on T.
        """
        kind = type(self).__name__
        self._store = token_cache(self._all_encoded(), self._tokens, folder, f"{kind} {key}", bare=True)
        # From now on only the sizes of their groups are needed, for the order.
        self.rows.close()

    def _all_encoded(self) -> Iterator[list[int]]:
        for index in range(len(self)):
            yield from self._encode(index)

    def cut_report(self, sample_count: int = 512) -> dict[str, Any]:
        """{"examined", "cut", "dropped_tokens_fraction"} over a fixed subset of the rows."""
        cut = before = after = 0
        examined = _spread(len(self), sample_count)
        for index in examined:
            whole, kept = self._lengths(index)
            cut += kept < whole
            before += whole
            after += kept
        return {"examined": len(examined), "cut": cut, "dropped_tokens_fraction": (before - after) / max(1, before)}

    def length(self, index: int) -> int:
        """The number of tokens of a sample, after cutting."""
        return self._lengths(index)[1]

    def _lengths(self, index: int) -> tuple[int, int]:
        """The number of tokens of a sample before and after cutting."""
        prompt, response = self._encoded(index)
        return len(prompt) + len(response), sum(map(len, self._fit(prompt, response)))

    def _encoded(self, index: int) -> tuple[list[int], list[int]]:
        """The tokens of prompt and response, not cut."""
        if self._store is None:
            return self._encode(index)
        return self._store.document(2 * index).tolist(), self._store.document(2 * index + 1).tolist()

    def _encode(self, index: int) -> tuple[list[int], list[int]]:
        raise NotImplementedError

    def _fit(self, prompt: list[int], response: list[int]) -> tuple[list[int], list[int]]:
        raise NotImplementedError

    def _texts(self, index: int) -> tuple[str, str]:
        row = self.rows.row(index)
        return row[self._columns[0]], row[self._columns[1]]


class PromptResponse(_Pairs):
    """For causal models: prompt and response in one sequence of up to T tokens.

    Only the response is trained on.

    With a chat template the prompt is the user's turn and the response the assistant's; otherwise
    the sequence is [begin] prompt response end.
    """

    def __getitem__(self, index: int) -> Sample:
        prompt, response = self._fit(*self._encoded(index))
        ids = torch.tensor(prompt + response, dtype=torch.int64)
        labels = ids.clone()
        labels[: len(prompt)] = IGNORED
        return ids, labels

    def _encode(self, index: int) -> tuple[list[int], list[int]]:
        tokens = self._tokens
        prompt, response = self._texts(index)
        dialogue = tokens.chat(prompt, response)
        if dialogue is not None:
            return dialogue
        begin = [] if tokens.begin is None else [tokens.begin]
        return begin + tokens.encode(prompt), [*tokens.encode(response), tokens.end]

    def _fit(self, prompt: list[int], response: list[int]) -> tuple[list[int], list[int]]:
        """Cut the end of the response and its end token: the model must not learn to stop early.

        If the prompt leaves the response less than a quarter of T, cut its beginning, except for
        the begin token.
        """
        room = self._seq_len - min(len(response), max(1, self._seq_len // 4))
        if len(prompt) > room:
            kept = prompt[:1] if prompt[0] == self._tokens.begin and room > 0 else []
            prompt = kept + prompt[len(prompt) - (room - len(kept)) :]
        return prompt, response[: self._seq_len - len(prompt)]


class Seq2SeqPairs(_Pairs):
    """For encoder-decoder models such as T5: prompt + end, response + end, each up to T tokens."""

    def __getitem__(self, index: int) -> Sample:
        prompt, response = self._fit(*self._encoded(index))
        return torch.tensor(prompt, dtype=torch.int64), torch.tensor(response, dtype=torch.int64)

    def _encode(self, index: int) -> tuple[list[int], list[int]]:
        prompt, response = self._texts(index)
        return [*self._tokens.encode(prompt), self._tokens.end], [*self._tokens.encode(response), self._tokens.end]

    def _fit(self, prompt: list[int], response: list[int]) -> tuple[list[int], list[int]]:
        return self._cut(prompt), self._cut(response)

    def _cut(self, ids: list[int]) -> list[int]:
        return ids if len(ids) <= self._seq_len else [*ids[: self._seq_len - 1], self._tokens.end]


class RowText:
    """The token ids of one column, row by row, without begin and end. Can be iterated again."""

    def __init__(self, rows: Rows, tokens: Tokens, column: str = "text") -> None:
        self._rows = rows
        self._tokens = tokens
        self._column = column

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[list[int]]:
        for index in range(len(self._rows)):
            yield self._tokens.encode(self._rows.row(index)[self._column])


def collate(samples: Sequence[Sample], pad: int) -> dict[str, torch.Tensor]:
    """Pad: input_ids and attention_mask [b, t], labels [b, u], where padding is IGNORED."""
    inputs = [ids for ids, _ in samples]
    lengths = torch.tensor([len(ids) for ids in inputs])
    padded = torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True, padding_value=pad)
    labels = torch.nn.utils.rnn.pad_sequence([labels for _, labels in samples], batch_first=True, padding_value=IGNORED)
    # By length, not by id: the padding id may equal the end id.
    mask = (torch.arange(padded.shape[1]) < lengths[:, None]).long()
    return {"input_ids": padded, "attention_mask": mask, "labels": labels}


def in_one_row(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Samples of a causal model in one row: input_ids and labels [1, n], lengths [samples].

    The first token of a sample is never predicted from the sample before it.
    """
    labels = torch.cat([labels for _, labels in samples])
    lengths = torch.tensor([len(ids) for ids, _ in samples])
    labels[lengths.cumsum(0)[:-1]] = IGNORED
    ids = torch.cat([ids for ids, _ in samples])
    return {"input_ids": ids.unsqueeze(0), "labels": labels.unsqueeze(0), "lengths": lengths}


def _spread(size: int, count: int) -> list[int]:
    """Up to `count` of `size` indices, ascending, in stretches: neighbours are cheap to read."""
    if size <= count:
        return list(range(size))
    stretches = max(1, count // _STRETCH)
    length = count // stretches
    starts = np.linspace(0, size - length, stretches).astype(np.int64)
    return sorted({int(start) + offset for start in starts for offset in range(length)})


WINDOW = 4
"""Row groups whose rows are shuffled together, so that each group is read once per epoch."""


class PackedText(Dataset[Sample]):
    """Running text. A sample's id is the offset of its first token."""

    recut = True

    def __init__(self, store: TokenStore) -> None:
        self._store = store

    def table(self, seq_len: int) -> Table:
        boundaries = np.asarray(self._store.boundaries)
        return _cut(boundaries[:-1], np.diff(boundaries), seq_len)

    def cut_again(self, rest: Table, seq_len: int) -> Table:
        """Cut the same tokens again, after joining neighbours in the same document."""
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

    def lengths(self, keys: Sequence[Key]) -> list[int]:
        return [length for _, length in keys]

    def __getitem__(self, key: Key) -> Sample:
        start, length = key
        ids = torch.from_numpy(self._store.tokens[start : start + length].astype(np.int64))
        return ids, ids


class RowSamples(Dataset[Sample]):
    """Pairs of prompt and response, one sample per row.

    A sample's id is the row's number, whatever T cuts off.
    """

    recut = False

    def __init__(self, pairs: PromptResponse | Seq2SeqPairs) -> None:
        self.pairs = pairs

    def table(self, seq_len: int) -> Table:
        return Table(np.arange(len(self.pairs)), np.zeros(len(self.pairs), np.int64))

    def cut_again(self, rest: Table, seq_len: int) -> Table:
        return rest

    def shuffled(self, count: int, generator: np.random.Generator) -> np.ndarray:
        return window_order(self.pairs.rows.group_sizes(), WINDOW, generator)

    def lengths(self, keys: Sequence[Key]) -> list[int]:
        return [self.pairs.length(number) for number, _ in keys]

    def __getitem__(self, key: Key) -> Sample:
        return self.pairs[key[0]]


def _cut(starts: np.ndarray, lengths: np.ndarray, seq_len: int) -> Table:
    """Cut stretches of text into pieces of at most `seq_len`.

    A last piece of one token predicts nothing and is left out.
    """
    pieces = np.maximum(0, -(-(lengths - 1) // seq_len))
    # 0, 1, 2, ... within each stretch.
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offsets = number * seq_len
    ids = np.repeat(starts, pieces) + offsets
    return Table(ids.astype(np.int64), np.minimum(seq_len, np.repeat(lengths, pieces) - offsets).astype(np.int64))
