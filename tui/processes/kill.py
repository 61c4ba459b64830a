"""Choosing GPU processes, asking, ending them and reporting the outcome.

Only the user's processes can be chosen, and none is chosen beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.message import Message
from textual.widgets import Button, OptionList
from textual.widgets.option_list import Option

from memtop.supervisor import units, wire
from memtop.supervisor.language import Verbatim, tr
from memtop.tui.line import cell, cropped, name_cell, plain, wrap
from memtop.tui.screen import ConfirmDialog, Dashboard, Dialog, Words
from memtop.tui.store import Holder, Store
from memtop.tui.words import age

_DIALOG_WIDTH = 88
# Cells before the command: the box and the columns.
_BEFORE = 52
_GPU_WIDTH = 5
# Frame, padding and scroll bar of the dialog.
_AROUND = 8


def describe(holder: Holder, now: float | None, *, command_width: int) -> Verbatim:
    """pid, user, age, GPUs, VRAM and command of one process, in columns."""
    process = holder.process
    old = units.UNKNOWN if process.started is None or now is None else age(now - process.started)
    command = cropped(process.command or process.name or units.UNKNOWN, command_width)
    user = name_cell(process.user or units.UNKNOWN, 10)
    where = cropped(holder.where, _GPU_WIDTH)
    return Verbatim(f"{process.pid:>8}  {user} {cell(old, 7, right=True)}  {where}  {holder.memory:>10}  {command}")


def _heading() -> str:
    """The names of the columns, for rows with a box before them."""
    end = f"{cell('GPU', _GPU_WIDTH)}  {cell('VRAM', 10, right=True)}  {tr('command')}"
    return f"    {cell('pid', 8, right=True)}  {cell('user', 10)} {cell('age', 7, right=True)}  {end}"


def _prompt(holder: Holder, now: float | None, width: int, *, ticked: bool) -> Text:
    process = holder.process
    # Brackets instead of colour, so that the tick is visible without colours.
    box = ("[x]" if ticked else "[ ]") if process.choosable else " - "
    word = "! stray: " if process.stray else ("" if process.choosable else "cannot be chosen: ")
    indent = " " * 14
    why = [indent + plain(one) for one in wrap(f"{tr(word)}{tr(process.reason or '')}", width - len(indent))]
    return Text("\n".join([f"{box} {describe(holder, now, command_width=width - _BEFORE)}", *why]))


class TickList(OptionList):
    """Processes with ticks; Space, Enter or a click changes a tick if the process can be chosen."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("space", "select", "Tick", show=False)]

    class Ticked(Message):
        """A tick was set or removed."""

    def __init__(self, rows: Sequence[Holder], now: float | None, width: int) -> None:
        super().__init__(*(Option(_prompt(row, now, width, ticked=False), disabled=not row.process.choosable) for row in rows))
        self._rows = tuple(rows)
        self._width = width
        self._now = now
        self._ticked: frozenset[int] = frozenset()

    @property
    def chosen(self) -> tuple[Holder, ...]:
        """The ticked processes.

        Checked again: a process that cannot be chosen is never among them.
        """
        return tuple(row for n, row in enumerate(self._rows) if n in self._ticked and row.process.choosable)

    def on_option_list_option_selected(self, message: OptionList.OptionSelected) -> None:
        message.stop()
        number = message.option_index
        self._ticked ^= {number}
        prompt = _prompt(self._rows[number], self._now, self._width, ticked=number in self._ticked)
        self.replace_option_prompt_at_index(number, prompt)
        self.post_message(self.Ticked())


