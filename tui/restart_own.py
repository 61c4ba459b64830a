"""The restart form for the user's own program: batch, accumulation and sequence length, and what
the change means, while the user types.
"""

from __future__ import annotations

from pathlib import Path

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widgets import Button, Input, Static

from memtop.supervisor import units
from memtop.supervisor.clean import clean
from memtop.supervisor.errors import RunFolderError, UsageError
from memtop.supervisor.language import tr
from memtop.supervisor.names import shortened
from memtop.supervisor.run import explain
from memtop.supervisor.run.grip import (
    Grip,
    after_stop,
    consequences,
    done_after_stop,
    length_after,
    length_with,
    values_of,
    why_not_continued,
)
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.wire import Change, Checkpoint, Configuration, Phase, RunState
from memtop.tui.form import FormDialog, buttons, field
from memtop.tui.restart_plan import nothing_left
from memtop.tui.screen import TITLE_NAME, Dashboard, Words
from memtop.tui.store import Store

_FIELDS = ("batch", "accumulation", "seq_len")


def grip_of(run: RunState) -> Grip | None:
    """How memtop holds the run's program; None if it can change nothing in it."""
    try:
        file = RunFolder(Path(run.folder)).state()
    except RunFolderError:
        return None
    grip = file.grip if file is not None else None
    return grip if grip is not None and any(getattr(grip, name) is not None for name in _FIELDS) else None


def resumed_from(run: RunState) -> Checkpoint | None:
    """From where memtop lets the user's own program go on, or the program itself is known to; None
    if it begins again."""
    try:
        file = RunFolder(Path(run.folder)).state()
    except RunFolderError:
        file = None
    held = file is not None and file.grip is not None and why_not_continued(file.grip) is None
    if not held and not run.resumes:
        return None
    at = after_stop(run.checkpoint, run.updates, saves=run.alive and run.saves_when_stopped)
    return at if at is not None and at.complete else None


def where_own_resumes(run: RunState) -> str:
    """The same in one sentence."""
    at = resumed_from(run)
    if at is None:
        return explain.FROM_ZERO
    if at.updates is None:
        return "resumes from its newest checkpoint"
    if run.alive and run.saves_when_stopped:
        return f"resumes at the update at which it is stopped, now {units.count(at.updates)}"
    return f"resumes at update {units.count(at.updates)}"


def why_nothing_left(run: RunState, length: int | None, resumed: Checkpoint | None) -> str | None:
    """Why a length of so many updates leaves nothing to train; None if it leaves something, or if
    that is not known."""
    total = run.total_updates
    finished = run.state is Phase.FINISHED
    saved = resumed.updates if resumed is not None else 0 if finished else None
    done = done_after_stop(saved, run.updates, saves=run.alive and run.saves_when_stopped, finished=finished)
    if done is None or length is None or total is None or done < length:
        return None
    if length < total and done < total:
        return explain.nothing_would_be_left(done, length)
    if finished and resumed is None:
        return explain.nothing_left(run.name, done, length, saved=False)
    return nothing_left(run, resumed)


def why_complete(run: RunState) -> str | None:
    """Why a run of the user's own program has nothing left to train with its present length; None
    if it has something, or if that is not known."""
    resumed = resumed_from(run)
    return nothing_left(run, resumed) if grip_of(run) is None else why_nothing_left(run, run.total_updates, resumed)


def why_not_back(run: RunState, row: Configuration, now: Configuration | None) -> str | None:
    """Why the settings of this earlier configuration leave a Trainer of the user's own nothing to
    train; None if they leave something, or if that is not known. `now`: the present one."""
    grip = grip_of(run) if run.settings is None else None
    if grip is None or grip.profile is not None or now is None:
        return None
    return why_nothing_left(run, length_with(grip, row.knobs, now.knobs, row.uses, run.total_updates), resumed_from(run))


class OwnProgramDialog(FormDialog[Change]):
    """Closes with the change to send, or None."""

    AUTO_FOCUS = "#batch"

    def __init__(self, dashboard: Dashboard, run: RunState, grip: Grip) -> None:
        super().__init__()
        self._dashboard = dashboard
        self._run = run
        self._grip = grip
        self._shown = {name: str(value) for name in _FIELDS if (value := getattr(grip, name)) is not None}
        self._change: Change | None = None

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog form") as box:
            box.border_title = tr(f"Restart {shortened(self._run.name, TITLE_NAME)}")
            with Horizontal(classes="fields"):
                for name, text in self._shown.items():
                    yield from field(name, text)
            yield Words(id="problem", classes="problem")
            yield Words(id="consequences")
            yield Words(id="resumes", classes="muted")
            yield Static(clean(" ".join(self._run.command)), classes="muted", markup=False)
            yield from buttons("Restart")

    def on_mount(self) -> None:
        self.follow(self._dashboard, self._take)

    def _take(self, store: Store) -> None:
        self._run = store.run or self._run
        self.judge()

    @on(Button.Pressed, "#confirm")
    def _confirmed(self) -> None:
        self.dismiss(self._change)

    def judge(self) -> None:
        texts = {name: self.query_one(f"#{name}", Input).value.strip() for name in self._shown}
        changed = {name: text for name, text in texts.items() if text != self._shown[name]}
        run, words = self._run, ""
        why = why_not_continued(self._grip) if run.updates else None
        resumed = resumed_from(run)
        at = after_stop(run.checkpoint, run.updates, saves=run.alive and run.saves_when_stopped)
        try:
            seen = self._grip if run.program is None else self._grip.with_seen(run.program.knobs)
            words = consequences(seen, changed, at, run.updates, run.total_updates, ended=not run.alive)
            length = length_after(self._grip, values_of(changed, self._grip), run.total_updates)
            why = why or why_nothing_left(run, length, resumed)
        except UsageError as error:
            why = str(error)
        self._change = Change(assignments=changed) if why is None else None
        lines = [*([] if changed else ["the same settings as now"]), *(one for one in words.split("; ") if one)]
        self.show_judgement(why, lines)
        # Which updates are done again says where it resumes. With a wrong value it does not.
        does_again = (
            bool(words) and resumed is not None and resumed.updates is not None and (run.updates or 0) > resumed.updates
        )
        resumes = self.query_one("#resumes", Words)
        resumes.display = not does_again and why is None
        resumes.say(tr(where_own_resumes(run)))
