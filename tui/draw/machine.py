"""The machine's panels: one GPU, many GPUs, host memory and swap, GPU processes."""

from __future__ import annotations

from memtop.supervisor import units
from memtop.supervisor.monitor.values import GpuSample, HostSample
from memtop.tui.draw.bands import ROLES, banded, padded_tag
from memtop.tui.draw.bars import Share, memory_bar
from memtop.tui.draw.charts import history
from memtop.tui.draw.line import MUTED, STRONG, Line, fact, fit, join, join_fitting, line, spread, wrap
from memtop.tui.store import Store, VramSplit, gpu_key, holders, seconds_until_full, split_vram

_LABEL = 6
_IN_PAIRS_ABOVE = 6


def short_name(gpu: GpuSample) -> str:
    """The model without the words that every card has: `RTX A4500` out of `NVIDIA RTX A4500`."""
    name = gpu.name or "unknown GPU"
    for word in ("NVIDIA ", "GeForce ", "Tesla "):
        name = name.replace(word, "")
    return name


def gpu_title(gpu: GpuSample) -> str:
    """`GPU 0  RTX A4500  GPU-5f1c`: index, model and the part of the UUID that tells two cards apart."""
    short_uuid = f"  {gpu.uuid[:8]}" if gpu.uuid else ""
    return f"GPU {gpu.index}  {short_name(gpu)}{short_uuid}"


def draw_gpu(store: Store, gpu: GpuSample, width: int, height: int) -> list[Line]:
    """One GPU: bar, numbers, who holds it, the card's state, and history in what room is left."""
    if gpu.error:
        return [line(("!! cannot be read", "danger")), *wrap(gpu.error, width)][:height]
    lines = [
        (("VRAM".ljust(_LABEL), MUTED), *vram_bar(store, gpu, width - _LABEL)),
        _gpu_numbers(store, gpu, width),
        _gpu_holders(store, gpu, width),
        _gpu_state(store, gpu, width),
    ]
    room = height - len(lines)
    if room >= 2:
        past = store.gpu_history.get(gpu_key(gpu), ())
        lines += history(width, room, [m.fraction for m in past])
    elif height == 3:
        del lines[2]
    return lines[:height]


def vram_bar(store: Store, gpu: GpuSample, width: int) -> Line:
    """The card's memory, split into what is known of it."""
    total = gpu.total_bytes
    if not total:
        return fit(line(("memory not known", "unknown")), width)
    peak_bytes = store.gpu_peak_bytes.get(gpu_key(gpu))
    peak = None if peak_bytes is None else (peak_bytes + (gpu.reserved_bytes or 0)) / total
    return memory_bar(width, _vram_shares(store, gpu, total), peak=peak)


def _vram_shares(store: Store, gpu: GpuSample, total: int) -> list[Share]:
    if store.run is None:
        return [Share(gpu.used_fraction or 0.0, "█", "alloc")]
    split = split_vram(gpu, store.run)
    # What the driver reserves belongs to nobody's process; in the bar it counts as not this run's.
    other = (split.others or 0) + (gpu.reserved_bytes or 0)
    return [
        Share((split.allocated or 0) / total, "█", "alloc"),
        Share((split.cached or 0) / total, "▓", "cache"),
        Share((split.context or 0) / total, "▒", "context"),
        Share(other / total, "░", "other"),
    ]


def _gpu_numbers(store: Store, gpu: GpuSample, width: int) -> Line:
    peak = store.gpu_peak_bytes.get(gpu_key(gpu))
    left = join(
        (
            line((f"{units.gib(gpu.used_bytes)} / {units.gib(gpu.total_bytes)} GiB", STRONG)),
            banded(gpu.used_fraction, gpu.band),
        ),
        "   ",
    )
    return spread(left, fact("┆ peak", f"{units.gib(peak)} GiB"), width)


