"""The preset table: what each preset would make of this run. Enter applies, Esc returns."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Button, DataTable, Static

from memtop.presets import Preset, apply_preset
from memtop.presets.schema import Settings
from memtop.supervisor.wire import RunState
from memtop.tui.restart_plan import where_it_resumes
from memtop.tui.screens.dialog import Dialog


class PresetDialog(Dialog[str]):
    """Dismissed with the name of the preset to apply, or None."""

    AUTO_FOCUS = "DataTable"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(str(digit), f"point({digit})", f"Preset {digit}", show=False) for digit in range(1, 10)
    ]

    def __init__(self, run: RunState, settings: Settings, presets: dict[str, Preset], chosen_key: str) -> None:
        super().__init__()
        self._run = run
        self._settings = settings
        self._presets = presets
        self._chosen_key = chosen_key

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as box:
            box.border_title = f"Preset for {self._run.name}"
            yield DataTable(cursor_type="row", zebra_stripes=False)
            yield Static(id="description", classes="muted", markup=False)
            yield Static(where_it_resumes(self._run), classes="muted", markup=False)
            with Horizontal(classes="buttons"):
                yield Button("Cancel", id="cancel", compact=True)
                yield Button("Apply", id="confirm", variant="primary", compact=True)

    def on_mount(self) -> None:
        table = self.query_one(DataTable)
        for label in ("", "key", "preset", "B x A x W", "effective", "T", "checkpointing", "a switch"):
            table.add_column(label)
        for preset in self._presets.values():
            table.add_row(*self._row(preset), key=preset.name)
        wanted = int(self._chosen_key) if self._chosen_key else self._present_key()
        self.action_point(wanted)

    def action_point(self, key: int) -> None:
        """Put the cursor on the preset of that digit key."""
        for row, preset in enumerate(self._presets.values()):
            if preset.key == key:
                self.query_one(DataTable).move_cursor(row=row)

    @on(DataTable.RowHighlighted)
    def _pointed(self, message: DataTable.RowHighlighted) -> None:
        preset = self._presets[str(message.row_key.value)]
        self.query_one("#description", Static).update(f"{preset.title}. {preset.description}")

    @on(DataTable.RowSelected)
    def _entered(self, message: DataTable.RowSelected) -> None:
        self.dismiss(str(message.row_key.value))

    @on(Button.Pressed, "#confirm")
    def _confirmed(self) -> None:
        table = self.query_one(DataTable)
        self.dismiss(list(self._presets)[table.cursor_row])

    def _present_key(self) -> int:
        present = self._presets.get(self._settings.preset)
        return present.key if present else 1

    def _row(self, preset: Preset) -> list[Text]:
        after = apply_preset(self._settings, preset)
        now = preset.name == self._settings.preset
        # Sequence length and data stay as they are under every preset, so a switch always resumes.
        cells = (
            "▸" if now else " ",
            str(preset.key),
            preset.name,
            f"{after.batch} x {after.accumulation} x {after.world_size}",
            str(after.effective_batch),
            str(after.seq_len),
            "on" if after.gradient_checkpointing else "off",
            "is on now" if now else "resumes",
        )
        return [Text(cell, style="bold" if now else "") for cell in cells]
