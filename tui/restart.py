"""The restart form: batch, accumulation, seq_len and preset, with consequences and forecast while
the user types.

If the trainer can take up the change at its next update, the form also offers that.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from textual import on, work
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widgets import Button, Input, Label, Select

from memtop.presets import apply_preset
from memtop.presets.edits import find_preset
from memtop.presets.fields import FIELDS
from memtop.presets.measured import Learned
from memtop.presets.schema import Settings
from memtop.supervisor.language import tr
from memtop.supervisor.names import shortened
from memtop.supervisor.recovery.configuration import failed_settings
from memtop.supervisor.recovery.forecast import Forecaster, forecaster_of
from memtop.supervisor.wire import Change, RunState
from memtop.tui.form import FormDialog, buttons, field
from memtop.tui.line import MUTED, Line, fit
from memtop.tui.panel import LinePanel
from memtop.tui.remedies import FORECAST, WhatIf, earlier_runs, forecast_lines, what_if
from memtop.tui.restart_plan import (
    NUMBER_FIELDS,
    RestartPlan,
    can_be_live,
    not_live_yet,
    nothing_left_with,
    number_text,
    restart_plan,
    where_it_resumes,
)
from memtop.tui.screen import TITLE_NAME, Dashboard, Words
from memtop.tui.store import Store

_LIVE = (
    "Apply now (Enter, then ←): from the next update on, without a stop.  Restart: saves, ends the program, starts it again."
)
_NOT_YET = "Apply now, without a stop, is possible after the first update."

_SPLIT = ("batch", "accumulation")


class RestartRequest(NamedTuple):
    """The result of the form."""

    change: Change
    live: bool
    """Change at the next update, without a restart."""


class RestartDialog(FormDialog[RestartRequest]):
    """Closes with the change to send and how to apply it, or None."""

    AUTO_FOCUS = "#batch"

    def __init__(self, dashboard: Dashboard, run: RunState, settings: Settings, presets: tuple[str, ...]) -> None:
        super().__init__()
        self._dashboard = dashboard
        self._run = run
        self._settings = settings
        self._presets = presets if settings.preset in presets else (settings.preset, *presets)
        self._plan: RestartPlan | None = None
        self._learned = Learned()
        """What earlier runs have measured, once it is read."""
        self._seen: WhatIf | None = None
        """What was foreseen last."""
        self._asked: tuple[Settings, Learned] | None = None
        """What is being foreseen."""
        self._put = {name: number_text(settings, name) for name in NUMBER_FIELDS}
        """The text that the form itself has put into each field."""

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog form") as box:
            box.border_title = tr(f"Restart {shortened(self._run.name, TITLE_NAME)} from train_latest_state")
            with Horizontal(classes="fields"):
                for name in NUMBER_FIELDS:
                    yield from field(name, number_text(self._settings, name), tr(FIELDS[name].unit))
                with Vertical(classes="field"):
                    yield Label(tr("preset"))
                    options = [(name, name) for name in self._presets]
                    yield Select(options, value=self._settings.preset, allow_blank=False, id="preset", compact=True)
            yield Words(id="problem", classes="problem")
            yield Words(id="consequences")
            yield LinePanel(self._draw_outlook, id="outlook")
            yield Words(tr(where_it_resumes(self._run)), id="resumes", classes="muted")
            yield Words(tr(_LIVE), id="ways")
            yield from buttons("Restart", Button(tr("Apply now"), id="live", variant="success", compact=True))

    def on_mount(self) -> None:
        # The run's state may change while the form is open.
        self.follow(self._dashboard, self._take)
        self.watch(self.query_one("#preset", Select), "expanded", self._make_room)
        self.run_worker(self._learn())

    async def _learn(self) -> None:
        self._learned = await earlier_runs(self._dashboard.store)
        if self.is_open:
            self.judge()

    def _take(self, store: Store) -> None:
        self._run = store.run or self._run
        self.query_one("#resumes", Words).say(tr(where_it_resumes(self._run)))
        self.judge()

    def _make_room(self, is_open: bool) -> None:
        """Move the text beside the open list of presets, which would cover it."""
        self.query_one(".dialog").set_class(is_open, "-list")

    @on(Select.Changed, "#preset")
    def _preset_chosen(self, message: Select.Changed) -> None:
        # A preset has its own split. The fields show it, unless a person has typed another one.
        after = self._settings
        if str(message.value) != self._settings.preset:
            after = apply_preset(self._settings, find_preset(str(message.value), self._settings.recipe), self._failed())
        texts = self._texts()
        if all(texts[name] == self._put[name] for name in _SPLIT):
            with self.prevent(Input.Changed):
                for name in _SPLIT:
                    self._put[name] = number_text(after, name)
                    self.query_one(f"#{name}", Input).value = self._put[name]
        self.judge()

    @on(Button.Pressed, "#confirm")
    def _confirmed(self) -> None:
        self._leave(live=False)

    @on(Button.Pressed, "#live")
    def _confirmed_live(self) -> None:
        self._leave(live=True)

    def _leave(self, *, live: bool) -> None:
        if self._plan is not None and self._plan.change is not None:
            self.dismiss(RestartRequest(self._plan.change, live))

    def _draw_outlook(self, store: Store, width: int, height: int) -> list[Line]:
        after = self._plan.after if self._plan is not None else None
        if after is None:
            return []
        seen = self._seen if self._seen is not None and self._seen.after == after else None
        lines = forecast_lines(self._forecaster(), seen, width)
        if len(lines) > height:
            lines = [*lines[: height - 1], fit((*lines[height - 1], (" …", MUTED)), width)]
        return lines

    def _forecaster(self) -> Forecaster:
        store = self._dashboard.store
        return forecaster_of(store.run, store.configurations, store.gpus, store.host, self._learned)

    def _foresee(self, after: Settings) -> None:
        """In a thread, unless one foresees the same already."""
        asked = (after, self._learned)
        if self._asked != asked:
            self._asked = asked
            self._foresee_in_thread(after, self._forecaster())

    @work(group=FORECAST, exclusive=True)
    async def _foresee_in_thread(self, after: Settings, forecaster: Forecaster) -> None:
        self._seen = await asyncio.to_thread(what_if, forecaster, after)
        self._asked = None
        if self.is_open:
            self.query_one("#outlook", LinePanel).show(self._dashboard.store)

    def _failed(self) -> tuple[Settings, ...]:
        return failed_settings(self._dashboard.store.configurations)

    def _texts(self) -> dict[str, str]:
        return {name: self.query_one(f"#{name}", Input).value for name in NUMBER_FIELDS}

    def judge(self) -> None:
        preset = str(self.query_one("#preset", Select).value)
        plan = restart_plan(self._settings, self._texts(), preset, self._failed(), self._run)
        self._plan = plan
        for name in NUMBER_FIELDS:
            self.query_one(f"#{name}", Input).set_class(name == plan.wrong_field, "-wrong")
        # The run may end while the form is open.
        complete = nothing_left_with(self._run, plan.after)
        self.show_judgement(plan.problem or complete, plan.lines)
        # With a wrong value it does not resume.
        self.query_one("#resumes").display = complete is None and plan.problem is None
        live = plan.after is not None and can_be_live(self._settings, plan.after, self._run)
        waits = plan.after is not None and not_live_yet(self._settings, plan.after, self._run)
        self.query_one("#live").display = live
        ways = self.query_one("#ways", Words)
        ways.display = live or waits
        ways.say(tr(_LIVE if live else _NOT_YET))
        self.query_one("#outlook", LinePanel).show(self._dashboard.store)
        if plan.after is not None:
            self._foresee(plan.after)
