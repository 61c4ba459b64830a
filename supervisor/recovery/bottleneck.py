"""What limits a run's speed, and what would make it faster. Pure functions of measurements.

The parts of an update (data wait, forward, backward, optimizer) decide first, then the activity of
the GPU's multiprocessors and its power. Utilization only shows that some kernel ran: it never
decides alone, but at 100 % it rules out that the GPU waits.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator

import msgspec
from msgspec.structs import replace

from memtop.presets import edit_settings
from memtop.presets.schema import Settings
from memtop.supervisor import units
from memtop.supervisor.monitor.values import Band
from memtop.supervisor.recovery.batch_trial import ForecastOf, Split, above_safe, forecast_refusal, next_split
from memtop.supervisor.recovery.configuration import optimizer_on_gpu
from memtop.supervisor.recovery.forecast import Estimates
from memtop.supervisor.recovery.situation import restart_command
from memtop.supervisor.recovery.values import Advice, Forecast, Remedy

FEWEST_UPDATES = 10
"""With fewer updates the medians are not reliable."""
WARM_UP = 2
"""The first updates after a start or a change are not measured: compilation, autotuning, new
buffers."""
WAITS = 0.20
"""The fraction of an update that waits for data from which on the loader is the bottleneck."""
IDLE_SM, IDLE_POWER = 0.35, 0.45
"""Below these fractions (active multiprocessors; if not known, of the power limit) the GPU is
idle."""
BUSY = 0.80
"""The utilization from which on a GPU that does not wait counts as busy, if nothing better is
known."""
WAITING_CORES = 0.3
"""A rank on the CPU that keeps less than this busy waits for something; an overloaded machine can
halve what it gets."""
DISTURBS = 0.25
"""If other programs use at least this share of the machine's CPU, the summary of a run on the CPU
names them."""
SWAPS = 1 << 20
"""Sustained bytes per second read back from swap that slow a run down by themselves. Less is enough
if tasks wait for memory."""
WAITS_FOR_MEMORY = 0.05
"""The fraction of time in which a task waited for memory."""

RAM_EDGE, RAM_DANGER = 0.80, 0.90
"""The bands of host memory for remedies that need more of it: below 80 % safe, above 90 %
danger."""
MOST_WORKERS = 8
_WORKER_BYTES = 512 << 20
"""Assumed for one loader worker until one has been measured."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the newest updates and samples, in bytes, seconds and fractions (0-1). None: not
    known."""

    updates: int
    """How many updates were measured."""
    on_gpu: bool
    step_seconds: float | None = None
    data_wait_seconds: float | None = None
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    optimizer_seconds: float | None = None
    samples_per_second: float | None = None
    utilization_fraction: float | None = None
    """Of the run's least busy GPU, as are the next two."""
    sm_active_fraction: float | None = None
    power_fraction: float | None = None
    """Of the power limit."""
    gpu_fraction: float | None = None
    """Memory in use on the run's fullest GPU."""
    gpu_free_bytes: int | None = None
    host_fraction: float | None = None
    host_total_bytes: int | None = None
    """The machine's memory, or the memory group's limit."""
    host_used_bytes: int | None = None
    available_at_start_bytes: int | None = None
    swap_fraction: float | None = None
    swap_in_bytes_per_second: float | None = None
    """Sustained: the median of the last half minute."""
    pressure_fraction: float | None = None
    workers: int | None = None
    """Running loader workers of all processes."""
    worker_bytes: int | None = None
    """Private host memory of one loader worker."""
    rank_cores: float | None = None
    """How many CPU cores a rank keeps busy."""
    other_cpu_fraction: float | None = None
    """The share of the machine's CPU that programs apart from the run use."""
    cores: int | None = None

    @property
    def wait_fraction(self) -> float | None:
        """The fraction of an update that waits for data."""
        if self.data_wait_seconds is None or not self.step_seconds:
            return None
        return self.data_wait_seconds / self.step_seconds


