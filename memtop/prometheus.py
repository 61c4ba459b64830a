"""The newest sample as Prometheus metrics over HTTP. A scrape reads what was sampled last; it never calls the driver.

What is not known is absent. Names end in their unit; counters end in `_total` on the wire.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from memtop.supervisor.errors import UsageError
from memtop.supervisor.monitor.history import gpu_key
from memtop.supervisor.monitor.values import GpuSample, MachineSnapshot
from memtop.supervisor.wire import RunState, StateUpdate

if TYPE_CHECKING:
    from memtop.tui.feed import FeedMessage

LOOPBACK = "127.0.0.1"
_GPU = ("gpu", "uuid", "name")
# Metric, field, words. Fields with `details.` are those that change slowly.
_GPU_GAUGES = (
    ("memory_total_bytes", "total_bytes", "GPU memory in all"),
    ("memory_used_bytes", "used_bytes", "GPU memory in use, without what the driver reserves"),
    ("memory_free_bytes", "free_bytes", "GPU memory that can still be allocated"),
    ("memory_reserved_bytes", "reserved_bytes", "GPU memory that the driver reserves"),
    ("memory_used_ratio", "used_fraction", "share of GPU memory that cannot be allocated any more, 0-1"),
    ("utilization_ratio", "utilization_fraction", "share of time in which some kernel ran, 0-1"),
    ("memory_utilization_ratio", "memory_utilization_fraction", "share of time in which memory was read or written, 0-1"),
    ("temperature_celsius", "temperature_celsius", "core temperature"),
    ("power_watts", "power_watts", "power drawn"),
    ("power_limit_watts", "power_limit_watts", "power allowed"),
    ("memory_temperature_celsius", "details.memory_temperature_celsius", "memory temperature"),
    ("fan_ratio", "details.fan_fraction", "fan speed, 0-1"),
    ("pcie_sent_bytes_per_second", "details.pcie_sent_bytes_per_second", "from the GPU over PCIe"),
    ("pcie_received_bytes_per_second", "details.pcie_received_bytes_per_second", "to the GPU over PCIe"),
    ("nvlink_sent_bytes_per_second", "details.nvlink_sent_bytes_per_second", "from the GPU over NVLink"),
    ("nvlink_received_bytes_per_second", "details.nvlink_received_bytes_per_second", "to the GPU over NVLink"),
    ("retired_pages", "details.retired_pages", "memory pages taken out of use"),
    ("remapped_rows_correctable", "details.remapped_rows_correctable", "rows replaced for correctable errors"),
    ("remapped_rows_uncorrectable", "details.remapped_rows_uncorrectable", "rows replaced for uncorrectable errors"),
)
_GPU_COUNTERS = (
    ("energy_joules", "details.energy_joules", "energy used since the driver was loaded"),
    ("ecc_corrected_errors", "details.ecc_corrected_errors", "since the driver was loaded"),
    ("ecc_uncorrected_errors", "details.ecc_uncorrected_errors", "since the driver was loaded"),
)
_HOST_GAUGES = (
    ("memory_total_bytes", "total_bytes", "RAM in all"),
    ("memory_limit_bytes", "limit_bytes", "the cgroup's limit where one below the RAM is set"),
    ("memory_used_bytes", "used_bytes", "RAM in use"),
    ("memory_available_bytes", "available_bytes", "RAM that can still be had"),
    ("memory_used_ratio", "used_fraction", "share of RAM (or of the limit) in use, 0-1"),
    ("swap_total_bytes", "swap_total_bytes", "swap in all"),
    ("swap_used_bytes", "swap_used_bytes", "swap in use"),
    ("swap_in_bytes_per_second", "swap_in_bytes_per_second", "read back from swap"),
    ("swap_out_bytes_per_second", "swap_out_bytes_per_second", "written to swap"),
    ("memory_pressure_ratio", "pressure_fraction", "share of 10 s in which some task waited for memory, 0-1"),
    ("cpu_ratio", "cpu_fraction", "share of the cores' time in use, 0-1"),
)
_RUN_GAUGES = (
    ("update", "updates", "updates done"),
    ("updates_planned", "total_updates", "updates that the run will have"),
    ("samples_seen", "samples_seen", "samples trained on"),
    ("loss", "loss", "newest training loss"),
    ("learning_rate", "learning_rate", "newest learning rate"),
    ("gradient_norm", "gradient_norm", "newest gradient norm"),
    ("samples_per_second", "samples_per_second", "speed"),
    ("tokens_per_second", "tokens_per_second", "speed"),
    ("step_seconds", "step_seconds", "time that the newest update took"),
    ("eta_seconds", "eta_seconds", "time that is left"),
    ("resident_memory_bytes", "run_rss_bytes", "resident memory of all processes of the run"),
)


def parse_address(text: str) -> tuple[str, int]:
    """`[HOST:]PORT`; UsageError for anything else. IPv6 addresses in brackets."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or LOOPBACK
    if not (port.isascii() and port.isdigit()) or not 1 <= int(port) <= 65535:
        raise UsageError(f"--prometheus {text!r}: give [HOST:]PORT, the port from 1 to 65535")
    return host, int(port)


