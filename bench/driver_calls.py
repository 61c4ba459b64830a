"""The cost of each call into this machine's driver, and of one reading of all its GPUs. Needs a
GPU.

    python -m bench.driver_calls [ROUNDS]

Median microseconds per call, without the first call of each. Unsupported calls are marked.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any

import pynvml

from bench.common import report, spread
from memtop.supervisor.monitor.nvml.reader import NvmlReader

_CALLS: dict[str, Callable[[Any], Any]] = {
    "memory": lambda h: pynvml.nvmlDeviceGetMemoryInfo(h, version=pynvml.nvmlMemory_v2),
    "utilization": pynvml.nvmlDeviceGetUtilizationRates,
    "compute_processes": pynvml.nvmlDeviceGetComputeRunningProcesses_v3,
    "graphics_processes": pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3,
    "mps_processes": pynvml.nvmlDeviceGetMPSComputeRunningProcesses_v3,
    "process_utilization": lambda h: pynvml.nvmlDeviceGetProcessUtilization(h, time.time_ns() // 1000 - 1_000_000),
    "temperature": lambda h: pynvml.nvmlDeviceGetTemperature(h, pynvml.NVML_TEMPERATURE_GPU),
    "power": pynvml.nvmlDeviceGetPowerUsage,
    "power_limit": pynvml.nvmlDeviceGetEnforcedPowerLimit,
    "clock": lambda h: pynvml.nvmlDeviceGetClockInfo(h, pynvml.NVML_CLOCK_SM),
    "throttle_reasons": pynvml.nvmlDeviceGetCurrentClocksEventReasons,
    "performance_state": pynvml.nvmlDeviceGetPerformanceState,
    "fan": pynvml.nvmlDeviceGetFanSpeed,
    "bar1": pynvml.nvmlDeviceGetBAR1MemoryInfo,
    "encoder": pynvml.nvmlDeviceGetEncoderUtilization,
    "ecc": lambda h: pynvml.nvmlDeviceGetTotalEccErrors(h, 1, 0),
    "pcie_throughput": lambda h: pynvml.nvmlDeviceGetPcieThroughput(h, pynvml.NVML_PCIE_UTIL_TX_BYTES),
    "field_values": lambda h: pynvml.nvmlDeviceGetFieldValues(h, [82, 185, 230]),
}


def microseconds(call: Callable[[], Any], rounds: int) -> dict[str, float] | str:
    """The median per call, or why the call failed."""
    try:
        # "Not found" means that no process was busy in the last second, and is a valid answer.
        with contextlib.suppress(pynvml.NVMLError_NotFound):
            call()
    except pynvml.NVMLError as error:
        return str(error)
    values = []
    for _ in range(rounds):
        started = time.perf_counter()
        with contextlib.suppress(pynvml.NVMLError_NotFound):
            call()
        values.append((time.perf_counter() - started) * 1e6)
    return spread(values)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    calls = {name: microseconds(lambda call=call: call(handle), rounds) for name, call in _CALLS.items()}  # type: ignore[misc]
    now = [0.0]
    reader = NvmlReader(monotonic=lambda: now[0])
    reader.read()

    def tick() -> None:
        now[0] += 1.0
        reader.read()

    results = {
        "gpu": pynvml.nvmlDeviceGetName(handle),
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "gpus": pynvml.nvmlDeviceGetCount(),
        "microseconds_per_call": calls,
        "microseconds_per_reading_of_all_gpus": microseconds(tick, 50),
    }
    reader.close()
    report("driver_calls", results)


if __name__ == "__main__":
    main()
