"""The driver's thread: a driver that is slow, hangs, comes back or makes our own code fail."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from memtop.supervisor.monitor.nvml.reader import NvmlReader, NvmlReading
from memtop.supervisor.monitor.nvml.thread import FRESH_SECONDS, DriverThread
from memtop.supervisor.units import GIB
from tests.monitor.conftest import Clock
from tests.nvml_double.double import Script


class Gated:
    """Answers only when it is let through, as a driver does that waits for a sick card."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.begun = threading.Event()
        self.reads = 0
        self.closed = False

    def read(self) -> NvmlReading:
        self.begun.set()
        assert self.gate.wait(60)
        self.reads += 1
        return NvmlReading(driver_version=str(self.reads))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def gated() -> Gated:
    return Gated()


def test_a_driver_that_answers_gives_the_reading_of_this_moment(driver: Script) -> None:
    thread = DriverThread(NvmlReader(), patience=30)
    for used in (3, 5):
        driver.clear().gpu(0, total=20 * GIB, used=used * GIB).write()
        found = thread.read()
        assert found.age_seconds is None
        assert [gpu.used_bytes for gpu in found.reading.gpus] == [used * GIB]
    thread.close()


def test_before_the_first_answer_the_note_has_the_waiting_time(gated: Gated, clock: Clock) -> None:
    thread = DriverThread(gated, patience=0, monotonic=clock)
    assert thread.read().reading.note == "waiting for the NVIDIA driver"
    clock.pass_(12)
    found = thread.read()
    assert found.age_seconds == 12
    assert "has not answered for 12 s" in (found.reading.note or "")
    gated.gate.set()
    thread.close()


def test_a_hung_driver_leaves_the_last_reading_with_its_age_and_gets_no_second_call(gated: Gated, clock: Clock) -> None:
    gated.gate.set()
    thread = DriverThread(gated, patience=30, monotonic=clock)
    assert thread.read().reading.driver_version == "1"
    gated.gate.clear()
    gated.begun.clear()
    thread.patience = 0
    thread.read()
    assert gated.begun.wait(120)
    for _ in range(5):
        clock.pass_(2)
        found = thread.read()
        assert found.reading.driver_version == "1"
    assert found.age_seconds == 10 > FRESH_SECONDS
    assert gated.reads == 1

    gated.gate.set()
    thread.patience = 30
    found = thread.read()
    assert (found.reading.driver_version, found.age_seconds) == ("2", None)
    thread.close()
    assert gated.closed


def test_an_error_of_ours_is_raised_where_the_reading_is_wanted_and_the_next_read_works() -> None:
    class Broken(Gated):
        def read(self) -> NvmlReading:
            self.reads += 1
            if self.reads == 1:
                raise ZeroDivisionError("ours")
            return NvmlReading()

    thread = DriverThread(Broken(), patience=30)
    with pytest.raises(ZeroDivisionError):
        thread.read()
    assert thread.read().age_seconds is None
    thread.close()


def test_a_program_ends_although_the_driver_hangs() -> None:
    program = """
import time
from memtop.supervisor.monitor.nvml.thread import DriverThread

class Hung:
    def read(self):
        time.sleep(600)
    def close(self):
        raise AssertionError("the hung thread still uses it")

thread = DriverThread(Hung(), patience=0.1)
print(thread.read().reading.note)
thread.close()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "waiting for the NVIDIA driver\n"
    assert done.stderr == ""
