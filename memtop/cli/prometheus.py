"""Serves the newest sample as Prometheus metrics over HTTP. A scrape never calls the driver.

Unknown values are absent. Names end in their unit; the client library appends `_total` to counters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from memtop.cli.http_server import HttpServer, cannot_listen
from memtop.supervisor.monitor.history import gpu_key
from memtop.supervisor.monitor.processes.proc import readable
from memtop.supervisor.monitor.values import GpuSample, MachineSnapshot
from memtop.supervisor.wire import RunState, StateUpdate

if TYPE_CHECKING:
    from memtop.tui.feed import FeedMessage

_GPU = ("gpu", "uuid", "name")
# Metric, field, description. Fields of `details` change slowly.
_GPU_GAUGES = (
    ("memory_total_bytes", "total_bytes", "total GPU memory"),
    ("memory_used_bytes", "used_bytes", "GPU memory in use, without the memory that the driver reserves"),
    ("memory_free_bytes", "free_bytes", "GPU memory that can still be allocated"),
    ("memory_reserved_bytes", "reserved_bytes", "GPU memory that the driver reserves"),
    ("memory_used_ratio", "used_fraction", "share of GPU memory that cannot be allocated, 0-1"),
    ("utilization_ratio", "utilization_fraction", "share of time in which a kernel ran, 0-1"),
    ("memory_utilization_ratio", "memory_utilization_fraction", "share of time in which memory was read or written, 0-1"),
    ("temperature_celsius", "temperature_celsius", "core temperature"),
    ("power_watts", "power_watts", "power draw"),
    ("power_limit_watts", "power_limit_watts", "power limit"),
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
    ("memory_total_bytes", "total_bytes", "total RAM"),
    ("memory_limit_bytes", "limit_bytes", "limit of the cgroup, if it is lower than the RAM"),
    ("memory_used_bytes", "used_bytes", "RAM in use"),
    ("memory_available_bytes", "available_bytes", "RAM that can still be allocated"),
    ("memory_used_ratio", "used_fraction", "share of RAM (or of the limit) in use, 0-1"),
    ("swap_total_bytes", "swap_total_bytes", "total swap"),
    ("swap_used_bytes", "swap_used_bytes", "swap in use"),
    ("swap_in_bytes_per_second", "swap_in_bytes_per_second", "bytes read from swap"),
    ("swap_out_bytes_per_second", "swap_out_bytes_per_second", "bytes written to swap"),
    ("memory_pressure_ratio", "pressure_fraction", "share of the last 10 s in which a task waited for memory, 0-1"),
    ("cpu_ratio", "cpu_fraction", "share of the cores' time in use, 0-1"),
)
_RUN_GAUGES = (
    ("update", "updates", "updates done"),
    ("updates_planned", "total_updates", "total updates of the run"),
    ("samples_seen", "samples_seen", "training samples seen"),
    ("loss", "loss", "newest training loss"),
    ("learning_rate", "learning_rate", "newest learning rate"),
    ("gradient_norm", "gradient_norm", "newest gradient norm"),
    ("samples_per_second", "samples_per_second", "training speed"),
    ("tokens_per_second", "tokens_per_second", "training speed"),
    ("padding_ratio", "padding_fraction", "share of padding among the tokens of the newest update, 0-1"),
    ("step_seconds", "step_seconds", "duration of the newest update"),
    ("eta_seconds", "eta_seconds", "estimated time until the run ends"),
    ("resident_memory_bytes", "run_rss_bytes", "resident memory of all processes of the run"),
)


class Endpoint(Collector):
    """Serves /metrics in a thread until `close`. UsageError if it cannot listen at that address."""

    def __init__(self, host: str, port: int) -> None:
        self._machine: MachineSnapshot | None = None
        self._run: RunState | None = None
        # The number of Xids by (GPU, code), and the time of the newest counted one by GPU.
        self._xids: dict[tuple[str, int], int] = {}
        self._counted: dict[str, float] = {}
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server = HttpServer(host, port, make_wsgi_app(registry))
        except OSError as error:
            raise cannot_listen("--prometheus", host, port, error) from None

    def update(self, machine: MachineSnapshot | None, run: RunState | None) -> None:
        """Set what the next scrape returns; None keeps the previous value."""
        if machine is not None:
            self._count_xids(machine)
            self._machine = machine
        self._run = run or self._run

    def observe(self, message: FeedMessage) -> FeedMessage:
        """Take the sample out of a message to the dashboard, and return the message."""
        if isinstance(message, MachineSnapshot):
            self.update(message, None)
        elif isinstance(message, StateUpdate):
            self.update(message.machine, message.run)
        return message

    def close(self) -> None:
        self._server.close()

    def _count_xids(self, machine: MachineSnapshot) -> None:
        for gpu in machine.gpus:
            key, newest = gpu_key(gpu), self._counted.get(gpu_key(gpu), 0.0)
            for trouble in gpu.troubles:
                if trouble.kind == "xid" and trouble.code is not None and trouble.time > newest:
                    self._xids[key, trouble.code] = self._xids.get((key, trouble.code), 0) + 1
                    self._counted[key] = max(self._counted.get(key, 0.0), trouble.time)

    # --- a scrape ---------------------------------------------------------------------------------

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        # Read once: the next sample may arrive while this one is being sent.
        machine, run, xids = self._machine, self._run, dict(self._xids)
        families: list[GaugeMetricFamily | CounterMetricFamily] = []
        if machine is not None:
            families += [_gauge("memtop_sample_time_seconds", "time of the sample, Unix time", (), [((), machine.time)])]
            age: Rows = [] if machine.gpu_age_seconds is None else [((), machine.gpu_age_seconds)]
            words = "age of the values of the GPUs; present only while the driver does not answer in time"
            families += [_gauge("memtop_gpu_age_seconds", words, (), age)]
            families += [*_gpus(machine, xids), *_mig(machine), *_processes(machine), *_host(machine)]
        if run is not None:
            families += _run(run)
        yield from (family for family in families if family.samples)


Rows = list[tuple[tuple[str, ...], float]]


def _gauge(name: str, words: str, labels: tuple[str, ...], rows: Rows) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, words, labels=labels)
    for values, number in rows:
        family.add_metric([readable(value) for value in values], number)
    return family


def _counter(name: str, words: str, labels: tuple[str, ...], rows: Rows) -> CounterMetricFamily:
    family = CounterMetricFamily(name, words, labels=labels)
    for values, number in rows:
        family.add_metric([readable(value) for value in values], number)
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
    yield _gauge("memtop_gpu_up", "1 if the GPU can be read, otherwise 0", _GPU, list(up))
    held: Rows = [((*_names(gpu), reason), 1.0) for gpu in machine.gpus for reason in gpu.details.throttle_reasons or ()]
    yield _gauge("memtop_gpu_throttled", "1 for each reason that currently lowers the clocks", (*_GPU, "reason"), held)
    errors: Rows = [
        ((*_names(gpu), str(code)), float(count))
        for gpu in machine.gpus
        for (key, code), count in sorted(xids.items())
        if key == gpu_key(gpu)
    ]
    yield _counter("memtop_gpu_xid_errors", "Xid errors since memtop started to watch", (*_GPU, "code"), errors)


def _mig(machine: MachineSnapshot) -> Iterator[GaugeMetricFamily]:
    for name, field, words in (
        ("total_bytes", "total_bytes", "total memory of a MIG instance"),
        ("used_bytes", "used_bytes", "memory of a MIG instance in use"),
        ("free_bytes", "free_bytes", "memory of a MIG instance that can still be allocated"),
        ("used_ratio", "used_fraction", "share of a MIG instance's memory that cannot be allocated, 0-1"),
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
            # A process is listed once for each MIG instance that it uses.
            held.add((*_names(gpu), str(p.pid), p.user or "", p.name or "", p.run or ""), p.used_bytes)
    labels = (*_GPU, "pid", "user", "process", "run")
    yield _gauge("memtop_process_memory_used_bytes", "GPU memory of one process on one GPU", labels, held.rows)
    for name, field, words in (
        ("memory_used_bytes", "used_bytes", "GPU memory of all its processes"),
        ("resident_memory_bytes", "host_rss_bytes", "resident host memory of all its processes"),
        ("cpu_cores", "host_cpu_fraction", "CPU cores in use"),
    ):
        of_jobs = _Sums()
        for job in machine.jobs:
            of_jobs.add((job.name, job.user or ""), _value(job, field))
        yield _gauge(f"memtop_job_{name}", words, ("job", "user"), of_jobs.rows)


class _Sums:
    """Sums by labels, since labels must not repeat. A sum with an unknown part is absent."""

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
    families.append(_gauge("memtop_run_state", "1 for the current state of the run", ("run", "state"), state))
    peaks: Rows = [((run.name, str(r.rank)), float(r.peak_bytes)) for r in run.ranks if r.peak_bytes is not None]
    words = "peak memory of torch's allocator in the newest update"
    families.append(_gauge("memtop_run_peak_memory_bytes", words, ("run", "rank"), peaks))
    return families
