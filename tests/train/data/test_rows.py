"""Rows of files: read correctly, in bounded memory, and every error is one line."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from memtop.train import BadInputError
from memtop.train.data.files import built_once
from memtop.train.data.parquet import ParquetRows
from memtop.train.data.rows import open_rows, window_order
from tests.train.data.support import MEASURE_READING, PAIR, at_once, pair, write_lines, write_long, write_pairs
from tests.train.launching import printed_by

_MEASURE_COPYING = """
import json, resource, sys
from pathlib import Path
from memtop.train.data.rows import open_rows
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
open_rows(sys.argv[3], ["prompt", "response"]).row(0)
before = peak()
rows = open_rows(sys.argv[1], ["prompt", "response"], cache_dir=Path(sys.argv[2]))
print(json.dumps({"growth": peak() - before, "rows": len(rows)}))
"""
# A limit on the size of files acts like a full disk.
_NO_ROOM = """
import json, resource, signal, sys
from pathlib import Path
from memtop.train.data.rows import open_rows
from memtop.train import BadInputError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    open_rows(sys.argv[1], ["prompt", "response"], cache_dir=Path(sys.argv[2]))
except BadInputError as error:
    print(json.dumps({"error": str(error)}))
"""


def opened_parquet(path: Path, cache_dir: Path, **options: Any) -> ParquetRows:
    rows = open_rows(path, PAIR, cache_dir=cache_dir, **options)
    assert isinstance(rows, ParquetRows)
    return rows


def read_there(several: list[Any], indices: list[int], answers: Any) -> None:
    answers.put((os.getpid(), *([rows.row(index) for index in indices] for rows in several)))


def test_parquet_rows_are_read_in_any_order(tmp_path: Path) -> None:
    rows = opened_parquet(write_pairs(tmp_path / "a.parquet", 2345, group=100), tmp_path / "cache")
    order = random.Random(1).sample(range(2345), 300)
    assert [rows.row(n) for n in order] == [pair(n) for n in order]
    assert len(rows) == sum(rows.group_sizes()) == 2345
    assert rows.group_sizes() == [100] * 23 + [45]
    assert not (tmp_path / "cache").exists(), "a file in small groups is read without a copy"
    with pytest.raises(IndexError):
        rows.row(2345)


@pytest.mark.parametrize(("level", "kept"), [("standard", 4), ("low", 2), ("extreme", 1)])
def test_few_groups_are_kept_and_each_is_read_once_while_it_is(tmp_path: Path, level: Any, kept: int) -> None:
    rows = opened_parquet(write_pairs(tmp_path / "a.parquet", 1000, group=100), tmp_path, level=level)
    for _ in range(3):
        for group in range(kept):
            rows.row(group * 100 + 7)
    assert rows.groups_read == kept
    # Cycling through one group more than are kept: the next one needed was always evicted.
    for _ in range(3):
        for group in range(kept + 1):
            rows.row(group * 100 + 7)
    assert rows.groups_read == kept + 1 + 2 * (kept + 1)


@pytest.mark.parametrize("window", [1, 2, 4])
def test_the_window_order_reads_every_group_once(tmp_path: Path, window: int) -> None:
    level: Any = {1: "extreme", 2: "low", 4: "standard"}[window]
    rows = opened_parquet(write_pairs(tmp_path / "a.parquet", 2345, group=100), tmp_path, level=level)
    order = window_order(rows.group_sizes(), window, np.random.default_rng(3))
    assert sorted(order.tolist()) == list(range(2345))
    assert order.tolist() != sorted(order.tolist())
    for index in order:
        assert rows.row(int(index)) == pair(int(index))
    assert rows.groups_read == 24


def test_one_giant_group_is_copied_into_small_ones_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write_pairs(tmp_path / "a.parquet", 25_000, group=1_000_000)
    assert pq.ParquetFile(path).metadata.num_row_groups == 1
    rows = opened_parquet(path, tmp_path / "cache")
    said = capfd.readouterr().out
    assert said.count("\n") == 1
    assert f"memtop: data.train {path}: row groups of up to 25000 rows are too large" in said
    assert max(rows.group_sizes()) <= 2000
    assert [rows.row(n) for n in (0, 1999, 2000, 24_999)] == [pair(n) for n in (0, 1999, 2000, 24_999)]
    # The copy has only the needed columns.
    (copy,) = (tmp_path / "cache").glob("*.parquet")
    assert pq.ParquetFile(copy).schema_arrow.names == PAIR
    opened_parquet(path, tmp_path / "cache")
    assert capfd.readouterr().out == ""
    # A changed file has another copy.
    write_pairs(path, 25_001, group=1_000_000)
    assert len(opened_parquet(path, tmp_path / "cache")) == 25_001


def test_groups_of_many_bytes_are_copied_too_and_by_the_needed_columns(tmp_path: Path) -> None:
    path = write_long(tmp_path / "a.parquet", 3000, 12_000, group=3000)
    rows = open_rows(path, ["prompt"], cache_dir=tmp_path / "cache")
    assert rows.group_sizes() == [3000]
    assert not (tmp_path / "cache").exists()
    rows = opened_parquet(path, tmp_path / "cache")
    assert 300 < max(rows.group_sizes()) < 800, "groups of long rows have fewer rows"
    assert rows.row(2999)["prompt"] == "question 2999"


def test_the_leftovers_of_a_killed_writer_are_rebuilt(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.parquet", 25_000, group=1_000_000)
    opened_parquet(path, tmp_path / "cache")
    (copy,) = (tmp_path / "cache").glob("*.parquet")
    copy.rename(copy.with_name(copy.name + ".part"))
    copy.with_name(copy.name + ".part").write_bytes(b"half")
    assert opened_parquet(path, tmp_path / "cache").row(5) == pair(5)
    assert not list((tmp_path / "cache").glob("*.part"))


def test_a_cache_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.parquet", 25_000, group=1_000_000)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInputError, match=r"prepared data cannot be written there: Not a directory; set XDG_CACHE_HOME to"):
        opened_parquet(path, tmp_path / "file" / "cache")


def test_a_data_file_that_is_gone_is_no_fault_of_the_cache(tmp_path: Path) -> None:
    def build(temporary: Path) -> None:
        temporary.write_bytes((tmp_path / "data.jsonl").read_bytes())

    with pytest.raises(BadInputError, match=r"/data\.jsonl: cannot be read while its data is prepared: No such file"):
        built_once(tmp_path / "cache" / "index", build)


OPENING = """
import json, sys
from pathlib import Path
from tests.train.data.test_rows import opened_parquet
print("ready", flush=True)
sys.stdin.readline()
rows = opened_parquet(Path(sys.argv[1]), Path(sys.argv[2]))
print(json.dumps([len(rows), rows.row(12_345)]))
"""


def test_one_of_two_processes_writes_and_both_read(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.parquet", 25_000, group=1_000_000)
    found = at_once(OPENING, str(path), str(tmp_path / "cache"))
    assert [json.loads(lines[-1]) for lines in found] == [[25_000, pair(12_345)]] * 2
    assert sum("copying" in line for lines in found for line in lines) == 1


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_rows_are_read_in_loader_workers(tmp_path: Path, method: str) -> None:
    write_pairs(tmp_path / "a.parquet", 1000, group=100)
    write_lines(tmp_path / "a.jsonl", *(json.dumps(pair(n)) for n in range(1000)))
    both = [open_rows(tmp_path / f"a.{ending}", PAIR, cache_dir=tmp_path) for ending in ("parquet", "jsonl")]
    for rows in both:
        rows.row(17)
    context: Any = multiprocessing.get_context(method)
    answers = context.Queue()
    process = context.Process(target=read_there, args=(both, [999, 17, 3], answers))
    process.start()
    pid, *found = answers.get(timeout=120)
    process.join()
    assert pid != os.getpid()
    assert found == [[pair(999), pair(17), pair(3)]] * 2
    assert [rows.row(500) for rows in both] == [pair(500)] * 2


def test_a_pickle_is_small_and_a_changed_file_is_not_read(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.parquet", 1000, group=100)
    rows = open_rows(path, PAIR)
    rows.row(5)
    packed = pickle.dumps(rows)
    assert len(packed) < 4000
    assert pickle.loads(packed).row(5) == pair(5)
    write_pairs(path, 1001, group=100)
    with pytest.raises(BadInputError, match="was changed while it was in use"):
        pickle.loads(packed).row(5)


def test_closed_rows_open_again(tmp_path: Path) -> None:
    parquet = write_pairs(tmp_path / "a.parquet", 10, group=5)
    lines = write_lines(tmp_path / "a.jsonl", *(json.dumps(pair(n)) for n in range(10)))
    for path in (parquet, lines):
        rows = open_rows(path, PAIR)
        rows.row(3)
        rows.close()
        rows.close()
        assert rows.row(3) == pair(3)


def test_the_resident_set_does_not_grow_with_the_file(tmp_path: Path) -> None:
    # In 120 groups of 0.5 MB.
    path = write_long(tmp_path / "a.parquet", 30_000, 2000, group=250)
    assert path.stat().st_size > 60e6
    for level in ("standard", "extreme"):
        found = printed_by("-c", MEASURE_READING, str(path), level, str(write_pairs(tmp_path / "b.parquet", 10, group=10)))
        assert found["read"] == 1000 * 2000
        assert found["groups"] > 950, "this order is the worst for a cache"
        assert found["growth"] < 15e6


def test_a_missing_column_lists_the_existing_ones(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"question": ["a"], "answer": ["b"]}), path)
    with pytest.raises(BadInputError) as caught:
        open_rows(path, PAIR)
    assert str(caught.value) == (
        f"data.train {path}: no column 'prompt'; it has question, answer (use --set data.columns.prompt=NAME)"
    )
    with pytest.raises(BadInputError, match=r"data\.eval .*: no column 'ask'; .*data\.columns\.prompt=NAME"):
        open_rows(path, {"prompt": "ask", "response": "answer"}, setting="data.eval")
    assert open_rows(path, {"prompt": "question", "response": "answer"}).row(0) == {"question": "a", "answer": "b"}


def test_values_that_are_not_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["a"], "response": [3]}), path)
    with pytest.raises(BadInputError, match=r"row 0, column 'response': int64 where text is needed"):
        open_rows(path, PAIR)
    answers: list[Any] = ["b"] * 300
    answers[217] = None
    write_pairs(path, 300, group=100, response=answers)
    with pytest.raises(BadInputError, match=r"row 217 \(from 0\), column 'response': null where text is needed"):
        open_rows(path, PAIR)
    table = pq.read_table(path)
    pq.write_table(table, path, row_group_size=100, write_statistics=False)
    rows = open_rows(path, PAIR)
    assert rows.row(216)["response"] == "b"
    with pytest.raises(BadInputError, match=r"row 217 \(from 0\), column 'response': null"):
        rows.row(217)


def test_texts_in_dictionaries_are_texts(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    repeated = pa.array(["x", "y", "x"]).dictionary_encode()
    pq.write_table(pa.table({"prompt": repeated, "response": pa.array(["a", "b", "c"], pa.large_string())}), path)
    assert open_rows(path, PAIR).row(2) == {"prompt": "x", "response": "c"}


def test_a_giant_group_is_copied_in_bounded_memory(tmp_path: Path) -> None:
    path = write_long(tmp_path / "a.parquet", 60_000, 2000, group=60_000)
    assert pq.ParquetFile(path).metadata.num_row_groups == 1
    warm_up = write_pairs(tmp_path / "b.parquet", 10, group=10)
    found = printed_by("-c", _MEASURE_COPYING, str(path), str(tmp_path / "cache"), str(warm_up))
    assert found["rows"] == 60_000
    # The group is 120 MB large.
    assert found["growth"] < 60e6


def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    path = write_long(tmp_path / "a.parquet", 30_000, 200, group=30_000)
    found = printed_by("-c", _NO_ROOM, str(path), str(tmp_path / "cache"))
    assert "prepared data cannot be written there: " in found["error"]
    assert "XDG_CACHE_HOME" not in found["error"], "that is for a folder that refuses"
    assert "\n" not in found["error"]
    assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".lock"]


def test_damage_is_reported_with_its_place(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.parquet", 1000, group=100)
    whole = path.read_bytes()
    path.write_bytes(whole[:-400] + b"\xff" * 380 + whole[-20:])
    with pytest.raises(BadInputError, match="is not a complete parquet file: "):
        open_rows(path, PAIR)
    path.write_bytes(whole[:50] + b"\xff" * 200 + whole[250:])
    rows = open_rows(path, PAIR)
    assert rows.row(999) == pair(999)
    with pytest.raises(BadInputError, match=r"row group 0 is damaged: .*; replace it"):
        rows.row(0)
