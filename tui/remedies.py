"""One remedy on a few lines: its title, its predicted peak as a bar, and its cost; and forecasts of
edited settings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from typing import NamedTuple

from memtop.presets.comparison import speed_words
from memtop.presets.measured import Learned
from memtop.presets.schema import Settings
from memtop.supervisor import units
from memtop.supervisor.interpreters import learned_on
from memtop.supervisor.language import separator, tr
from memtop.supervisor.monitor.values import EDGE_FROM, mark
from memtop.supervisor.plan import gpu_kind
from memtop.supervisor.recovery.forecast import Forecaster, gpu_of
from memtop.supervisor.recovery.values import Forecast, Remedy, unknown_for_several
from memtop.tui.bars import ROLES, Share, memory_bar
from memtop.tui.line import MUTED, STRONG, Line, fit, join, line, width_of, wrap
from memtop.tui.store import Store

PREDICTED_GLYPH = "╍"
MEASURED_GLYPH = "█"
FORECAST = "forecast"
"""The group of the workers that foresee peaks, in threads."""
_BAR, _SHORT_BAR, _SHORTEST_BAR = 30, 12, 6
_WIDEST = 80
"""Cells of the bar of a form."""
_WIDE_FROM = 90
_COSTS = {
    "none": "only you can do this",
    "live": "at the next update, no restart",
    "resumes": "resumes",
    "converts": "resumes, the optimizer's state is converted",
    "new run": "begins a new run: a command to copy",
}


def is_applicable(remedy: Remedy) -> bool:
    """Whether memtop can apply it to this run; else it is a command for the user to copy."""
    return remedy.resumable not in ("none", "new run") and bool(remedy.assignments or remedy.preset)


def unknown_lines(remedies: Iterable[Remedy], width: int) -> tuple[list[str], list[Line]]:
    """Why peaks of several remedies are not known, and that as lines: each need not say it."""
    reasons = unknown_for_several(remedy for remedy in remedies if is_applicable(remedy))
    words = (f"? peaks not known where none is given: {reason}" for reason in reasons)
    return reasons, [part for text in words for part in wrap(text, width, "unknown")]


def remedy_lines(
    number: int, remedy: Remedy, width: int, *, alive: bool, resumes: bool = True, said: Collection[str] = ()
) -> tuple[Line, ...]:
    """`1  batch 8 -> 4, accumulation 4 -> 8` and, below it, the prediction and the cost.

    `alive`: the run trains, so that live changes need no restart. Without `resumes` a restart is
    not known to continue where the run was. `said`: reasons without a forecast that stand above.
    """
    indent = line("   ")
    room = max(10, width - width_of(indent))
    title = wrap(remedy.title, room, STRONG)
    price = [line((words, role)) for words, role in _price(remedy, alive=alive, resumes=resumes)]
    below: list[Line] = []
    if remedy.forecast is not None:
        prediction = predicted_line(remedy.forecast, room)
        both = join((prediction, join(price, separator(", "))), "   ")
        below = [both] if width_of(both) <= room else [prediction, *_packed(price, room)]
    else:
        if is_applicable(remedy) and remedy.forecast_unknown not in said:
            reason = remedy.forecast_unknown or "no measurement allows a forecast"
            below = wrap(f"? peak not known: {reason}", room, "unknown")
        below += _packed(price, room)
    head = line((f"{number:<3}", MUTED))
    return (
        *((*(indent if n else head), *part) for n, part in enumerate(title)),
        *((*indent, *part) for part in below),
    )


def why_words(remedy: Remedy) -> str:
    """Why it helps and what its prediction comes from, in the reader's language."""
    if remedy.forecast is None:
        return tr(remedy.why)
    return separator(". ").join((tr(remedy.why), tr(_prediction(remedy.forecast))))


def _prediction(found: Forecast) -> str:
    if found.least_bytes is None or found.most_bytes is None:
        return f"Predicted from: {found.basis}."
    least, most = units.size(found.least_bytes), units.size(found.most_bytes)
    return f"Predicted between {least} and {most}, from: {found.basis}."


