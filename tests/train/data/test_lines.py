"""Files of lines: JSON and text, checked before a run begins, read at their offsets."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from memtop.train import BadInputError
from memtop.train.data.rows import open_rows
from tests.train.data.support import MEASURE_READING, PAIR, pair, write_lines
from tests.train.launching import printed_by


def test_json_lines_and_blank_ones(tmp_path: Path) -> None:
    lines = [json.dumps(pair(n) | {"other": n}, ensure_ascii=bool(n % 2)) for n in range(500)]
    path = write_lines(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + lines[0].encode(), "", *lines[1:], "   ", "")
    for cache_dir in (None, tmp_path / "cache", tmp_path / "cache"):
        rows = open_rows(path, PAIR, cache_dir=cache_dir)
        assert len(rows) == 500
        assert rows.group_sizes() == [500]
        assert [rows.row(n) for n in (499, 0, 1, 250)] == [pair(n) for n in (499, 0, 1, 250)]
    assert len(list((tmp_path / "cache").glob("*.npy"))) == 1


def test_a_last_line_needs_no_line_break(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}')
    rows = open_rows(path, ["text"])
    assert [rows.row(n)["text"] for n in range(len(rows))] == ["one", "two"]


def test_text_has_one_row_per_line(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.txt", "first", "", "  indented, größer  ", "windows\r", "last")
    rows = open_rows(path, {"text": "text"})
    found = [rows.row(n) for n in range(len(rows))]
    assert found == [{"text": text} for text in ("first", "  indented, größer  ", "windows", "last")]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"prompt": "a", "response": ', r"line 3 is invalid JSON: .*truncated"),
        ('{"prompt": "a", "response": b}', r"line 3 is invalid JSON: "),
        ('["a", "b"]', r"line 3 is not a JSON object"),
        ('{"prompt": "a"}', r"line 3 has no column 'response'; it has prompt \(use --set data\.columns\.response=NAME\)"),
        ('{"prompt": "a", "response": null}', r"line 3, column 'response': null where text is needed"),
        ('{"prompt": 7, "response": "b"}', r"line 3, column 'prompt': a number where text is needed"),
        (b'{"prompt": "\xff", "response": "b"}', r"line 3 is invalid JSON: "),
    ],
)
def test_a_bad_line_is_named_before_training_starts(tmp_path: Path, line: str | bytes, expected: str) -> None:
    good = json.dumps(pair(1))
    path = write_lines(tmp_path / "a.jsonl", good, "", line, good)
    with pytest.raises(BadInputError, match=expected) as caught:
        open_rows(path, PAIR)
    assert str(caught.value).startswith(f"data.train {path}: ")
    assert "\n" not in str(caught.value)


def test_the_resident_set_does_not_grow_with_a_file_of_lines(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", *(json.dumps({"prompt": f"{n}", "response": "x" * 2000}) for n in range(30_000)))
    warm_up = write_lines(tmp_path / "b.jsonl", json.dumps(pair(0)))
    found = printed_by("-c", MEASURE_READING, str(path), "standard", str(warm_up))
    assert found["read"] == 1000 * 2000
    assert found["growth"] < 10e6


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    cases = {
        "gone.parquet": (None, "no such file; give --set data.train=FILE"),
        "empty.jsonl": (b"", "is empty"),
        "blank.txt": (b"\n \n", "has only blank lines"),
        "broken.parquet": (b"PAR1 and then nothing", "is not a complete parquet file"),
        "weights.bin": (b"\x00\x01\x02", "has NUL bytes, so it is not text; give a .parquet, .jsonl or text file"),
        "windows.txt": ("wide\n".encode("utf-16"), "is UTF-16, and UTF-8 is needed; convert it with `iconv"),
        "deep.jsonl": (b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "line 1 is invalid JSON: its values are nested"),
        "latin.txt": ("für\n".encode("latin-1"), "line 1 is not UTF-8"),
    }
    for name, (content, expected) in cases.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(BadInputError) as caught:
            open_rows(tmp_path / name, ["text"])
        assert expected in str(caught.value)
        assert str(tmp_path / name) in str(caught.value)
    with pytest.raises(BadInputError, match="is a folder"):
        open_rows(tmp_path, ["text"])
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "no_rows.parquet")
    with pytest.raises(BadInputError, match="has no rows"):
        open_rows(tmp_path / "no_rows.parquet", ["text"])


def test_text_has_no_pairs(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.txt", "one")
    with pytest.raises(BadInputError, match="no column 'prompt'; it has text"):
        open_rows(path, PAIR)
