"""The restart form: batch, accumulation, seq_len and preset, with the consequences said while typing."""

from __future__ import annotations

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widgets import Button, Input, Label, Select, Static

from memtop.presets import apply_preset
from memtop.presets.editing import find_preset
from memtop.presets.schema import Settings
from memtop.supervisor.wire import Change, RunState
from memtop.tui.restart_plan import NUMBER_FIELDS, RestartPlan, restart_plan, where_it_resumes
from memtop.tui.screens.dialog import Dialog


class RestartDialog(Dialog[Change]):
    """Dismissed with the change to send, or None."""

    AUTO_FOCUS = "#batch"

    def __init__(self, run: RunState, settings: Settings, presets: tuple[str, ...]) -> None:
        super().__init__()
        self._run = run
        self._settings = settings
        self._presets = presets if settings.preset in presets else (settings.preset, *presets)
        self._plan: RestartPlan | None = None

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as box:
            box.border_title = f"Restart {self._run.name} from train_latest_state"
            with Horizontal(classes="fields"):
                for field in NUMBER_FIELDS:
                    with Vertical(classes="field"):
                        yield Label(field)
                        yield Input(str(getattr(self._settings, field)), id=field, compact=True)
                with Vertical(classes="field"):
                    yield Label("preset")
                    options = [(name, name) for name in self._presets]
                    yield Select(options, value=self._settings.preset, allow_blank=False, id="preset", compact=True)
            yield Static(id="problem", classes="problem", markup=False)
            yield Static(id="consequences", markup=False)
            yield Static(where_it_resumes(self._run), id="resumes", classes="muted", markup=False)
            with Horizontal(classes="buttons"):
                yield Button("Cancel", id="cancel", compact=True)
                yield Button("Restart", id="confirm", variant="primary", compact=True)

    def on_mount(self) -> None:
        self._judge()

    @on(Input.Changed)
    def _typed(self) -> None:
        self._judge()

    @on(Select.Changed, "#preset")
    def _preset_chosen(self, message: Select.Changed) -> None:
        # A preset brings its own exact split; the fields show it and can be edited further.
        after = self._settings
        if str(message.value) != self._settings.preset:
            after = apply_preset(self._settings, find_preset(str(message.value), self._settings.recipe))
        with self.prevent(Input.Changed):
            for field in NUMBER_FIELDS:
                self.query_one(f"#{field}", Input).value = str(getattr(after, field))
        self._judge()

    @on(Input.Submitted)
    def _entered(self) -> None:
        # Enter in a field goes to the button instead of pressing it: the run is not to be restarted by accident.
        button = self.query_one("#confirm", Button)
        if not button.disabled:
            button.focus()

    @on(Button.Pressed, "#confirm")
    def _confirmed(self) -> None:
        if self._plan is not None and self._plan.change is not None:
            self.dismiss(self._plan.change)

    def _judge(self) -> None:
        texts = {field: self.query_one(f"#{field}", Input).value for field in NUMBER_FIELDS}
        plan = restart_plan(self._settings, texts, str(self.query_one("#preset", Select).value))
        self._plan = plan
        for field in NUMBER_FIELDS:
            self.query_one(f"#{field}", Input).set_class(field == plan.wrong_field, "-wrong")
        problem = self.query_one("#problem", Static)
        problem.display = plan.problem is not None
        problem.update(f"✗ {plan.problem}" if plan.problem else "")
        self.query_one("#consequences", Static).update("\n".join(plan.lines))
        self.query_one("#confirm", Button).disabled = plan.change is None
