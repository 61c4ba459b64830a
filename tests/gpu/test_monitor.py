"""The monitor's values of a real GPU, compared with those of nvidia-smi and torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

import pytest

from memtop.supervisor.monitor.processes.proc import identify
from memtop.supervisor.monitor.sampler import Sampler
from memtop.supervisor.monitor.termination import end_and_measure
from memtop.supervisor.monitor.values import GpuProcess, GpuSample
from memtop.supervisor.units import GIB

pytestmark = pytest.mark.usefixtures("card")
MIB = 1 << 20

_HOLDER = """
import sys, torch
torch.cuda.set_per_process_memory_fraction(0.5)
held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda").fill_(1)
torch.cuda.synchronize()
print(torch.cuda.memory_reserved(), torch.cuda.get_device_properties(0).uuid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def sampler() -> Iterator[Sampler]:
    sampler = Sampler(patience=30)
    yield sampler
    sampler.close()


@pytest.fixture
def holder() -> Iterator[tuple[subprocess.Popen[str], int, str]]:
    """A program that holds 2 GiB; the bytes that torch has reserved, and the GPU's UUID."""
    command = [sys.executable, "-c", _HOLDER, str(2 * GIB)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    reserved, uuid = process.stdout.readline().split()
    yield process, int(reserved), uuid
    process.kill()
    process.wait()


def gpu_of(sampler: Sampler, uuid: str) -> GpuSample:
    sampler.nvml.refresh()
    return next(gpu for gpu in sampler.sample().gpus if gpu.uuid is not None and gpu.uuid.removeprefix("GPU-") == uuid)


def row_of(gpu: GpuSample, pid: int) -> GpuProcess:
    return next(row for row in gpu.processes if row.pid == pid)


def test_the_numbers_are_nvidia_smis(sampler: Sampler) -> None:
    if shutil.which("nvidia-smi") is None:
        pytest.skip("nvidia-smi is not here to compare with")
    fields = "index,uuid,memory.total,memory.reserved,enforced.power.limit,clocks.max.sm,pcie.link.gen.max,driver_version"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    snapshot = sampler.sample()
    rows = [[word.strip() for word in line.split(",")] for line in output.splitlines()]
    assert len(rows) == len(snapshot.gpus)
    for (index, uuid, total, reserved, limit, clock, generation, driver), gpu in zip(rows, snapshot.gpus, strict=True):
        assert (gpu.index, gpu.uuid) == (int(index), uuid)
        assert gpu.total_bytes is not None
        assert abs(gpu.total_bytes - int(total) * MIB) <= MIB
        expected = (
            (reserved, gpu.reserved_bytes, MIB, MIB),
            (limit, gpu.power_limit_watts, 1, 0.1),
            (clock, gpu.details.sm_clock_limit_megahertz, 1, 0),
            (generation, gpu.details.pcie_generation_limit, 1, 0),
        )
        for words, value, unit, tolerance in expected:
            # A value that nvidia-smi does not know (`[N/A]`) is unknown to memtop, too.
            known = words.replace(".", "").isdigit()
            assert (value is not None) == known, words
            assert value is None or abs(value - float(words) * unit) <= tolerance
        assert snapshot.driver_version == driver


def test_an_unknown_value_has_a_reason_and_is_no_zero(sampler: Sampler) -> None:
    for gpu in sampler.sample().gpus:
        for values, skipped in ((gpu, {"error", "visible_index", "other_pool_bytes"}), (gpu.details, {"recovery_action"})):
            names = {name for name in values.__struct_fields__ if getattr(values, name) is None} - skipped
            assert names <= values.unknown.keys(), names - values.unknown.keys()


def test_a_programs_memory_is_found_under_its_name(sampler: Sampler, holder: tuple[subprocess.Popen[str], int, str]) -> None:
    process, reserved, uuid = holder
    gpu = gpu_of(sampler, uuid)
    if not any(row.pid == process.pid for row in gpu.processes):
        pytest.skip("the driver's process ids are not those of this container")
    row = row_of(gpu, process.pid)
    if row.used_bytes is None:
        pytest.skip(row.unknown["used_bytes"])
    # The CUDA context adds some hundred MiB, on no card more than 2 GiB.
    assert reserved < row.used_bytes < reserved + 2 * GIB
    assert row.command is not None
    assert row.choosable


def test_ending_it_gives_its_memory_back(sampler: Sampler, holder: tuple[subprocess.Popen[str], int, str]) -> None:
    process, reserved, uuid = holder
    gpu_of(sampler, uuid)
    identity = identify(process.pid)
    assert identity is not None
    report = end_and_measure([identity], sampler.sample())
    assert report.processes[0].outcome == "ended"
    assert process.wait(10) != 0
    if report.returned_bytes is None:
        pytest.skip(report.unknown["returned_bytes"])
    assert report.returned_bytes >= reserved * 0.9


# --- the command compared with nvidia-smi ---------------------------------------------------------


def watched() -> dict[str, Any]:
    """What `memtop watch --once --json` prints."""
    command = [sys.executable, "-m", "memtop", "watch", "--once", "--json"]
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout))


