"""GPUs on the dashboard: a panel per GPU, or one line each if there are many."""

from __future__ import annotations

from memtop.supervisor import units
from memtop.supervisor.language import Verbatim, tr
from memtop.supervisor.monitor.history import gpu_key
from memtop.supervisor.monitor.values import GpuSample, GpuTrouble
from memtop.tui import trends
from memtop.tui.bars import ROLES, banded, padded_tag
from memtop.tui.charts import history, spark
from memtop.tui.line import (
    MUTED,
    STRONG,
    Line,
    cell,
    cropped,
    dimmed,
    fact,
    fit,
    foreign,
    join,
    join_fitting,
    line,
    plain,
    spread,
    width_of,
    wrap,
)
from memtop.tui.machine.vram import mig_row, vram_bar, vram_legend
from memtop.tui.store import Store, foreseen_on, seconds_until_full, step_peak
from memtop.tui.words import age

LABEL = 6
"""Cells of the label before a bar."""
_TROUBLE_SHOWN_SECONDS = 3600.0
"""Older troubles are shown only on the details screen."""
_SPARK_HIGHEST = 30
"""Cells of the newest utilisation."""
_WRAPPED_FROM = 8
"""With this many lines, a panel has room for a second text line and the chart."""


def short_name(gpu: GpuSample) -> str:
    """The model without common words: `RTX A4500` for `NVIDIA RTX A4500`."""
    name = gpu.name or "unknown GPU"
    for word in ("NVIDIA ", "GeForce ", "Tesla "):
        name = name.replace(word, "")
    return name


def cuda_name(gpu: GpuSample) -> str:
    """`cuda:1` if CUDA numbers this GPU differently from the driver, else empty."""
    return "" if gpu.visible_index in (None, gpu.index) else f"cuda:{gpu.visible_index}"


def gpu_title(gpu: GpuSample) -> Verbatim:
    """`GPU 0  RTX A4500  GPU-5f1c`: index, model and the start of the UUID."""
    words = (f"GPU {gpu.index}", cuda_name(gpu), short_name(gpu), (gpu.uuid or "")[:8])
    return Verbatim("  ".join(word for word in words if word))


def draw_gpu(store: Store, gpu: GpuSample, width: int, height: int) -> list[Line]:
    """One GPU: bar, numbers, owners of the memory, the card's state, warnings, and history in the
    remaining lines.
    """
    if gpu.error:
        return [line(("!! cannot be read", "danger")), *wrap(gpu.error, width)][:height]
    old = driver_silence(store)
    warning = line((f"! {old}", "edge")) if old else gpu_warning(gpu, store.now)
    lines = [
        ((cell("VRAM", LABEL), MUTED), *vram_bar(store, gpu, width - LABEL)),
        _numbers(store, gpu, width),
        vram_legend(store, gpu, width),
        _state(store, gpu, width),
    ]
    if old:
        lines = dimmed(lines)
    if warning and height <= 4:
        # On the smallest panel the warning replaces the legend.
        lines[2] = fit(warning, width)
    elif warning:
        lines += _in_full(warning, width) if height >= _WRAPPED_FROM else [fit(warning, width)]
    room = height - len(lines)
    if gpu.mig and room > 0:
        # The instances are more important than the history of the whole card.
        rows = [mig_row(instance, width) for instance in gpu.mig]
        lines += rows if len(rows) <= room else [*rows[: room - 1], line((f"{len(rows) - room + 1} more MIG instances", MUTED))]
    elif room >= 2:
        past = store.gpu_history.get(gpu_key(gpu), ())
        chart = history(width, room, [(m.fraction, m.band) for m in past])
        lines += dimmed(chart) if old else chart
    elif height == 3:
        del lines[2]
    return lines[:height]


def _in_full(words: Line, width: int) -> list[Line]:
    """The line, continued on a second line if it is too long."""
    if width_of(words) <= width:
        return [words]
    first, *rest = wrap(plain(words), width, words[-1][1])
    return [first, fit(join(rest, " "), width)]


def driver_silence(store: Store) -> str:
    """`driver has not answered for 12 s`; empty while the GPU values are fresh."""
    seconds = store.machine.gpu_age_seconds if store.machine is not None else None
    return "" if seconds is None else f"driver has not answered for {age(seconds)}"


def gpu_warning(gpu: GpuSample, now: float | None) -> Line:
    """The newest trouble, else why the clocks are throttled; one short line, or empty."""
    recent = [t for t in gpu.troubles if now is None or now - t.time < _TROUBLE_SHOWN_SECONDS]
    if recent:
        return trouble_words(recent[-1], now)
    if gpu.details.recovery_action:
        return line(("!! ", "bad"), (gpu.details.recovery_action, "bad"))
    if gpu.details.remapping_failed:
        return line(("!! ", "bad"), ("no spare memory rows are left: the card should be replaced", "bad"))
    if gpu.details.throttle_reasons:
        return line((f"^ clocks held down: {', '.join(gpu.details.throttle_reasons)}", "edge"))
    return ()


def trouble_words(trouble: GpuTrouble, now: float | None) -> Line:
    """`!! Xid 79 4 min ago: ...`; faults caused by a program have a milder mark."""
    role, mark = ("edge", "^") if trouble.fault_of_program or trouble.kind == "returned" else ("bad", "!!")
    kind = f"Xid {trouble.code}" if trouble.kind == "xid" and trouble.code is not None else trouble.kind
    when = "" if now is None else f" {age(now - trouble.time)} ago"
    return line((f"{mark} {kind}{when}: {trouble.message}", role))


