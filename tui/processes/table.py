"""The process list: which columns fit, and how a row looks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from memtop.supervisor import units
from memtop.supervisor.language import tr
from memtop.supervisor.monitor.values import Job
from memtop.tui.line import JOB, MUTED, STRONG, TEXT, Heading, Line, Span, cell, fit, foreign, name_cell
from memtop.tui.processes.rows import Order, ProcessRow
from memtop.tui.words import age

_MARK_WIDTH = 2
_COMMAND_LOWEST = 24
_PLURALS = {"process": "processes"}


class ProcessColumn(NamedTuple):
    """One column; on a narrow terminal columns with a high rank are dropped first."""

    id: str
    title: str
    width: int
    rank: int
    text: Callable[[ProcessRow], str]
    right: bool = True


def _share(name: str) -> Callable[[ProcessRow], str]:
    def text(row: ProcessRow) -> str:
        if row.process is None and name != "cpu":
            # Fractions of different GPUs cannot be added.
            return ""
        return units.percent(row.number(name), 0)

    return text


def _bytes(name: str) -> Callable[[ProcessRow], str]:
    return lambda row: units.size(row.number(name))


def _vram(row: ProcessRow) -> str:
    size = row.number("vram")
    return units.size(size) if row.at_least is None else units.at_least(size)


def _time(row: ProcessRow) -> str:
    seconds = row.number("time")
    return units.UNKNOWN if seconds is None else age(seconds)


COLUMNS = (
    ProcessColumn("pid", "pid", 8, 0, lambda row: str(row.pid)),
    ProcessColumn("user", "user", 8, 2, lambda row: row.user or units.UNKNOWN, right=False),
    ProcessColumn("gpu", "GPU", 4, 1, lambda row: row.where, right=False),
    ProcessColumn("vram", "VRAM", 10, 1, _vram),
    ProcessColumn("sm", "SM", 5, 3, _share("sm")),
    ProcessColumn("bw", "BW", 5, 6, _share("bw")),
    ProcessColumn("cpu", "CPU", 6, 4, _share("cpu")),
    ProcessColumn("rss", "RSS", 8, 5, _bytes("rss")),
    ProcessColumn("time", "time", 7, 4, _time),
    ProcessColumn("container", "container", 20, 7, lambda row: row.container, right=False),
)
SORTABLE = (*(column.id for column in COLUMNS), "command")


def columns_for(width: int, rows: Sequence[ProcessRow]) -> tuple[ProcessColumn, ...]:
    """The columns that leave enough room for the command. The column `container` is left out if it
    is empty in all rows.
    """
    wanted = [c for c in COLUMNS if c.id != "container" or any(row.container for row in rows)]
    room = width - _MARK_WIDTH - _COMMAND_LOWEST
    kept = set()
    for column in sorted(wanted, key=lambda c: c.rank):
        if column.width + 1 > room:
            break
        room -= column.width + 1
        kept.add(column.id)
    return tuple(column for column in wanted if column.id in kept)


def heading(columns: Sequence[ProcessColumn], order: Order, width: int) -> tuple[Line, list[Heading]]:
    """The line of column names with an arrow at the sort column, and the cells of each name."""
    spans: list[Span] = [(" " * _MARK_WIDTH, TEXT)]
    places = []
    at = _MARK_WIDTH
    for column in columns:
        name = cell(_name(column.id, column.title, order), column.width, right=column.right)
        spans.append((f"{name} ", _role(column.id, order)))
        places.append(Heading(column.id, at, at + column.width + 1))
        at += column.width + 1
    spans.append((_name("command", "command", order), _role("command", order)))
    places.append(Heading("command", at, width))
    return fit(tuple(spans), width), places


def _padded(text: str, column: ProcessColumn) -> str:
    return cell(text, column.width, right=True) if column.right else name_cell(text, column.width)


def _name(column: str, title: str, order: Order) -> str:
    return tr(title) if column != order.column else f"{tr(title)}{'▾' if order.descending else '▴'}"


def _role(column: str, order: Order) -> str:
    return "heading" if column == order.column else MUTED


def draw_row(row: ProcessRow, columns: Sequence[ProcessColumn], *, ticked: bool, followed: bool, search: str) -> Line:
    """One row: a cell for the cursor, the tick, the columns, then marks and the command."""
    spans: list[Span] = [(" ✓" if ticked else "  ", "accent")]
    quiet = row.process is None
    for column in columns:
        spans.append((f"{_padded(column.text(row), column)} ", STRONG if quiet else TEXT))
    spans += _what(row, followed)
    return tuple(_with_match(spans, search))


def _what(row: ProcessRow, followed: bool) -> list[Span]:
    spans: list[Span] = [("  " * row.depth, TEXT)] if row.depth else []
    if row.process is None:
        fold = "" if row.folded is None else "▸ " if row.folded else "▾ "
        words = f"  {tr(roles_in_words(row.job))}" if row.job is not None else ""
        return [*spans, (fold, "accent"), (row.job_name, JOB), (words, MUTED)]
    process = row.process
    if process.stray:
        spans.append((tr("! stray "), "edge"))
    if process.gone:
        spans.append((tr("! no such process "), "edge"))
    if followed:
        spans.append((tr("▸ followed "), "accent"))
    if row.siblings:
        spans.append(("= ", MUTED))
    if process.role not in (None, "process") and row.depth:
        spans.append((f"{tr(process.role)}  ", "accent"))
    command = row.command
    return [*spans, (command or units.UNKNOWN, STRONG if command else "unknown")]


def roles_in_words(job: Job | None) -> str:
    """`launcher, 2 ranks, 8 loader workers`."""
    if job is None:
        return ""
    words = []
    for role, number in job.roles.items():
        many = _PLURALS.get(role, f"{role}s")
        words.append(role if number == 1 else f"{number} {many}")
    return ", ".join(words)


def _with_match(spans: Sequence[Span], search: str) -> list[Span]:
    """The spans with the search text marked; a match across two spans is not marked."""
    if not search:
        return list(spans)
    marked: list[Span] = []
    for text, role in spans:
        start = text.casefold().find(search)
        if start < 0:
            marked.append((text, role))
        else:
            end = start + len(search)
            marked += foreign((text[:start], role), (text[start:end], "match"), (text[end:], role))
    return marked
