"""Fixtures of the monitor's tests: the scripted driver, a clock to be turned by hand, real processes, written trees."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memtop.supervisor.monitor.nvml import events as nvml_events
from memtop.supervisor.monitor.nvml.reader import NvmlReader
from tests.nvml_double.double import driver, nvml_library

__all__ = ["driver", "nvml_library"]

Start = Callable[..., "subprocess.Popen[str]"]


class Clock:
    """Monotonic seconds that pass only when told."""

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
def reader(driver: object, clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[NvmlReader]:
    """A reader on the scripted driver with a clock turned by hand."""
    monkeypatch.setattr(nvml_events, "WAIT_MILLISECONDS", 5)
    reader = NvmlReader(monotonic=clock, environment={}, sys_root=tmp_path / "no-sys")
    yield reader
    reader.close()


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a Python program that says "ready" once it stands; all of them are ended afterwards."""
    started: list[subprocess.Popen[str]] = []

    def run(body: str = "", *, env: dict[str, str] | None = None, user: int | None = None) -> subprocess.Popen[str]:
        # Becoming another user happens inside: the interpreter's folder may be closed to that user.
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
    """Writes files below a folder: what /proc and /sys/fs/cgroup look like to the readers."""

    def write(files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write
