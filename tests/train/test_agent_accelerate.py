"""A program's own loop with accelerate, unchanged, with the agent: what it reports, and that it
trains as without the agent.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Runs, wait_for_file
from tests.forking import run as run_forked
from tests.train.test_agent_ranks import program, updates
from tests.train.test_agent_trainers import SCRIPT as TRAINER
from tests.train.test_agent_trainers import of_kind

LOOP = """
import hashlib, json, sys, torch
from accelerate import Accelerator

class Rows(torch.utils.data.Dataset):
    def __len__(self): return 22
    def __getitem__(self, at): return torch.full((4,), float(at % 5)) / 5, torch.tensor([float(at % 3)])

def train(accelerator, updates, save_at=(), resume=None, by_hand=1):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if resume:
        accelerator.load_state(resume)
    done, losses, calls = 0, [], 0
    while True:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(x), y)
                losses.append(float(loss.detach()))
                accelerator.backward(loss)
                calls += 1
                if calls % by_hand == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            if accelerator.sync_gradients and calls % by_hand == 0:
                done += 1
                if done in save_at:
                    accelerator.save_state("step_%d" % done)
                if done == updates:
                    return model, losses
"""
TRAIN = """
model, losses = train(Accelerator(gradient_accumulation_steps=2, cpu=True), 8, save_at=(4,))
with open("after.json", "w") as file:
    json.dump([losses, hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()], file)
"""


def test_what_a_loop_with_accelerate_reports(tmp_path: Path) -> None:
    reports = program(tmp_path, LOOP + TRAIN)[0]
    losses, _ = json.loads((tmp_path / "after.json").read_text())
    (loop,) = of_kind(reports, "loop")
    assert loop["framework"].startswith("accelerate ")
    assert (loop["effective_batch"], loop["resumed"]) == (4, False)
    assert loop["knobs"] == {
        "batch": {"value": 2, "name": "batch_size", "source": "DataLoader"},
        "accumulation": {"value": 2, "name": "gradient_accumulation_steps", "source": "Accelerator"},
    }
    steps = of_kind(reports, "step")
    assert updates(reports) == list(range(1, 9))
    # An epoch has 11 batches, so that its last update has one.
    assert [step["samples_seen"] for step in steps] == [4, 8, 12, 16, 20, 22, 26, 30]
    of_updates = [losses[at : at + 2] if at != 10 else losses[10:11] for at in (0, 2, 4, 6, 8, 10, 11, 13)]
    assert [step["loss"] for step in steps] == pytest.approx([sum(some) / len(some) for some in of_updates])
    assert {(step["batch"], step["accumulation"], step["learning_rate"]) for step in steps} == {(2, 2, 0.25)}
    (saved,) = of_kind(reports, "checkpoint")
    assert (saved["updates"], saved["samples_seen"], saved["path"]) == (4, 16, str(tmp_path / "step_4"))
    assert saved["size_bytes"] > 0


def test_a_resumed_loop_and_one_that_accumulates_by_itself(tmp_path: Path) -> None:
    code = """
train(Accelerator(cpu=True), 2, save_at=(2,), by_hand=3)
train(Accelerator(cpu=True), 2, save_at=(1,), resume="step_2", by_hand=3)
"""
    reports = program(tmp_path, LOOP + code)[0]
    first = of_kind(reports, "loop")[0]
    assert first["knobs"]["accumulation"] == {"value": 3, "name": None, "source": "calls of backward"}
    assert first["effective_batch"] == 6
    steps = of_kind(reports, "step")
    assert [(step["samples_seen"], step.get("loss")) for step in steps] == [(6, None), (12, None), (None, None), (None, None)]
    # How far a resumed loop is, only the program knows.
    assert [report["updates"] for report in of_kind(reports, "checkpoint")] == [2, None]


def test_the_trainer_reports_alone(tmp_path: Path) -> None:
    reports = program(tmp_path, TRAINER + "trainer(max_steps=2).train()\n")[0]
    assert not of_kind(reports, "loop")
    assert len(of_kind(reports, "checkpoint")) == 1


def test_two_optimizers_leave_loss_and_samples_open(tmp_path: Path) -> None:
    code = """
