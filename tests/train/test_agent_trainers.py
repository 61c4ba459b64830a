"""Hugging Face's Trainer, unchanged, with the agent: what it reports and obeys, and that it trains
as without the agent.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from memtop.train.agent.orders import Agreement
from tests.conftest import Runs, wait_for_file
from tests.forking import LONG
from tests.forking import run as run_forked
from tests.train.test_agent_ranks import journals, program, updates

SCRIPT = """
import hashlib, json, sys, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

class Rows(torch.utils.data.Dataset):
    def __len__(self): return 20
    def __getitem__(self, at):
        row = (torch.arange(8) * (at % 3 + 1)) % 32
        return {"input_ids": row, "labels": row}

def trainer(**given):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=8, n_layer=1, n_head=1, n_positions=8))
    values = dict(
        output_dir="out", num_train_epochs=2, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=0.1,
        report_to=[], save_strategy="steps", save_steps=4, eval_strategy="steps", eval_steps=5, logging_steps=2,
        disable_tqdm=True, use_cpu=True)
    arguments = TrainingArguments(**dict(values, **given))
    return Trainer(model=model, args=arguments, train_dataset=Rows(), eval_dataset=Rows())

def digest(model):
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()

"""


def of_kind(reports: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [report for report in reports if report["type"] == kind]


def test_what_a_trainer_reports(tmp_path: Path) -> None:
    code = (
        SCRIPT
        + """
one = trainer()
one.train()
json.dump(one.state.log_history, open("log.json", "w"))
"""
    )
    reports = program(tmp_path, code)[0]
    logged = {line["step"]: line for line in json.loads((tmp_path / "log.json").read_text()) if "loss" in line}
    (plan,) = of_kind(reports, "plan")
    assert (plan["updates"], plan["total_updates"], plan["resumed"], plan["effective_batch"]) == (0, 10, False, 4)
    assert plan["framework"].startswith("transformers ")
    assert plan["knobs"] == {
        "batch": {"value": 2, "name": "per_device_train_batch_size", "source": "TrainingArguments"},
        "accumulation": {"value": 2, "name": "gradient_accumulation_steps", "source": "TrainingArguments"},
        "eval_batch": {"value": 8, "name": "per_device_eval_batch_size", "source": "TrainingArguments"},
        "gradient_checkpointing": {"value": False, "name": "gradient_checkpointing", "source": "TrainingArguments"},
        "optimizer": {"value": "adamw_torch_fused", "name": "optim", "source": "TrainingArguments"},
    }
    steps = of_kind(reports, "step")
    assert updates(reports) == list(range(1, 11)), "each update once"
    assert [step["samples_seen"] for step in steps] == list(range(4, 44, 4))
    assert [step["learning_rate"] for step in steps] == pytest.approx([0.1 * (1 - done / 10) for done in range(10)])
    assert {(step["batch"], step["accumulation"]) for step in steps} == {(2, 2)}
    for step in steps:
        own = logged.get(step["update"], {})
        names = (step["logged"], step.get("loss"), step.get("gradient_norm"), step["epoch"])
        assert names == (bool(own), own.get("loss"), own.get("grad_norm"), own.get("epoch", step["epoch"]))
    assert [own["learning_rate"] for own in logged.values()] == [steps[at - 1]["learning_rate"] for at in logged]
    assert [(report["update"], report["loss"] is not None) for report in of_kind(reports, "evaluation")] == [
        (5, True),
        (10, True),
    ]
    saved = of_kind(reports, "checkpoint")
    assert [(report["updates"], report["path"]) for report in saved] == [
        (update, str(tmp_path / "out" / f"checkpoint-{update}")) for update in (4, 8, 10)
    ]
    assert all(report["size_bytes"] > 0 for report in saved)
    assert [report["outcome"] for report in of_kind(reports, "end")] == ["finished"]


def test_trainings_one_after_another_have_one_count(tmp_path: Path) -> None:
    """Two are resumed and logged by epoch; then an optimizer of the program's own steps."""
    code = (
        SCRIPT
        + """
trainer(eval_strategy="no").evaluate()
trainer(max_steps=4, eval_strategy="no").train()
two = trainer(max_steps=6, eval_strategy="no", logging_strategy="epoch", output_dir="out-2")
two.train(resume_from_checkpoint="out/checkpoint-4")
two.train(resume_from_checkpoint="out/checkpoint-4")
own = torch.optim.SGD(two.model.parameters(), lr=0.5)
own.step()
own.step()
"""
    )
    reports = program(tmp_path, code)[0]
    plans = [(plan["updates"], plan["total_updates"], plan["resumed"]) for plan in of_kind(reports, "plan")]
    # The second Trainer begins where the first has ended, after 4 updates of its own numbering.
    assert plans == [(0, 4, False), (8, 10, True), (8, 10, True)]
    numbers = updates(reports)
    assert numbers[:4] == [1, 2, 3, 4]
    # An epoch ends after 5 of the Trainer's updates; then the update is reported once more.
    assert numbers[4:-2] == [9, 9, 10, 10] * 2
    assert numbers[-2:] == [11, 12], "the optimizer hook counts on"
    late = [step for step in of_kind(reports, "step") if step["update"] == 9]
    assert [step["logged"] for step in late] == [False, True] * 2
    assert all((step.get("loss") is not None) == step["logged"] for step in late)


