"""Settings on trial are never the run's: whoever takes over, stops or restarts in the middle finds those before."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from memtop.presets.schema import Settings
from memtop.supervisor.run.lifecycle import Lifecycle
from memtop.supervisor.run.supervisor import Supervisor
from memtop.supervisor.wire import Change, Phase, Trial
from tests.run.test_pieces import SETTINGS, Clock, supervisor_at_update

# The same effective batch in smaller pieces.
TRIED = replace(SETTINGS, batch=1, accumulation=SETTINGS.batch * SETTINGS.accumulation)
TRIAL = Trial(title="batch changes", started=1.0, state="measuring after")
UNDO = Change(configuration=1, reason="trial undone: batch changes")


def events(supervisor: Supervisor, kind: str) -> list[str]:
    return [event.message for event in supervisor.ledger.events() if event.kind == kind]


def on_trial(tmp_path: Path, phase: Phase, **data: Any) -> Supervisor:
    """A supervisor that takes over a run in that phase, with a trial in its ledger that another one left half-way."""
    supervisor = supervisor_at_update(tmp_path, 7)
    configurations = supervisor.survival.configurations
    configurations.begin_attempt(1, "start", SETTINGS)
    configurations.change(5, "trial", TRIED, died=None, saved=5, said=(1, 5.0))
    supervisor.settings = TRIED
    supervisor.lifecycle = Lifecycle(phase, Clock())
    supervisor.event(
        "trial", "measuring after", {"trial": msgspec.to_builtins(TRIAL), "undo": msgspec.to_builtins(UNDO), **data}
    )
    return supervisor


def settings_by_configuration(supervisor: Supervisor) -> list[tuple[Settings | None, str | None]]:
    return [(row.settings, row.outcome) for row in supervisor.survival.configurations.rows]


@pytest.mark.parametrize("phase", [Phase.STOPPED, Phase.FAILED, Phase.FINISHED])
def test_a_run_that_ended_in_a_trial_has_the_settings_before(tmp_path: Path, phase: Phase) -> None:
    supervisor = on_trial(tmp_path, phase)
    supervisor.prevention.trials.take_up()
    assert supervisor.settings == SETTINGS
    assert settings_by_configuration(supervisor) == [
        (SETTINGS, "replaced"),
        (TRIED, "replaced"),
        (SETTINGS, phase.value),
    ]
    assert events(supervisor, "trial")[-1] == "trial of batch changes: undone: its supervisor ended in the middle of it"
    # Once, not whenever somebody takes the run up.
    supervisor.prevention.trials.take_up()
    assert len(events(supervisor, "trial")) == 2


def test_a_death_of_memory_in_a_trial_stays_known(tmp_path: Path) -> None:
    supervisor = on_trial(tmp_path, Phase.FAILED)
    supervisor.survival.configurations.end("gpu_oom", 7, 5, died_of_memory=True)
    supervisor.prevention.trials.take_up()
    tried = supervisor.survival.configurations.records[1]
    assert (tried.configuration.outcome, tried.died_of_memory) == ("gpu_oom", True)
    assert not supervisor.survival.configurations.records[2].died_of_memory


@pytest.mark.parametrize("phase", [Phase.STOPPING, Phase.RESTARTING])
async def test_what_a_person_has_decided_is_not_overridden_after_a_change_of_supervisors(tmp_path: Path, phase: Phase) -> None:
    supervisor = on_trial(tmp_path, phase)
    wanted = Change(reason="a person's") if phase is Phase.RESTARTING else None
    supervisor.pending = wanted
    trials = supervisor.prevention.trials
    trials.take_up()
    await asyncio.sleep(0.3)
    # Neither stopped for another reason nor restarted with another change; its end is waited for.
    assert (supervisor.pending, supervisor.ladder, supervisor.phase) == (wanted, None, phase)
    assert trials.running
    assert supervisor.foreseen(Change()) == SETTINGS
    supervisor.lifecycle.move(Phase.STOPPED)
    trial = await trials.finished()
    assert trial.state == "undone"
    assert str(trial.reason).endswith("what comes next starts from the settings before")
    assert supervisor.settings == SETTINGS


async def test_a_restart_that_was_asked_for_goes_before_the_undoing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the taking over and the restart the run is still training."""
    supervisor = on_trial(tmp_path, Phase.TRAINING)
    monkeypatch.setattr("memtop.supervisor.run.supervisor.start_program", lambda *_, **__: 1)
    trials = supervisor.prevention.trials
    trials.take_up()
    supervisor.pending = Change(seq_len=16)
    await asyncio.sleep(0.3)
    assert supervisor.pending == Change(seq_len=16)
    supervisor.lifecycle.move(Phase.RESTARTING)
    supervisor.launch(2, "restart", supervisor.pending)
    assert (await trials.finished()).state == "undone"
    assert supervisor.settings is not None
    assert (supervisor.settings.seq_len, supervisor.settings.batch) == (16, SETTINGS.batch)