def predicted_line(forecast: Forecast, width: int) -> Line:
    """`╍╍╍╍╍▴   ┊┊   ~13.9 of 19.6 GiB  70.9 % · safe`: dashed, and always with `~`, because it is
    not measured.
    """
    if forecast.fraction is None:
        return fit(line((f"~{units.size(forecast.peak_bytes)} predicted", "predicted")), width)
    of = units.scale(forecast.total_bytes)
    size = f"~{of.number(forecast.taken_bytes)} of {of.number(forecast.total_bytes)} {of.unit}"
    numbers = line(
        (size, "predicted"),
        (f" {units.percent(forecast.fraction):>7} ", "predicted"),
        (f"{mark(forecast.band)} {forecast.band.value}", ROLES[forecast.band]),
    )
    room = min(_BAR if width >= _WIDE_FROM else _SHORT_BAR, width - width_of(numbers) - 1)
    if room < _SHORTEST_BAR:
        return numbers
    end = min(1.0, forecast.fraction)
    bar = memory_bar(room, [Share(end, PREDICTED_GLYPH, "predictedbar")], predicted=end)
    return (*bar, (" ", "text"), *numbers)


def _price(remedy: Remedy, *, alive: bool, resumes: bool) -> list[tuple[str, str]]:
    """The costs, the most important first, with their roles."""
    found = [("training unchanged", "good") if remedy.keeps_math else ("changes training", "edge")]
    if remedy.resumable == "none":
        copied = "text" if remedy.writes else "a command" if remedy.command else None
        found = [(f"only you can do this: {copied} to copy" if copied else _COSTS["none"], MUTED)]
    else:
        cost = "resumes" if remedy.resumable == "live" and not alive else remedy.resumable
        if resumes or cost != "resumes":
            found.append((_COSTS[cost], "text" if cost != "new run" else "edge"))
    if remedy.needs_consent and is_applicable(remedy):
        found.insert(0, ("! needs your consent", "edge"))
    if is_applicable(remedy):
        found.append((_speed(remedy), MUTED))
    if remedy.seconds_left is not None:
        found.append((f"about {units.duration(remedy.seconds_left)} left", MUTED))
    return found


def _speed(remedy: Remedy) -> str:
    if remedy.speed is None:
        return speed_words(remedy.speed_class)
    change = round(remedy.speed - 1, 2)
    return "about the same speed" if change == 0 else f"speed about {units.change(change, 0)}"