def test_a_new_trainer_that_resumes_the_training_before_goes_on_with_its_count(tmp_path: Path) -> None:
    """As after a lack of memory: with half the batch, and so twice as many updates."""
    code = (
        SCRIPT
        + """
class Refused(TrainerCallback):
    def on_step_end(self, args, state, control, **others):
        if state.global_step == 6:
            raise torch.OutOfMemoryError("CUDA out of memory.")

one = trainer(max_steps=2, output_dir="other")
one.train()
first = trainer()
first.add_callback(Refused())
try:
    first.train()
except torch.OutOfMemoryError:
    trainer(per_device_train_batch_size=1).train(resume_from_checkpoint=True)
"""
    )
    reports = program(tmp_path, code)[0]
    plans = [
        (plan["updates"], plan["total_updates"], plan["resumed"], plan["samples_seen"]) for plan in of_kind(reports, "plan")
    ]
    # The third Trainer resumes after 4 updates of the second one.
    assert plans == [(0, 2, False, 0), (2, 12, False, 8), (6, 22, True, 24)]
    assert updates(reports) == [1, 2, *range(3, 8), *range(7, 23)], "the sixth one was not logged"
    saved = {report["updates"]: report["path"] for report in of_kind(reports, "checkpoint")}
    assert saved[22] == str(tmp_path / "out" / "checkpoint-20")
    assert of_kind(reports, "step")[-1]["samples_seen"] == 8 + 40


EVENTS = ("train_begin", "step_begin", "step_end", "epoch_end", "log", "evaluate", "predict", "save", "train_end")
FAULT = """
import sys
fault = sys.argv[1]
def fail(*_): raise ValueError("made to fail")
if fault == "import":
    import memtop_agent.hooks, memtop_agent.trainers
    memtop_agent.hooks.LoaderWatch.hook = memtop_agent.trainers.follow = fail
elif fault in EVENTS:
    import memtop_agent.trainers
    setattr(memtop_agent.trainers.TrainerTraining, fault, fail)
"""
TRAIN = """
one = trainer(output_dir="out-" + fault)
one.train()
one.predict(Rows())
with open(fault + ".txt", "w") as file:
    file.write(digest(one.model) + json.dumps([line.get("loss") for line in one.state.log_history]))
"""


