"""The rows of a parquet file, read by row groups: only the needed columns are decoded, and few
groups are kept.

A module of its own, because Arrow is slow to load and few runs need it.
"""

from __future__ import annotations

import bisect
import mmap
import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from memtop.train import BadInputError, first_line
from memtop.train.data.files import DataFile, built_once, fingerprint

GROUP_BYTES = 32 * 2**20
"""The largest row group, in decoded bytes of the needed columns, that needs no rewritten copy."""
GROUP_ROWS = 20_000
"""The same in rows."""
REWRITTEN_ROWS = 2000
"""Rows per group in the copy of a file whose groups are larger; fewer if rows are long."""
_REWRITTEN_BYTES = 8 * 2**20


def open_parquet(source: DataFile, groups_kept: int, cache_dir: Path) -> ParquetRows:
    """The rows of a file, or of a copy in smaller row groups if its own are too large."""
    mapped = _Mapped(source, source.path)
    try:
        _check_columns(source, mapped.file)
        needs = _group_needs(source, mapped.file.metadata)
        if not sum(rows for rows, _ in needs):
            raise BadInputError(f"{source}: has no rows")
        if all(rows <= GROUP_ROWS and size <= GROUP_BYTES for rows, size in needs):
            return ParquetRows(source, source.path, groups_kept)
        name = fingerprint(source.path, "parquet rows", *source.columns)
        copy = built_once(cache_dir / f"{name}.parquet", lambda temporary: _rewrite(mapped, needs, temporary, cache_dir))
    finally:
        mapped.close()
    return ParquetRows(source, copy, groups_kept)


class ParquetRows:
    """Rows from a few decoded row groups; memory does not depend on the file's size."""

    def __init__(self, source: DataFile, path: Path, groups_kept: int) -> None:
        self.groups_read = 0
        """The number of row groups decoded so far, to measure an order of reading."""
        self._source = source
        self._path = path
        self._stamp = source.stamp(path)
        self._kept = groups_kept
        self._groups: OrderedDict[int, Any] = OrderedDict()
        self._process = os.getpid()
        self._mapped: _Mapped | None = _Mapped(source, path)
        metadata = self._mapped.file.metadata
        self._sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._starts = [0]
        for size in self._sizes:
            self._starts.append(self._starts[-1] + size)

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, index: int) -> dict[str, str]:
        """Row `index` as {column: text}."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        group = bisect.bisect_right(self._starts, index) - 1
        table = self._group(group)
        offset = index - self._starts[group]
        values = {name: table.column(name)[offset].as_py() for name in self._source.columns}
        for name, value in values.items():
            if value is None:
                raise _missing_value(self._source, index, name)
        return values

    def group_sizes(self) -> list[int]:
        """Rows per row group, in the file's order."""
        return list(self._sizes)

    def close(self) -> None:
        self._groups.clear()
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": None, "_groups": OrderedDict()}

    def _group(self, number: int) -> Any:
        if number in self._groups:
            self._groups.move_to_end(number)
            return self._groups[number]
        # Evict first, so that there is never one group too many.
        while len(self._groups) >= self._kept:
            self._groups.popitem(last=False)
        self._groups[number] = self._opened().read(number)
        self.groups_read += 1
        return self._groups[number]

    def _opened(self) -> _Mapped:
        if self._mapped is None or self._process != os.getpid():
            self._source.check_unchanged(self._path, self._stamp)
            self._mapped = _Mapped(self._source, self._path)
            self._process = os.getpid()
        return self._mapped