def ram_band(fraction: float | None, swap_in: float | None = None) -> Band:
    """The band of host memory for remedies that need more of it. Any sustained swapping is
    danger."""
    if swap_in:
        return Band.DANGER
    if fraction is None:
        return Band.UNKNOWN
    if fraction < RAM_EDGE:
        return Band.SAFE
    return Band.DANGER if fraction > RAM_DANGER else Band.EDGE


def loader_processes(workers: int, world_size: int) -> int:
    """Loader workers on the machine: every training process has its own."""
    return workers * world_size


class OwnSplit(msgspec.Struct, frozen=True, kw_only=True):
    """The batch and the accumulation of the user's own program, in its own terms, where a restart
    can change them."""

    batch: int
    accumulation: int
    effective_batch: int
    accumulation_of: int = 1
    """The accumulation must be a multiple of this."""


def advise(
    measured: Measured,
    settings: Settings | None,
    forecast: ForecastOf | None = None,
    failed: Collection[int] = (),
    *,
    run: str = "RUN",
    own: OwnSplit | None = None,
    estimates: Estimates | None = None,
) -> Advice:
    """The bottleneck with its evidence, what can be tried against it, and what must not be done
    now.

    `settings` is None for the user's own program: `own` is what a restart can change in it. Its
    proposal is a command that a person types. `failed`: micro-batches that ran out of memory in
    this run; `run`: its name, for the commands; `estimates`: foresees changes other than the batch,
    on a GPU.
    """
    bottleneck, summary = bottleneck_of(measured)
    rungs: list[Remedy | str | None] = []
    if settings is not None and bottleneck != "unknown":
        rungs = list(_ladder(bottleneck, measured, settings, forecast or _unknown, failed, estimates))
    elif bottleneck in ("compute", "launch"):
        rungs = [_of_own_program(own, forecast or _unknown, failed)]
    return Advice(
        bottleneck=bottleneck,
        summary=summary,
        evidence=tuple(_evidence(measured, settings)),
        proposals=tuple(_with_command(rung, run) for rung in rungs if isinstance(rung, Remedy)),
        refused=tuple(rung for rung in rungs if isinstance(rung, str)),
    )


def _with_command(remedy: Remedy, run: str) -> Remedy:
    """A change that the running trainer can make is tried; others need a restart."""
    tried = f"memtop advise {shlex.quote(run)} --try"
    is_tried = remedy.id in _TRIED and remedy.resumable != "none"
    return replace(remedy, command=tried if is_tried else restart_command(run, remedy.assignments))


_TRIED = ("larger_batch", "workers")


def _unknown(_: int) -> Forecast | None:
    return None


# --- the bottleneck ----------------------------------------------------------------------------


def bottleneck_of(m: Measured) -> tuple[str, str]:
    """data | compute | launch | swap | unknown, and one sentence about it."""
    if _is_swapping(m):
        rate = units.size(m.swap_in_bytes_per_second)
        return "swap", f"swapping: {rate}/s of memory in use are read back from disk, and everything waits for that"
    if m.updates < FEWEST_UPDATES:
        why = (
            f"not known yet: {m.updates} updates measured, {FEWEST_UPDATES} are needed; "
            f"the first {WARM_UP} after a start or a change are not measured"
        )
        return "unknown", why
    wait = m.wait_fraction
    if wait is None:
        return "unknown", "not known: the program does not report the parts of its updates"
    if wait >= WAITS:
        return "data", f"waiting for data: {units.percent(wait, 0)} of each update"
    work = f"only {units.percent(wait, 0)} of each update waits for data"
    if not m.on_gpu:
        if m.rank_cores is None:
            return "unknown", f"not known: {work}, and its CPU time is not known"
        if m.rank_cores < WAITING_CORES:
            waits = f"a rank keeps only {m.rank_cores:.1f} CPU cores busy: it waits for something else"
            if m.rank_cores < 0.05:
                waits = "a rank keeps less than 0.1 CPU cores busy: it waits for something else"
            return "unknown", f"not known: {work}, but {waits}"
        if (m.other_cpu_fraction or 0.0) < DISTURBS:
            return "compute", f"compute-bound: {work}, and a rank keeps {m.rank_cores:.1f} CPU cores busy"
        others = f"other programs use {units.percent(m.other_cpu_fraction, 0)} of the machine's CPU"
        return "compute", f"compute-bound: {work}, a rank keeps {m.rank_cores:.1f} CPU cores busy, and {others}"
    if m.sm_active_fraction is not None:
        idle, of = m.sm_active_fraction < IDLE_SM, f"{units.percent(m.sm_active_fraction, 0)} of the multiprocessors have work"
    elif m.power_fraction is not None:
        idle, of = m.power_fraction < IDLE_POWER, f"the GPU draws {units.percent(m.power_fraction, 0)} of its power limit"
    elif m.utilization_fraction is not None and m.utilization_fraction >= BUSY:
        idle, of = False, f"the GPU is busy {units.percent(m.utilization_fraction, 0)} of the time"
    else:
        return "unknown", f"not known: {work}, and neither the multiprocessors' activity nor the power is reported"
    if idle:
        return "launch", f"launch-bound: {work}, but {of}: the kernels are too small to fill the GPU"
    return "compute", f"compute-bound: {work}, and {of}"