def _gpu_holders(store: Store, gpu: GpuSample, width: int) -> Line:
    if store.run is None:
        runs = sum(p.used_bytes or 0 for p in gpu.processes if p.run is not None)
        parts = [fact("processes", str(len(gpu.processes)))]
        if runs:
            parts.append(fact("of memtop runs", f"{units.gib(runs)} GiB"))
    else:
        parts = _split_facts(split_vram(gpu, store.run))
    if gpu.reserved_bytes:
        parts.append(fact("driver", units.gib(gpu.reserved_bytes)))
    return join_fitting(parts, width)


def _split_facts(split: VramSplit) -> list[Line]:
    named = (
        ("█", "alloc", "alloc", split.allocated),
        ("▓", "cache", "cache", split.cached),
        ("▒", "context", "context", split.context),
        ("░", "other", "others", split.others),
    )
    return [line((glyph, role), " ", *fact(word, units.gib(value))) for glyph, role, word, value in named]


def _gpu_state(store: Store, gpu: GpuSample, width: int) -> Line:
    left = join(
        (
            fact("util", units.percent(gpu.utilization_fraction, 0)),
            line((_celsius(gpu), STRONG)),
            line((_watts(gpu), STRONG)),
        ),
        "   ",
    )
    seconds = seconds_until_full(store.gpu_history.get(gpu_key(gpu), ()))
    return spread(left, _forecast(seconds), width)


def _forecast(seconds: float | None) -> Line:
    if seconds is None:
        return ()
    minutes = seconds / 60
    text = f"{minutes:.0f} min" if minutes >= 1 else f"{seconds:.0f} s"
    return line(("^ full in ", "edge"), (text, "edge"), (" at this rate", MUTED))


def _celsius(gpu: GpuSample) -> str:
    value = gpu.temperature_celsius
    return f"{units.UNKNOWN if value is None else f'{value:.0f}'} °C"


def _watts(gpu: GpuSample) -> str:
    if gpu.power_watts is None:
        return f"{units.UNKNOWN} W"
    limit = "" if gpu.power_limit_watts is None else f"/{gpu.power_limit_watts:.0f}"
    return f"{gpu.power_watts:.0f}{limit} W"


def draw_gpu_row(store: Store, gpu: GpuSample, width: int, *, selected: bool = False, name_width: int = 0) -> Line:
    """One GPU on one line: `0 A4500 ████▓▒░   84.7% · safe  97% 62 °C`; less where there is less room."""
    marker = "▸" if selected else " "
    head = line((f"{marker}{gpu.index:>2} ", "accent" if selected else MUTED))
    if name_width:
        head = (*head, (f"{short_name(gpu)[:name_width]:<{name_width}} ", STRONG))
    if gpu.error:
        return fit((*head, ("!! cannot be read: ", "danger"), (gpu.error, MUTED)), width)
    percent = "–" if gpu.used_fraction is None else f"{gpu.used_fraction * 100:.1f}%"
    tail = line(" " * (7 - len(percent)), (f"{percent} ", ROLES[gpu.band]), *padded_tag(gpu.band))
    if width >= 70:
        util = "–" if gpu.utilization_fraction is None else f"{gpu.utilization_fraction * 100:.0f}%"
        tail = (*tail, (f" {util:>4} {_celsius(gpu):>5}", STRONG))
    if width >= 76 and name_width > 8:
        tail = (*line((f" {units.gib(gpu.used_bytes):>5}/{units.gib(gpu.total_bytes, 0)} GiB", STRONG)), *tail)
    room = width - sum(len(t) for t, _ in head) - sum(len(t) for t, _ in tail)
    return fit((*head, *vram_bar(store, gpu, room), *tail), width)


def draw_gpu_table(store: Store, width: int, height: int) -> list[Line]:
    """Many GPUs, one line each, and the details of the selected one below."""
    gpus = store.gpus
    selected = min(store.selected_gpu, len(gpus) - 1)
    names = min(16, max((len(short_name(g)) for g in gpus), default=0))
    rows = [draw_gpu_row(store, g, width, selected=i == selected, name_width=names) for i, g in enumerate(gpus)]
    spare = height - len(rows)
    if spare < 4 or not gpus:
        return rows[:height]
    chosen = gpus[selected]
    title = line((f"{gpu_title(chosen)} ", STRONG), ("─" * max(0, width - len(gpu_title(chosen)) - 1), "limit"))
    return [*rows, title, *draw_gpu(store, chosen, width, spare - 1)]