class _Mapped:
    """A memory-mapped parquet file.

    Pages are released after a read; otherwise they would add up in the resident set.
    """

    def __init__(self, source: DataFile, path: Path) -> None:
        self.source = source
        with path.open("rb") as file:
            self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            # Arrow's own memory map cannot release pages.
            self.file = pq.ParquetFile(pa.BufferReader(pa.py_buffer(self._mapping)), pre_buffer=False)
        except (pa.ArrowException, OSError) as error:
            copy = "" if path == source.path else f" in its copy {path}, which may be deleted"
            raise BadInputError(f"{source}: is not a complete parquet file{copy}: {_first_line(error)}; replace it") from None

    def read(self, group: int) -> Any:
        """One row group's needed columns, decoded; a pyarrow table."""
        try:
            return self.file.read_row_group(group, columns=self.source.columns, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise BadInputError(f"{self.source}: row group {group} is damaged: {_first_line(error)}; replace it") from None
        finally:
            self.release()

    def release(self) -> None:
        """Release mapped pages and the free memory of Arrow's pool."""
        self._mapping.madvise(mmap.MADV_DONTNEED)
        pa.default_memory_pool().release_unused()

    def close(self) -> None:
        # The mapping itself ends with Arrow's last buffer on it.
        self.release()
        self.file.close()


def _check_columns(source: DataFile, file: Any) -> None:
    schema = file.schema_arrow
    source.check_columns(schema.names)
    for name in source.columns:
        kind = schema.field(name).type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
            raise BadInputError(f"{source}: row 0, column '{name}': {kind} where text is needed")
    _check_nulls(source, file)


def _check_nulls(source: DataFile, file: Any) -> None:
    """Find missing values by the file's statistics.

    Without statistics, they are found when their row is read.
    """
    start = 0
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        for chunk in _chunks(source, group):
            if chunk.statistics is not None and chunk.statistics.has_null_count and chunk.statistics.null_count:
                at = start
                for batch in _batches(source, file, REWRITTEN_ROWS, row_groups=[number], columns=[chunk.path_in_schema]):
                    _check_batch(source, batch, at)
                    at += batch.num_rows
        start += group.num_rows


def _check_batch(source: DataFile, batch: Any, start: int) -> None:
    """BadInputError for the first null; `start` is the number of the batch's first row."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if column.null_count:
            raise _missing_value(source, start + column.is_null().index(True).as_py(), name)


def _missing_value(source: DataFile, row: int, name: str) -> BadInputError:
    return BadInputError(f"{source}: row {row} (from 0), column '{name}': null where text is needed; remove such rows")


def _chunks(source: DataFile, group: Any) -> list[Any]:
    chunks = (group.column(number) for number in range(group.num_columns))
    return [chunk for chunk in chunks if chunk.path_in_schema in source.columns]


def _group_needs(source: DataFile, metadata: Any) -> list[tuple[int, int]]:
    """Rows and decoded bytes of the needed columns, per row group."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    return [(group.num_rows, sum(chunk.total_uncompressed_size for chunk in _chunks(source, group))) for group in groups]


def _rewrite(mapped: _Mapped, needs: list[tuple[int, int]], target: Path, folder: Path) -> None:
    """Copy the needed columns in small row groups, one batch at a time."""
    source, file = mapped.source, mapped.file
    rows, size = sum(rows for rows, _ in needs), sum(size for _, size in needs)
    each = min(REWRITTEN_ROWS, max(16, _REWRITTEN_BYTES * rows // max(1, size)))
    largest = max(rows for rows, _ in needs)
    text = (
        f"row groups of up to {largest} rows are too large for random access: copying {size / 2**20:.0f} MiB once to {folder}"
    )
    print(f"memtop: {source}: {text}", flush=True)
    schema = pa.schema([file.schema_arrow.field(name).remove_metadata() for name in source.columns])
    start = 0
    # Statistics and dictionaries would cost time and gain nothing for text.
    with pq.ParquetWriter(target, schema, compression="snappy", use_dictionary=False, write_statistics=False) as writer:
        for batch in _batches(source, file, each, columns=source.columns):
            _check_batch(source, batch, start)
            writer.write_batch(batch.select(source.columns))
            start += batch.num_rows
            mapped.release()


def _batches(source: DataFile, file: Any, rows: int, **which: Any) -> Iterator[Any]:
    try:
        yield from file.iter_batches(rows, use_threads=False, **which)
    except (pa.ArrowException, OSError) as error:
        raise BadInputError(f"{source}: is damaged: {_first_line(error)}; replace it") from None


def _first_line(error: Exception) -> str:
    return first_line(error).rstrip(". ")