def test_a_fault_in_any_hook_changes_nothing_but_the_reports(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(FAULT.replace("EVENTS", repr(EVENTS)) + SCRIPT + TRAIN)
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("MEMTOP_", "PYTHONPATH"))}
    command = [sys.executable, str(path), "without"]
    done = run_forked(command, env=bare, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    wanted = (tmp_path / "without.txt").read_text()
    for fault in ("none", "import", *EVENTS) if LONG else ("none", "train_begin", "step_end", "save"):
        folder = tmp_path / f"attempt-{fault}"
        folder.mkdir()
        env = {**bare, "PYTHONPATH": str(SITE), "MEMTOP_ATTEMPT_DIR": str(folder), "MEMTOP_ATTEMPT": "1"}
        # A forked program has imported the libraries already; one with options is not forked.
        options = ["-X", "utf8"] if fault == "import" else []
        command = [sys.executable, *options, str(path), fault]
        done = run_forked(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / f"{fault}.txt").read_text() == wanted, fault
        reports = journals(folder)[0]
        warnings = [report["message"] for report in of_kind(reports, "warning")]
        assert len(warnings) == (0 if fault == "none" else 2 if fault == "import" else 1), warnings
        assert all("made to fail" in message for message in warnings)
        numbers = updates(reports)
        if fault == "import":
            assert not numbers
            continue
        # The optimizer hook counts on from the update after the fault.
        assert numbers[-1] == 10
        assert sorted(set(numbers)) == numbers
        assert len(numbers) >= 9


SITE = Path(__file__).resolve().parents[2] / "train" / "agent" / "site"


def test_ranks_agree_whichever_of_them_is_ahead(tmp_path: Path) -> None:
    """A rank reads the file after the first rank's update before, and before its update after."""
    for seed in range(200):
        chance = random.Random(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        first, second = (Agreement(str(folder), 1) for _ in range(2))
        did: tuple[list[Any], list[Any]] = ([], [])
        for update in range(1, 30):
            second_reads_first = chance.random() < 0.5
            if second_reads_first:
                did[1].append(second.at(update))
            did[0].append(first.at(update))
            if not first.is_open(update) and chance.random() < 0.5:
                first.propose(update, chance.random() < 0.5)
            if not second_reads_first:
                did[1].append(second.at(update))
        assert did[0] == did[1]
        assert set(did[0]) == {None, "checkpoint", "stop"}


def stop_once(file: Path, path: Path, rank: int) -> threading.Thread:
    """A supervisor that tells this rank to stop once the file exists."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()

    def serve() -> None:
        with server:
            for _ in range(2):
                connection, _ = server.accept()
                stream = connection.makefile("rb")
                if json.loads(stream.readline())["rank"] == rank:
                    break
            wait_for_file(file)
            connection.sendall(json.dumps({"type": "command", "id": 7, "name": "stop"}).encode() + b"\n")
            (path.parent / "answer.json").write_bytes(stream.readline())

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


FAULT_IN_ONE = """
import os
if os.environ["RANK"] == "1":
    import memtop_agent.trainers as agent
    def fail(*_): raise ValueError("made to fail")
    agent.TrainerTraining.step_end = fail
"""


@pytest.mark.parametrize("fault", ["", FAULT_IN_ONE], ids=["", "reports of one fail"])
def test_two_ranks_save_and_stop_after_the_same_update(tmp_path: Path, fault: str) -> None:
    code = (
        SCRIPT
        + fault
        + """
class Third(TrainerCallback):
    def on_step_end(self, args, state, control, **others):
        if state.global_step == 3:
            open("third-" + str(args.process_index), "w").close()

one = trainer(max_steps=100000, eval_strategy="no", save_steps=100000)
one.add_callback(Third())
one.train()
"""
    )
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    thread = stop_once(tmp_path / "third-0", tmp_path / "s", 0)
    found = program(tmp_path, code, *torchrun, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", MEMTOP_SOCKET=str(tmp_path / "s"))
    thread.join(60)
    answer = json.loads((tmp_path / "answer.json").read_text())
    last = updates(found[0])[-1]
    assert updates(found[1])[-1] == last < 100000
    assert (answer["ok"], answer["message"]) == (True, f"saved at update {last}: {tmp_path / 'out' / f'checkpoint-{last}'}")
    state = json.loads((tmp_path / "out" / f"checkpoint-{last}" / "trainer_state.json").read_text())
    assert state["global_step"] == last
    ends = [report["outcome"] for reports in found.values() for report in of_kind(reports, "end")]
    assert ends == ["stopped"] * (1 if fault else 2)
    assert len(of_kind(found[1], "warning")) == bool(fault)
    assert of_kind(found[0], "plan")[0]["effective_batch"] == 8


def test_a_supervised_trainer_shows_its_numbers_and_saves_and_stops_on_request(runs: Runs) -> None:
    code = (
        SCRIPT
        + """
one = trainer(max_steps=100000, eval_strategy="no", save_steps=100000, logging_steps=5)
one.train()
open("after", "w").write(str(one.state.global_step))
"""
    )
    (runs.root / "mine.py").write_text(code)
    runs.memtop("train", "--detach", "--name", "own", "--", sys.executable, "mine.py")
    run = runs.wait("own", lambda run: (run["updates"] or 0) > 5 and run["loss"] is not None and run["eta_seconds"] is not None)
    assert (run["state"], run["total_updates"], run["effective_batch"]) == ("training", 100000, 4)
    assert run["samples_per_second"] > 0
    assert run["samples_seen"] == run["updates"] * 4
    shown = run["program"]
    assert (shown["grip"], shown["resumes"], shown["checkpoint"]) == ("hooks", None, None)
    assert shown["knobs"]["batch"] == {"value": 2, "name": "per_device_train_batch_size", "source": "TrainingArguments"}
    runs.memtop("checkpoint", "own")
    run = runs.wait("own", lambda run: run["checkpoint"] is not None)
    saved = run["program"]["checkpoint"]
    assert saved["complete"]
    assert saved["path"] == str(runs.root / "out" / f"checkpoint-{saved['update']}")
    assert (run["checkpoint"]["updates"], run["checkpoint"]["complete"]) == (saved["update"], True)
    runs.memtop("stop", "own")
    run = runs.show("own", metrics=True)
    assert (run["state"], run["exit_status"]) == ("stopped", 0)
    assert (runs.root / "after").read_text() == str(run["updates"]) == str(run["checkpoint"]["updates"])
    rows = run["metrics"]
    assert [row["update"] for row in rows] == list(range(1, run["updates"] + 1))
    assert [row["update"] for row in rows if row["loss"] is not None] == list(range(5, run["updates"] + 1, 5))
    (runs.root / "out" / f"checkpoint-{run['updates']}" / "trainer_state.json").write_text("{")
    assert not runs.show("own")["program"]["checkpoint"]["complete"]


LIMITED = """
import os, shutil
one = trainer(max_steps=100000, eval_steps=4, logging_steps=5, load_best_model_at_end=True, save_total_limit=1,
    metric_for_best_model="first", greater_is_better=True)
one.compute_metrics = lambda _: {"first": -one.state.global_step}
one.train()
open("after", "w").write(str(one.args.save_total_limit))
if os.path.exists("deletes"):
    shutil.rmtree("out")
"""


def test_the_checkpoint_of_a_stop_stays_though_another_is_the_best_and_only_one_is_allowed(runs: Runs) -> None:
    (runs.root / "mine.py").write_text(SCRIPT + LIMITED)
    runs.memtop("train", "--detach", "--name", "own", "--", sys.executable, "mine.py")
    runs.wait("own", lambda run: (run["updates"] or 0) > 9)
    runs.memtop("stop", "own")
    run = runs.show("own")
    assert (run["reason"], run["checkpoint"]["complete"]) == ("stopped as requested, state saved", True)
    assert run["checkpoint"]["updates"] == run["updates"]
    assert {path.name for path in (runs.root / "out").iterdir()} == {"checkpoint-4", f"checkpoint-{run['updates']}"}
    assert (runs.root / "after").read_text() == "1"


def done_again(reached: int, saved: int) -> str:
    one = reached - saved == 1
    since = f"since the last saved state (at update {saved})"
    return f"{reached - saved} {'update' if one else 'updates'} {since} {'is' if one else 'are'} done again"


def test_what_a_stop_has_saved_and_the_program_then_deletes_is_not_called_saved(runs: Runs) -> None:
    (runs.root / "mine.py").write_text(SCRIPT + LIMITED)
    (runs.root / "deletes").touch()
    runs.memtop("train", "--detach", "--name", "own", "--", sys.executable, "mine.py")
    runs.wait("own", lambda run: (run["updates"] or 0) > 9)
    runs.memtop("restart", "own", "--detach")
    before, present = runs.wait("own", lambda run: len(run["attempts"]) == 2)["attempts"]
    again = done_again(before["updates"], present["start_updates"])
    assert runs.events("own", "attempt")[-1].message.endswith(f"; {again}")
    runs.wait("own", lambda run: (run["updates"] or 0) > before["updates"] + 4)
    runs.memtop("stop", "own")
    run = runs.show("own")
    path = runs.root / "out" / f"checkpoint-{run['updates']}"
    again = done_again(run["updates"], present["start_updates"])
    assert run["reason"] == f"stopped as requested, but the checkpoint is gone: {path}; {again}"
    assert run["checkpoint"]["updates"] == present["start_updates"]
