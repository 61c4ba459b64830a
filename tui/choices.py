"""What the user chooses on the screens and finds again in later dashboards: the theme, the order of
the lists, and how curves are drawn.

Each choice is a key of the configuration, and its value is text.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from memtop.supervisor.errors import UsageError


def order_text(column: str, *, descending: bool) -> str:
    """`vram down`: the column and the direction of the arrow at its name."""
    return f"{column} {'down' if descending else 'up'}"


DEFAULTS = {
    "theme": "memtop",
    "processes-sort": order_text("vram", descending=True),
    "processes-view": "by job",
    "runs-sort": order_text("age", descending=True),
    "metrics-axis": "update",
    "metrics-smoothing": "0",
    "metrics-scale": "linear",
}
SCALES = ("linear", "log")

Save = Callable[[str, str], tuple[Path, str | None]]
"""Writes a key and its value into the user's file: returns the file, and what comes before it, if
anything does. Raises UsageError."""


class Saved(NamedTuple):
    """What became of a choice: a message."""

    key: str
    text: str
    kind: str
    """`good` if the next dashboard has the value, too."""


def offered(key: str) -> Sequence[str]:
    """The values that a key can have."""
    # A screen's module takes time to load; most dashboards need none of them here.
    if key == "theme":
        from memtop.tui.themes import NAMES

        return NAMES
    if key == "processes-sort":
        from memtop.tui.processes.table import SORTABLE

        return _orders(SORTABLE)
    if key == "processes-view":
        from memtop.tui.processes.rows import ProcessView

        return [view.value for view in ProcessView]
    if key == "runs-sort":
        from memtop.supervisor.run.runs import COLUMNS

        return _orders(column.id for column in COLUMNS)
    if key == "metrics-axis":
        from memtop.tui.metrics.curves import AXES

        return AXES
    if key == "metrics-smoothing":
        from memtop.tui.metrics.drawing import SMOOTHINGS

        return list(map(str, SMOOTHINGS))
    return SCALES


def _orders(columns: Iterable[str]) -> list[str]:
    return [order_text(column, descending=way) for column in columns for way in (True, False)]


def order_of(text: str) -> tuple[str, bool]:
    """The column, and whether its largest value is the first."""
    column, _, direction = text.rpartition(" ")
    return column, direction == "down"


class Choices:
    """The choices that count now: those of earlier dashboards, and then the user's newest ones."""

    def __init__(self, values: Mapping[str, str] | None = None, save: Save | None = None, ignored: Sequence[str] = ()) -> None:
        """`save` None: they are forgotten with the dashboard. `ignored`: why values of the
        configuration cannot be used."""
        self._values = {**DEFAULTS, **(values or {})}
        self._save = save
        self._unsaved: dict[str, str] = {}
        self._saving = threading.Lock()
        self._ignored = ignored

    def __getitem__(self, key: str) -> str:
        return self._values[key]

    def take_ignored(self) -> Sequence[str]:
        """What the user has not been told in a dashboard yet: later ones have nothing to say."""
        ignored, self._ignored = self._ignored, ()
        return ignored

    def choose(self, key: str, value: str, *, saved: bool) -> None:
        """Use this value from now on; `save` saves it if `saved`."""
        self._values[key] = value
        if self._save is not None and saved:
            self._unsaved[key] = value

    def save(self) -> list[Saved]:
        """Save what has not been saved yet. It may take long, on a network file system for example:
        call it in a thread."""
        done = []
        with self._saving:
            while self._save is not None and self._unsaved:
                key, value = self._unsaved.popitem()
                done.append(_saved(self._save, key, value))
        return done


def _saved(save: Save, key: str, value: str) -> Saved:
    try:
        path, first = save(key, value)
    except UsageError as error:
        return Saved(key, f"{key} {value}: not saved: {error}", "bad")
    if first is not None:
        return Saved(key, f"{key} {value}: saved in {path}; but {first} comes first", "note")
    return Saved(key, f"{key} {value}: saved in {path}", "good")
