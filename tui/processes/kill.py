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
from memtop.tui.dialog import Dialog
from memtop.tui.line import cropped, plain, wrap
from memtop.tui.store import Holder
from memtop.tui.words import age

_DIALOG_WIDTH = 88
# What stands before the command: the box and the columns.
_BEFORE = 52
_GPU_WIDTH = 5
# Frame, padding and scroll bar of the dialog.
_AROUND = 8


def describe(holder: Holder, now: float | None, *, command_width: int) -> str:
    """pid, user, age, GPUs, VRAM and command of one process, in columns."""
    process = holder.process
    old = units.UNKNOWN if process.started is None or now is None else age(now - process.started)
    command = cropped(process.command or process.name or units.UNKNOWN, command_width)
    user = cropped(process.user or units.UNKNOWN, 10)
    where = cropped(holder.where, _GPU_WIDTH)
    return f"{process.pid:>8}  {user} {old:>7}  {where}  {units.size(holder.used_bytes):>9}  {command}"


def _prompt(holder: Holder, now: float | None, width: int, *, ticked: bool) -> Text:
    process = holder.process
    # Words in brackets, not a coloured box: the tick must be seen without colours.
    box = ("[x]" if ticked else "[ ]") if process.choosable else " - "
    word = "! stray: " if process.stray else ("" if process.choosable else "not to be chosen: ")
    indent = " " * 14
    why = [indent + plain(one) for one in wrap(f"{word}{process.reason or ''}", width - len(indent))]
    return Text("\n".join([f"{box} {describe(holder, now, command_width=width - _BEFORE)}", *why]))


class TickList(OptionList):
    """Processes with a tick each; Space, Enter or a click changes it where that is allowed."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("space", "select", "Tick", show=False)]

    class Ticked(Message):
        """A tick was set or taken away."""

    def __init__(self, rows: Sequence[Holder], now: float | None, width: int) -> None:
        super().__init__(*(Option(_prompt(row, now, width, ticked=False), disabled=not row.process.choosable) for row in rows))
        self._rows = tuple(rows)
        self._width = width
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
        prompt = _prompt(self._rows[number], self._now, self._width, ticked=number in self._ticked)
        self.replace_option_prompt_at_index(number, prompt)
        self.post_message(self.Ticked())


class KillDialog(Dialog[tuple[Holder, ...]]):
    """Dismissed with what was ticked, or None."""

    def __init__(self, rows: Sequence[Holder], now: float | None, missing: Sequence[str] = ()) -> None:
        """`missing`: why there may be processes that are not in the list, a sentence each."""
        super().__init__()
        self._missing = tuple(missing)
        self._rows = tuple(rows)
        self._now = now

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog -dangerous") as box:
            box.border_title = "Processes that hold GPU memory"
            header = f"    {'pid':>8}  {'user':<10} {'age':>7}  {'GPU':<{_GPU_WIDTH}}  {'VRAM':>9}  command"
            nobody = [] if self._missing else ["no process but this run's uses a GPU"]
            above = [*self._missing, *([header] if self._rows else nobody)]
            yield Static("\n".join(above), classes="muted", markup=False)
            yield TickList(self._rows, self._now, min(_DIALOG_WIDTH, self.app.size.width * 96 // 100) - _AROUND)
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