def _numbers(store: Store, gpu: GpuSample, width: int) -> Line:
    left = join(
        (
            line((f"{units.gib(gpu.taken_bytes)} / {units.gib(gpu.total_bytes)} GiB", STRONG)),
            banded(gpu.used_fraction, gpu.band),
            line(("unified", "accent")) if gpu.unified else (),
        ),
        "   ",
    )
    peak = fact("┆ peak", f"{units.gib(store.gpu_peak_bytes.get(gpu_key(gpu)))} GiB")
    step, foreseen = step_peak(store, gpu), foreseen_on(store, gpu)
    # The agent measures within an update, which sampling once a second cannot see.
    before = [] if step is None else [fact("step peak", units.gib(step))]
    if foreseen is not None:
        before.insert(0, fact("▴ foreseen", f"~{units.gib(foreseen.peak_bytes)}", "predicted"))
    while before and width_of(left) + 2 + width_of(join((*before, peak))) > width:
        del before[0]
    return spread(left, join((*before, peak)), width)


def _state(store: Store, gpu: GpuSample, width: int) -> Line:
    details = gpu.details
    forecast = _forecast(store, gpu)
    parts = [
        fact("util", units.percent(gpu.utilization_fraction, 0)),
        line((celsius(gpu.temperature_celsius), STRONG)),
        line((_watts(gpu), STRONG)),
    ]
    if details.sm_clock_megahertz is not None:
        parts.append(fact("clock", f"{details.sm_clock_megahertz} MHz"))
    if gpu.memory_utilization_fraction is not None:
        parts.append(fact("bandwidth", units.percent(gpu.memory_utilization_fraction, 0)))
    room = width - (width_of(forecast) + 2 if forecast else 0)
    past = [moment.utilization for moment in store.gpu_history.get(gpu_key(gpu), ())]
    spare = room - width_of(join(parts, "   ")) - 1
    if len(past) > 1 and (recent := spark(past, min(_SPARK_HIGHEST, spare), (0.0, 1.0))):
        parts[0] = (*parts[0], *line((f" {recent}", "hist")))
    return spread(join_fitting(parts, room, "   "), forecast, width)


def _forecast(store: Store, gpu: GpuSample) -> Line:
    """When the card is full: for a run from its supervisor, else from this dashboard's samples."""
    if store.run is not None:
        trend = trends.of_gpu(store.run, gpu)
        return () if trend is None else trends.full_in(trend, store.run)
    seconds = seconds_until_full(store.gpu_history.get(gpu_key(gpu), ()))
    if seconds is None:
        return ()
    return line((f"^ full in {units.about(seconds)}", "edge"), (" at this rate", MUTED))


def celsius(value: float | None) -> str:
    return f"{units.UNKNOWN if value is None else f'{value:.0f}'} °C"


def _watts(gpu: GpuSample) -> str:
    if gpu.power_watts is None:
        return f"{units.UNKNOWN} W"
    limit = "" if gpu.power_limit_watts is None else f"/{gpu.power_limit_watts:.0f}"
    return f"{gpu.power_watts:.0f}{limit} W"


def draw_gpu_row(store: Store, gpu: GpuSample, width: int, *, selected: bool = False, name_width: int = 0) -> Line:
    """One GPU on one line: `0 A4500 ████▓▒░   84.7 % · safe  97 % 62 °C`; shorter on a narrow
    terminal.
    """
    marker = "▸" if selected else " "
    alarm = "!" if gpu_warning(gpu, store.now) else " "
    head = line((f"{marker}{gpu.index:>2}", "accent" if selected else MUTED), (alarm, "edge"))
    if name_width:
        head = (*head, (f"{cropped(short_name(gpu), name_width)} ", STRONG))
    if gpu.error:
        return fit((*head, ("!! cannot be read: ", "danger"), (gpu.error, MUTED)), width)
    percent = units.percent(gpu.used_fraction)
    tail = line(" " * (7 - len(percent)), (f"{percent} ", ROLES[gpu.band]), *padded_tag(gpu.band))
    if width >= 70:
        util = units.percent(gpu.utilization_fraction, 0)
        tail = (*tail, (f" {util:>5} {celsius(gpu.temperature_celsius):>5}", STRONG))
    if width >= 76 and name_width > 8:
        tail = (*line((f" {units.gib(gpu.taken_bytes):>5}/{units.gib(gpu.total_bytes, 0)} GiB", STRONG)), *tail)
    room = width - width_of(head) - width_of(tail)
    row = fit((*head, *vram_bar(store, gpu, room), *tail), width)
    return dimmed([row])[0] if driver_silence(store) else row


def draw_gpu_table(store: Store, width: int, height: int) -> list[Line]:
    """One line per GPU, and the selected GPU's panel below."""
    gpus = store.gpus
    selected = min(store.selected_gpu, len(gpus) - 1)
    names = min(16, max((len(short_name(g)) for g in gpus), default=0))
    rows = [draw_gpu_row(store, g, width, selected=i == selected, name_width=names) for i, g in enumerate(gpus)]
    spare = height - len(rows)
    if spare < 4 or not gpus:
        return rows[:height]
    chosen = gpus[selected]
    title = foreign((f"{gpu_title(chosen)} ", STRONG), ("─" * max(0, width - len(gpu_title(chosen)) - 1), "limit"))
    return [*rows, title, *draw_gpu(store, chosen, width, spare - 1)]


def draw_gpu_note(store: Store, width: int, height: int) -> list[Line]:
    """Why no GPU is shown."""
    if store.machine is None:
        return [line(("waiting for the first sample", MUTED))]
    on_cpu = " - training on CPU" if store.run is not None and store.run.alive else ""
    return wrap(Verbatim(f"{tr(store.machine.gpu_note or 'no GPU')}{tr(on_cpu)}"), width)[:height]