def is_loopback(host: str) -> bool:
    return host == "localhost" or host == "::1" or host.startswith("127.")


class Endpoint(Collector):
    """Serves /metrics on a thread of its own until `close`. UsageError if that address cannot be had."""

    def __init__(self, host: str, port: int) -> None:
        self._machine: MachineSnapshot | None = None
        self._run: RunState | None = None
        # By (GPU, code): how many, and the newest moments already counted.
        self._xids: dict[tuple[str, int], int] = {}
        self._counted: dict[str, float] = {}
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except socket.gaierror as error:
            raise UsageError(f"--prometheus {host}:{port}: no such host: {error.strerror}") from None
        except OSError as error:
            raise UsageError(f"--prometheus {host}:{port}: cannot listen there: {error.strerror}; give another port") from None

    def update(self, machine: MachineSnapshot | None, run: RunState | None) -> None:
        """What the next scrape tells. None leaves what was known."""
        if machine is not None:
            self._count_xids(machine)
            self._machine = machine
        self._run = run or self._run

    def overhear(self, message: FeedMessage) -> FeedMessage:
        """Take what a message to the dashboard tells, and pass it on."""
        if isinstance(message, MachineSnapshot):
            self.update(message, None)
        elif isinstance(message, StateUpdate):
            self.update(message.machine, message.run)
        return message

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _count_xids(self, machine: MachineSnapshot) -> None:
        for gpu in machine.gpus:
            key, newest = gpu_key(gpu), self._counted.get(gpu_key(gpu), 0.0)
            for trouble in gpu.troubles:
                if trouble.kind == "xid" and trouble.code is not None and trouble.time > newest:
                    self._xids[key, trouble.code] = self._xids.get((key, trouble.code), 0) + 1
                    self._counted[key] = max(self._counted.get(key, 0.0), trouble.time)

    # --- a scrape -------------------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        # Taken once: the next sample may come while this is being sent.
        machine, run, xids = self._machine, self._run, dict(self._xids)
        families: list[GaugeMetricFamily | CounterMetricFamily] = []
        if machine is not None:
            families += [_gauge("memtop_sample_time_seconds", "when this was sampled, Unix time", (), [((), machine.time)])]
            age: Rows = [] if machine.gpu_age_seconds is None else [((), machine.gpu_age_seconds)]
            words = "how old the GPUs' numbers are, there only while the driver does not answer in time"
            families += [_gauge("memtop_gpu_age_seconds", words, (), age)]
            families += [*_gpus(machine, xids), *_mig(machine), *_processes(machine), *_host(machine)]
        if run is not None:
            families += _run(run)
        yield from (family for family in families if family.samples)


Rows = list[tuple[tuple[str, ...], float]]


def _gauge(name: str, words: str, labels: tuple[str, ...], rows: Rows) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, words, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family