def _is_swapping(m: Measured) -> bool:
    rate = m.swap_in_bytes_per_second or 0.0
    return rate >= SWAPS or (rate > 0 and (m.pressure_fraction or 0.0) >= WAITS_FOR_MEMORY)


_REST = "the rest (gradient clipping and all-reduce, reports, saves)"


def _evidence(m: Measured, settings: Settings | None) -> Iterator[str]:
    parts = {
        "data wait": m.data_wait_seconds,
        "forward": m.forward_seconds,
        "backward": m.backward_seconds,
        "optimizer": m.optimizer_seconds,
    }
    if m.step_seconds:
        known = {name: seconds for name, seconds in parts.items() if seconds is not None}
        rest = _REST if len(known) == len(parts) else "not reported"
        # Medians of the parts may add up to more than the median of the whole.
        shares = units.shares({**known, rest: max(0.0, m.step_seconds - sum(known.values()))})
        split = [f"{name} {share} %" for name, share in shares.items() if share or name != rest] if known else []
        of = f" ({', '.join(split)})" if split else ""
        yield f"an update takes {m.step_seconds:.3g} s{of}, median of {m.updates}"
    if m.samples_per_second is not None:
        yield f"{m.samples_per_second:.1f} samples/s over the newest updates: warm-up, evaluations and saves count, too"
    gpu = {
        "busy": m.utilization_fraction,
        "multiprocessors active": m.sm_active_fraction,
        "of the power limit": m.power_fraction,
        "of its memory used": m.gpu_fraction,
    }
    of_gpu = [f"{units.percent(fraction, 0)} {words}" for words, fraction in gpu.items() if fraction is not None]
    if of_gpu:
        yield f"GPU: {', '.join(of_gpu)}"
    if m.host_fraction is not None:
        yield f"host memory: {units.percent(m.host_fraction)} used{_since_start(m)}"
    if m.swap_fraction is not None:
        rate = "" if not m.swap_in_bytes_per_second else f", {units.size(m.swap_in_bytes_per_second)}/s read back"
        yield f"swap: {units.percent(m.swap_fraction)} used{rate}"
    if settings is not None and settings.accumulation > 1:
        yield f"accumulation {settings.accumulation}: so many passes make one update; it costs no speed and hardly any memory"


def _since_start(m: Measured) -> str:
    if m.available_at_start_bytes is None or m.host_total_bytes is None or m.host_used_bytes is None:
        return ""
    now = max(0, m.host_total_bytes - m.host_used_bytes)
    return f"; available at the start {units.size(m.available_at_start_bytes)}, now {units.size(now)}"


# --- what helps ---------------------------------------------------------------------------------

_Rung = Remedy | str | None
"""What can be tried, why it cannot, or None if it does not apply."""