def _packed(parts: list[Line], width: int) -> list[Line]:
    """Parts side by side on as many lines as needed."""
    lines: list[Line] = []
    for part in parts:
        longer = join((lines[-1], part), separator(", ")) if lines else part
        if lines and width_of(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(fit(part, width) if width_of(part) > width else part)
    return lines


async def earlier_runs(store: Store) -> Learned:
    """What earlier runs have measured on the GPU of this one. Files are read, in a thread."""
    run, gpu = store.run, gpu_of(store.run, store.gpus)
    if run is None or run.settings is None or gpu is None:
        return Learned()
    return await asyncio.to_thread(learned_on, gpu_kind(gpu), run.settings.python, without=run.folder)


class WhatIf(NamedTuple):
    """What is foreseen for edited settings."""

    after: Settings
    measured: Forecast | None
    """These are the present settings: this was measured."""
    predicted: Forecast | str
    safe: tuple[Settings, Forecast] | None
    """If the prediction is not safe: what keeps the effective batch and is."""


def what_if(forecaster: Forecaster, after: Settings) -> WhatIf:
    """It may estimate many splits: call it in a thread."""
    if (measured := forecaster.measured(after)) is not None:
        return WhatIf(after, measured, measured, None)
    found = forecaster.predicted(after)
    unsafe = isinstance(found, Forecast) and not found.is_measured and (found.fraction or 0) >= EDGE_FROM
    return WhatIf(after, None, found, forecaster.safe_split(after) if unsafe else None)


def forecast_lines(forecaster: Forecaster, seen: WhatIf | None, width: int) -> list[Line]:
    """`VRAM peak 17.1 GiB measured -> ~13.9 GiB predicted 70.9 % · safe`, its bar with the measured
    peak, and the basis; or why there is no forecast. Of the present settings only what was
    measured. None: not foreseen yet.
    """
    what, now = forecaster.what, forecaster.current
    if seen is None:
        return [line((f"{what} ", MUTED), ("…", MUTED))]
    if (peak := seen.measured) is not None:
        # The list of runs shows the highest with any settings.
        measured = f"{units.size(peak.peak_bytes)} measured with these settings"
        head = line((f"{what} ", MUTED), (measured, STRONG), *_share(peak, STRONG))
        return [fit(head, width), *_bar(None, peak, width), *_with_others(forecaster, width)]
    found = seen.predicted
    if isinstance(found, str):
        return wrap(f"? {what} cannot be predicted: {found}", width, "unknown")
    before = "" if now is None else f"{units.size(now.bytes)} measured -> "
    if found.is_measured:
        # What others hold has a line of its own.
        earlier = f"{units.size(found.peak_bytes)} {found.basis.split('; ')[0]}"
        return [
            fit(line((f"{what} ", MUTED), (before, STRONG), (earlier, STRONG), *_share(found, STRONG)), width),
            *_bar(None, found, width),
            *_with_others(forecaster, width),
        ]
    predicted = (f"~{units.size(found.peak_bytes)} predicted", "predicted")
    head = line((f"{what} ", MUTED), (before, STRONG), predicted, *_share(found, "predicted"))
    bar = _bar(found, None if now is None else forecaster.seen(now), width)
    return [fit(head, width), *bar, *_safe_split(seen.safe, found, width), *basis_lines(found, width)]


def _with_others(forecaster: Forecaster, width: int) -> list[Line]:
    """Of a measured peak, whose percentage would otherwise look wrong."""
    if not forecaster.others_bytes:
        return []
    return wrap(f"the percentage counts the {units.size(forecaster.others_bytes)} of other processes, too", width, MUTED)


def _safe_split(safe: tuple[Settings, Forecast] | None, found: Forecast, width: int) -> list[Line]:
    """What keeps the effective batch and is safe; empty if the prediction is safe."""
    if found.fraction is None or found.fraction < EDGE_FROM:
        return []
    if safe is None:
        return wrap("no split with this effective batch is predicted to be safe", width, "edge")
    settings, less = safe
    words = f"{settings.batch} x {settings.accumulation} keeps the effective batch, safe at ~{units.size(less.peak_bytes)}"
    return wrap(words, width, "edge")


def basis_lines(found: Forecast, width: int) -> list[Line]:
    """`between 11.0 GiB and 13.2 GiB, from: estimate`"""
    if found.least_bytes is None or found.most_bytes is None:
        return wrap(f"from: {found.basis}", width, MUTED)
    least, most = units.size(found.least_bytes), units.size(found.most_bytes)
    return wrap(f"between {least} and {most}, from: {found.basis}", width, MUTED)


def _bar(predicted: Forecast | None, measured: Forecast | None, width: int) -> list[Line]:
    """What is predicted as a dashed bar with the measured peak in it; without a prediction, what
    was measured. Empty if the total is not known."""
    peak = None if measured is None else measured.fraction
    shown = peak if predicted is None else predicted.fraction
    if shown is None:
        return []
    end = min(1.0, shown)
    if predicted is None:
        return [memory_bar(min(_WIDEST, width), [Share(end, MEASURED_GLYPH, "alloc")])]
    return [memory_bar(min(_WIDEST, width), [Share(end, PREDICTED_GLYPH, "predictedbar")], peak=peak, predicted=end)]


def _share(peak: Forecast, role: str) -> Line:
    """` 70.9 % · safe`; empty if the total is not known."""
    if peak.fraction is None:
        return ()
    return line((f" {units.percent(peak.fraction)} ", role), (f"{mark(peak.band)} {peak.band.value}", ROLES[peak.band]))