class KillDialog(Dialog[tuple[Holder, ...]]):
    """Closes with the ticked processes, or None."""

    def __init__(self, rows: Sequence[Holder], now: float | None, missing: Sequence[str] = ()) -> None:
        """`missing` holds sentences on why processes may be missing from the list."""
        super().__init__()
        self._missing = tuple(missing)
        self._rows = tuple(rows)
        self._now = now

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog -dangerous") as box:
            box.border_title = tr("Processes that hold GPU memory")
            empty = [] if self._missing else [tr("only this run's processes use a GPU")]
            above = [*map(tr, self._missing), *([_heading()] if self._rows else empty)]
            yield Words("\n".join(above), classes="muted")
            yield TickList(self._rows, self._now, min(_DIALOG_WIDTH, self.app.size.width * 96 // 100) - _AROUND)
            if self._rows:
                note = "Space ticks, Tab goes to the buttons. Other users' processes and services cannot be chosen."
                yield Words(tr(note), classes="muted")
            with Horizontal(classes="buttons"):
                yield Button(tr("Cancel"), id="cancel", compact=True)
                yield Button(tr("End the ticked…"), id="confirm", variant="error", compact=True, disabled=True)

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


# --- ending ---------------------------------------------------------------------------------------


class Speaker(Protocol):
    """A screen that shows the outcome of an action."""

    def say(self, text: str, kind: str = "note") -> None: ...


def begin_ending(
    dashboard: Dashboard, store: Store, chosen: Sequence[Holder], speaker: Speaker, answered: Callable[[bool], None]
) -> bool:
    """Ask, then end the processes in a worker of the application: it continues and reports even if
    the screen is left.

    Returns False if processes are being ended already.
    """
    if dashboard.ending_processes:
        speaker.say("processes are being ended already: wait for their report")
        return False
    ending = end_chosen(dashboard, store, chosen, speaker, lambda: answered(True), lambda: answered(False))
    dashboard.app.run_worker(ending, group="ending", exclusive=True)
    return True


async def end_chosen(
    dashboard: Dashboard,
    store: Store,
    chosen: Sequence[Holder],
    speaker: Speaker,
    answered: Callable[[], None],
    refused: Callable[[], None] = lambda: None,
) -> None:
    """Name the chosen processes and what ending them costs, ask, end them, and report.

    `answered` is called as soon as the user has said yes, before the processes end; `refused` if
    the user said no.
    """
    one = len(chosen) == 1
    lines = [
        f"End {'this process' if one else f'these {len(chosen)} processes'}?",
        "",
        *(line for holder in chosen for line in _named(holder, store.now)),
        "",
        *consequences(chosen, store),
    ]
    label = "End it" if one else f"End {len(chosen)}"
    app = dashboard.app
    if not await app.push_screen_wait(ConfirmDialog("End processes", lines, confirm=label)):
        refused()
        return
    answered()
    machine = dashboard.store.machine
    assert machine is not None
    dashboard.ending_processes = True
    try:
        speaker.say("ending: interrupt first, kill last, up to 20 s", "busy")
        outcome = await dashboard.process_actions.end_processes([holder.process for holder in chosen], machine)
    finally:
        dashboard.ending_processes = False
    # If the screen was left meanwhile, the dashboard shows the report.
    still_open: Sequence[object] = app.screen_stack
    reporter: Speaker = speaker if speaker in still_open else dashboard
    reporter.say(outcome.text, "good" if outcome.good else "failed")


def _named(holder: Holder, now: float | None) -> tuple[Verbatim, Verbatim]:
    """The process, and below it its whole command: two runs may differ in the last word only."""
    process = holder.process
    where = tr(f"on GPU {', '.join(map(str, holder.gpu_indices))}: ")
    return (
        Verbatim(describe(holder, now, command_width=0).rstrip()),
        Verbatim(f"{'':>10}{where}{process.command or process.name or units.UNKNOWN}"),
    )


def consequences(chosen: Sequence[Holder], store: Store) -> list[str]:
    """What ending these processes frees and what it loses."""
    known = [holder.at_least_bytes for holder in chosen if holder.at_least_bytes is not None]
    all_known = all(holder.used_bytes is not None for holder in chosen)
    freed = "an unknown amount"
    if known and (all_known or any(known)):
        freed = units.size(sum(known)) if all_known else units.at_least(sum(known))
    lines = [f"{'Its' if len(chosen) == 1 else 'Their'} GPU memory is freed ({freed}); unsaved work is lost."]
    for name in dict.fromkeys(holder.process.run for holder in chosen if not holder.process.stray):
        if name is not None:
            lines.append(_loss_of_run(name, store.run))
    return lines


def _loss_of_run(name: str, run: wire.RunState | None) -> str:
    if run is None or run.name != name:
        return f"Run {name} would lose the work since its newest checkpoint (see memtop show {name})."
    saved = run.checkpoint.updates if run.checkpoint is not None and run.checkpoint.complete else None
    if run.updates is None:
        return f"Run {name} would end; its progress is not known."
    if saved is None:
        return f"Run {name} would lose all of its {units.count(run.updates)} updates: it has no checkpoint yet."
    lost = max(0, run.updates - saved)
    return f"Run {name} would lose {units.count(lost)} updates, back to update {units.count(saved)}. Stop saves first."
