"""The restart form for a program of the user's own with Hugging Face's Trainer: batch, accumulation
and sequence length, and what the change means, while the user types.
"""

from __future__ import annotations

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widgets import Button, Input, Label, Static

from memtop.supervisor.clean import clean
from memtop.supervisor.errors import UsageError
from memtop.supervisor.run.grip import Grip, consequences
from memtop.supervisor.wire import Change, RunState
from memtop.tui.screen import Dialog

_FIELDS = ("batch", "accumulation", "seq_len")


def grip_of(run: RunState) -> Grip | None:
    """What memtop can change in the run's program; None if nothing."""
    program = run.program
    if program is None or program.grip != "hooks" or program.knobs.batch is None or program.knobs.accumulation is None:
        return None
    batch, accumulation = program.knobs.batch.value, program.knobs.accumulation.value
    if not batch or not accumulation:
        return None
    length = program.knobs.seq_len
    return Grip(
        output_dir="",
        batch=batch,
        accumulation=accumulation,
        processes=max(1, (run.effective_batch or 0) // (batch * accumulation)),
        seq_len=length.value if length is not None else None,
    )


class OwnProgramDialog(Dialog[Change]):
    """Closes with the change to send, or None."""

    AUTO_FOCUS = "#batch"

    def __init__(self, run: RunState, grip: Grip) -> None:
        super().__init__()
        self._run = run
        self._grip = grip
        self._shown = {name: str(value) for name in _FIELDS if (value := getattr(grip, name)) is not None}
        self._change: Change | None = None

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as box:
            box.border_title = f"Restart {self._run.name} from its newest checkpoint"
            with Horizontal(classes="fields"):
                for field, text in self._shown.items():
                    with Vertical(classes="field"):
                        yield Label(field)
                        yield Input(text, id=field, compact=True)
            yield Static(id="problem", classes="problem", markup=False)
            yield Static(id="consequences", markup=False)
            yield Static(clean(" ".join(self._run.command)), classes="muted", markup=False)
            with Horizontal(classes="buttons"):
                yield Button("Cancel", id="cancel", compact=True)
                yield Button("Restart", id="confirm", variant="primary", compact=True)

    def on_mount(self) -> None:
        self._judge()

    @on(Input.Changed)
    def _typed(self) -> None:
        self._judge()

    @on(Input.Submitted)
    def _entered(self) -> None:
        # Enter in a field moves to the button, so that no restart happens by accident.
        button = self.query_one("#confirm", Button)
        if not button.disabled:
            button.focus()

    @on(Button.Pressed, "#confirm")
    def _confirmed(self) -> None:
        self.dismiss(self._change)

    def _judge(self) -> None:
        texts = {field: self.query_one(f"#{field}", Input).value.strip() for field in self._shown}
        changed = {field: text for field, text in texts.items() if text != self._shown[field]}
        run, words, why = self._run, "", None
        reached = run.updates if run.alive and not run.saves_when_stopped else None
        try:
            words = consequences(self._grip, changed, run.checkpoint, reached, run.total_updates)
        except UsageError as error:
            why = str(error)
        self._change = Change(assignments=changed) if why is None else None
        problem = self.query_one("#problem", Static)
        problem.display = why is not None
        problem.update(f"✗ {why}" if why is not None else "")
        lines = [one for one in words.split("; ") if one] if changed else ["the same settings as now"]
        self.query_one("#consequences", Static).update("\n".join(lines))
        self.query_one("#confirm", Button).disabled = why is not None
