"""The preset table: what each preset would change in this run.

Enter applies its memory strategy, Esc returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import ClassVar

from rich.cells import cell_len
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Button

from memtop.presets import Preset
from memtop.presets.comparison import Outlook, other_changes, outlook
from memtop.presets.fields import ZERO
from memtop.presets.schema import Settings
from memtop.supervisor import units
from memtop.supervisor.language import Verbatim, separator, tr
from memtop.supervisor.monitor.values import mark
from memtop.supervisor.recovery.values import Forecast
from memtop.supervisor.wire import RunState
from memtop.tui.line import MUTED, STRONG, TEXT, Line, cropped, foreign, wrap_within
from memtop.tui.line_list import Entry, LineList, ListContent
from memtop.tui.panel import LinePanel
from memtop.tui.remedies import FORECAST
from memtop.tui.restart_plan import where_it_resumes
from memtop.tui.screen import Dialog, KeysDialog
from memtop.tui.store import Store

_WIDEST = 130
_SIDES = 4
"""Cells of the frame and of the margins beside the text."""
_TABLE = 14
"""The most lines of the table."""
_AROUND = 2 + 1 + 2
"""Lines of the frame, below the table, and of the buttons."""


class PresetDialog(Dialog[str]):
    """Closes with the name of the preset to apply, or None."""

    AUTO_FOCUS = "LineList"
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(digit), f"point({digit})", f"Preset {digit}", show=False) for digit in range(2, 10)),
        Binding("0", "point(0)", "Preset 0", show=False),
        Binding("1", "point(1)", "Select", key_display="1-0", tooltip="Select the preset with this key; ● is the present one"),
        Binding(
            "enter",
            "apply",
            "Apply",
            key_display="Enter",
            tooltip="Restart with the memory strategy of the selected preset",
        ),
        Binding("question_mark", "keys", "Help", show=False),
    ]

    def __init__(
        self,
        run: RunState,
        settings: Settings,
        presets: dict[str, Preset],
        chosen_key: str,
        failed: Sequence[Settings] = (),
        learn: Callable[[], Awaitable[Callable[[Settings], Forecast | str]]] | None = None,
    ) -> None:
        """`learn` gives what foresees the peak of settings; None: nothing does."""
        super().__init__()
        self._run = run
        self._settings = settings
        self._outlooks = {name: outlook(settings, preset, failed) for name, preset in presets.items()}
        self._possible = {name: look.kept for name, look in self._outlooks.items() if look.switch != "refused"}
        self._peaks: dict[str, Forecast | str | None] = {} if learn is None else dict.fromkeys(self._possible)
        """By preset, the predicted peak, or why there is none; None before that is known."""
        self._learn = learn
        self._chosen_key = chosen_key

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog presets") as box:
            box.border_title = tr(f"Preset for {self._run.name}")
            yield LineList(self._draw)
            yield LinePanel(self._draw_description, id="description")
            with Horizontal(classes="buttons"):
                yield Button(tr("Cancel"), id="cancel", compact=True)
                yield Button(tr("Apply"), id="confirm", variant="primary", compact=True)

    def on_mount(self) -> None:
        # The heading and a line for each.
        self.query_one(LineList).styles.height = len(self._outlooks) + 1
        wanted = int(self._chosen_key) if self._chosen_key else self._present_key()
        if wanted is not None:
            self.action_point(wanted)
        self._pointed()
        if self._learn is not None:
            self.run_worker(self._foresee(self._learn), group=FORECAST)

    async def _foresee(self, learn: Callable[[], Awaitable[Callable[[Settings], Forecast | str]]]) -> None:
        """Each takes milliseconds, or much longer with many layers; the screen ends it."""
        foresee = await learn()
        for name, after in self._possible.items():
            self._peaks[name] = await asyncio.to_thread(foresee, after)
            if not self.is_open:
                return
            self.query_one(LineList).redraw()
            self._describe()

    def action_point(self, key: int) -> None:
        """Move the cursor to the preset of a digit key."""
        for name, look in self._outlooks.items():
            if look.preset.key == key:
                self.query_one(LineList).move_to(name)

    def on_resize(self) -> None:
        self._describe()

    @on(LineList.Moved)
    def _pointed(self) -> None:
        if self._chosen() is not None:
            self._describe()

    @on(LineList.Chosen)
    @on(Button.Pressed, "#confirm")
    def action_apply(self) -> None:
        self.dismiss(self._chosen())

    def _describe(self) -> None:
        """Show the text of the preset under the cursor, on as many lines as it needs and as there
        is room for."""
        panel = self.query_one("#description", LinePanel)
        width = min(_WIDEST, self.app.size.width * 96 // 100) - _SIDES
        panel.styles.height = len(self._described(width))
        panel.show(Store())

    def _draw_description(self, store: Store, width: int, height: int) -> list[Line]:
        return self._described(width)[:height]

    def _described(self, width: int) -> list[Line]:
        chosen = self._chosen()
        table = min(_TABLE, len(self._outlooks) + 1)
        room = self.app.size.height * 96 // 100 - table - _AROUND
        return (
            []
            if chosen is None
            else described(self._outlooks[chosen], where_it_resumes(self._run), width, room, self._peaks.get(chosen))
        )

    def action_keys(self) -> None:
        self.app.push_screen(KeysDialog(self))

    def _chosen(self) -> str | None:
        """The name of the preset under the cursor."""
        cursor = self.query_one(LineList).cursor
        return None if cursor is None else str(cursor)

    def _draw(self, width: int) -> ListContent:
        return preset_table(list(self._outlooks.values()), self._settings, width, self._peaks)

    def _present_key(self) -> int | None:
        present = self._outlooks.get(self._settings.preset)
        return present.preset.key if present else None


_TITLES = ("key", "preset", "B x A x W", "effective", "switch", "T", "ZeRO", "predicted peak", "what else changes")
_PEAK = 7
_LEAST_OF_LAST = 20
"""Cells that the last column needs; without it, the text below the table says what changes."""
_LESS_IMPORTANT = (3, 5, 2, 6)
"""The columns that a narrow table leaves out: a switch keeps the first two, and the text below the
table names the new split and ZeRO."""
_GAP = 2


def preset_table(
    looks: Sequence[Outlook], settings: Settings, width: int, peaks: Mapping[str, Forecast | str | None] | None = None
) -> ListContent:
    """A row for each preset; ● is the present one. No column is cut but the last one. `peaks`: the
    predicted ones by preset, None before they are known; without any there is no such column."""
    peaks = peaks or {}
    rows = [[tr(cell) for cell in _cells(look, settings, peaks.get(look.preset.name, ""))] for look in looks]
    titles = [tr(title) for title in _TITLES]
    wide = [max(map(cell_len, column)) for column in zip(titles, *rows, strict=True)]
    foreseen = not all(isinstance(peak, str) for peak in peaks.values())
    shown = [column for column in range(len(titles) - 1) if foreseen or column != _PEAK]
    for column in _LESS_IMPORTANT:
        if _MARGIN + sum(wide[one] + _GAP for one in shown) - _GAP > width:
            shown.remove(column)
    left = width - _MARGIN - sum(wide[one] + _GAP for one in shown)
    if left >= _LEAST_OF_LAST:
        shown.append(len(titles) - 1)
        wide[-1] = left

    def drawn(cells: Sequence[str], mark: str, role: str) -> Line:
        words = (" " * _GAP).join(cropped(cells[one], wide[one]) for one in shown)
        return foreign((f" {mark} ", "good"), (words, role))

    entries = []
    for look, cells in zip(looks, rows, strict=True):
        chosen = look.preset.name == settings.preset
        entries.append(Entry(look.preset.name, [drawn(cells, "●" if chosen else " ", STRONG if chosen else TEXT)]))
    return ListContent(entries, drawn(titles, " ", "heading"))


_MARGIN = 3
"""Cells of the cursor and of the mark of the present preset."""


def _cells(look: Outlook, settings: Settings, peak: Forecast | str | None) -> tuple[str, ...]:
    after, preset = look.kept, look.preset
    # An edit may have changed the preset's split: then the preset can be applied again.
    now = after == settings
    return (
        "–" if preset.key is None else str(preset.key),
        Verbatim(preset.name),
        after.split_text,
        str(after.effective_batch),
        "is on now" if now else look.switch,
        str(after.seq_len),
        after.zero.short,
        _peak_words(peak),
        # The split and ZeRO have their own columns.
        _listed(other_changes(settings, after, but=ZERO)) or "nothing",
    )


def _peak_words(peak: Forecast | str | None) -> str:
    """`~13.9 GiB · safe`, without `~` if it was measured; `–` if it is not known, `…` before it
    is."""
    if peak is None:
        return "…"
    if not isinstance(peak, Forecast):
        return units.UNKNOWN
    return f"{'' if peak.is_measured else '~'}{units.size(peak.peak_bytes)} {mark(peak.band)} {tr(peak.band.value)}"


def described(look: Outlook, resumes: str, width: int, room: int, peak: Forecast | str | None = None) -> list[Line]:
    """The preset in words on so many lines: what a switch changes in this run, where it resumes,
    and what a new run would use. The least important words are cut first."""
    texts = {
        "preset": separator(". ").join((tr(look.preset.title), tr(look.preset.description))),
        "switch": _of_a_switch(look),
        "risk": "" if look.risk is None else tr(f"! {look.risk}"),
        "resumes": "" if look.switch == "refused" else tr(resumes),
        "peak": _peak_sentence(peak),
        "whole": _as_a_new_run(look),
    }
    lines: dict[str, list[Line]] = {}
    for name in ("switch", "risk", "peak", "resumes", "preset", "whole"):
        left = room - sum(map(len, lines.values()))
        if texts[name] and left > 0:
            lines[name] = wrap_within(Verbatim(texts[name]), width, left, MUTED if name != "risk" else "edge")
    return [part for name in texts for part in lines.get(name, ())]


def _peak_sentence(peak: Forecast | str | None) -> str:
    if peak is None:
        return ""
    if isinstance(peak, str):
        return tr(f"The peak cannot be predicted: {peak}")
    size = units.size(peak.peak_bytes) if peak.total_bytes is None else units.used_of(peak.peak_bytes, peak.total_bytes)
    if peak.is_measured:
        return tr(f"Peak {size}: {peak.basis}")
    if peak.least_bytes is None or peak.most_bytes is None:
        return tr(f"Predicted peak ~{size}: {peak.basis}")
    least, most = units.size(peak.least_bytes), units.size(peak.most_bytes)
    return tr(f"Predicted peak ~{size}, between {least} and {most}: {peak.basis}")


def _of_a_switch(look: Outlook) -> str:
    if look.switch == "refused":
        return tr(f"Switch: refused, {look.reason}")
    changed = _listed(look.changes) or tr("nothing changes")
    why = f" ({tr(look.reason)})" if look.switch == "converts" else ""
    return f"{tr('Switch')}{separator(': ')}{tr(look.switch)}{separator(', ')}{changed}{why}"


def _as_a_new_run(look: Outlook) -> str:
    """What else changes with all values of the preset; empty if nothing does, or if a switch is
    refused for the same reason."""
    if look.switch_whole == "refused":
        return "" if look.reason_whole == look.reason else tr(f"As a new run: refused, {look.reason_whole}")
    if look.whole_changes == look.changes:
        return ""
    head = tr(f"As a new run (memtop train --fresh --preset {look.preset.name})")
    return f"{head}{separator(': ')}{_listed(change for change in look.whole_changes if change not in look.changes)}"


def _listed(changes: Iterable[str]) -> str:
    return separator("; ").join(map(tr, changes))
