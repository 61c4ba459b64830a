"""What the rules make of the reports of a program that is not memtop's trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from memtop.supervisor.program import Knob, ProgramCheckpoint
from memtop.supervisor.run.effects import CheckSaved, DropRows, UpdateAttempt
from memtop.supervisor.run.events import Replayed, Reported, SavedChecked, States
from memtop.supervisor.run.model import CurrentAttempt
from memtop.supervisor.run.progress import Progress
from memtop.supervisor.run.record.checkpoints import checked
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.run.runs import RunRow
from memtop.supervisor.run.state import run_state
from memtop.supervisor.wire import Checkpoint, Phase, RunState
from tests.run.brain import START, Brain, training
from tests.run.interrupted import interrupt_save
from tests.run.reported import reported

BATCH = {"value": 2, "name": "per_device_train_batch_size", "source": "SFTConfig"}
PLAN = {"type": "plan", "updates": 0, "total_updates": 100, "framework": "transformers 5", "effective_batch": 16}
SAVED = {"type": "checkpoint", "time": 50.0, "updates": 8, "samples_seen": 32, "size_bytes": 9, "path": "/out/checkpoint-8"}


def own(*values: dict[str, Any]) -> Brain:
    """A command of the user, after these reports."""
    brain = training(settings=None, progress=Progress(), states=States())
    brain.report(*values)
    return brain


def shown(brain: Brain) -> RunState:
    return run_state(brain.model)


def step(update: int, **values: Any) -> dict[str, Any]:
    return {"type": "step", "update": update, "time": 100.0 + 2 * update, **values}


def test_the_grip_and_the_settings_are_shown() -> None:
    assert shown(training()).program is None, "the built-in trainer"
    assert (own().model.progress.step, shown(own()).program) == (None, type(shown(own()).program)())
    counted = shown(own(step(1))).program
    assert counted is not None
    assert counted.grip == "optimizer"
    run = shown(own({**PLAN, "knobs": {"batch": BATCH}}))
    assert run.program is not None
    assert (run.program.grip, run.program.resumes, run.effective_batch, run.total_updates) == ("hooks", None, 16, 100)
    assert run.program.knobs.batch == Knob(value=2, name="per_device_train_batch_size", source="SFTConfig")
    assert run.program.knobs.accumulation is None
    assert not run.resumes
    assert shown(own({**PLAN, "updates": 40, "resumed": True})).resumes, "it has done so"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("env X=1 python -m mytrain.train", "mytrain.train"),
        ("python -m json.tool", "json.tool"),
        ("nice python -u train.py --x a.py", "train.py"),
        ("./run.sh", "run.sh"),
        ("/opt/bin/trainer --fast", "trainer"),
    ],
)
def test_the_list_of_runs_names_the_script_or_the_module(command: str, name: str) -> None:
    run = RunState(name="a", folder="/a", state=Phase.TRAINING, created=1.0, command=tuple(command.split()))
    assert RunRow(folder=RunFolder(Path("/a")), run=run).program == name


def test_a_save_of_no_time_takes_less_than_a_tenth_of_a_second() -> None:
    brain = training()
    brain.report({"type": "checkpoint", "updates": 2, "size_bytes": 1 << 20, "seconds": 0.01, "pause_seconds": 0.06})
    assert brain.messages("checkpoint")[-1] == "checkpoint at update 2: 1 MiB in < 0.1 s, training stopped for 0.1 s"


def test_the_newest_logged_loss_stays_until_the_next_one() -> None:
    brain = own(PLAN, step(1, logged=False), step(2, loss=2.5, gradient_norm=0.5), step(3, logged=False, learning_rate=0.1))
    run = shown(brain)
    assert (run.updates, run.loss, run.gradient_norm, run.learning_rate) == (3, 2.5, 0.5, 0.1)
    brain.report(step(4, loss=None))
    assert shown(brain).loss is None, "a loss that is not finite is not known"


def test_the_remaining_time_follows_from_updates_where_samples_are_not_known() -> None:
    brain = own(PLAN, *(step(update) for update in range(1, 11)))
    assert shown(brain).eta_seconds == pytest.approx(90 * 2.0)
    # An update that is reported again, with its loss, is counted once.
    brain.report({**step(10, loss=1.0), "time": 500.0})
    assert (shown(brain).eta_seconds, shown(brain).loss) == (pytest.approx(90 * 2.0), 1.0)
    assert shown(own(*(step(update) for update in range(1, 11)))).eta_seconds is None, "no total is known"


def test_a_second_training_in_one_process_goes_on_where_the_first_has_ended() -> None:
    brain = own({**PLAN, "updates": 40, "resumed": True}, step(41), {"type": "end", "outcome": "finished"})
    brain.report({**PLAN, "updates": 100, "total_updates": 150})
    assert [effect.values for effect in brain.asked(UpdateAttempt)] == [{"start_updates": 40}] * 2
    assert [effect.update for effect in brain.asked(DropRows)] == [41, 101]
    assert (brain.model.progress.end, shown(brain).total_updates) == (None, 150)


def test_a_checkpoint_of_a_program_is_read_before_it_is_shown() -> None:
    brain = own(PLAN, step(8), SAVED)
    assert shown(brain).checkpoint is None
    (effect,) = brain.asked(CheckSaved)
    assert effect.reported == Checkpoint(
        path="/out/checkpoint-8", updates=8, samples_seen=32, size_bytes=9, saved_at=50.0, complete=False
    )
    brain.tell(SavedChecked(found=Checkpoint(path="/out/checkpoint-8", updates=8, complete=True)))
    run = shown(brain)
    assert run.program is not None
    assert run.program.checkpoint == ProgramCheckpoint(path="/out/checkpoint-8", update=8, complete=True)
    assert run.checkpoint is not None
    assert run.checkpoint.updates == 8


def test_the_next_supervisor_reads_it_again() -> None:
    brain = training(settings=None, progress=Progress(), attempt=CurrentAttempt(number=1, started=START))
    brain.tell(Reported(rank=0, report=reported(SAVED), replayed=True))
    assert not brain.asked(CheckSaved)
    brain.tell(Replayed())
    assert [effect.reported.path for effect in brain.asked(CheckSaved)] == ["/out/checkpoint-8"]


def test_a_checkpoint_is_complete_if_its_last_file_is_whole(tmp_path: Path) -> None:
    told = Checkpoint(path=str(tmp_path), updates=8, complete=False)
    missing = checked(told)
    assert not missing.complete
    assert f"{tmp_path}/trainer_state.json is missing" in str(missing.problem)
    for content, is_whole in (("", False), ('{"global_step": 8, "log_', False), ("[8]", False), ('{"global_step": 8}', True)):
        (tmp_path / "trainer_state.json").write_text(content)
        found = checked(told)
        assert (found.complete, found.problem is None) == (is_whole, is_whole), content


def test_a_checkpoint_of_one_file_is_complete_if_its_end_is_there(tmp_path: Path) -> None:
    told = Checkpoint(path=str(tmp_path / "step=8.ckpt"), updates=8, complete=False)
    assert f"{told.path} is missing" in str(checked(told).problem)
    torch.save({"state": torch.zeros(1000)}, told.path)
    whole = Path(told.path).read_bytes()
    assert checked(told).complete
    Path(told.path).write_bytes(whole[:-50])
    assert checked(told).problem == f"{told.path}: its end is missing: the save was interrupted, or goes on"
    interrupt_save({"state": torch.zeros(1000)}, Path(told.path), 1)
    assert checked(told).problem == f"{told.path}: it has no data.pkl: the save was interrupted"
