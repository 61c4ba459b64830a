"""The machine on a small terminal: one line per GPU, one for RAM, one for swap; and the plain list
of GPU processes.
"""

from __future__ import annotations

from memtop.supervisor import units
from memtop.supervisor.language import tr
from memtop.supervisor.monitor.values import why_incomplete
from memtop.tui.bars import ROLES, banded, padded_tag
from memtop.tui.line import MUTED, STRONG, Line, cell, fit, foreign, join, line, name_cell, width_of
from memtop.tui.machine.gpu import LABEL, draw_gpu_note, draw_gpu_row, short_name
from memtop.tui.machine.host import ram_bar, swap_row
from memtop.tui.store import Store, holders

_IN_PAIRS_ABOVE = 6


def draw_compact_machine(store: Store, width: int, height: int) -> list[Line]:
    """80x24: one line per GPU (two GPUs per line if there are many), one for RAM, one for swap."""
    host = store.host
    whole = host.limit_bytes or host.total_bytes
    tail = join(
        (
            line((f" {units.used_of(host.used_bytes, whole)}", STRONG)),
            line((f"{units.percent(host.used_fraction):>7}", ROLES[host.band])),
            padded_tag(host.band),
        )
    )
    room = max(4, width - LABEL - width_of(tail))
    ram = fit(((cell("RAM", LABEL), MUTED), *ram_bar(store, room), *tail), width)
    return [*_compact_gpus(store, width, max(1, height - 2)), ram, swap_row(host, width)][:height]


def _compact_gpus(store: Store, width: int, height: int) -> list[Line]:
    gpus = store.gpus
    if not gpus:
        note = draw_gpu_note(store, width * 2, 1)
        return [fit(((cell("GPU", LABEL), MUTED), *note[0]), width)]
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
    """The number of lines of the compact machine panel."""
    return 2 + (max(1, gpu_count) if gpu_count <= _IN_PAIRS_ABOVE else (gpu_count + 1) // 2)


def draw_processes(store: Store, width: int, height: int) -> list[Line]:
    """All GPU processes of the machine, strays first."""
    rows = holders(store.machine)
    missing = [] if store.machine is None else [fit(line((f"! {why}", "edge")), width) for why in why_incomplete(store.machine)]
    if not rows:
        return missing[:height] or [line(("no process uses a GPU", MUTED))]
    missing = missing[: max(0, height - 2)]
    height -= len(missing)
    header = f"{cell('pid', 8, right=True)}  {cell('user', 10)} {cell('GPU', 6)} {cell('VRAM', 9, right=True)}  "
    lines = [line((f"{header}{cell('run', 14)} {tr('command')}", MUTED))]
    for row in rows[: height - 1]:
        process = row.process
        where = ",".join(str(i) for i in row.gpu_indices)
        left = f"{process.pid:>8}  {name_cell(process.user or '–', 10)} {where[:6]:<6} {units.size(row.used_bytes):>9}  "
        left += f"{name_cell(process.run or '–', 14)} "
        mark: Line = line(("! stray ", "edge")) if process.stray else ()
        if store.followed is not None and process.pid in store.followed.pids:
            mark = (*mark, *line(("▸ followed ", "accent")))
        command = foreign((process.command or process.name or "–", STRONG))
        lines.append(fit((*foreign((left, "text")), *mark, *command), width))
    hidden = len(rows) - (len(lines) - 1)
    if hidden > 0:
        lines[-1] = line((f"{hidden + 1} more", MUTED))
    return [*missing, *lines]
