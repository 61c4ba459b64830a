"""The height of each panel, from the terminal's size and the store. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from memtop.tui.dashboard.overview import compact_rows
from memtop.tui.machine.gpu import draw_gpu_note
from memtop.tui.machine.host import host_rows
from memtop.tui.store import Store

GPU_PANELS = 4
"""Up to this many GPUs have their own panels; more GPUs share one panel with a line each."""
_WIDE_FROM = (110, 34)
_GPU_LOWEST, _GPU_HIGHEST = 6, 12
_LOSS_LOWEST = 9
_HOST_LOWEST = 7
_RANKS_SHOWN = 4
_CHART = 4
_NOTE_HIGHEST = 4
# Border and padding of a panel, both sides.
_FRAME = 4
_EVENTS_LOWEST, _EVENTS_AT_EASE = 6, 8


@dataclass(frozen=True)
class DashboardLayout:
    """Heights by selector (0 hides), and which other widgets are shown."""

    heights: dict[str, int]
    gpu_columns: int
    """Columns of the GPUs' panels."""
    shown: dict[str, bool]


def plan(store: Store, width: int, height: int, *, notice: bool) -> DashboardLayout:
    """The layout for this store on a terminal of this size."""
    compact = width < _WIDE_FROM[0] or height < _WIDE_FROM[1]
    has_run = store.run is not None
    columns = 1 if has_run or not 2 <= len(store.gpus) <= GPU_PANELS else 2
    events = has_run and compact and store.events_wanted
    shown = {
        "#notice": notice,
        "#wide": not compact,
        "#compact": compact,
        "#processes": not has_run,
        "#log": has_run and not events,
        "#compact-events": events,
        # Without a run the host has a column only beside a single one of GPUs.
        "#right": has_run or (bool(store.gpus) and columns == 1),
    }
    # Header, flash line and buttons.
    body = height - 3 - notice - (width < 80)
    heights = _compact(store, body) if compact else _wide(store, width, body, columns)
    return DashboardLayout(heights, columns, shown)


def _host_height(store: Store, room: int) -> int:
    """All lines of the host panel if some events stay visible, and a chart if there is much
    room.
    """
    wanted = 2 + host_rows(store)
    if store.run is None:
        return min(room, wanted + _CHART)
    if room >= wanted + _CHART + _EVENTS_AT_EASE:
        return wanted + _CHART
    return max(_HOST_LOWEST, min(wanted, room - _EVENTS_LOWEST))


def _compact(store: Store, body: int) -> dict[str, int]:
    training = 3 if store.run is not None else 0
    # The log always keeps one line and its frame.
    machine = min(compact_rows(len(store.gpus)), body - training - 3)
    return {"#compact-machine": machine, "#compact-training": training}


def _note_height(store: Store, width: int) -> int:
    """Height of the full text on why there is no GPU; it includes what to do."""
    column = width if store.run is None else width // 2
    return 2 + len(draw_gpu_note(store, column - _FRAME, _NOTE_HIGHEST))


def _wide(store: Store, width: int, body: int, columns: int) -> dict[str, int]:
    run = store.run
    count = len(store.gpus)
    # A quarter for the log (or the processes), if the panels above have enough room.
    upper = body - max(6, round(body * 0.26))
    loss = _LOSS_LOWEST if run is not None else 0
    if columns == 2:
        return _in_columns(store, upper)
    each = (upper - loss) // count if count else 0
    table = count > GPU_PANELS or (count > 0 and each < _GPU_LOWEST)
    note = 0 if count else _note_height(store, width)
    heights = {"#wide": upper, "#gpu-note": note, "#gpu-table": 0}
    for position in range(GPU_PANELS):
        heights[f"#gpu-{position}"] = min(_GPU_HIGHEST, each) if position < count and not table else 0
    if table:
        # One line per GPU, a frame, and the selected GPU's panel if there is room.
        heights["#gpu-table"] = min(upper - loss, count + 2 + 9)
    heights["#gpus"] = sum(heights[f"#gpu-{i}"] for i in range(GPU_PANELS))
    heights["#host-big"] = 0 if count else max(_HOST_LOWEST, (upper - note) // 2 if run is not None else upper - note)
    training = 0
    if run is not None:
        ranks = min(_RANKS_SHOWN, len(run.ranks))
        # The reason of its end may need a second line.
        reason = 0 if not run.reason else 2 if run.state.final else 1
        source = run.program is not None and run.program.why is not None
        training = 2 + 6 + reason + source + ranks
    host = _host_height(store, upper - training)
    heights |= {"#training": training, "#host": host if count else 0}
    heights |= {"#events": max(3, upper - training - heights["#host"]) if run is not None else 0}
    left = heights["#gpu-note"] + heights["#gpu-table"] + heights["#host-big"]
    left += heights["#gpus"]
    heights["#loss"] = max(0, upper - left) if run is not None else 0
    if run is None and count:
        # Without a run the process list fills the rest.
        heights["#wide"] = min(upper, max(left, heights["#host"]))
    return heights


def _in_columns(store: Store, upper: int) -> dict[str, int]:
    """Without a run: two GPUs beside each other, and the host below all of them."""
    count = len(store.gpus)
    rows = (count + 1) // 2
    host = max(_HOST_LOWEST, min(_host_height(store, upper), upper - rows * _GPU_LOWEST))
    each = max(_GPU_LOWEST, min(_GPU_HIGHEST, (upper - host) // rows))
    heights = {"#wide": rows * each + host, "#gpus": rows * each, "#host-big": host}
    heights |= {f"#gpu-{position}": each if position < count else 0 for position in range(GPU_PANELS)}
    return heights | dict.fromkeys(("#gpu-note", "#gpu-table", "#host", "#training", "#events", "#loss"), 0)