def _ladder(
    bottleneck: str,
    m: Measured,
    settings: Settings,
    forecast: ForecastOf,
    failed: Collection[int],
    estimates: Estimates | None,
) -> Iterator[_Rung]:
    band = ram_band(m.host_fraction, m.swap_in_bytes_per_second)
    if bottleneck == "data":
        yield _more_workers(m, settings, band)
        yield _pinning(m, settings, band)
    if bottleneck == "swap" or band is Band.DANGER:
        yield from _less_host_memory(m, settings)
    if settings.zero.offload_optimizer and bottleneck in ("compute", "swap"):
        yield _offload_off(m, settings, estimates)
    if not settings.zero.offload_optimizer and band is not Band.SAFE:
        yield f"optimizer offload: it moves gigabytes into host memory, which is {_full(m, band)}"
    if bottleneck in ("compute", "launch"):
        yield from _larger_batch(bottleneck, settings, forecast, failed)
    elif bottleneck == "data":
        yield "a larger micro-batch: it would wait for its samples just as long"
    else:
        yield "a larger micro-batch: the swapping must end first, or only the disk's speed would be measured"


def _larger_batch(bottleneck: str, settings: Settings, forecast: ForecastOf, failed: Collection[int]) -> Iterator[_Rung]:
    split, refused = next_split(settings, forecast, failed)
    if split is not None:
        yield larger_batch(settings, split, forecast(split.batch), bottleneck)
    yield from refused


def larger_batch(settings: Settings, split: Split, forecast: Forecast | None, bottleneck: str) -> Remedy:
    """The larger split as a remedy."""
    title = (
        f"batch {settings.batch} -> {split.batch}, accumulation {settings.accumulation} -> {split.accumulation}: "
        f"effective batch stays {settings.effective_batch}"
    )
    fills = "larger kernels fill the GPU better" if bottleneck == "launch" else "fewer, larger kernels can help a little"
    return Remedy(
        id="larger_batch",
        title=title,
        why=f"{fills}; a trial over some updates keeps it only if samples/s rise",
        keeps_math=True,
        resumable="resumes" if settings.zero.stage else "live",
        assignments={"batch": str(split.batch), "accumulation": str(split.accumulation)},
        forecast=forecast,
    )


def _of_own_program(own: OwnSplit | None, forecast: ForecastOf, failed: Collection[int]) -> _Rung:
    """The next larger micro-batch of the user's own program with the same effective batch."""
    if own is None:
        return "a larger micro-batch: memtop cannot set it in this program; its options or its script can"
    parts = own.accumulation // own.accumulation_of
    factor = next((number for number in range(2, parts + 1) if parts % number == 0), None)
    if factor is None:
        return f"batch {own.batch}: it is already the whole effective batch of each process"
    batch, accumulation = own.batch * factor, own.accumulation // factor
    title = f"batch {own.batch} -> {batch}"
    if tried := [one for one in failed if one <= batch]:
        return f"{title}: B {min(tried)} ran out of memory in this run"
    expected = forecast(batch)
    if (why := forecast_refusal(title, factor, expected, is_next=True)) is not None:
        return why
    return Remedy(
        id="larger_batch",
        title=f"{title}, accumulation {own.accumulation} -> {accumulation}: effective batch stays {own.effective_batch}",
        why="fewer, larger kernels can help; the restart first says where your program resumes",
        keeps_math=True,
        resumable="none",
        assignments={"batch": str(batch), "accumulation": str(accumulation)},
        forecast=expected,
    )