def queried() -> list[dict[str, str]]:
    """The same values from `nvidia-smi -q -x`, one for each GPU, by their path in its document."""
    if shutil.which("nvidia-smi") is None:
        pytest.skip("nvidia-smi is not here to compare with")
    output = subprocess.run(["nvidia-smi", "-q", "-x"], check=True, capture_output=True, text=True, timeout=60).stdout
    paths = (
        "uuid",
        "product_name",
        "fb_memory_usage/total",
        "fb_memory_usage/used",
        "utilization/gpu_util",
        "temperature/gpu_temp",
        "gpu_power_readings/instant_power_draw",
    )
    return [{path: gpu.findtext(path) or "N/A" for path in paths} for gpu in ElementTree.fromstring(output).iter("gpu")]


def number(words: str) -> float | None:
    """The number of "1024 MiB"; None for N/A."""
    first = words.split()[0]
    return float(first) if first.replace(".", "").isdigit() else None


_WORKER = """
import torch
torch.cuda.set_per_process_memory_fraction(0.5)
matrix = torch.ones(8192, 8192, device="cuda", dtype=torch.float16)
torch.cuda.synchronize()
print("ready", flush=True)
while True:
    for _ in range(20):
        matrix @ matrix
    torch.cuda.synchronize()
"""


@pytest.fixture(params=["idle", "under load"])
def load(request: pytest.FixtureRequest) -> Iterator[str]:
    """Nothing of ours on the GPU, or a program that multiplies matrices."""
    if request.param == "idle":
        yield "idle"
        return
    process = subprocess.Popen([sys.executable, "-c", _WORKER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield "under load"
    process.kill()
    process.wait()


def test_the_command_prints_what_nvidia_smi_prints(load: str, record_property: Any) -> None:
    before, document, after = queried(), watched(), queried()
    record_property("memtop", document["gpus"])
    record_property("nvidia_smi", [before, after])
    assert len(document["gpus"]) == len(before)
    for gpu, first, second in zip(document["gpus"], before, after, strict=True):
        assert (gpu["uuid"], gpu["name"]) == (first["uuid"], first["product_name"])
        for path, name, unit, tolerance in (
            ("fb_memory_usage/total", "total_bytes", MIB, MIB),
            ("fb_memory_usage/used", "used_bytes", MIB, 64 * MIB),
            ("utilization/gpu_util", "utilization_fraction", 0.01, 0.25),
            ("temperature/gpu_temp", "temperature_celsius", 1, 5),
        ):
            found = [value for value in (number(first[path]), number(second[path])) if value is not None]
            if not found:
                assert gpu[name] is None, name
                continue
            # The value may move between two readings.
            low, high = min(found) * unit - tolerance, max(found) * unit + tolerance
            assert low <= gpu[name] <= high, name
    if load == "under load":
        assert any((gpu["utilization_fraction"] or 0) > 0.5 for gpu in document["gpus"])
