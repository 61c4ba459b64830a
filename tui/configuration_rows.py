"""The configurations of a run as a table: what each was, what it needed and gave, and why it began and ended."""

from __future__ import annotations

from typing import NamedTuple

from rich.cells import cell_len

from memtop.presets.comparison import changes
from memtop.presets.schema import Settings
from memtop.supervisor import units
from memtop.supervisor.diagnosis.values import Kind
from memtop.supervisor.recovery.values import Peak
from memtop.supervisor.wire import Configuration
from memtop.tui.line import MUTED, STRONG, Heading, Line, cropped, fact, fit, join_fitting, line, wrap
from memtop.tui.words import OUTCOMES, in_words

PRESENT = "present"
_GOOD = (PRESENT, "finished")
_BAD = frozenset(("failed", *(kind.value for kind in Kind)))
_WORDS = {kind.value: words for kind, words in OUTCOMES.items()}


class Column(NamedTuple):
    """One column: its words, its cells, whether it holds numbers, and from which width of the terminal it is shown."""

    id: str
    title: str
    width: int
    number: bool = True
    shown_from: int = 0


COLUMNS = (
    Column("number", "#", 3),
    Column("attempt", "att", 3),
    Column("since", "since", 7),
    Column("split", "B x A x W", 11, number=False),
    Column("seq_len", "T", 5),
    Column("preset", "preset", 15, number=False, shown_from=110),
    Column("peak", "peak", 10),
    Column("speed", "samp/s", 7),
    Column("outcome", "outcome", 12, number=False),
)


def columns_for(width: int) -> list[Column]:
    """Those that are shown; the reason takes what is left."""
    return [column for column in COLUMNS if width >= column.shown_from]


def heading(width: int) -> tuple[Line, list[Heading]]:
    """The line of the columns' names, and where each stands."""
    places, parts, start = [], [], 2
    for column in columns_for(width):
        parts.append(_cell(column, column.title))
        places.append(Heading(column.id, start, start + column.width))
        start += column.width + 1
    return fit(line(("  " + " ".join(parts) + " reason", "heading")), width), places


def row(of: Configuration, width: int, *, present: bool) -> Line:
    """One configuration; what is not known is a dash. The present one has a dot before it, too."""
    words = {
        "number": str(of.number),
        "attempt": str(of.attempt),
        "since": units.count(of.since_update),
        "split": split_words(of.settings),
        "seq_len": units.UNKNOWN if of.settings is None else str(of.settings.seq_len),
        "preset": units.UNKNOWN if of.settings is None else of.settings.preset,
        "peak": peak_words(of.peak),
        "speed": units.UNKNOWN if of.samples_per_second is None else units.rate(of.samples_per_second),
        "outcome": outcome_words(of, present=present),
    }
    outcome = words["outcome"]
    parts: list[tuple[str, str]] = [("● " if present else "  ", "good")]
    for column in columns_for(width):
        role = _outcome_role(of.outcome or outcome) if column.id == "outcome" else STRONG if present else "text"
        parts.append((f"{_cell(column, words[column.id])} ", role))
    return fit(line(*parts, (in_words(of.reason), MUTED)), width)


def went_badly(outcome: str | None) -> bool:
    """Whether it ended in a failure of its own."""
    return outcome in _BAD


def _outcome_role(outcome: str) -> str:
    return "good" if outcome in _GOOD else "bad" if went_badly(outcome) else MUTED


def _cell(column: Column, text: str) -> str:
    if not column.number:
        return cropped(text, column.width)
    return " " * max(0, column.width - cell_len(text)) + text


def split_words(settings: Settings | None) -> str:
    return units.UNKNOWN if settings is None else f"{settings.batch} x {settings.accumulation} x {settings.world_size}"


def peak_words(peak: Peak | None) -> str:
    """`17.1 GiB` as measured; `≥ 19.1 GiB` where more was wanted than there was."""
    if peak is None:
        return units.UNKNOWN
    return f"≥ {units.size(peak.bytes)}" if peak.failed else units.size(peak.bytes)


def outcome_words(of: Configuration, *, present: bool) -> str:
    """`replaced`, or what ended it: `out of VRAM`."""
    return _WORDS.get(of.outcome or "", of.outcome) or (PRESENT if present else units.UNKNOWN)


def facts(of: Configuration, now: Configuration | None, width: int) -> list[Line]:
    """All of the one under the cursor: where it began and ended, its reason in full, and what going back to it would change."""
    until = "now" if of.until_update is None else f"update {units.count(of.until_update)}"
    updates: Line = ()
    if of.peak is not None and of.peak.updates > 0:
        updates = fact("peak measured over", f"{units.count(of.peak.updates)} update{'' if of.peak.updates == 1 else 's'}")
    preset = () if of.settings is None else fact("preset", of.settings.preset)
    head = [fact(f"configuration {of.number}, from update", units.count(of.since_update)), fact("to", until), updates, preset]
    lines = [join_fitting([part for part in head if part], width), *wrap(f"why: {in_words(of.reason)}", width)]
    return [*lines, *wrap(f"to go back: {'; '.join(differences(of, now))}", width, MUTED)]


def differences(of: Configuration, now: Configuration | None) -> list[str]:
    """What going back to it changes, each in a few words."""
    if now is None or now.number == of.number:
        return ["it is the present one"]
    if of.settings is None or now.settings is None:
        return ["what differs is not known: the settings of this program are its own"]
    return changes(now.settings, of.settings) or ["nothing differs from the present one"]
