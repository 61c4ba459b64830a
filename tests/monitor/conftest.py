"""Fixtures of the monitor's tests: the scripted driver, a manual clock, real processes, trees of
files."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from memtop.supervisor.monitor.nvml.reader import NvmlReader
from memtop.supervisor.monitor.processes.proc import ProcessId, identify
from memtop.supervisor.monitor.values import GpuSample
from tests.nvml_double.double import driver, nvml_library

__all__ = ["driver", "nvml_library"]

GIB, MIB = 1 << 30, 1 << 20
Start = Callable[..., "subprocess.Popen[str]"]
Value = TypeVar("Value")


def one(reader: NvmlReader) -> GpuSample:
    """The sample of the only GPU."""
    (gpu,) = reader.read().gpus
    return gpu


def known(pid: int) -> ProcessId:
    """The identity of a process that exists."""
    found = identify(pid)
    assert found is not None
    return found


def ended(start: Start) -> ProcessId:
    """The identity of a process that has ended and was collected."""
    process = start()
    identity = known(process.pid)
    process.kill()
    process.wait()
    return identity


def eventually(look: Callable[[], Value], good: Callable[[Value], bool]) -> Value:
    """Repeat `look` until its value is good: another thread makes it so."""
    for _ in range(6000):
        value = look()
        if good(value):
            return value
        time.sleep(0.01)
    raise AssertionError(f"still {value}")


class Clock:
    """Monotonic seconds that pass only on request."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reader(driver: object, clock: Clock, tmp_path: Path) -> Iterator[NvmlReader]:
    """A reader of the scripted driver, with the manual clock."""
    reader = NvmlReader(monotonic=clock, environment={}, sys_root=tmp_path / "no-sys")
    yield reader
    reader.close()


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a Python program and waits until it has printed "ready"; all of them are ended
    afterwards."""
    started: list[subprocess.Popen[str]] = []

    def run(body: str = "", *, env: dict[str, str] | None = None, user: int | None = None) -> subprocess.Popen[str]:
        # The program itself changes its user, who may be unable to read the interpreter's folder.
        body = body if user is None else f"os.setuid({user})\n{body}"
        program = f"import os, signal, sys, time\n{body}\nprint('ready', flush=True)\nwhile True: time.sleep(60)"
        process = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", program], env=env or {}, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


Tree = Callable[[dict[str, str]], Path]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Writes files below a folder, as the readers find them in /proc and /sys/fs/cgroup."""

    def write(files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write
