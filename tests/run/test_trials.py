"""Settings on trial are never the run's: whoever takes over, stops or restarts in the middle finds those before."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from memtop.presets.schema import Settings
from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.monitor.values import GpuSample, MachineSnapshot
from memtop.supervisor.recovery.values import Forecast
from memtop.supervisor.run.lifecycle import Lifecycle
from memtop.supervisor.run.pending_restart import NOTICE_SECONDS, Comeback, Waiting
from memtop.supervisor.run.supervisor import Supervisor
from memtop.supervisor.run.trial_state import Stage, TrialState
from memtop.supervisor.wire import Change, Phase, Proposal, Trial
from tests.run.test_pieces import SETTINGS, Clock, supervisor_at_update

# The same effective batch in smaller pieces.
TRIED = replace(SETTINGS, batch=1, accumulation=SETTINGS.batch * SETTINGS.accumulation)
TRIAL = Trial(title="batch changes", started=1.0, state="measuring after")
UNDO = Change(configuration=1, reason="trial undone: batch changes")
STATE = TrialState(
    stage=Stage.MEASURING_AFTER,
    trial=TRIAL,
    change=Change(reason="trial of batch changes"),
    undo=UNDO,
    before=SETTINGS,
    after=TRIED,
    requested=True,
    confirmed=True,
    unproven=True,
    attempt=1,
)


def events(supervisor: Supervisor, kind: str) -> list[str]:
    return [event.message for event in supervisor.ledger.events() if event.kind == kind]


def on_trial(tmp_path: Path, phase: Phase, **data: Any) -> Supervisor:
    """A supervisor that takes over a run in that phase, with an unfinished trial in its ledger."""
    supervisor = supervisor_at_update(tmp_path, 7)
    configurations = supervisor.survival.configurations
    configurations.begin_attempt(1, "start", SETTINGS)
    configurations.change(5, "trial", TRIED, died=None, saved=5, changed_by=(1, 5.0))
    supervisor.settings = TRIED
    supervisor.lifecycle = Lifecycle(phase, Clock())
    supervisor.event("trial", "measuring after", {"state": msgspec.to_builtins(STATE), **data})
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
    assert events(supervisor, "trial")[-1].startswith(
        "trial of batch changes: undone: its supervisor ended in the middle of it"
    )
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


def test_a_change_starts_from_the_settings_before_unless_it_names_others(tmp_path: Path) -> None:
    supervisor = on_trial(tmp_path, Phase.TRAINING)
    supervisor.prevention.trials.take_up()
    assert supervisor.foreseen(Change()) == SETTINGS
    named = supervisor.foreseen(Change(assignments={"batch": str(TRIED.batch), "accumulation": str(TRIED.accumulation)}))
    assert named == TRIED
    supervisor.lifecycle = Lifecycle(Phase.STOPPED, Clock())
    assert supervisor.foreseen(Change()) == SETTINGS


def test_a_trial_of_another_version_costs_a_warning_not_the_supervisor(tmp_path: Path) -> None:
    supervisor = on_trial(tmp_path, Phase.STOPPED, state={"name": "of the future"})
    supervisor.prevention.trials.take_up()
    (warning,) = events(supervisor, "warning")
    assert "the run's last trial cannot be read" in warning


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
    trials.take_up()
    trials.tick()

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
    trials.tick()
    assert (await asyncio.wait_for(trials.finished(), 20)).state == "undone"
    assert (supervisor.settings, trials.before) == (SETTINGS, None)


async def test_a_comeback_from_a_trial_can_be_called_off(tmp_path: Path) -> None:
    supervisor = on_trial(tmp_path, Phase.RESTARTING)
    survival, trials = supervisor.survival, supervisor.prevention.trials
    diagnosis = Diagnosis(kind=Kind.GPU_OOM, reason="torch", confidence=1.0, summary="out of memory")
    survival.proposal = Proposal(diagnosis=diagnosis)
    survival.comeback = Comeback(Waiting(change=Change(assignments={"batch": "1"})), tmp_path, Clock())
    trials.take_up()
    trials.tick()
    supervisor.begin_stopping()
    trials.tick()
    trial = await asyncio.wait_for(trials.finished(), 20)
    assert (trial.state, supervisor.phase, supervisor.settings) == ("undone", Phase.FAILED, SETTINGS)
    assert len(supervisor.ledger.attempts()) == 1
