"""All documents of a corpus as one flat row of tokens on disk: what is read at random needs no tokenizer any more."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from memtop.train.corpus.once import built_once, digest
from memtop.train.corpus.tokens import Tokens
from memtop.train.errors import BadInputError

_TOKENS, _BOUNDARIES = "tokens.npy", "boundaries.npy"
_FLUSH = 1 << 20
"""Tokens that are held before they are written."""


class TokenStore:
    """`tokens` [n], uint16 or uint32, and `boundaries` [documents + 1], int64: document i is tokens[b[i]:b[i + 1]].

    A store in a folder is mapped, not read, and pickled as the folder's name.
    """

    def __init__(self, tokens: np.ndarray, boundaries: np.ndarray, folder: Path | None = None) -> None:
        self.tokens = tokens
        self.boundaries = boundaries
        self._folder = folder

    @classmethod
    def open(cls, folder: Path) -> TokenStore:
        """The store that `token_cache` left in this folder."""
        try:
            tokens, boundaries = (np.load(folder / name, mmap_mode="r") for name in (_TOKENS, _BOUNDARIES))
        except (OSError, ValueError) as error:
            raise BadInputError(
                f"{folder}: cached tokens cannot be read: {error}; remove the folder to have it built anew"
            ) from None
        return cls(tokens, boundaries, folder)

    @classmethod
    def from_arrays(cls, documents: Iterable[np.ndarray], vocabulary: int) -> TokenStore:
        """In memory, for small corpora; begin and end are in the documents already."""
        pieces = [np.asarray(document).astype(_dtype(vocabulary)) for document in documents]
        boundaries = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
        return cls(np.concatenate(pieces) if pieces else np.empty(0, _dtype(vocabulary)), boundaries)

    def __len__(self) -> int:
        """Documents."""
        return len(self.boundaries) - 1

    def document(self, index: int) -> np.ndarray:
        """A view of one document's tokens."""
        return self.tokens[self.boundaries[index] : self.boundaries[index + 1]]

    def __reduce__(self) -> tuple[Any, ...]:
        if self._folder is not None:
            return TokenStore.open, (self._folder,)
        return TokenStore, (self.tokens, self.boundaries)


def token_cache(rows_or_texts: Iterable[str | Sequence[int]], tokens: Tokens, folder: Path, key: str) -> TokenStore:
    """Every document as [begin] ids [end], built at the first call in bounded memory, mapped at every later one.

    Documents are texts or lists of ids, such as RowText gives. `key` must change with them (see once.fingerprint); the
    tokenizer's identity is part of the name by itself. One process builds, the others wait.
    """
    name = digest("tokens 1", key, tokens.identity)
    path = built_once(folder / f"{name}.tokens", lambda temporary: _build(rows_or_texts, tokens, temporary))
    return TokenStore.open(path)


def _build(documents: Iterable[str | Sequence[int]], tokens: Tokens, folder: Path) -> None:
    folder.mkdir()
    begin = [] if tokens.begin is None else [tokens.begin]
    dtype = _dtype(tokens.vocabulary)
    with (folder / _TOKENS).open("wb") as file, (folder / _BOUNDARIES).open("wb") as boundaries_file:
        flat = _GrowingArray(file, dtype, tokens.vocabulary)
        boundaries = _GrowingArray(boundaries_file, np.dtype(np.int64), np.iinfo(np.int64).max)
        boundaries.extend([0])
        for document in documents:
            flat.extend(begin)
            flat.extend(tokens.encode(document) if isinstance(document, str) else document)
            flat.extend([tokens.end])
            boundaries.extend([flat.length])
        flat.finish()
        boundaries.finish()


class _GrowingArray:
    """A .npy file [length] that grows: its header, of fixed size, is written again at the end."""

    def __init__(self, file: BinaryIO, dtype: np.dtype[Any], limit: int) -> None:
        self.length = 0
        self._file = file
        self._dtype = dtype
        self._limit = limit
        self._held = array("q")
        self._write_header()

    def extend(self, values: Sequence[int]) -> None:
        self._held.extend(values)
        self.length += len(values)
        if len(self._held) >= _FLUSH:
            self._flush()

    def finish(self) -> None:
        self._flush()
        self._file.seek(0)
        self._write_header()

    def _flush(self) -> None:
        values = np.frombuffer(self._held, np.int64) if self._held else np.empty(0, np.int64)
        if len(values) and not 0 <= values.min() <= values.max() < self._limit:
            raise BadInputError(
                f"a token id {values.max()} is outside the tokenizer's vocabulary of {self._limit}; its files do not match"
            )
        self._file.write(values.astype(self._dtype).tobytes())
        self._held = array("q")

    def _write_header(self) -> None:
        # numpy pads the header for lengths up to 21 digits, so it keeps its size.
        header = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, header)


def _dtype(vocabulary: int) -> np.dtype[Any]:
    return np.dtype(np.uint16 if vocabulary <= 65536 else np.uint32)