async def test_a_program_that_still_starts_is_waited_for(tmp_path: Path) -> None:
    supervisor = on_trial(tmp_path, Phase.STARTING)
    supervisor.prevention.trials.take_up()
    await asyncio.sleep(0.3)
    assert (supervisor.phase, supervisor.pending) == (Phase.STARTING, None)
    supervisor.lifecycle.move(Phase.FAILED)
    await supervisor.prevention.trials.finished()
    assert supervisor.settings == SETTINGS


def test_a_change_starts_from_the_settings_before_unless_it_names_others(tmp_path: Path) -> None:
    supervisor = on_trial(tmp_path, Phase.TRAINING)
    trials = supervisor.prevention.trials
    trials.before = SETTINGS
    assert supervisor.foreseen(Change()) == SETTINGS
    named = supervisor.foreseen(Change(batch=TRIED.batch, accumulation=TRIED.accumulation))
    assert named == TRIED
    supervisor.lifecycle = Lifecycle(Phase.STOPPED, Clock())
    assert supervisor.foreseen(Change()) == SETTINGS


async def test_an_edit_of_a_person_ends_a_trial(tmp_path: Path) -> None:
    """It started from the settings before: there is nothing left to take back, and none of it is."""
    supervisor = on_trial(tmp_path, Phase.TRAINING)
    trials = supervisor.prevention.trials
    trials.take_up()
    trials._expected = TRIED
    assert trials.running
    edited = {"batch": SETTINGS.batch, "accumulation": SETTINGS.accumulation, "workers": 3}
    report = {"type": "settings", "update": 8, "reason": "asked", "changes": edited}
    supervisor.survival.report(0, report)
    supervisor.prevention.report(0, report)
    assert trials.before is None
    assert trials._task is not None
    trials._task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await trials._task
    assert supervisor.settings == replace(SETTINGS, workers=3)


def test_a_trial_of_another_version_costs_a_warning_not_the_supervisor(tmp_path: Path) -> None:
    supervisor = on_trial(tmp_path, Phase.STOPPED, trial={"name": "of the future"})
    supervisor.prevention.trials.take_up()
    (warning,) = events(supervisor, "warning")
    assert "the run's last trial cannot be understood" in warning


async def test_a_change_just_after_the_program_took_it_back_starts_from_the_settings_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer comes over the socket, the report that makes the settings the run's through a file, later."""
    supervisor = on_trial(tmp_path, Phase.TRAINING)

    async def answered(*_: object) -> int:
        return 8

    trials = supervisor.prevention.trials
    monkeypatch.setattr(trials, "_apply", answered)
    trials.before, trials.newest, trials._undo = SETTINGS, TRIAL, UNDO
    trials._go(trials._give_up("slower"))
    await asyncio.sleep(0.2)
    assert supervisor.foreseen(Change()) == SETTINGS
    report = {"type": "settings", "update": 8, "reason": "asked"}
    changes = {"batch": SETTINGS.batch, "accumulation": SETTINGS.accumulation}
    supervisor.survival.report(0, {**report, "changes": changes})
    assert (await trials.finished()).state == "undone"
    assert supervisor.foreseen(Change()) == SETTINGS


async def test_an_error_while_a_trial_is_taken_back_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = on_trial(tmp_path, Phase.TRAINING)

    def broken(_: Change) -> Settings:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(supervisor, "foreseen", broken)
    trials = supervisor.prevention.trials
    trials.before, trials.newest, trials._undo = SETTINGS, TRIAL, UNDO
    trials._go(trials._give_up("slower"))
    await asyncio.sleep(0.1)
    assert (
        "slower; not taken back at once: an error of memtop's own: ZeroDivisionError: of ours"
        in events(supervisor, "trial")[-1]
    )
    supervisor.lifecycle.move(Phase.STOPPED)
    trial = await trials.finished()
    assert trial.state == "failed"
    assert supervisor.settings == SETTINGS


async def test_whatever_ends_the_task_is_told(tmp_path: Path) -> None:
    supervisor = on_trial(tmp_path, Phase.TRAINING)
    trials = supervisor.prevention.trials
    trials.newest = TRIAL

    async def broken() -> None:
        raise KeyError("of ours")

    trials._go(broken())
    await trials.finished()
    await asyncio.sleep(0)
    assert events(supervisor, "trial")[-1] == "trial of batch changes: failed: an error of memtop's own: KeyError: 'of ours'"
