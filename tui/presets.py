"""The preset table: what each preset would change in this run.

Enter applies its memory strategy, Esc returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Button, DataTable

from memtop.presets import Preset
from memtop.presets.comparison import Outlook, outlook
from memtop.presets.schema import Settings
from memtop.supervisor.language import Verbatim, separator, tr
from memtop.supervisor.wire import RunState
from memtop.tui.restart_plan import where_it_resumes
from memtop.tui.screen import Dialog, Words


class PresetDialog(Dialog[str]):
    """Closes with the name of the preset to apply, or None."""

    AUTO_FOCUS = "DataTable"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(str(digit), f"point({digit})", f"Preset {digit}", show=False) for digit in range(10)
    ]

    def __init__(
        self,
        run: RunState,
        settings: Settings,
        presets: dict[str, Preset],
        chosen_key: str,
        failed: Sequence[Settings] = (),
    ) -> None:
        super().__init__()
        self._run = run
        self._settings = settings
        self._outlooks = {name: outlook(settings, preset, failed) for name, preset in presets.items()}
        self._chosen_key = chosen_key

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog presets") as box:
            box.border_title = tr(f"Preset for {self._run.name}")
            yield DataTable(cursor_type="row", zebra_stripes=False)
            yield Words(id="description", classes="muted")
            yield Words(tr(where_it_resumes(self._run)), classes="muted")
            with Horizontal(classes="buttons"):
                yield Button(tr("Cancel"), id="cancel", compact=True)
                yield Button(tr("Apply"), id="confirm", variant="primary", compact=True)

    def on_mount(self) -> None:
        table = self.query_one(DataTable)
        for label in ("", "key", "preset", "B x A x W", "effective", "a switch", "T", "ZeRO", "what else changes"):
            table.add_column(tr(label))
        for look in self._outlooks.values():
            table.add_row(*self._row(look), key=look.preset.name)
        wanted = int(self._chosen_key) if self._chosen_key else self._present_key()
        if wanted is not None:
            self.action_point(wanted)

    def action_point(self, key: int) -> None:
        """Move the cursor to the preset of a digit key."""
        for row, look in enumerate(self._outlooks.values()):
            if look.preset.key == key:
                self.query_one(DataTable).move_cursor(row=row)

    @on(DataTable.RowHighlighted)
    def _pointed(self, message: DataTable.RowHighlighted) -> None:
        self.query_one("#description", Words).say(_description(self._outlooks[str(message.row_key.value)]))

    @on(DataTable.RowSelected)
    def _entered(self, message: DataTable.RowSelected) -> None:
        self.dismiss(str(message.row_key.value))

    @on(Button.Pressed, "#confirm")
    def _confirmed(self) -> None:
        table = self.query_one(DataTable)
        self.dismiss(list(self._outlooks)[table.cursor_row])

    def _present_key(self) -> int | None:
        present = self._outlooks.get(self._settings.preset)
        return present.preset.key if present else None

    def _row(self, look: Outlook) -> list[Text]:
        after, preset = look.kept, look.preset
        chosen = preset.name == self._settings.preset
        # An edit may have changed the preset's split: then the preset can be applied again.
        now = after == self._settings
        cells = (
            "▸" if chosen else " ",
            "–" if preset.key is None else str(preset.key),
            Verbatim(preset.name),
            after.split_text,
            str(after.effective_batch),
            "is on now" if now else look.switch,
            str(after.seq_len),
            after.zero.short,
            # The split and ZeRO have their own columns.
            _listed(change for change in look.changes if not change.startswith(("split", "plain", "ZeRO"))) or "nothing",
        )
        return [Text(tr(cell), style="bold" if chosen else "") for cell in cells]


def _description(look: Outlook) -> str:
    """The preset in words: what a switch changes in this run, and what a new run would use."""
    changed = _listed(look.changes) or tr("nothing changes")
    lines = [separator(". ").join((tr(look.preset.title), tr(look.preset.description)))]
    lines.append(f"{tr('Switch')}{separator(': ')}{tr(look.switch)}{separator(', ')}{changed}")
    if look.switch == "refused":
        lines[1] = tr(f"Switch: refused, {look.reason}")
    elif look.switch == "converts":
        lines[1] += f" ({tr(look.reason)})"
    if look.risk is not None:
        lines.append(tr(f"! {look.risk}"))
    if look.switch_whole == "refused" and look.reason_whole != look.reason:
        lines.append(tr(f"Whole: refused, {look.reason_whole}"))
    elif look.switch_whole != "refused" and look.whole_changes != look.changes:
        head = tr(f"Whole ({look.switch_whole}, memtop train --fresh --preset {look.preset.name})")
        lines.append(f"{head}{separator(': ')}{_listed(change for change in look.whole_changes if change not in look.changes)}")
    return "\n".join(lines)


def _listed(changes: Iterable[str]) -> str:
    return separator("; ").join(map(tr, changes))
