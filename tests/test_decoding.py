"""The first decoding of a Struct by several threads at one time: presets/decoding.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from memtop.presets import decoding, host_memory

FIRST = """
import sys, threading
import msgspec
from memtop.presets.decoding import decoder_of
from memtop.supervisor.run.record.folder import RunSpec
from tests.run.brain import spec

document = msgspec.json.encode(spec("a", 1.0))
sys.setswitchinterval(1e-6)
together = threading.Barrier(4)

def decode():
    together.wait()
    found.append(decoder_of(RunSpec).decode(document))

found = []
threads = [threading.Thread(target=decode) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert found[1:] == found[:-1]
"""
"""Two of three such processes die of a segmentation fault if each thread makes its own decoder."""


def test_threads_that_decode_a_struct_for_the_first_time_do_not_end_the_process() -> None:
    for _ in range(5):
        assert subprocess.run([sys.executable, "-c", FIRST], check=False, cwd=Path(__file__).parents[1]).returncode == 0


def test_one_thread_alone_meets_the_rows_of_the_host_memory_first(monkeypatch: pytest.MonkeyPatch) -> None:
    # Threads of the restart form do. Tried as above, up to 10 of 60 processes died.
    known, convert = [], msgspec.convert

    def converted(value: object, shape: type[list[host_memory.HostRow]]) -> list[host_memory.HostRow]:
        known.append(shape in decoding._decoders)
        return convert(value, shape)

    monkeypatch.setattr(decoding, "_decoders", {})
    monkeypatch.setattr(msgspec, "convert", converted)
    host_memory.host_rows.cache_clear()
    assert host_memory.host_rows()
    assert known == [True]
