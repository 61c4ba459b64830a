"""Token ids of texts, by bytes or a transformers tokenizer, and a corpus of them on disk."""

from __future__ import annotations

import json
import os
import re
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from memtop.train import BadInputError, first_line
from memtop.train.data.files import built_once, digest

# Byte-level tokens: 0-255 are bytes.
BEGIN, END, PAD = 256, 257, 258
VOCABULARY = 259


class Tokens(Protocol):
    """A tokenizer."""

    @property
    def vocabulary(self) -> int:
        """All ids are below it."""
        ...

    @property
    def begin(self) -> int | None:
        """The id that every text begins with; None if the tokenizer does not add one."""
        ...

    @property
    def end(self) -> int: ...

    @property
    def pad(self) -> int: ...

    @property
    def identity(self) -> str:
        """Changes when the same text would give other ids; part of the name of cached tokens."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of the text alone, without begin and end."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids, without special tokens."""
        ...

    def chat(self, prompt: str, response: str) -> tuple[list[int], list[int]] | None:
        """The ids before the response and of the response; None without a chat template."""
        ...

    def save(self, folder: Path) -> None:
        """Write the tokenizer into the folder of an exported model."""
        ...


class ByteTokens:
    """UTF-8 bytes as ids 0-255; 256 is begin, 257 end, 258 padding."""

    vocabulary = VOCABULARY
    begin: int | None = BEGIN
    end = END
    pad = PAD
    identity = "bytes"

    def encode(self, text: str) -> list[int]:
        # JSON strings may contain half a surrogate pair.
        return list(text.encode("utf-8", "surrogatepass"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(number for number in ids if number < BEGIN).decode("utf-8", "replace")

    def chat(self, prompt: str, response: str) -> tuple[list[int], list[int]] | None:
        return None

    def save(self, folder: Path) -> None:
        meaning = {"kind": "bytes", "vocabulary": VOCABULARY, "bytes": [0, 255], "begin": BEGIN, "end": END, "pad": PAD}
        text = "ids 0-255 are the bytes of the text in UTF-8; a document is begin, its bytes, end; pad follows the end"
        (folder / "tokenizer_bytes.json").write_text(json.dumps({**meaning, "meaning": text}, indent=1) + "\n")


class LibraryTokens:
    """A tokenizer in a local folder, or one with a hub name that is in the local cache."""

    def __init__(self, path: str) -> None:
        tokenizer = _load(path)
        self._tokenizer = tokenizer
        end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
        if end is None:
            raise BadInputError(f"tokenizer {path}: has no end token; set eos_token in its tokenizer_config.json")
        self.end: int = end
        self.pad: int = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        known = tokenizer.get_vocab()
        # Some vocabularies have holes, so their length may be below some ids.
        self.vocabulary: int = max(known.values()) + 1
        # Many tokenizers define a begin token that they never add. The model was trained with what
        # they do add.
        added = tokenizer("a", verbose=False)["input_ids"]
        self.begin: int | None = added[0] if added and added[0] == tokenizer.bos_token_id else None
        template = repr(tokenizer.chat_template)
        self.identity = digest(repr(sorted(known.items())), _rules(tokenizer), str(self.begin), str(end), template)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def chat(self, prompt: str, response: str) -> tuple[list[int], list[int]] | None:
        if not self._tokenizer.chat_template:
            return None
        question = [{"role": "user", "content": prompt}]
        opening = self._render(question, add_generation_prompt=True)
        whole = self._render([*question, {"role": "assistant", "content": response}])
        # Some templates open a response differently from how they store it; then only the response
        # itself is used.
        answer = self.encode(whole.removeprefix(opening) if whole.startswith(opening) else response)
        if self.end in answer:
            # Drop what templates add after the end, such as a line break.
            answer = answer[: len(answer) - answer[::-1].index(self.end)]
        else:
            answer.append(self.end)
        return self.encode(opening), answer

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(str(folder))

    def _render(self, messages: list[dict[str, str]], **options: Any) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, **options)
        # A template is a program, so any kind of error is possible.
        except Exception as error:  # noqa: BLE001
            name = self._tokenizer.name_or_path
            raise BadInputError(f"tokenizer {name}: its chat template failed: {type(error).__name__}: {error}") from None
        return text


def load_tokens(name: str | None, model_path: str | None = None) -> Tokens:
    """A tokenizer by folder or hub name, or "bytes"; by default the model's, else bytes."""
    name = name or model_path or "bytes"
    return ByteTokens() if name == "bytes" else LibraryTokens(name)


def _load(path: str) -> Any:
    # Slow to import, and not needed for bytes.
    from transformers import AutoTokenizer

    expanded = os.path.expanduser(path)  # noqa: PTH111 - Path's raises without a home folder
    looks_local = path.startswith(("/", ".", "~")) or Path(expanded).exists()
    if looks_local and not Path(expanded).is_dir():
        raise BadInputError(f"tokenizer {path}: no such folder; give a folder with tokenizer.json, a hub name or bytes")
    try:
        return AutoTokenizer.from_pretrained(expanded, trust_remote_code=False)
    # Broken files raise any kind of error from three libraries.
    except Exception as error:  # noqa: BLE001
        # Of a list of what is missing, the first line is only the beginning.
        reason = re.sub(r" from one of: *$", "", first_line(error)).rstrip(".")
        help_ = (
            "the folder needs tokenizer.json or another tokenizer file"
            if looks_local
            else "download it while online (hf download NAME), or give a local folder or bytes"
        )
        raise BadInputError(f"tokenizer {path}: cannot be loaded: {reason}; {help_} (data.tokenizer)") from None


def _rules(tokenizer: Any) -> str:
    """How the tokenizer splits text. Only fast tokenizers report that in full."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return str(backend.to_str()) if backend is not None else f"{type(tokenizer).__name__} {tokenizer.name_or_path}"


_TOKENS, _BOUNDARIES = "tokens.npy", "boundaries.npy"
_FLUSH = 1 << 20
"""Tokens that are collected before they are written."""


class TokenStore:
    """`tokens` [n] and `boundaries` [documents + 1]: document i is tokens[b[i]:b[i + 1]].

    Tokens are uint16 or uint32, boundaries int64.

    A store in a folder is memory-mapped, and pickled as the folder's name.
    """

    def __init__(self, tokens: np.ndarray, boundaries: np.ndarray, folder: Path | None = None) -> None:
        self.tokens = tokens
        self.boundaries = boundaries
        self._folder = folder

    @classmethod
    def open(cls, folder: Path) -> TokenStore:
        """Open the store that `token_cache` wrote into this folder."""
        try:
            tokens, boundaries = (np.load(folder / name, mmap_mode="r") for name in (_TOKENS, _BOUNDARIES))
        except (OSError, ValueError) as error:
            raise BadInputError(
                f"{folder}: cached tokens cannot be read: {error}; delete the folder to build it again"
            ) from None
        return cls(tokens, boundaries, folder)

    @classmethod
    def from_arrays(cls, documents: Iterable[np.ndarray], vocabulary: int) -> TokenStore:
        """A store in memory, for small corpora. The documents already contain begin and end."""
        pieces = [np.asarray(document).astype(_dtype(vocabulary)) for document in documents]
        boundaries = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
        return cls(np.concatenate(pieces) if pieces else np.empty(0, _dtype(vocabulary)), boundaries)

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.boundaries) - 1

    def document(self, index: int) -> np.ndarray:
        """A view of one document's tokens."""
        return self.tokens[self.boundaries[index] : self.boundaries[index + 1]]

    def __reduce__(self) -> tuple[Any, ...]:
        if self._folder is not None:
            return TokenStore.open, (self._folder,)
        return TokenStore, (self.tokens, self.boundaries)


def token_cache(
    rows_or_texts: Iterable[str | Sequence[int]], tokens: Tokens, folder: Path, key: str, *, bare: bool = False
) -> TokenStore:
    """Every document as [begin] ids [end], built once in bounded memory and then mapped.

    Documents are texts or lists of ids, such as RowText gives. With `bare`, nothing is put
    around them. `key` must change with them (see `files.fingerprint`); the tokenizer's identity is
    added to it. One process builds, the others wait.
    """
    name = digest("tokens 1", key, tokens.identity)
    path = built_once(folder / f"{name}.tokens", lambda temporary: _build(rows_or_texts, tokens, temporary, bare=bare))
    return TokenStore.open(path)


def _build(documents: Iterable[str | Sequence[int]], tokens: Tokens, folder: Path, *, bare: bool) -> None:
    folder.mkdir()
    begin = [] if bare or tokens.begin is None else [tokens.begin]
    end = [] if bare else [tokens.end]
    dtype = _dtype(tokens.vocabulary)
    with (folder / _TOKENS).open("wb") as file, (folder / _BOUNDARIES).open("wb") as boundaries_file:
        flat = _GrowingArray(file, dtype, tokens.vocabulary)
        boundaries = _GrowingArray(boundaries_file, np.dtype(np.int64), np.iinfo(np.int64).max)
        boundaries.extend([0])
        for document in documents:
            flat.extend(begin)
            flat.extend(tokens.encode(document) if isinstance(document, str) else document)
            flat.extend(end)
            boundaries.extend([flat.length])
        flat.finish()
        boundaries.finish()


class _GrowingArray:
    """A .npy file [length] that grows. Its header, of fixed size, is written again at the end."""

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
