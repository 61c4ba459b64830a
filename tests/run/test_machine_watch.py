"""Events about bands: the changes between two known readings."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memtop.supervisor.monitor.processes.proc import identify
from memtop.supervisor.monitor.values import Band
from memtop.supervisor.monitor.vram import RankMemory
from memtop.supervisor.run import machine_watch
from memtop.supervisor.run.machine_watch import MachineWatch
from memtop.supervisor.units import GIB
from tests.nvml_double.double import Script, driver, nvml_library

__all__ = ["driver", "nvml_library"]


async def test_a_reading_that_failed_is_no_change_of_a_band(
    driver: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timed out once, or for a while: only what is known is compared."""
    monkeypatch.setattr(machine_watch, "SAMPLE_SECONDS", 0.1)
    failed = object()
    script = (19, failed, 19, failed, failed, 4, 4, failed, 4)
    watch = MachineWatch(tmp_path, list, lambda: (1, ()))
    bands: list[Band] = []
    crossings: list[str] = []
    done = asyncio.Event()

    def describe(used: object) -> None:
        driver.clear().gpu(0, total=20 * GIB, used=used * GIB if isinstance(used, int) else 0)
        if used is failed:
            driver.fail("nvmlDeviceGetMemoryInfo_v2", 0, 10)
        driver.write()

    def take(keep: bool) -> None:
        assert watch.machine is not None
        (gpu,) = watch.machine.gpus
        bands.append(gpu.band)
        crossings.extend(line for line in watch.crossings() if line.startswith("GPU"))
        if len(bands) < len(script):
            describe(script[len(bands)])
        else:
            done.set()

    describe(script[0])
    watch.start(take, lambda error: pytest.fail(f"the watch ended: {error}"))
    await done.wait()
    watch.stop()
    assert bands == [Band.UNKNOWN if used is failed else Band.DANGER if used == 19 else Band.SAFE for used in script]
    assert crossings == ["GPU 0: danger -> safe, 20.0 % of 20.0 GiB taken"]


@pytest.mark.parametrize("is_member", [False, True])
async def test_the_cpu_that_other_programs_use(is_member: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_watch, "SAMPLE_SECONDS", 0.2)
    spins = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
    sleeps = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    ours = identify((spins if is_member else sleeps).pid)
    assert ours is not None
    rank = RankMemory(rank=0, pid=ours.pid)
    watch = MachineWatch(tmp_path, lambda: [ours], lambda: (1, (rank,)))
    done = asyncio.Event()
    seen: list[tuple[float, float]] = []

    def take(keep: bool) -> None:
        if watch.rank_cores is not None and watch.other_cpu_fraction is not None:
            seen.append((watch.rank_cores, watch.other_cpu_fraction))
        used = [cores if is_member else others for cores, others in seen]
        if max(used, default=0.0) > 0.2 / (os.cpu_count() or 1):
            done.set()

    try:
        watch.start(take, lambda error: pytest.fail(f"the watch ended: {error}"))
        await asyncio.wait_for(done.wait(), 60)
    finally:
        watch.stop()
        for process in (spins, sleeps):
            process.kill()
            process.wait()
    # A program that sleeps uses nothing itself.
    assert is_member or max(cores for cores, _ in seen) < 0.2