accelerator = Accelerator(cpu=True)
one, two = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
first, second = (torch.optim.SGD(model.parameters(), lr=0.25) for model in (one, two))
loader = torch.utils.data.DataLoader(Rows(), batch_size=2)
one, two, first, second, loader = accelerator.prepare(one, two, first, second, loader)
for x, y in loader:
    for model, optimizer in ((one, first), (two, second)):
        accelerator.backward((model(x) - y).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
"""
    steps = of_kind(program(tmp_path, LOOP + code)[0], "step")
    assert len(steps) == 11
    assert [(step.get("loss"), step["samples_seen"], step["accumulation"]) for step in steps[1:]] == [(None, None, 1)] * 10


FAULTS = """
fault = FAULT
if fault:
    import memtop_agent.accelerators as agent
    def fail(*_, **__): raise ValueError("made to fail")
    setattr(agent if fault == "report_checkpoint" else agent.Loop, fault, fail)
"""


def test_a_fault_changes_nothing_but_the_reports(tmp_path: Path) -> None:
    code = LOOP + FAULTS + TRAIN
    path = tmp_path / "without.py"
    path.write_text(code.replace("FAULT", "None"))
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("MEMTOP_", "PYTHONPATH"))}
    done = run_forked([sys.executable, str(path)], env=bare, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    for fault in ("backward", "details_of_update", "save_state", "report_checkpoint"):
        place = tmp_path / fault
        place.mkdir()
        (reports,) = program(place, code.replace("FAULT", repr(fault))).values()
        assert (place / "after.json").read_text() == (tmp_path / "after.json").read_text(), fault
        assert updates(reports) == list(range(1, 9)), "the optimizer hook counts on"
        (warning,) = of_kind(reports, "warning")
        assert "made to fail" in warning["message"]


def test_a_supervised_loop_shows_its_settings_and_its_checkpoint(runs: Runs) -> None:
    (runs.root / "mine.py").write_text(LOOP + TRAIN)
    runs.memtop("train", "--detach", "--name", "own", "--", sys.executable, "mine.py")
    run: dict[str, Any] = runs.wait("own", lambda run: run["state"] == "finished")
    assert (run["updates"], run["effective_batch"], run["samples_seen"]) == (8, 4, 30)
    assert run["loss"] is not None
    shown = run["program"]
    assert (shown["grip"], shown["resumes"]) == ("optimizer", None)
    assert "accelerate" in shown["why"]
    assert shown["knobs"]["accumulation"]["value"] == 2
    assert (shown["checkpoint"]["path"], shown["checkpoint"]["complete"]) == (str(runs.root / "step_4"), True)
    (runs.root / "step_4" / "random_states_0.pkl").write_bytes(b"PK")
    assert not runs.show("own")["program"]["checkpoint"]["complete"]


OWN_FOLDER = """
import argparse, pathlib, time, torch
from accelerate import Accelerator
parser = argparse.ArgumentParser()
parser.add_argument("--resume_from_checkpoint")
resumed = parser.parse_args().resume_from_checkpoint
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
loader = torch.utils.data.DataLoader(torch.arange(400.0).reshape(-1, 1), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
done = 0
if resumed:
    accelerator.load_state(resumed)
    done = int(resumed.split("step_")[-1])

def collect(*_):
    pathlib.Path("saving").touch()
    while pathlib.Path("slow").exists():
        time.sleep(0.05)

accelerator.register_save_state_pre_hook(collect)
for x in accelerator.skip_first_batches(loader, done):
    loss = model(x).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    done += 1
    print(f"step {done}/100 loss {loss.item()}", flush=True)
    if done in (10, 20):
        accelerator.save_state(f"states/step_{done}")
    while done == 25 and not resumed:
        time.sleep(0.1)
"""


def test_the_states_that_a_loop_saves_where_its_command_does_not_say_are_found(runs: Runs) -> None:
    (runs.root / "mine.py").write_text(OWN_FOLDER)
    runs.memtop("train", "--detach", "--name", "own", "--", sys.executable, "mine.py")
    run = runs.wait("own", lambda run: run["updates"] == 25 and run["checkpoint"] is not None)
    assert run["program"]["profile"] == "accelerate"
    assert (run["checkpoint"]["path"], run["checkpoint"]["updates"]) == (str(runs.root / "states/step_20"), 20)
    runs.memtop("stop", "own")
    for name in ("step_10", "step_20"):
        (runs.root / "states" / name / "model.safetensors").rename(runs.root / name)
    told = runs.memtop("restart", "own", "--detach", status=2).stderr
    words = f"this program would begin from zero: there is no complete checkpoint of this run in {runs.root}/states/step_* ("
    assert told.startswith(f"memtop: {words}")
    assert told.endswith("; `--set position=lost` restarts it nevertheless\n")
    for name in ("step_10", "step_20"):
        (runs.root / name).rename(runs.root / "states" / name / "model.safetensors")
    told = runs.memtop("restart", "own", "--detach").stderr
    assert told.startswith("restarting from the program's checkpoint at update 20; 5 updates since update 20 are done again\n")
    run = runs.wait("own", lambda run: run["state"] == "finished")
    assert (run["updates"], run["attempts"][1]["start_updates"], run["program"]["resumes"]) == (100, 20, True)


def test_a_stop_waits_for_a_save_that_has_written_no_file_yet(runs: Runs) -> None:
    (runs.root / "mine.py").write_text(OWN_FOLDER)
    (runs.root / "slow").touch()
    runs.memtop("train", "--detach", "--name", "own", "--", sys.executable, "mine.py")
    wait_for_file(runs.root / "saving")
    with runs.start("stop", "own", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as stopping:
        assert stopping.stderr.readline() == "stopping: memtop sends SIGINT to the program, which does not save then\n"
        assert stopping.stderr.readline() == "the program is saving: SIGINT follows when it has saved\n"
        (runs.root / "slow").unlink()
        stopping.communicate()
    assert (runs.root / "states/step_10/random_states_0.pkl").exists()
    assert runs.show("own")["checkpoint"]["complete"]