def _counter(name: str, words: str, labels: tuple[str, ...], rows: Rows) -> CounterMetricFamily:
    family = CounterMetricFamily(name, words, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family


def _names(gpu: GpuSample) -> tuple[str, str, str]:
    return (str(gpu.index), gpu.uuid or "", gpu.name or "")


def _value(of: object, path: str) -> float | None:
    for name in path.split("."):
        of = getattr(of, name)
    assert of is None or isinstance(of, (int, float))
    return of


def _gpus(machine: MachineSnapshot, xids: dict[tuple[str, int], int]) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
    for name, path, words in _GPU_GAUGES:
        rows = [(_names(gpu), value) for gpu in machine.gpus if (value := _value(gpu, path)) is not None]
        yield _gauge(f"memtop_gpu_{name}", words, _GPU, list(rows))
    for name, path, words in _GPU_COUNTERS:
        rows = [(_names(gpu), value) for gpu in machine.gpus if (value := _value(gpu, path)) is not None]
        yield _counter(f"memtop_gpu_{name}", words, _GPU, list(rows))
    up = [(_names(gpu), 0.0 if gpu.error else 1.0) for gpu in machine.gpus]
    yield _gauge("memtop_gpu_up", "1 if the GPU can be read, 0 if the driver refuses it", _GPU, list(up))
    held: Rows = [((*_names(gpu), reason), 1.0) for gpu in machine.gpus for reason in gpu.details.throttle_reasons or ()]
    yield _gauge("memtop_gpu_throttled", "1 for each reason that holds the clocks down now", (*_GPU, "reason"), held)
    errors: Rows = [
        ((*_names(gpu), str(code)), float(count))
        for gpu in machine.gpus
        for (key, code), count in sorted(xids.items())
        if key == gpu_key(gpu)
    ]
    yield _counter("memtop_gpu_xid_errors", "Xids announced since memtop began to watch", (*_GPU, "code"), errors)


def _mig(machine: MachineSnapshot) -> Iterator[GaugeMetricFamily]:
    for name, field, words in (
        ("total_bytes", "total_bytes", "memory of a MIG instance in all"),
        ("used_bytes", "used_bytes", "memory of a MIG instance in use"),
        ("free_bytes", "free_bytes", "memory of a MIG instance that can still be allocated"),
        ("used_ratio", "used_fraction", "share of a MIG instance's memory that cannot be allocated any more, 0-1"),
    ):
        rows: Rows = [
            ((str(gpu.index), str(one.position), one.uuid or "", one.name or ""), value)
            for gpu in machine.gpus
            for one in gpu.mig
            if (value := _value(one, field)) is not None
        ]
        yield _gauge(f"memtop_mig_memory_{name}", words, ("gpu", "mig", "uuid", "name"), rows)


def _processes(machine: MachineSnapshot) -> Iterator[GaugeMetricFamily]:
    held = _Sums()
    for gpu in machine.gpus:
        for p in gpu.processes:
            # Once for each MIG instance that it is on.
            held.add((*_names(gpu), str(p.pid), p.user or "", p.name or "", p.run or ""), p.used_bytes)
    labels = (*_GPU, "pid", "user", "process", "run")
    yield _gauge("memtop_process_memory_used_bytes", "GPU memory of one process on one GPU", labels, held.rows)
    for name, field, words in (
        ("memory_used_bytes", "used_bytes", "GPU memory of all its processes"),
        ("resident_memory_bytes", "host_rss_bytes", "resident host memory of all its processes"),
        ("cpu_cores", "host_cpu_fraction", "cores' time in use"),
    ):
        of_jobs = _Sums()
        for job in machine.jobs:
            of_jobs.add((job.name, job.user or ""), _value(job, field))
        yield _gauge(f"memtop_job_{name}", words, ("job", "user"), of_jobs.rows)


class _Sums:
    """One row for each set of labels, since labels must not repeat; none where a part of its sum is not known."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, ...], float | None] = {}

    def add(self, labels: tuple[str, ...], value: float | None) -> None:
        before = self._of.get(labels, 0.0)
        self._of[labels] = None if value is None or before is None else before + value

    @property
    def rows(self) -> Rows:
        return [(labels, value) for labels, value in self._of.items() if value is not None]


def _host(machine: MachineSnapshot) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
    for name, field, words in _HOST_GAUGES:
        value = _value(machine.host, field)
        yield _gauge(f"memtop_host_{name}", words, (), [] if value is None else [((), value)])
    kills = machine.host.oom_kills
    words = "processes that the kernel killed for memory in this cgroup"
    yield _counter("memtop_host_oom_kills", words, (), [] if kills is None else [((), float(kills))])


def _run(run: RunState) -> list[GaugeMetricFamily | CounterMetricFamily]:
    name = (run.name,)
    families: list[GaugeMetricFamily | CounterMetricFamily] = []
    for metric, field, words in _RUN_GAUGES:
        value = _value(run, field)
        families.append(_gauge(f"memtop_run_{metric}", words, ("run",), [] if value is None else [(name, value)]))
    state: Rows = [((run.name, run.state.value), 1.0)]
    families.append(_gauge("memtop_run_state", "1 for the state that the run is in", ("run", "state"), state))
    peaks: Rows = [((run.name, str(r.rank)), float(r.peak_bytes)) for r in run.ranks if r.peak_bytes is not None]
    words = "most that torch's allocator held in the newest update"
    families.append(_gauge("memtop_run_peak_memory_bytes", words, ("run", "rank"), peaks))
    return families
