"""Following a log file: growth, half lines, rotation, truncation, terminal control."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from memtop.tui.dashboard.log import FIRST_BYTES, LONGEST_LINE, LogTail


def test_a_file_that_does_not_exist_yet(tmp_path: Path) -> None:
    tail = LogTail(tmp_path / "output.log")
    assert tail.read() == []
    (tmp_path / "output.log").write_text("one\n")
    assert tail.read() == ["one"]


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    path.write_text("one\ntw")
    tail = LogTail(path)
    assert tail.read() == ["one"]
    with path.open("a") as file:
        file.write("o\nthree\n")
    assert tail.read() == ["two", "three"]
    assert tail.read() == []


def test_a_truncated_file_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    path.write_text("one\ntwo\n")
    tail = LogTail(path)
    tail.read()
    path.write_text("new\n")
    assert tail.read() == ["new"]


def test_a_rotated_file_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    path.write_text("one\n")
    tail = LogTail(path)
    tail.read()
    path.rename(tmp_path / "output.log.1")
    path.write_text("a much longer first line\n")
    assert tail.read() == ["a much longer first line"]


def test_only_whole_lines_of_the_end_of_a_long_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    path.write_text("".join(f"line {n:08d}\n" for n in range(FIRST_BYTES // 10)))
    rows = LogTail(path).read()
    assert rows[-1] == f"line {FIRST_BYTES // 10 - 1:08d}"
    assert all(len(row) == 13 for row in rows)


def test_a_program_that_prints_faster_than_it_is_read_is_followed_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    path.write_text("one\n")
    tail = LogTail(path)
    assert tail.read() == ["one"]
    with path.open("ab") as file:
        # Of this, memtop keeps only the end.
        file.truncate(1 << 40)
        file.write(b"\n" + b"last\n" * (FIRST_BYTES // 5))
    rows = tail.read()
    assert rows[0] == "[1024.0 GiB of output are not shown]"
    assert set(rows[1:]) == {"last"}
    assert tail.read() == []


def test_terminal_control_is_taken_out(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    path.write_bytes(b"\x1b[31mred\x1b[0m\ttab\n 10%|#\r 20%|##\r\n\x1b]0;title\x07text\x00\n\xc2\x9b2Jpage\n\x1b[1mhalf")
    tail = LogTail(path)
    assert tail.read() == ["red    tab", " 20%|##", "text", "page"]
    assert tail.partial == "half"


def test_a_line_being_written_is_shown_as_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    tail = LogTail(path)
    steps = [
        (b"ste", [], "ste"),
        (b"p 1\n\r 10%|#  ", ["step 1"], " 10%|#  "),
        (b"\r 20%|## ", [], " 20%|## "),
        (b"\r 30%|##", [], " 30%|##"),
        (b" \r", [], " 30%|## "),
        # Only now it is known whether that return belonged to the line's end.
        (b"\nepoch 2\r\n", [" 30%|## ", "epoch 2"], ""),
        (b"\rover\rand over", [], "and over"),
        (b"\r", [], "and over"),
        (b"again\nend\n", ["again", "end"], ""),
    ]
    for data, rows, partial in steps:
        with path.open("ab") as file:
            file.write(data)
        assert (tail.read(), tail.partial) == (rows, partial)


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced")
def test_a_line_without_an_end_is_kept_within_bounds(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    tail = LogTail(path)
    tail.read()
    tracemalloc.clear_traces()
    for _ in range(20):
        with path.open("ab") as file:
            file.write(b"x" * 10_000)
        assert tail.read() == []
    kept, _ = tracemalloc.get_traced_memory()
    assert kept < 4 * LONGEST_LINE, "of 200 kB"
    assert tail.partial == "x" * LONGEST_LINE + "…"
    for number in range(2_000):
        with path.open("ab") as file:
            file.write(b"\r %4d of 2000" % number)
        tail.read()
    kept, _ = tracemalloc.get_traced_memory()
    assert kept < 2 * LONGEST_LINE, "the newest of 26 kB"
    with path.open("ab") as file:
        file.write(b"\n" + b"y" * LONGEST_LINE + b"\n" + b"z" * 100_000 + b"\n")
    assert tail.read() == [" 1999 of 2000", "y" * LONGEST_LINE, "z" * LONGEST_LINE + "…"]