def draw_gpu_note(store: Store, width: int, height: int) -> list[Line]:
    """One honest line where there is no GPU."""
    if store.machine is None:
        return [line(("waiting for the first sample", MUTED))]
    on_cpu = " - training on CPU" if store.run is not None and store.run.alive else ""
    return wrap(f"{store.machine.gpu_note or 'no GPU'}{on_cpu}", width)[:height]


def draw_host(store: Store, width: int, height: int) -> list[Line]:
    """Host memory and swap, with history in what room is left."""
    host = store.host
    lines = [
        (("RAM".ljust(_LABEL), MUTED), *ram_bar(store, width - _LABEL)),
        _host_numbers(host, width),
        _host_holders(store, width),
        *_swap_lines(host, width),
        _swap_traffic(host, width),
    ]
    spare = height - len(lines)
    if spare >= 3:
        lines += history(width, spare, [m.fraction for m in store.host_history])
    return lines[:height]


def ram_bar(store: Store, width: int) -> Line:
    """Host memory: this run's processes, then everybody else's."""
    host = store.host
    used = host.used_fraction or 0.0
    whole = host.limit_bytes or host.total_bytes
    if store.run is None:
        return memory_bar(width, [Share(used, "█", "alloc")], peak=store.host_peak_fraction)
    rss = store.run.run_rss_bytes
    own = min(used, rss / whole) if rss and whole else 0.0
    shares = [Share(own, "█", "alloc"), Share(used - own, "░", "other")]
    return memory_bar(width, shares, peak=store.host_peak_fraction)


def _host_numbers(host: HostSample, width: int) -> Line:
    whole = host.limit_bytes or host.total_bytes
    left = join(
        (
            line((f"{units.gib(host.used_bytes)} / {units.gib(whole)} GiB", STRONG)),
            banded(host.used_fraction, host.band),
        ),
        "   ",
    )
    if host.limit_bytes is None:
        return spread(left, fact("available", f"{units.gib(host.available_bytes)} GiB"), width)
    return spread(left, fact("limit", f"{units.gib(host.limit_bytes)} of {units.gib(host.total_bytes)}"), width)


def _host_holders(store: Store, width: int) -> Line:
    cpu = fact("cpu", units.percent(store.host.cpu_fraction, 0))
    if store.run is None:
        return fit(cpu, width)
    rss = store.run.run_rss_bytes
    used = store.host.used_bytes
    others = None if rss is None or used is None else max(0, used - rss)
    own = line(("█", "alloc"), " ", *fact("this run", units.gib(rss)))
    rest = line(("░", "other"), " ", *fact("others", units.gib(others)))
    return spread(join((own, rest)), cpu, width)


def _swap_lines(host: HostSample, width: int) -> list[Line]:
    if host.swap_total_bytes == 0:
        return [line(("Swap".ljust(_LABEL), MUTED), ("none", MUTED))]
    return [swap_row(host, width)]


def swap_row(host: HostSample, width: int) -> Line:
    """Swap on one line: bar, numbers, band."""
    if host.swap_total_bytes == 0:
        return line(("Swap".ljust(_LABEL), MUTED), ("none", MUTED))
    tail = join(
        (
            line((f" {units.gib(host.swap_used_bytes)} / {units.gib(host.swap_total_bytes)} GiB", STRONG)),
            line((f"{units.percent(host.swap_fraction):>7}", ROLES[host.swap_band])),
            padded_tag(host.swap_band),
        )
    )
    room = max(4, width - _LABEL - sum(len(t) for t, _ in tail))
    bar = memory_bar(room, [Share(host.swap_fraction or 0.0, "█", "alloc")])
    return fit((("Swap".ljust(_LABEL), MUTED), *bar, *tail), width)


