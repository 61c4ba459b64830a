"""Choosing GPU processes to end. Only the user's own can be ticked, and nothing is ticked beforehand."""

from __future__ import annotations

from collections.abc import Sequence

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widgets import Button, SelectionList, Static
from textual.widgets.selection_list import Selection

from memtop.supervisor import units
from memtop.tui.draw.training import age
from memtop.tui.screens.dialog import Dialog
from memtop.tui.store import Holder

_COMMAND_WIDTH = 30


def describe(holder: Holder, now: float | None) -> str:
    """pid, user, age, VRAM and command of one process, in columns."""
    process = holder.process
    old = units.UNKNOWN if process.started is None or now is None else age(now - process.started)
    command = (process.command or process.name or units.UNKNOWN)[:_COMMAND_WIDTH]
    user = (process.user or units.UNKNOWN)[:10]
    return f"{process.pid:>8}  {user:<10} {old:>7}  {units.size(holder.used_bytes):>9}  {command:<{_COMMAND_WIDTH}}"


def _prompt(holder: Holder, now: float | None) -> str:
    process = holder.process
    word = "! stray" if process.stray else ("  yours" if process.choosable else "  not to be chosen")
    reason = f": {process.reason}" if process.reason else ""
    return f"{describe(holder, now)}\n          {word}{reason}"


class KillDialog(Dialog[tuple[Holder, ...]]):
    """Dismissed with what was ticked, or None."""

    def __init__(self, rows: Sequence[Holder], now: float | None) -> None:
        super().__init__()
        self._rows = tuple(rows)
        self._now = now

    @property
    def choosable(self) -> tuple[Holder, ...]:
        return tuple(row for row in self._rows if row.process.choosable)

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog -dangerous") as box:
            box.border_title = "Processes that hold GPU memory"
            header = f"    {'pid':>8}  {'user':<10} {'age':>7}  {'VRAM':>9}  command"
            yield Static(header if self._rows else "no process but this run's uses a GPU", classes="muted", markup=False)
            yield SelectionList[int](
                *(
                    Selection(_plain(_prompt(row, self._now)), number, disabled=not row.process.choosable)
                    for number, row in enumerate(self._rows)
                )
            )
            note = "Space ticks. Other users' processes and services of the machine cannot be chosen."
            yield Static(note, classes="muted", markup=False)
            with Horizontal(classes="buttons"):
                yield Button("Cancel", id="cancel", compact=True)
                yield Button("End the ticked…", id="confirm", variant="error", compact=True, disabled=True)

    def on_mount(self) -> None:
        # Enter in the list only ticks; where there is nothing to tick, it shall close the dialog.
        rows = self.query_one(SelectionList)
        rows.display = bool(self._rows)
        target = rows if self.choosable else self.query_one("#cancel", Button)
        target.focus()

    @on(SelectionList.SelectedChanged)
    def _ticked(self) -> None:
        self.query_one("#confirm", Button).disabled = not self._chosen()

    @on(Button.Pressed, "#confirm")
    def _confirmed(self) -> None:
        self.dismiss(self._chosen())

    def _chosen(self) -> tuple[Holder, ...]:
        numbers = set(self.query_one(SelectionList).selected)
        return tuple(row for n, row in enumerate(self._rows) if n in numbers and row.process.choosable)


def _plain(text: str) -> str:
    # Commands may contain what looks like markup.
    return text.replace("[", "\\[")
