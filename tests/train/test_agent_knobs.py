"""A real program built on Hugging Face's Trainer gets other settings and resumes, unchanged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.train.test_agent_ranks import program

# It writes down the samples and the loss of each update, and never passes a checkpoint.
TRAIN = """
import json, os, sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

set_seed(1)
seen = []

class Rows(torch.utils.data.Dataset):
    def __len__(self): return 24
    def __getitem__(self, at):
        row = (torch.arange(8) * (at + 3)) % 32  # the second value tells which sample it is
        return {"input_ids": row, "labels": row}

class Recording(Trainer):
    def training_step(self, model, inputs, *others):
        seen.extend((inputs["input_ids"][:, 1] - 3).tolist())
        return super().training_step(model, inputs, *others)

class Written(TrainerCallback):
    def on_step_end(self, args, state, control, **others):
        with open("updates.jsonl" + os.environ.get("RANK", ""), "a") as file:
            file.write(json.dumps({"update": state.global_step, "samples": seen[:]}) + "\\n")
        seen.clear()

    def on_log(self, args, state, control, logs, **others):
        if "loss" in logs:
            with open("losses.jsonl", "a") as file:
                file.write(json.dumps([state.global_step, logs["loss"], logs["learning_rate"]]) + "\\n")

small = dict(vocab_size=32, n_embd=8, n_layer=1, n_head=1, n_positions=8, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
model = GPT2LMHeadModel(GPT2Config(**small))
OTHERS
arguments = Arguments(
    output_dir="out", num_train_epochs=2, per_device_train_batch_size=4, learning_rate=0.05, logging_steps=1, save_steps=4,
    report_to=[], disable_tqdm=True, use_cpu=True, MORE
)
Recording(model=model, args=arguments, train_dataset=Rows(), callbacks=[Written()]).train(RESUME)
"""
# Like TRL's SFTConfig: it sets values of its own, then those of the base class follow.
SUBCLASS = """
from dataclasses import dataclass

@dataclass
class Arguments(TrainingArguments):
    max_length: int = 1024

    def __post_init__(self):
        self.bf16 = False
        super().__post_init__()
"""


def train(
    folder: Path,
    others: str = "Arguments = TrainingArguments",
    more: str = "",
    resume: str = "",
    start: tuple[str, ...] = (),
    **given: str,
) -> str:
    folder.mkdir(exist_ok=True)
    for path in (*folder.glob("updates.jsonl*"), folder / "losses.jsonl"):
        path.unlink(missing_ok=True)
    code = TRAIN.replace("OTHERS", others).replace("MORE", more).replace("RESUME", resume)
    journals = program(folder, code, *start, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", **given)
    return json.dumps([report for report in journals[0] if report["type"] == "trainer"][-1])


def rows(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def changes(folder: Path, resume: Path | None, **knobs: Any) -> dict[str, str]:
    wanted = {"output_dir": str(folder / "out"), "knobs": knobs, "resume": None, "update": None}
    if resume is not None:
        wanted |= {"resume": str(resume), "update": int(resume.name.partition("-")[2] or 0)}
    return {"MEMTOP_TRAINER": json.dumps(wanted)}


@pytest.mark.parametrize("how", ["never passes one", "passes the newest", "batch from the checkpoint"])
def test_half_the_batch_continues_with_the_same_samples_and_losses(tmp_path: Path, how: str) -> None:
    # In transformers 5, only auto_find_batch_size takes the batch from the checkpoint; before 5.1
    # every Trainer did.
    more = "auto_find_batch_size=True" if how == "batch from the checkpoint" else ""
    whole = tmp_path / "whole"
    train(whole, more=more)
    expected, losses = rows(whole / "updates.jsonl"), rows(whole / "losses.jsonl")
    assert [row["update"] for row in expected] == list(range(1, 13))
    kept = tmp_path / "kept" / "checkpoint-4"
    shutil.copytree(whole / "out" / "checkpoint-4", kept)
    resume = "resume_from_checkpoint='out/checkpoint-8'" if how == "passes the newest" else ""
    text = train(whole, more=more, resume=resume, **changes(whole, kept, batch=2, accumulation=2))
    assert {name: json.loads(text)[name] for name in ("batch", "accumulation", "processes")} == {
        "batch": 2,
        "accumulation": 2,
        "processes": 1,
    }
    assert sorted(json.loads(text)["earlier"]) == ["checkpoint-12", "checkpoint-4", "checkpoint-8"]
    assert rows(whole / "updates.jsonl") == expected[4:]
    for (update, loss, rate), (_, its_loss, its_rate) in zip(losses[4:], rows(whole / "losses.jsonl"), strict=True):
        assert its_loss == pytest.approx(loss, abs=2e-3), update
        assert its_rate == pytest.approx(rate), update


def test_workers_that_torchrun_starts_again_go_on_from_what_was_saved_since(tmp_path: Path) -> None:
    train(tmp_path)
    kept, out = tmp_path / "kept" / "checkpoint-4", tmp_path / "out"
    shutil.copytree(out / "checkpoint-4", kept)
    (out / "checkpoint-12/trainer_state.json").write_text("{")  # torchrun ended it meanwhile
    train(tmp_path, **changes(tmp_path, kept, batch=2, accumulation=2), TORCHELASTIC_RESTART_COUNT="1")
    assert [row["update"] for row in rows(tmp_path / "updates.jsonl")] == [9, 10, 11, 12]


def test_two_ranks_get_the_same_settings_and_the_same_checkpoint(tmp_path: Path) -> None:
    # In transformers 5, only this takes the batch from the checkpoint.
    more, knobs = "auto_find_batch_size=True", {"batch": 2, "accumulation": 2}
    train(tmp_path, more=more, start=TORCHRUN)
    expected = of_both_ranks(tmp_path)
    assert [len(samples) for samples in expected] == [8] * 6
    kept = tmp_path / "kept" / "checkpoint-4"
    shutil.copytree(tmp_path / "out" / "checkpoint-4", kept)
    with pytest.raises(AssertionError, match="memtop: the program did not resume: it begins after update 0 instead of 4"):
        train(tmp_path, AGAIN, more, start=TORCHRUN, **changes(tmp_path, kept, **knobs))
    assert not list(tmp_path.glob("updates.jsonl*")), "neither rank has trained"
    train(tmp_path, more=more, start=TORCHRUN, **changes(tmp_path, kept, **knobs))
    assert of_both_ranks(tmp_path) == expected[4:]


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
AGAIN = """
Arguments = TrainingArguments
Recording.train = Trainer.train.__wrapped__  # not what memtop's agent has made of it
"""


def of_both_ranks(folder: Path) -> list[list[int]]:
    """The samples of each update. Which rank has which depends on the batch."""
    ranks = [rows(folder / f"updates.jsonl{rank}") for rank in (0, 1)]
    return [sorted(first["samples"] + second["samples"]) for first, second in zip(*ranks, strict=True)]


def test_a_subclass_gets_its_own_fields_too_and_other_trainers_nothing(tmp_path: Path) -> None:
    more = "gradient_accumulation_steps=8, save_strategy='no', max_steps=1"
    given = {"batch": 2, "accumulation": 1, "seq_len": 64, "eval_batch": 3, "gradient_checkpointing": True, "optimizer": "sgd"}
    jit = f"{more}, enable_jit_checkpoint=True"
    text = train(tmp_path, SUBCLASS + WRITE, jit, **changes(tmp_path, None, **given))
    assert (json.loads(text)["seq_len"], json.loads(text)["saves_on_sigterm"]) == (64, True)
    assert rows(tmp_path / "arguments.jsonl") == [[2, 1, 64, 3, True, "sgd", 2]]
    elsewhere = changes(tmp_path / "elsewhere", None, **given)
    train(tmp_path, SUBCLASS + WRITE, more, **elsewhere)
    assert rows(tmp_path / "arguments.jsonl")[1] == [4, 8, 1024, 8, False, "adamw_torch_fused", 4]


# As many scripts do; the first arguments object stays where it was made.
MOVES = """
import time

def Arguments(**given):
    TrainingArguments(**given)
    made = TrainingArguments(**given)
    made.output_dir = os.path.join(made.output_dir, time.strftime("%Y-%m-%d_%H-%M-%S"))
    return made
"""


def test_a_program_that_changes_its_folder_afterwards_gets_its_settings_too(tmp_path: Path) -> None:
    more = "max_steps=2, save_strategy='no'"
    before = json.loads(train(tmp_path, MOVES, more))
    folder = str(tmp_path / "out")
    assert (before["made_in"], before["batch"], str(Path(before["output_dir"]).parent)) == ([folder, 2], 4, folder)
    wanted = {"output_dir": before["output_dir"], "made_in": before["made_in"], "knobs": {"batch": 2, "accumulation": 2}}
    given = {"MEMTOP_TRAINER": json.dumps({**wanted, "resume": None, "update": None})}
    after = json.loads(train(tmp_path, MOVES, more, **given))
    assert (after["made_in"], after["batch"], after["accumulation"]) == ([folder, 2], 2, 2)
    # The same folder, but another one of its arguments objects.
    other = json.loads(train(tmp_path, MOVES.replace("    TrainingArguments(**given)\n", ""), more, **given))
    assert (other["made_in"], other["batch"]) == ([folder, 1], 4)


def test_a_program_without_a_folder_gets_its_settings_too(tmp_path: Path) -> None:
    """transformers 5 then chooses one."""
    more, nowhere = "max_steps=2, save_strategy='no'", "Arguments = lambda output_dir, **given: TrainingArguments(**given)"
    before = json.loads(train(tmp_path, nowhere, more))
    wanted = {name: before[name] for name in ("output_dir", "made_in")}
    given = {"MEMTOP_TRAINER": json.dumps({**wanted, "knobs": {"batch": 2}, "resume": None, "update": None})}
    assert json.loads(train(tmp_path, nowhere, more, **given))["batch"] == 2


WRITE = """
class Recording(Recording):
    def train(self, *given):
        a = self.args
        with open("arguments.jsonl", "a") as file:
            file.write(json.dumps([
                a.per_device_train_batch_size, a.gradient_accumulation_steps, a.max_length, a.per_device_eval_batch_size,
                a.gradient_checkpointing, str(a.optim.value), a.train_batch_size,
            ]) + "\\n")
        super().train(*given)
"""


# As transformers did before 5.1.
OLD = """
from transformers import TrainerState
Arguments = TrainingArguments

class Trainer(Trainer):
    def get_train_dataloader(self):
        self._train_batch_size = TrainerState.load_from_json(os.environ["KEPT"]).train_batch_size
        return super().get_train_dataloader()
"""


def test_the_batch_of_the_settings_before_is_not_taken_from_the_checkpoint(tmp_path: Path) -> None:
    """After a return to the settings before. The checkpoint may be the program's own file."""
    train(tmp_path, more="max_steps=4")
    kept = tmp_path / "kept" / "checkpoint-4"
    shutil.copytree(tmp_path / "out" / "checkpoint-4", kept)
    path = kept / "trainer_state.json"
    text = json.dumps({**json.loads(path.read_text()), "train_batch_size": 2})
    path.write_text(text)
    train(tmp_path, others=OLD, more="max_steps=5", KEPT=str(path), **changes(tmp_path, kept))
    (row,) = rows(tmp_path / "updates.jsonl")
    assert (row["update"], len(row["samples"])) == (5, 4)
    assert path.read_text() == text


def test_changes_that_cannot_be_read_change_nothing(tmp_path: Path) -> None:
    more = "max_steps=1, save_strategy='no'"
    text = train(tmp_path, more=more, MEMTOP_TRAINER='{"knobs": [')
    assert json.loads(text)["batch"] == 4
    # A checkpoint that is gone: the program says so itself.
    with pytest.raises(AssertionError, match="Can't find a valid checkpoint"):
        train(tmp_path, more=more, **changes(tmp_path, tmp_path / "gone", batch=2))
