"""Settings on trial are never the run's: whoever takes over, stops or restarts in the middle finds those before."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from memtop.supervisor.run.lifecycle import Lifecycle
from msgspec.structs import replace

from memtop.presets.schema import Settings
from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.errors import MemtopError
from memtop.supervisor.monitor.values import GpuSample, MachineSnapshot
from memtop.supervisor.recovery.values import Forecast
from memtop.supervisor.run.pending_restart import NOTICE_SECONDS, Comeback, Waiting
from memtop.supervisor.run.supervisor import Supervisor
from memtop.supervisor.wire import Change, Phase, Proposal, Trial
from tests.run.reported import reported
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
    supervisor.pending = Change(assignments={"seq_len": "16"})
    await asyncio.sleep(0.3)
    assert supervisor.pending == Change(assignments={"seq_len": "16"})
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
    named = supervisor.foreseen(Change(assignments={"batch": str(TRIED.batch), "accumulation": str(TRIED.accumulation)}))
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
    supervisor.survival.report(0, reported(report))
    supervisor.prevention.report(0, reported(report))
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
    supervisor.survival.report(0, reported({**report, "changes": changes}))
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


def at_its_end(supervisor: Supervisor, how: str) -> None:
    supervisor.progress = supervisor.progress.after(
        0, reported({"type": "plan", "total_updates": 7 if how == "last update" else 1000})
    )
    if how == "waits for room":
        supervisor.progress = supervisor.progress.after(
            0, reported({"type": "save_failed", "update": 7, "message": "no room", "waiting": True})
        )


@pytest.mark.parametrize("how", ["waits for room", "last update"])
async def test_a_run_whose_work_is_done_is_not_restarted_to_undo_a_trial(tmp_path: Path, how: str) -> None:
    """What it could not save yet is only in its memory."""
    supervisor = on_trial(tmp_path, Phase.TRAINING)
    at_its_end(supervisor, how)
    trials = supervisor.prevention.trials
    trials.before, trials.newest, trials._undo = SETTINGS, TRIAL, UNDO
    trials._go(trials._give_up("slower"))
    await asyncio.sleep(0.3)
    assert (supervisor.pending, supervisor.ladder, supervisor.phase) == (None, None, Phase.TRAINING)
    assert trials.running
    supervisor.lifecycle.move(Phase.FINISHED)
    trial = await trials.finished()
    assert (trial.state, supervisor.settings) == ("undone", SETTINGS)
    assert "slower; not taken back at once: the run is at its last update; what comes next starts from" in str(trial.reason)


@pytest.mark.parametrize("how", ["waits for room", "last update"])
async def test_a_trial_neither_begins_nor_goes_on_where_no_update_comes_any_more(tmp_path: Path, how: str) -> None:
    supervisor = on_trial(tmp_path, Phase.TRAINING)
    supervisor.settings = SETTINGS
    trials = supervisor.prevention.trials
    before = trials.begin(Change(assignments={"workers": str(SETTINGS.workers + 1)}))
    assert before.state == "measuring before"
    at_its_end(supervisor, how)
    over = await asyncio.wait_for(trials.finished(), 20)
    assert (over.state, over.reason) == ("refused", "the run is at its last update")
    with pytest.raises(MemtopError, match="nothing can be tried any more: the run is at its last update"):
        trials.begin(Change(assignments={"workers": str(SETTINGS.workers + 1)}))


async def test_a_trial_that_died_comes_back_when_the_memory_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the settings before it, after the notice and the wait that the remedy would have had."""
    supervisor = on_trial(tmp_path, Phase.RESTARTING)
    monkeypatch.setattr("memtop.supervisor.run.supervisor.start_program", lambda *_, **__: 1)
    survival, trials, clock = supervisor.survival, supervisor.prevention.trials, Clock()
    survival.configurations.end("gpu_oom", 7, 5, died_of_memory=True)
    diagnosis = Diagnosis(kind=Kind.GPU_OOM, reason="torch", confidence=1.0, summary="out of memory")
    survival.proposal = Proposal(diagnosis=diagnosis)
    remedy = Change(assignments={"batch": "1", "accumulation": str(TRIED.accumulation)}, reason="gpu_oom at update 7")
    forecast = Forecast(peak_bytes=1 << 30, basis="line")
    waiting = Waiting(change=remedy, gpus_before={"GPU-0": 0}, forecast=forecast)
    survival.comeback = Comeback(waiting, tmp_path, clock)
    trials.before, trials.newest, trials._undo = SETTINGS, TRIAL, UNDO
    trials._go(trials._give_up("the program died"))
    await asyncio.sleep(0.3)

    def card(used: int) -> None:
        supervisor.watch.machine = MachineSnapshot(time=1.0, gpus=(GpuSample(index=0, uuid="GPU-0", used_bytes=used),))

    card(8 << 30)
    clock.now += NOTICE_SECONDS
    survival.tick()
    assert (supervisor.phase, len(supervisor.ledger.attempts())) == (Phase.RESTARTING, 1), (
        "the dead program's memory is waited for"
    )
    # The next supervisor begins with the same, after the same wait.
    state = supervisor.folder.state()
    assert state is not None
    assert state.waiting == Waiting(change=UNDO, gpus_before={"GPU-0": 0})
    assert state.run.proposal is not None
    assert state.run.proposal.remedies[0].assignments == {
        "batch": str(SETTINGS.batch),
        "accumulation": str(SETTINGS.accumulation),
    }
    card(0)
    survival.tick()
    assert [attempt.settings for attempt in supervisor.ledger.attempts()] == [SETTINGS, SETTINGS]
    supervisor.lifecycle.move(Phase.TRAINING)
    assert (await asyncio.wait_for(trials.finished(), 20)).state == "undone"
    assert (supervisor.settings, trials.before) == (SETTINGS, None)


async def test_a_comeback_from_a_trial_can_be_called_off(tmp_path: Path) -> None:
    supervisor = on_trial(tmp_path, Phase.RESTARTING)
    survival, trials = supervisor.survival, supervisor.prevention.trials
    diagnosis = Diagnosis(kind=Kind.GPU_OOM, reason="torch", confidence=1.0, summary="out of memory")
    survival.proposal = Proposal(diagnosis=diagnosis)
    survival.comeback = Comeback(Waiting(change=Change(assignments={"batch": "1"})), tmp_path, Clock())
    trials.before, trials.newest, trials._undo = SETTINGS, TRIAL, UNDO
    trials._go(trials._give_up("the program died"))
    await asyncio.sleep(0.3)
    supervisor.begin_stopping()
    trial = await asyncio.wait_for(trials.finished(), 20)
    assert (trial.state, supervisor.phase, supervisor.settings) == ("undone", Phase.FAILED, SETTINGS)
    assert len(supervisor.ledger.attempts()) == 1
