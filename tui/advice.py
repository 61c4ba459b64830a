"""What bounds a run's speed, what would help, what would not, and what a trial measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from memtop.supervisor import units
from memtop.supervisor.wire import Advice, RunState, Trial
from memtop.tui.line import MUTED, STRONG, Line, line, wrap
from memtop.tui.words import BOTTLENECKS

_STATES = {"kept": ("✓", "good"), "undone": ("■", "edge"), "refused": ("✗", "bad"), "failed": ("✗", "bad")}


class Row(NamedTuple):
    """One line of the comparison."""

    title: str
    name: str
    words: Callable[[float], str]


_ROWS = (
    Row("samples/s", "samples_per_second", units.rate),
    Row("tokens/s", "tokens_per_second", lambda value: units.count(value) if value >= 10 else units.rate(value)),
    Row("peak", "peak_bytes", units.size),
    Row("host RAM", "host_bytes", units.size),
    Row("swap", "swap_bytes", units.size),
)
_LABEL, _VALUE = 11, 20


def advice_lines(run: RunState, width: int) -> list[Line]:
    """The judgement and its evidence."""
    advice = run.advice
    if advice is None:
        return [line(("? what bounds the speed is not known yet: it is judged from measured updates", "unknown"))]
    word = BOTTLENECKS.get(advice.bottleneck, "")
    lines = [line(("The run is ", MUTED), (word, "accent"))] if word else []
    # The judgement often begins with the very word.
    rest = advice.summary.removeprefix(f"{word}: ")
    lines += wrap(rest[:1].upper() + rest[1:], width, STRONG)
    for text in advice.evidence:
        lines += [(*line(("· " if n == 0 else "  ", MUTED)), *part) for n, part in enumerate(wrap(text, width - 2))]
    return lines


def refused_lines(advice: Advice, width: int) -> list[Line]:
    """What would seem to help and must not be done, each with its reason."""
    if not advice.refused:
        return []
    lines = [line(("Not to be done now", "heading"))]
    for text in advice.refused:
        lines += [(*line(("✗ " if n == 0 else "  ", "bad")), *part) for n, part in enumerate(wrap(text, width - 2))]
    return lines


def trial_lines(trial: Trial, width: int) -> list[Line]:
    """Before and after beside each other; a change is worth believing where it is larger than the spread."""
    sign, role = _STATES.get(trial.state, ("◌", "accent"))
    head = line(("Last trial  ", "heading"), (f"{sign} {trial.state}", role))
    lines = [head, *wrap(trial.title, width, STRONG)]
    if trial.reason:
        lines += wrap(trial.reason, width)
    known = [row for row in _ROWS if row.name in trial.before or row.name in trial.after]
    if known:
        lines.append(line((f"{'':<{_LABEL}}{'before':>{_VALUE}}{'after':>{_VALUE}}{'change':>10}", MUTED)))
        lines += [_row(row, trial) for row in known]
    return lines


def _row(row: Row, trial: Trial) -> Line:
    before, after = trial.before.get(row.name), trial.after.get(row.name)
    change = "" if not before or after is None else f"{(after - before) / before * 100:+.1f} %"
    values = "".join(f"{_value(row, part):>{_VALUE}}" for part in (trial.before, trial.after))
    return line((f"{row.title:<{_LABEL}}", MUTED), (values, STRONG), (f"{change:>10}", "text"))


def _value(row: Row, measured: dict[str, float]) -> str:
    value, spread = measured.get(row.name), measured.get(f"{row.name}_spread")
    if value is None:
        return units.UNKNOWN
    return row.words(value) if spread is None else f"{row.words(value)} ± {row.words(spread)}"
