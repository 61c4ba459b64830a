"""`open_data` opens the data that a recipe names, for training and for evaluation."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from memtop.presets import Settings
from memtop.presets.schema import HostLevel
from memtop.train import BadInputError
from memtop.train.data.files import cache_folder, fingerprint
from memtop.train.data.rows import open_rows
from memtop.train.data.samples import PackedText, PromptResponse, RowSamples, RowText, Seq2SeqPairs
from memtop.train.data.tokens import BEGIN, END, ByteTokens, Tokens, TokenStore, token_cache

# Tests, bundled copies and installed packages are not part of the standard library's sources.
_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
_EVALUATION_BYTES = 200_000

Data = PackedText | RowSamples


class OpenedData(msgspec.Struct, frozen=True):
    """The data of a run, and notes for the user about it."""

    train: Data
    evaluation: Data | None
    notes: tuple[str, ...]


def open_data(settings: Settings, tokens: Tokens, *, level: HostLevel = "standard") -> OpenedData:
    """The data sets of the settings; BadInputError names the key, the file and the problem."""
    data = settings.data
    if data.get("train"):
        train, notes = _from_file("train", settings, tokens, level)
        evaluation, more = _from_file("eval", settings, tokens, level) if data.get("eval") else (None, [])
        return OpenedData(train, evaluation, (*notes, *more))
    source = data.get("source")
    if source != "python-stdlib":
        raise BadInputError(f"data.source {source!r}: unknown; use python-stdlib, or give data.train=FILE")
    if settings.task != "causal":
        raise BadInputError(f"data.source python-stdlib: {settings.recipe} trains on pairs, not on text; give data.train=FILE")
    if not isinstance(tokens, ByteTokens):
        raise BadInputError("data.source python-stdlib: has only bytes; give --set data.tokenizer=bytes, or data.train=FILE")
    most = int(data.get("max_bytes", 4_000_000))
    text = _text_of(_stdlib_sources(0, most))
    if not len(text):
        raise BadInputError(f"data.source python-stdlib: no sources found in {sysconfig.get_path('stdlib')}")
    # The bytes after those for training.
    rest = _text_of(_stdlib_sources(most, most + _EVALUATION_BYTES))
    return OpenedData(PackedText(text), PackedText(rest) if len(rest) else None, ())


def _from_file(split: str, settings: Settings, tokens: Tokens, level: HostLevel) -> tuple[Data, list[str]]:
    data, path = settings.data, Path(settings.data[split])
    names = dict(data.get("columns", {}))
    wanted = ("text",) if settings.task == "causal" else ("prompt", "response")
    columns = {role: names.get(role, role) for role in wanted}
    cache = cache_folder()
    rows = open_rows(path, columns, level=level, cache_dir=cache, setting=f"data.{split}")
    if not len(rows):
        raise BadInputError(f"data.{split} {path}: has no rows")
    if settings.task == "causal":
        column = columns["text"]
        return PackedText(token_cache(RowText(rows, tokens, column), tokens, cache, fingerprint(path, column))), []
    kind = Seq2SeqPairs if settings.task == "seq2seq" else PromptResponse
    pairs = kind(rows, tokens, settings.seq_len, (columns["prompt"], columns["response"]))
    pairs.cache(cache, fingerprint(path, *columns.values()))
    report = pairs.cut_report()
    note = (
        f"data.{split}: {report['cut']} of {report['examined']} examined samples exceed T {settings.seq_len} and are cut; "
        f"{report['dropped_tokens_fraction'] * 100:.1f} % of the tokens are lost"
    )
    return RowSamples(pairs), [note] if report["cut"] else []


def _text_of(documents: Iterator[bytes]) -> TokenStore:
    return TokenStore.from_arrays(map(byte_document, documents), ByteTokens.vocabulary)


def byte_document(text: bytes) -> np.ndarray:
    """A text as byte-level tokens, with begin and end."""
    return np.concatenate(([BEGIN], np.frombuffer(text, np.uint8), [END]))


def _stdlib_sources(first: int, last: int) -> Iterator[bytes]:
    """The bytes [first, last) of the standard library's sources, split by file."""
    root = Path(sysconfig.get_path("stdlib"))
    position = 0
    for path in _python_files(root):
        size = path.stat().st_size
        if position + size > first:
            text = path.read_bytes()[max(0, first - position) : last - position]
            if text:
                yield text
        position += size
        if position >= last:
            return


def _python_files(folder: Path) -> Iterator[Path]:
    """The Python files below a folder, by name; none of a folder that cannot be read.

    A folder is read when its first file is wanted.
    """
    try:
        with os.scandir(folder) as entries:
            ordered = sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    for entry in ordered:
        if entry.name in _LEFT_OUT:
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _python_files(Path(entry.path))
        elif entry.name.endswith(".py"):
            yield Path(entry.path)