def _more_workers(m: Measured, settings: Settings, band: Band) -> _Rung:
    if band is not Band.SAFE:
        return f"more loader workers: each needs host memory, which is {_full(m, band)}"
    if m.host_total_bytes is None or m.host_used_bytes is None:
        return "more loader workers: how much host memory is left is not known"
    world = settings.world_size
    each = m.worker_bytes or _WORKER_BYTES
    room = int((RAM_EDGE * m.host_total_bytes - m.host_used_bytes) // (each * world))
    # One core for each training process and one for each worker; more workers would not help.
    cores = MOST_WORKERS if m.cores is None else max(1, m.cores // world - 1)
    wanted = min(max(2, 2 * settings.workers), MOST_WORKERS, cores, settings.workers + room)
    budget = f"{loader_processes(wanted, world)} x {units.size(each)}{'' if m.worker_bytes else ' (assumed)'}"
    if wanted <= settings.workers:
        what = "cores" if cores <= settings.workers else "bytes of host memory below 80 %"
        return f"more loader workers than {settings.workers} per process: no {what} are left for them"
    return Remedy(
        id="workers",
        title=f"loader workers {settings.workers} -> {wanted} per process, {loader_processes(wanted, world)} in all",
        why=f"they prepare batches while the previous one is trained on; host memory for them: {budget}",
        keeps_math=True,
        resumable="live",
        assignments={"workers": str(wanted)},
        forecast_unknown="it needs host memory, not GPU memory",
    )


def _pinning(m: Measured, settings: Settings, band: Band) -> _Rung:
    if not m.on_gpu or settings.pin_memory is not False:
        return None
    if band is not Band.SAFE:
        return f"pinned buffers: they cannot be swapped out, and host memory is {_full(m, band)}"
    return Remedy(
        id="pin_memory",
        title="pinned host buffers on",
        why="copies to the GPU overlap with its work; this costs host memory only",
        keeps_math=True,
        resumable="resumes",
        assignments={"pin_memory": "true"},
        forecast_unknown="it needs host memory, not GPU memory",
    )


def _less_host_memory(m: Measured, settings: Settings) -> Iterator[_Rung]:
    lower = {"standard": "low", "low": "extreme"}.get(settings.host_level)
    if lower is not None:
        yield Remedy(
            id="host_level",
            title=f"host memory {settings.host_level} -> {lower}",
            why="the data is read through a memory map in smaller pieces, and fewer of them are kept",
            keeps_math=True,
            resumable="resumes",
            assignments={"host_level": lower},
            forecast_unknown="it saves host memory; how much depends on the data",
        )
    if settings.workers:
        running = m.workers if m.workers is not None else loader_processes(settings.workers, settings.world_size)
        gives = "" if m.worker_bytes is None else f", {units.size(running * m.worker_bytes)} in all"
        yield Remedy(
            id="fewer_workers",
            title=f"loader workers {settings.workers} -> {settings.workers // 2} per process",
            why=f"{running} worker processes hold private host memory{gives}",
            keeps_math=True,
            resumable="live",
            assignments={"workers": str(settings.workers // 2)},
            forecast_unknown="it saves host memory, not GPU memory",
        )
    band = ram_band(m.host_fraction, m.swap_in_bytes_per_second)
    yield f"more loader workers, pinned buffers: host memory is {_full(m, band)}"


def _offload_off(m: Measured, settings: Settings, estimates: Estimates | None) -> _Rung:
    values = optimizer_on_gpu(settings)
    found: Forecast | str = "the size of the optimizer state is not measured while it is in host memory"
    if estimates is not None:
        found = estimates.forecast(edit_settings(settings, assignments=values))
    if isinstance(found, Forecast):
        if (why := above_safe("optimizer offload off", found)) is not None:
            return why
        title = "optimizer offload off"
    elif m.gpu_fraction is None or m.gpu_free_bytes is None:
        return "optimizer offload off: how much GPU memory is free is not known"
    elif m.gpu_fraction >= 0.6:
        used = units.percent(m.gpu_fraction, 0)
        return f"optimizer offload off: {used} of the GPU is already used, so the optimizer may not fit"
    else:
        title = f"optimizer offload off: {units.size(m.gpu_free_bytes)} of the GPU are free"
    return Remedy(
        id="offload_off",
        title=title,
        why="the optimizer step runs on the GPU, and its state leaves host memory",
        keeps_math=True,
        resumable="resumes",
        assignments=values,
        forecast=found if isinstance(found, Forecast) else None,
        forecast_unknown=found if isinstance(found, str) else None,
    )


def _full(m: Measured, band: Band) -> str:
    if m.swap_in_bytes_per_second:
        return f"at {units.percent(m.host_fraction)} with {units.size(m.swap_in_bytes_per_second)}/s read back from swap"
    if band is Band.UNKNOWN:
        return "not known"
    return f"at {units.percent(m.host_fraction)} ({band.value}; safe below 80 %)"
