"""The first decoding of a Struct by several threads at one time: presets/decoding.py."""

from __future__ import annotations

import subprocess
import sys

FIRST = """
import sys, threading
import msgspec
from memtop.presets.decoding import decoder_of
from memtop.supervisor.run.record.folder import RunSpec

sys.setswitchinterval(1e-6)
together = threading.Barrier(4)

def decode():
    together.wait()
    try:
        decoder_of(RunSpec).decode(b"{}")
    except msgspec.ValidationError:
        refused.append(True)

refused = []
threads = [threading.Thread(target=decode) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(refused) == 4
"""
"""Two of three such processes die of a segmentation fault if each thread makes its own decoder."""


def test_threads_that_decode_a_struct_for_the_first_time_do_not_end_the_process() -> None:
    for _ in range(5):
        assert subprocess.run([sys.executable, "-c", FIRST], check=False).returncode == 0
