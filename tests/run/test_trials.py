"""Trials as rules of the run: every change during a trial starts from the settings before it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from memtop.presets.schema import Settings
from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.monitor.values import GpuSample, MachineSnapshot
from memtop.supervisor.recovery.values import Forecast
from memtop.supervisor.run.effects import Launch
from memtop.supervisor.run.events import Launched, Requested, Sampled
from memtop.supervisor.run.pending_restart import NOTICE_SECONDS, Waiting
from memtop.supervisor.run.record.configurations import Configurations
from memtop.supervisor.run.rules.attempts import foreseen
from memtop.supervisor.run.state import run_state, state_file
from memtop.supervisor.run.trial_state import TrialStage, TrialState
from memtop.supervisor.wire import Change, Phase, Proposal, Stop, Trial
from tests.run.brain import SETTINGS, Brain, row, state_of, states, taken_over

# The same effective batch in smaller pieces.
TRIED = replace(SETTINGS, batch=1, accumulation=SETTINGS.batch * SETTINGS.accumulation)
TRIAL = Trial(title="batch changes", started=1.0, state="measuring after")
UNDO = Change(configuration=1, reason="trial undone: batch changes")
STATE = TrialState(
    stage=TrialStage.MEASURING_AFTER,
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
OOM = Diagnosis(kind=Kind.GPU_OOM, reason="torch", confidence=1.0, summary="out of memory")
CONFIGURATIONS = (
    Configurations().begin_attempt(1, "start", SETTINGS, 9.0).change(5, "trial", TRIED, died=None, saved=5, changed_by=(1, 5.0))
)


def on_trial(phase: Phase, *, died: bool = False, waiting: Waiting | None = None, **data: Any) -> Brain:
    """A supervisor that takes over a run in that phase, with an unfinished trial in its ledger."""
    known = CONFIGURATIONS.end("gpu_oom", 7, 5, died_of_memory=True) if died else CONFIGURATIONS
    is_over = phase.final or waiting is not None
    state = state_of(phase, waiting=waiting)
    if died:
        state = replace(state, run=replace(state.run, proposal=Proposal(diagnosis=OOM)))
    attempt = row(ended=10.0, outcome="failed") if is_over else row()
    trial = {"state": msgspec.to_builtins(STATE), **data}
    return taken_over(attempt, records=known.records, state=state, states=states(5), trial=trial)


def settings_by_configuration(brain: Brain) -> list[tuple[Settings | None, str | None]]:
    return [(row.settings, row.outcome) for row in brain.model.configurations.rows]


@pytest.mark.parametrize("phase", [Phase.STOPPED, Phase.FAILED, Phase.FINISHED])
def test_a_run_that_ended_in_a_trial_has_the_settings_before(phase: Phase) -> None:
    brain = on_trial(phase)
    assert brain.model.settings == SETTINGS
    assert settings_by_configuration(brain) == [(SETTINGS, "replaced"), (TRIED, "replaced"), (SETTINGS, phase.value)]
    (message,) = brain.messages("trial")
    assert message.startswith("trial of batch changes: undone: its supervisor ended in the middle of it")
    # Once, not whenever a supervisor takes the run up.
    assert brain.model.trial is not None
    finished = {"state": msgspec.to_builtins(brain.model.trial)}
    again = taken_over(row(ended=10.0, outcome="failed"), records=brain.model.configurations.records, trial=finished)
    assert again.messages("trial") == []
    assert again.model.settings == SETTINGS


def test_a_death_of_memory_in_a_trial_stays_known() -> None:
    records = on_trial(Phase.FAILED, died=True).model.configurations.records
    assert (records[1].configuration.outcome, records[1].died_of_memory) == ("gpu_oom", True)
    assert not records[2].died_of_memory


def test_a_change_starts_from_the_settings_before_unless_it_names_others() -> None:
    model = on_trial(Phase.TRAINING).model
    assert model.settings == TRIED
    assert foreseen(model, Change()) == SETTINGS
    split = {"batch": str(TRIED.batch), "accumulation": str(TRIED.accumulation)}
    assert foreseen(model, Change(assignments=split)) == TRIED
    assert foreseen(replace(model, phase=Phase.STOPPED), Change()) == SETTINGS


def test_a_trial_of_another_version_costs_a_warning_not_the_supervisor() -> None:
    (warning,) = on_trial(Phase.STOPPED, state={"name": "of the future"}).messages("warning")
    assert "the run's last trial cannot be read" in warning


def dead_in_a_trial() -> Brain:
    remedy = Change(assignments={"batch": "1", "accumulation": str(TRIED.accumulation)}, reason="gpu_oom at update 7")
    waiting = Waiting(change=remedy, gpus_before={"GPU-0": 0}, forecast=Forecast(peak_bytes=1 << 30, basis="line"))
    brain = on_trial(Phase.RESTARTING, died=True, waiting=waiting)
    brain.tick()
    return brain


def test_a_trial_that_died_is_undone_when_the_memory_is_free() -> None:
    """The restart takes the settings before the trial. It waits as long as a restart with the
    remedy would have waited."""
    brain = dead_in_a_trial()

    def sample(used: int) -> None:
        machine = MachineSnapshot(time=1.0, gpus=(GpuSample(index=0, uuid="GPU-0", used_bytes=used),))
        brain.tell(Sampled(machine=machine))

    sample(8 << 30)
    brain.tick(after=NOTICE_SECONDS)
    assert brain.asked(Launch) == [], "the dead program's memory is waited for"
    # The next supervisor begins with the same, after the same wait.
    assert state_file(brain.model, "", None).waiting == Waiting(change=UNDO, gpus_before={"GPU-0": 0})
    proposal = run_state(brain.model).proposal
    assert proposal is not None
    assert proposal.remedies[0].assignments == {
        "batch": str(SETTINGS.batch),
        "accumulation": str(SETTINGS.accumulation),
    }
    sample(0)
    brain.tick()
    (launch,) = brain.asked(Launch)
    assert launch.settings == SETTINGS
    brain.tell(Launched(number=2, started=brain.wall, states=states(5)))
    brain.report({"type": "step", "update": 6, "time": brain.wall, "step_seconds": 0.5})
    brain.tick()
    assert brain.model.trial is not None
    assert (brain.model.trial.trial.state, brain.model.settings, brain.model.trial.proven) == ("undone", SETTINGS, None)


def test_a_restart_after_a_trial_can_be_called_off() -> None:
    brain = dead_in_a_trial()
    brain.tell(Requested(client=1, request=Stop(id=1)))
    brain.tick()
    assert brain.model.trial is not None
    assert (brain.model.trial.trial.state, brain.model.phase, brain.model.settings) == ("undone", Phase.FAILED, SETTINGS)
    assert brain.asked(Launch) == []
