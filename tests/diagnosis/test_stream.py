"""Logs of any length and encoding, in chunks of any size: the same diagnosis, in bounded memory."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtop.supervisor.diagnosis.diagnose import diagnose, diagnose_file
from memtop.supervisor.diagnosis.text import AFTER, BLOCK, HEAD, TAIL, excerpt
from memtop.supervisor.diagnosis.values import Evidence, Kind
from tests.diagnosis import logs
from tests.diagnosis.logs import MESSAGE, RAISED

LOGS = logs.read("failure_logs.jsonl")
Result = TypeVar("Result")
STEP = b"step 1/9000 | loss 2.1 | lr 1e-4 | 3.1 it/s\n"
BAR = "\rEpoch 3:  37%|███▋      | 1110/3000 [06:11<10:33,  2.98it/s, loss=2.31]".encode()


def filler(size: int) -> bytes:
    unit = STEP + BAR * 5 + b"\n"
    return (unit * (size // len(unit) + 1))[:size]


def pieces(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    yield from (data[start:end] for start, end in pairwise(places))


@settings(max_examples=120, deadline=None)
@given(index=st.integers(0, len(LOGS) - 1), cuts=st.lists(st.integers(0, 10**6), max_size=40))
def test_the_sizes_of_the_chunks_do_not_matter(index: int, cuts: list[int]) -> None:
    evidence = Evidence(exit_status=LOGS[index].exit_code)
    whole = diagnose([LOGS[index].data], evidence)
    assert diagnose(pieces(LOGS[index].data, cuts), evidence) == whole
    assert diagnose((bytes([byte]) for byte in LOGS[index].data), evidence) == whole


@settings(max_examples=15, deadline=None)
@given(place=st.integers(0, 5 * BLOCK // 2), cuts=st.lists(st.integers(0, 10**8), max_size=12))
def test_the_sizes_of_the_chunks_of_a_long_log_do_not_matter(place: int, cuts: list[int]) -> None:
    data = filler(place) + b"\n" + RAISED.encode() + filler(5 * BLOCK // 2 - place)[:4000]
    whole = excerpt([data])
    assert excerpt(pieces(data, cuts)) == whole
    assert diagnose([piece.data for piece in whole]).kind is Kind.GPU_OOM_FRAGMENTED


@pytest.mark.parametrize(
    "place", [0, HEAD, BLOCK - 30, BLOCK - 1, BLOCK, BLOCK + AFTER - 5, 2 * BLOCK - AFTER - 40, 3 * BLOCK + 17]
)
def test_a_failure_anywhere_in_a_long_log_is_found(place: int) -> None:
    """Also across the borders of the blocks."""
    disk = b"OSError: [Errno 28] No space left on device: '/data/step_1.pt'\n"
    data = filler(place) + b"\n" + disk + b"[rank1]: nothing\n" * ((TAIL + 3 * BLOCK) // 17)
    assert diagnose([data]).kind is Kind.DISK_FULL


def test_pieces_cover_the_log_in_order_and_once() -> None:
    data = b"".join(filler(70_000) + MESSAGE.encode() + b"\n" for _ in range(60))
    found = excerpt([data])
    assert found[0].start == 0
    assert found[-1].end == len(data)
    assert all(data[piece.start : piece.end] == piece.data for piece in found)
    assert all(before.end < after.start for before, after in pairwise(found))


def test_the_first_and_the_last_of_thousands_are_kept() -> None:
    def story() -> Iterator[bytes]:
        yield b"OSError: [Errno 28] No space left on device: '/first'\n" + filler(200_000)
        for _ in range(300):
            yield b"worker was killed by a test\n" + filler(60_000)
        yield b"\nMemoryError\n" + filler(300_000)

    kept = b"".join(piece.data for piece in excerpt(story()))
    assert b"/first" in kept
    assert b"MemoryError" in kept
    assert len(kept) < 4 << 20


@pytest.mark.parametrize(
    "unit", [b"a", b"Killed ", BAR, STEP, b"\x00", b"\xff\xfe", MESSAGE.encode() + b"\n"], ids=lambda unit: repr(unit[:8])
)
def test_memory_is_bounded_whatever_the_lines(unit: bytes) -> None:
    """The excerpt of a stream has a fixed size, and a diagnosis takes a fixed multiple of its
    text."""
    chunk = (unit * (1 << 16))[: 1 << 16]
    kept, peak = traced(lambda: sum(len(piece.data) for piece in excerpt(chunk for _ in range(120))))
    assert kept < 2 << 20
    assert peak < 16 << 20
    diagnose([chunk])
    _, peak = traced(lambda: diagnose([chunk]))
    assert peak < 24 * len(chunk)


def traced(work: Callable[[], Result]) -> tuple[Result, int]:
    """The result, and the most memory that Python objects took meanwhile, in bytes."""
    tracemalloc.start()
    try:
        return work(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-8-sig", "latin-1"])
def test_encodings(encoding: str) -> None:
    text = ("étape 3 terminée\n" * 40 + RAISED).encode(encoding)
    found = diagnose(text[at : at + 7] for at in range(0, len(text), 7))
    assert found.kind is Kind.GPU_OOM_FRAGMENTED
    assert found.evidence[0] == MESSAGE
    assert "étape" not in found.evidence[0]


def test_a_file_and_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    path.write_bytes(filler(3 * BLOCK) + RAISED.encode())
    with path.open("rb") as file:
        found = diagnose_file(file, Evidence(exit_status=1))
    assert found.kind is Kind.GPU_OOM_FRAGMENTED
    reading, writing = os.pipe()
    feeder = subprocess.Popen(
        [sys.executable, "-c", "import shutil, sys; shutil.copyfileobj(open(sys.argv[1], 'rb'), sys.stdout.buffer)", path],
        stdout=writing,
    )
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert diagnose(iter(lambda: pipe.read(999), b""), Evidence(exit_status=1)) == found
    assert feeder.wait() == 0
