"""Trends of a run in one line each: what grows steadily, and when the memory is full."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len

from memtop.supervisor import units
from memtop.supervisor.language import tr
from memtop.supervisor.monitor.values import GpuSample
from memtop.supervisor.recovery.values import Trend
from memtop.supervisor.wire import RunState
from memtop.tui.line import MUTED, Line, line


def of_gpu(run: RunState, gpu: GpuSample) -> Trend | None:
    """The trend that fills this GPU first."""
    return first_full([trend for trend in run.trends if trend.subject.gpu_index == gpu.index])


def of_host(run: RunState) -> list[Trend]:
    """The trends of host memory and swap."""
    return [trend for trend in run.trends if not trend.subject.kind.of_gpu]


def first_full(trends: Sequence[Trend]) -> Trend | None:
    """The most urgent trend; trends without a limit come last."""
    return min(trends, key=_urgency, default=None)


def _urgency(trend: Trend) -> float:
    return float("inf") if trend.full_in_seconds is None else trend.full_in_seconds


def before_the_end(trend: Trend, run: RunState) -> bool:
    """Whether the memory is full before the run ends; also True if the run's end is not known."""
    if trend.full_in_seconds is None:
        return False
    if trend.full_at_update is not None and run.total_updates is not None:
        return trend.full_at_update <= run.total_updates
    return run.eta_seconds is None or trend.full_in_seconds <= run.eta_seconds


def full_in(trend: Trend, run: RunState) -> Line:
    """`^ full in 14 min (update 1 520) at this rate`: short enough for a panel's line."""
    if trend.full_in_seconds is None:
        return line((f"^ grows {units.size(trend.bytes_per_second)}/s", "edge"))
    if not before_the_end(trend, run):
        return line((f"^ grows {_rate(trend)}, {_NOT_BEFORE}", MUTED))
    return line((f"^ full in {units.about(trend.full_in_seconds)}", "edge"), (_where(trend), MUTED), (" at this rate", MUTED))


def sentence(trend: Trend, run: RunState, width: int) -> str:
    """`GPU 0 reserved: full in 14 min (update 1 520) at this rate`, in fewer words where there is
    no room for them; where there is no limit, the supervisor's own words. In the reader's language.
    """
    if trend.full_in_seconds is None:
        return tr(trend.message)
    what = trend.what.removeprefix("anonymous ")
    if not before_the_end(trend, run):
        forms: list[tuple[str, ...]] = [(f"{what}: grows {_rate(trend)}, {_NOT_BEFORE}",), (f"{what}: {_NOT_BEFORE}",)]
    else:
        full, where = f"{what}: full in {units.about(trend.full_in_seconds)}", _where(trend)
        forms = [(full, where, " at this rate"), (full, where), (full,)]
    shown = ["".join(map(tr, form)) for form in forms]
    return next((form for form in shown if cell_len(form) <= width), shown[-1])


_NOT_BEFORE = "not full before the run ends"


def _rate(trend: Trend) -> str:
    if trend.bytes_per_update is not None:
        return f"{units.size(trend.bytes_per_update)} per update"
    return f"{units.size(trend.bytes_per_second)}/s"


def _where(trend: Trend) -> str:
    return "" if trend.full_at_update is None else f" (update {units.count(trend.full_at_update)})"
