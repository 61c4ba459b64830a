"""Choosing GPU processes to end. Only the user's own can be ticked, and nothing is ticked beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.message import Message
from textual.widgets import Button, OptionList, Static
from textual.widgets.option_list import Option

from memtop.supervisor import units
from memtop.tui.draw.words import age
from memtop.tui.screens.dialog import Dialog
from memtop.tui.store import Holder

_COMMAND_WIDTH = 30


def describe(holder: Holder, now: float | None, *, command_width: int = _COMMAND_WIDTH) -> str:
    """pid, user, age, VRAM and command of one process, in columns."""
    process = holder.process
    old = units.UNKNOWN if process.started is None or now is None else age(now - process.started)
    command = (process.command or process.name or units.UNKNOWN)[:command_width]
    user = (process.user or units.UNKNOWN)[:10]
    return f"{process.pid:>8}  {user:<10} {old:>7}  {units.size(holder.used_bytes):>9}  {command:<{command_width}}"


def _prompt(holder: Holder, now: float | None, *, ticked: bool) -> Text:
    process = holder.process
    # Words in brackets, not a coloured box: the tick must be seen without colours.
    box = ("[x]" if ticked else "[ ]") if process.choosable else " - "
    word = "! stray: " if process.stray else ("" if process.choosable else "not to be chosen: ")
    return Text(f"{box} {describe(holder, now)}\n    {'':>8}  {word}{process.reason or ''}", no_wrap=True, overflow="ellipsis")


class TickList(OptionList):
    """Processes with a tick each; Space, Enter or a click changes it where that is allowed."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("space", "select", "Tick", show=False)]

    class Ticked(Message):
        """A tick was set or taken away."""

    def __init__(self, rows: Sequence[Holder], now: float | None) -> None:
        super().__init__(*(Option(_prompt(row, now, ticked=False), disabled=not row.process.choosable) for row in rows))
        self._rows = tuple(rows)
        self._now = now
        self._ticked: frozenset[int] = frozenset()

    @property
    def chosen(self) -> tuple[Holder, ...]:
        """What is ticked. Looked at once more: what may not be chosen is never in it."""
        return tuple(row for n, row in enumerate(self._rows) if n in self._ticked and row.process.choosable)

    def on_option_list_option_selected(self, message: OptionList.OptionSelected) -> None:
        message.stop()
        number = message.option_index
        self._ticked ^= {number}
        prompt = _prompt(self._rows[number], self._now, ticked=number in self._ticked)
        self.replace_option_prompt_at_index(number, prompt)
        self.post_message(self.Ticked())


class KillDialog(Dialog[tuple[Holder, ...]]):
    """Dismissed with what was ticked, or None."""

    def __init__(self, rows: Sequence[Holder], now: float | None) -> None:
        super().__init__()
        self._rows = tuple(rows)
        self._now = now

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog -dangerous") as box:
            box.border_title = "Processes that hold GPU memory"
            header = f"    {'pid':>8}  {'user':<10} {'age':>7}  {'VRAM':>9}  command"
            yield Static(header if self._rows else "no process but this run's uses a GPU", classes="muted", markup=False)
            yield TickList(self._rows, self._now)
            note = "Space ticks. Other users' processes and services of the machine cannot be chosen."
            yield Static(note, classes="muted", markup=False)
            with Horizontal(classes="buttons"):
                yield Button("Cancel", id="cancel", compact=True)
                yield Button("End the ticked…", id="confirm", variant="error", compact=True, disabled=True)

    def on_mount(self) -> None:
        rows = self.query_one(TickList)
        rows.display = bool(self._rows)
        if any(row.process.choosable for row in self._rows):
            # Enter in the list only ticks.
            rows.focus()
            rows.action_first()
        else:
            self.query_one("#cancel", Button).focus()

    @on(TickList.Ticked)
    def _changed(self) -> None:
        self.query_one("#confirm", Button).disabled = not self.query_one(TickList).chosen

    @on(Button.Pressed, "#confirm")
    def _confirmed(self) -> None:
        self.dismiss(self.query_one(TickList).chosen)
