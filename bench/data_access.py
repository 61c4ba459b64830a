"""Seconds and resident memory for reading one sample, for several ways to read a parquet file.

    python -m bench.data_access

The file is generated: 200 000 rows of random words, about 130 MB of text, in row groups of 1000.
Each arm runs in a fresh process. Memory is the growth to the peak after the same libraries were
loaded and another tiny file was read.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from bench.common import report
from memtop.train.data.rows import open_rows, window_order

ROWS, GROUP, WORDS = 200_000, 1000, 120
COLUMNS = ["prompt", "response"]
Reader = Callable[[int], dict[str, str]]
READS = {
    "groups_window_order": 100_000,
    "groups_window_order_low": 100_000,
    "groups_random_order": 1000,
    "whole_file_per_sample": 6,
    "whole_table_in_memory": 100_000,
}
"""The number of samples that each arm reads: few if a sample takes seconds."""


def write_file(path: Path, rows: int) -> None:
    generator = random.Random(1)
    words = ["".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=generator.randint(2, 8))) for _ in range(20_000)]
    schema = pa.schema([(name, pa.string()) for name in COLUMNS])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, rows, GROUP):
            texts = [" ".join(generator.choices(words, k=generator.randint(WORDS // 2, WORDS * 3 // 2))) for _ in range(GROUP)]
            prompts = [f"question {start + number}" for number in range(GROUP)]
            writer.write_table(pa.table({"prompt": prompts, "response": texts}), row_group_size=GROUP)


def measure(arm: str, path: Path, warm_up: Path) -> dict[str, Any]:
    """Measure one arm in this process: seconds per sample and bytes of resident growth."""
    reader(arm, warm_up)[0](0)
    before = psutil.Process().memory_info().rss
    with Peak() as peak:
        started = time.perf_counter()
        read, order = reader(arm, path)
        opened = time.perf_counter()
        for index in order[: READS[arm]]:
            read(int(index))
        seconds = time.perf_counter() - opened
    samples = min(READS[arm], len(order))
    return {
        "samples": samples,
        "microseconds_per_sample": round(seconds / samples * 1e6, 1),
        "seconds_to_open": round(opened - started, 3),
        "resident_growth_mib": round((peak.bytes - before) / 2**20, 1),
    }


def reader(arm: str, path: Path) -> tuple[Reader, Sequence[int] | np.ndarray]:
    """A function that reads one row, and the order to read in."""
    generator = np.random.default_rng(1)
    if arm.startswith("groups"):
        low = arm.endswith("low")
        rows = open_rows(path, COLUMNS, level="low" if low else "standard")
        if arm == "groups_random_order":
            return rows.row, generator.permutation(len(rows))
        return rows.row, window_order(rows.group_sizes(), 2 if low else 4, generator)
    order = generator.permutation(pq.read_metadata(path).num_rows)
    if arm == "whole_table_in_memory":
        table = pq.read_table(path, columns=COLUMNS)
        return lambda index: row_of(table, index), order
    return lambda index: row_of(pq.read_table(path, columns=COLUMNS), index), order


def row_of(table: Any, index: int) -> dict[str, str]:
    found: dict[str, str] = table.slice(index, 1).to_pylist()[0]
    return found


class Peak:
    """The largest resident set of this process inside the block, in bytes, sampled every 2 ms."""

    def __enter__(self) -> Peak:
        self.bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        process = psutil.Process()
        while not self._ended.wait(0.002):
            self.bytes = max(self.bytes, process.memory_info().rss)


def in_children(path: Path, warm_up: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for arm in READS:
        command = [sys.executable, "-m", "bench.data_access", arm, str(path), str(warm_up)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
        yield arm, json.loads(done.stdout)


def main() -> None:
    if len(sys.argv) == 4:
        print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))))
        return
    with tempfile.TemporaryDirectory(prefix="memtop-") as name:
        path, warm_up = Path(name) / "rows.parquet", Path(name) / "tiny.parquet"
        write_file(path, ROWS)
        write_file(warm_up, GROUP)
        arms = dict(in_children(path, warm_up))
        decoded = pq.read_table(path, columns=COLUMNS).nbytes
        report(
            "data_access",
            {
                "rows": ROWS,
                "rows_per_group": GROUP,
                "file_mib": round(path.stat().st_size / 2**20, 1),
                "decoded_mib": round(decoded / 2**20, 1),
                **arms,
            },
        )


if __name__ == "__main__":
    main()
