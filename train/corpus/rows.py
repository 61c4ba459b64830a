"""Rows of text from a file of any size: read one at a time, in any order, in little memory.

`.parquet` by row groups, `.jsonl`, `.ndjson` and `.json` by lines, everything else as text with one row per line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import platformdirs

from memtop.presets.schema import HostLevel
from memtop.train.corpus.lines import JsonRows, TextRows
from memtop.train.corpus.source import Source
from memtop.train.errors import BadInputError

GROUPS_KEPT: dict[HostLevel, int] = {"standard": 4, "low": 2, "extreme": 1}
"""Decoded row groups of a parquet file that stay in memory per process."""
_LINES = (".jsonl", ".ndjson", ".json")


class Rows(Protocol):
    """Rows of named texts. May be pickled into a loader worker, where the file is opened again at the first read."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> dict[str, str]:
        """The needed columns of row `index`, counted from 0, as {column: text}."""
        ...

    def group_sizes(self) -> list[int]:
        """Rows per stretch that is read as a whole: what a shuffle should keep close together. Their sum is the length."""
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

    `columns` names the needed ones, or maps what each is for to its name ({"prompt": "question"}); rows have the names.
    `cache_dir` takes what is prepared once (a parquet file in smaller groups, the index of a file of lines); without it that
    is the user's cache folder, and indices stay in memory. `setting` is what the messages call the file.
    """
    path = Path(path).expanduser()
    roles = dict(columns) if isinstance(columns, Mapping) else {name: name for name in columns}
    source = Source(setting, path.absolute(), roles)
    _check_readable(source)
    kind = path.suffix.lower()
    if kind == ".parquet":
        # Arrow takes a while to load, and not every run needs it.
        from memtop.train.corpus.parquet import open_parquet

        return open_parquet(source, GROUPS_KEPT[level], cache_dir or platformdirs.user_cache_path("memtop"))
    return JsonRows(source, cache_dir) if kind in _LINES else TextRows(source, cache_dir)


def window_order(sizes: Sequence[int], window: int, generator: np.random.Generator) -> np.ndarray:
    """A permutation of all rows, int64 [sum of sizes], that reads `window` row groups at a time.

    The groups are shuffled, taken `window` by `window`, and the rows of each such window are shuffled among themselves. A
    cache of `window` groups then reads every group once per epoch. With a single group it is a plain permutation.
    """
    starts = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
    groups = generator.permutation(len(sizes))
    parts = [np.empty(0, np.int64)]
    for first in range(0, len(groups), window):
        rows = np.concatenate([np.arange(starts[group], starts[group + 1]) for group in groups[first : first + window]])
        parts.append(generator.permutation(rows))
    return np.concatenate(parts)


def _check_readable(source: Source) -> None:
    path = source.path
    try:
        with path.open("rb") as file:
            head = file.read(8192)
    except FileNotFoundError:
        raise BadInputError(f"{source}: no such file; give --set {source.setting}=FILE") from None
    except IsADirectoryError:
        raise BadInputError(f"{source}: is a folder; name one .parquet, .jsonl or text file in it") from None
    except OSError as error:
        raise BadInputError(f"{source}: cannot be read: {error.strerror}") from None
    if not head:
        raise BadInputError(f"{source}: is empty")
    if path.suffix.lower() != ".parquet" and b"\0" in head:
        raise BadInputError(
            f"{source}: {path.suffix or 'a file without ending'} is not text; .parquet, .jsonl and text files can be read"
        )
