"""The form that queues a run: a new run with the recipe or the command of another one, which begins
after a run or when the GPUs are free."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widgets import Button, Input, Label, Select

from memtop.presets.schema import Settings
from memtop.supervisor.clean import clean
from memtop.supervisor.language import tr
from memtop.supervisor.names import shortened
from memtop.supervisor.wire import RunState
from memtop.tui.form import FormDialog, buttons, field
from memtop.tui.restart_plan import NUMBER_FIELDS, RestartPlan, data_consequences, number_text, restart_plan
from memtop.tui.screen import TITLE_NAME, Words

_WHEN_FREE = "when no other run and no program uses its GPUs"
_LONGEST_COMMAND = 60
"""Cells of a command that are shown."""
_WHEN_FREE_ON_CPU = "when no other run goes on"


class QueueRequest(NamedTuple):
    """The result of the form."""

    name: str
    settings: Settings | None
    """Of a recipe; None for the user's own program, whose command stays the same."""
    after: Path | None
    """The folder of the run that it waits for; None: for free GPUs."""


class QueueDialog(FormDialog[QueueRequest]):
    """Closes with what to queue, or None."""

    AUTO_FOCUS = "#confirm"

    def __init__(self, run: RunState, name: str, others: Sequence[RunState], *, then: str | None, told: int) -> None:
        """`name`: a name that is free. `others`: the runs that it can wait for, the best first.
        `then`: the run's command for the very end. `told`: how many targets it notifies."""
        super().__init__()
        self._then, self._told = then, told
        self._run = run
        self._free_name = name
        self._others = others
        self._plan: RestartPlan | None = None

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog form") as box:
            box.border_title = tr(f"Queue a run like {shortened(self._run.name, TITLE_NAME)}")
            with Horizontal(classes="fields"):
                with Vertical(classes="field -wide"):
                    yield Label(tr("name"))
                    yield Input(self._free_name, id="name", compact=True)
                settings = self._run.settings
                if settings is not None:
                    for name in NUMBER_FIELDS:
                        yield from field(name, number_text(settings, name))
            yield Label(tr("begins"), classes="muted")
            free = _WHEN_FREE_ON_CPU if settings is not None and settings.device == "cpu" else _WHEN_FREE
            after = [
                (tr(f"after {shortened(run.name, TITLE_NAME)} ({run.state.value}), however it ends"), run.folder)
                for run in self._others
            ]
            waits_for_it = bool(after) and self._others[0].folder == self._run.folder
            start = self._run.folder if waits_for_it else ""
            yield Select([*after, (tr(free), "")], value=start, allow_blank=False, id="begins", compact=True)
            yield Words(id="problem", classes="problem")
            yield Words(id="consequences")
            yield from buttons("Queue")

    def on_mount(self) -> None:
        self.judge()

    @on(Button.Pressed, "#confirm")
    def _confirmed(self) -> None:
        after = str(self.query_one("#begins", Select).value)
        settings = self._plan.after if self._plan is not None else None
        self.dismiss(QueueRequest(self._new_name, settings, Path(after) if after else None))

    @property
    def _new_name(self) -> str:
        return self.query_one("#name", Input).value.strip()

    def judge(self) -> None:
        problem, lines = self._judge_settings(self._run.settings)
        name = self._new_name
        taken = bool(name) and os.path.lexists(Path(self._run.folder).parent / name)
        if taken or not name:
            problem = f"{clean(name)}: a run has this name already" if taken else "a run needs a name"
        self.query_one("#name", Input).set_class(taken or not name, "-wrong")
        self.show_judgement(problem, (*lines, *self._taken_over()))

    def _taken_over(self) -> Iterator[str]:
        """What the new run does as the old one, apart from the training."""
        if self._told:
            yield f"--notify: notifies the same targets ({self._told})"
        if self._then is not None:
            yield f"--then: at its end it runs {shortened(self._then, _LONGEST_COMMAND)}"
            if not self._run.state.final:
                yield f"! {shortened(self._run.name, TITLE_NAME)} runs that, too, when it ends: before this run begins"

    def _judge_settings(self, before: Settings | None) -> tuple[str | None, tuple[str, ...]]:
        """What is wrong with the numbers, and what they change."""
        if before is None:
            return None, ("the same command, from its beginning",)
        texts = {name: self.query_one(f"#{name}", Input).value for name in NUMBER_FIELDS}
        self._plan = plan = restart_plan(before, texts, before.preset)
        for name in NUMBER_FIELDS:
            self.query_one(f"#{name}", Input).set_class(name == plan.wrong_field, "-wrong")
        if plan.after is None or plan.after == before:
            return plan.problem, ("the same settings, from the first update",)
        return None, data_consequences(before, plan.after)