def _swap_traffic(host: HostSample, width: int) -> Line:
    def rate(value: float | None) -> str:
        return units.UNKNOWN if value is None else f"{units.size(value)}/s"

    return fit(
        join(
            (
                fact("swap in", rate(host.swap_in_bytes_per_second)),
                fact("out", rate(host.swap_out_bytes_per_second)),
                fact("memory pressure", units.percent(host.pressure_fraction)),
            ),
            "   ",
        ),
        width,
    )


def draw_compact_machine(store: Store, width: int, height: int) -> list[Line]:
    """80x24: one line per GPU (two beside each other where there are many), one for RAM, one for swap."""
    host = store.host
    whole = host.limit_bytes or host.total_bytes
    tail = join(
        (
            line((f" {units.gib(host.used_bytes)} / {units.gib(whole)} GiB", STRONG)),
            line((f"{units.percent(host.used_fraction):>7}", ROLES[host.band])),
            padded_tag(host.band),
        )
    )
    room = max(4, width - _LABEL - sum(len(t) for t, _ in tail))
    ram = fit((("RAM".ljust(_LABEL), MUTED), *ram_bar(store, room), *tail), width)
    return [*_compact_gpus(store, width, max(1, height - 2)), ram, swap_row(host, width)][:height]


def _compact_gpus(store: Store, width: int, height: int) -> list[Line]:
    gpus = store.gpus
    if not gpus:
        note = draw_gpu_note(store, width * 2, 1)
        return [fit((("GPU".ljust(_LABEL), MUTED), *note[0]), width)]
    if len(gpus) <= _IN_PAIRS_ABOVE:
        names = min(10, max(len(short_name(g)) for g in gpus))
        rows = [draw_gpu_row(store, g, width, name_width=names) for g in gpus]
        each = 1
    else:
        half = (width - 2) // 2
        pairs = [gpus[i : i + 2] for i in range(0, len(gpus), 2)]
        rows = [join([draw_gpu_row(store, g, half) for g in pair]) for pair in pairs]
        each = 2
    if len(rows) <= height:
        return rows
    hidden = gpus[(height - 1) * each :]
    fullest = max(hidden, key=lambda g: g.used_fraction or 0.0)
    rest = line((f"   {len(hidden)} more GPUs, the fullest is {fullest.index}:", MUTED))
    return [*rows[: height - 1], (*rest, *banded(fullest.used_fraction, fullest.band))]


def compact_rows(gpu_count: int) -> int:
    """How many lines the compact machine wants."""
    return 2 + (max(1, gpu_count) if gpu_count <= _IN_PAIRS_ABOVE else (gpu_count + 1) // 2)


def draw_processes(store: Store, width: int, height: int) -> list[Line]:
    """All GPU processes of the machine, strays first."""
    rows = holders(store.machine)
    if not rows:
        return [line(("no process uses a GPU", MUTED))]
    header = f"{'pid':>8}  {'user':<10} {'GPU':<6} {'VRAM':>9}  {'run':<14} command"
    lines = [line((header, MUTED))]
    for row in rows[: height - 1]:
        process = row.process
        where = ",".join(str(i) for i in row.gpu_indices)
        left = f"{process.pid:>8}  {(process.user or '–')[:10]:<10} {where[:6]:<6} {units.size(row.used_bytes):>9}  "
        left += f"{(process.run or '–')[:14]:<14} "
        mark: Line = line(("! stray ", "edge")) if process.stray else ()
        if store.followed is not None and process.pid in store.followed.pids:
            mark = (*mark, ("▸ followed ", "accent"))
        lines.append(fit(line((left, "text"), *mark, (process.command or process.name or "–", STRONG)), width))
    hidden = len(rows) - (len(lines) - 1)
    if hidden > 0:
        lines[-1] = line((f"{hidden + 1} more", MUTED))
    return lines
