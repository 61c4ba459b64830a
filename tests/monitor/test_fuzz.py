"""Random drivers that change at random: the sampler never raises, and every unknown value is None
and has a reason."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from memtop.supervisor.monitor.nvml import errors as nvml_errors
from memtop.supervisor.monitor.nvml.reader import NvmlReader
from memtop.supervisor.monitor.sampler import Sampler
from memtop.supervisor.monitor.values import MachineSnapshot
from tests.monitor.conftest import GIB, Clock
from tests.nvml_double.double import Script

ROUNDS = int(os.environ.get("MEMTOP_FUZZ_ROUNDS", "250"))
CODES = (*sorted(nvml_errors.CODE_WORDS), 5, 22, 23, 24, 26, 29, 12345)
FUNCTIONS = (
    *("nvmlInitWithFlags", "nvmlShutdown", "nvmlSystemGetDriverVersion", "nvmlSystemGetCudaDriverVersion_v2"),
    *("nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetName"),
    *("nvmlDeviceGetUUID", "nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"),
    *("nvmlDeviceGetBAR1MemoryInfo", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetTemperature", "nvmlDeviceGetMigMode"),
    *("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3", "nvmlDeviceGetFieldValues"),
    *("nvmlDeviceGetMPSComputeRunningProcesses_v3", "nvmlDeviceGetProcessUtilization", "nvmlDeviceGetPowerUsage"),
    *("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetFanSpeed", "nvmlDeviceGetRemappedRows", "nvmlDeviceGetNvLinkState"),
    *("nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex", "nvmlDeviceGetGpuInstanceId"),
    *("nvmlEventSetCreate", "nvmlDeviceRegisterEvents", "nvmlEventSetWait_v2", "nvmlDeviceGetSupportedEventTypes"),
    *("nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc", "nvmlGpmSampleGet", "nvmlGpmMetricsGet", "nvmlGpmSampleFree"),
    *("nvmlDeviceGetPcieThroughput", "nvmlDeviceGetEncoderUtilization", "nvmlDeviceGetMaxClockInfo", "nvmlEventSetFree"),
)
ODD = (0, 1, 100, 101, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
FIELDS = (29, 30, 82, 91, 138, 139, 165, 230)


def random_script(rng: random.Random, script: Script, pids: list[int], serial: int) -> None:
    script.clear()
    if rng.random() < 0.05:
        script.init_error(rng.choice(CODES))
    for index in range(rng.choice((0, 1, 1, 2, 2, 3))):
        total = rng.choice((0, 8 * GIB, 24 * GIB, 2**64 - 1))
        fields: dict[str, int | str] = {"total": total, "used": rng.choice((0, GIB, total, total + GIB, rng.choice(ODD)))}
        fields["uuid"] = f"GPU-{rng.randrange(4)}"
        for key in (
            "temp",
            "power",
            "util",
            "memory_util",
            "fan",
            "pstate",
            "reserved",
            "integrated",
            "gpm",
            "sm_active",
            "energy",
        ):
            if rng.random() < 0.15:
                fields[key] = rng.choice(ODD)
        fields["mig"] = int(rng.random() < 0.3)
        if rng.random() < 0.1:
            fields["error"] = rng.choice(CODES)
        script.gpu(index, **fields)
        for position in rng.sample(range(7), rng.randrange(3)):
            script.mig(index, position, total=10 * GIB, used=rng.choice((0, GIB, 11 * GIB)), gi=position, ci=0)
            script.process(index, pid=rng.choice(pids), used=GIB, mig=position)
        for _ in range(rng.randrange(4)):
            used = rng.choice((None, 0, GIB, 2**63))
            script.process(index, pid=rng.choice(pids), used=used, kind=rng.choice(("compute", "graphics", "mps")))
            script.busy(index, pid=rng.choice(pids), sm=rng.choice((0, 50, 100, 300)))
        for number in FIELDS:
            if rng.random() < 0.6:
                value, status = rng.choice((0, 2, 18, *ODD)), rng.choice((0, 0, 0, 0, *CODES))
                scope = 2**32 - 1 if number in (138, 139) else rng.randrange(3) if number == 165 else 0
                script.field(index, number, value, scope=scope, status=status)
        if rng.random() < 0.2:
            script.event(index, 2 ** rng.randrange(16), rng.randrange(200))
    for _ in range(rng.randrange(4)):
        script.fail(rng.choice(FUNCTIONS), rng.choice((-1, 0, 1)), rng.choice(CODES))
    if rng.random() < 0.2:
        script.missing(rng.choice(FUNCTIONS[4:]))
    script.write()


def check(snapshot: MachineSnapshot) -> None:
    msgspec.json.encode(snapshot)
    assert snapshot.gpus or snapshot.gpu_note
    for gpu in snapshot.gpus:
        honest(gpu, optional=("visible_index", "other_pool_bytes", "error", "band"))
        honest(gpu.details, optional=("recovery_action",))
        for mig in gpu.mig:
            honest(mig, optional=("error",))
        for row in gpu.processes:
            honest(row, optional=("run", "reason", "container", "job", "role", "mig_instance", "started_ticks"))
    honest(snapshot.host, optional=())


def honest(value: Any, *, optional: tuple[str, ...]) -> None:
    """Every None has its reason, no known number has one, and fractions are fractions."""
    for field in value.__struct_fields__:
        found = getattr(value, field)
        if found is None and field not in optional:
            assert field in value.unknown, (type(value).__name__, field, value)
        if isinstance(found, (int, float)) and not isinstance(found, bool):
            assert field not in value.unknown, (type(value).__name__, field, value)
            assert found >= 0, (field, found)
        if isinstance(found, float) and field.endswith("_fraction") and field not in ("fan_fraction", "host_cpu_fraction"):
            assert 0 <= found <= 1, (field, found)


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_no_driver_brings_the_sampler_down(
    driver: Script, reader: NvmlReader, clock: Clock, start: Callable[..., Any], seed: int
) -> None:
    rng = random.Random(seed)
    pids = [start().pid, os.getpid(), 0, 2**32 - 1, 2**22 - 7, 1]
    watcher = Sampler(nvml=reader, monotonic=clock, patience=30.0)
    for round_ in range(ROUNDS):
        random_script(rng, driver, pids, round_)
        if rng.random() < 0.1:
            reader.refresh()
        if rng.random() < 0.1:
            reader.want_pcie()
        check(watcher.sample())
        clock.pass_(rng.choice((0.5, 2.0, 5.0, 10.0)))
    watcher.close()
