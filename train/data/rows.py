"""Rows of text from a file of any size, read one at a time, in any order, in little memory.

`.parquet` is read by row groups (`parquet.py`), `.jsonl`, `.ndjson` and `.json` by lines,
everything else as text with one row per line. For a file of lines, one pass finds where each line
begins and checks it, so that a run does not fail hours later at line 700 000. After that, a row is
one read at its offset. Blank lines are skipped.
"""

from __future__ import annotations

import codecs
import os
from array import array
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, ClassVar, Protocol

import msgspec
import numpy as np

from memtop.presets.schema import HostLevel
from memtop.train import BadInputError
from memtop.train.data.files import DataFile, built_once, cache_folder, fingerprint

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class LineRows:
    """The common part of JSON lines and text.

    `_starts` is int64 [rows + 1]: the offset of each row, and the file's size.
    """

    _kind: ClassVar[str]

    def __init__(self, source: DataFile, cache_dir: Path | None) -> None:
        self._source = source
        self._stamp = source.stamp(source.path)
        self._index: Path | None = None
        self._file: FileIO | None = None
        if cache_dir is None:
            self._starts = self._find_lines()
        else:
            name = fingerprint(source.path, self._kind, *source.columns)
            self._index = built_once(cache_dir / f"{name}.lines.npy", self._save_lines)
            self._starts = np.load(self._index, mmap_mode="r")
        if not len(self):
            raise BadInputError(f"{source}: has only blank lines")

    def __len__(self) -> int:
        return len(self._starts) - 1

    def row(self, index: int) -> dict[str, str]:
        """Row `index` as {column: text}."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        start, end = int(self._starts[index]), int(self._starts[index + 1])
        # There may be blank lines between two rows.
        line = os.pread(self._opened().fileno(), end - start, start).split(b"\n", 1)[0]
        return self._parse(line, f"row {index} (from 0)")

    def group_sizes(self) -> list[int]:
        """One group: every row costs the same."""
        return [len(self)]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None, "_starts": self._starts if self._index is None else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._index is not None:
            self._starts = np.load(self._index, mmap_mode="r")

    def _parse(self, line: bytes, where: str) -> dict[str, str]:
        raise NotImplementedError

    def _opened(self) -> FileIO:
        if self._file is None:
            self._source.check_unchanged(self._source.path, self._stamp)
            # Read at an offset, not mapped: one access to a mapping may make megabytes resident.
            # Forks may share the file.
            self._file = self._source.path.open("rb", buffering=0)
        return self._file

    def _find_lines(self) -> np.ndarray:
        starts, position = array("q"), 0
        with self._source.path.open("rb", buffering=1 << 20) as file:
            if file.read(3) == _BYTE_ORDER_MARK:
                position = 3
            file.seek(position)
            for number, line in enumerate(file, start=1):
                if not line.isspace():
                    self._parse(line.rstrip(b"\n"), f"line {number}")
                    starts.append(position)
                position += len(line)
        starts.append(position)
        return np.frombuffer(starts, np.int64)

    def _save_lines(self, temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.save(file, self._find_lines())


class JsonRows(LineRows):
    """One JSON object per line; values of the needed columns are strings."""

    _kind = "json lines"

    def _parse(self, line: bytes, where: str) -> dict[str, str]:
        source = self._source
        try:
            found = msgspec.json.decode(line)
        except RecursionError:
            raise BadInputError(f"{source}: {where} is invalid JSON: its values are nested too deeply") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            hint = "; one object per line is needed" if line.lstrip()[:1] in (b"[", b"{") else ""
            raise BadInputError(f"{source}: {where} is invalid JSON: {error}{hint}") from None
        if not isinstance(found, dict):
            raise BadInputError(f"{source}: {where} is not a JSON object; one object per line is needed (see jq -c '.[]')")
        source.check_columns(found, f"{where} has ")
        for name in source.columns:
            if not isinstance(found[name], str):
                raise BadInputError(f"{source}: {where}, column '{name}': {_kind_of(found[name])} where text is needed")
        return {name: found[name] for name in source.columns}


class TextRows(LineRows):
    """UTF-8 text; its only column is called text."""

    _kind = "text"

    def __init__(self, source: DataFile, cache_dir: Path | None) -> None:
        source.check_columns(["text"])
        super().__init__(source, cache_dir)

    def _parse(self, line: bytes, where: str) -> dict[str, str]:
        try:
            return {"text": line.rstrip(b"\r").decode()}
        except UnicodeDecodeError as error:
            raise BadInputError(
                f"{self._source}: {where} is not UTF-8 ({error.reason}); convert it with iconv -t utf-8"
            ) from None


def _kind_of(value: Any) -> str:
    if value is None:
        return "null"
    return {"int": "a number", "float": "a number", "bool": "true or false", "list": "a list", "dict": "an object"}[
        type(value).__name__
    ]


GROUPS_KEPT: dict[HostLevel, int] = {"standard": 4, "low": 2, "extreme": 1}
"""Decoded row groups of a parquet file that each process keeps in memory."""
_LINES = (".jsonl", ".ndjson", ".json")


class Rows(Protocol):
    """Rows of named texts.

    Can be pickled into a loader worker, which opens the file again at the first read.
    """

    def __len__(self) -> int: ...

    def row(self, index: int) -> dict[str, str]:
        """The needed columns of row `index`, counted from 0, as {column: text}."""
        ...

    def group_sizes(self) -> list[int]:
        """The sizes of the parts that are read as a whole, which a shuffle should keep together.

        Their sum is the length.
        """
        ...

    def close(self) -> None: ...


def open_rows(
    path: str | Path,
    columns: Sequence[str] | Mapping[str, str],
    *,
    level: HostLevel = "standard",
    cache_dir: Path | None = None,
    setting: str = "data.train",
) -> Rows:
    """The rows of a file; BadInputError says in one line what is wrong with it.

    `columns` names the needed columns, or maps each role to its column ({"prompt": "question"});
    rows use the columns' names. `cache_dir` stores what is prepared once: a parquet file in smaller
    groups, or the index of a file of lines. Without it, parquet files go to the user's cache folder
    and indices stay in memory. `setting` names the file in messages.
    """
    path = Path(path).expanduser()
    roles = dict(columns) if isinstance(columns, Mapping) else {name: name for name in columns}
    source = DataFile(setting, path.absolute(), roles)
    _check_readable(source)
    kind = path.suffix.lower()
    if kind == ".parquet":
        # Arrow is slow to load, and not every run needs it.
        from memtop.train.data.parquet import open_parquet

        return open_parquet(source, GROUPS_KEPT[level], cache_dir or cache_folder())
    return JsonRows(source, cache_dir) if kind in _LINES else TextRows(source, cache_dir)


def window_order(sizes: Sequence[int], window: int, generator: np.random.Generator) -> np.ndarray:
    """A permutation of all rows, int64 [sum of sizes], that reads `window` row groups at a time.

    The groups are shuffled and taken `window` at a time, and the rows of each window are shuffled
    together. With a cache of `window` groups, every group is read once per epoch. A single group
    gives a plain permutation.
    """
    starts = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
    groups = generator.permutation(len(sizes))
    parts = [np.empty(0, np.int64)]
    for first in range(0, len(groups), window):
        rows = np.concatenate([np.arange(starts[group], starts[group + 1]) for group in groups[first : first + window]])
        parts.append(generator.permutation(rows))
    return np.concatenate(parts)


def _check_readable(source: DataFile) -> None:
    path = source.path
    try:
        with path.open("rb") as file:
            head = file.read(8192)
    except FileNotFoundError:
        raise BadInputError(f"{source}: no such file; give --set {source.setting}=FILE") from None
    except IsADirectoryError:
        raise BadInputError(f"{source}: is a folder; give one .parquet, .jsonl or text file in it") from None
    except OSError as error:
        raise BadInputError(f"{source}: cannot be read: {error.strerror}") from None
    if not head:
        raise BadInputError(f"{source}: is empty")
    if path.suffix.lower() != ".parquet" and b"\0" in head:
        if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise BadInputError(f"{source}: is UTF-16, and UTF-8 is needed; convert it with `iconv -f utf-16 -t utf-8`")
        raise BadInputError(f"{source}: has NUL bytes, so it is not text; give a .parquet, .jsonl or text file")
