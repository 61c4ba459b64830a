"""The document of `memtop show --json` for programs of the user's own: the names are a contract,
and every value that is known is there."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.conftest import Runs

TRAINER = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=8, n_layer=1, n_head=1, n_positions=4))
rows = [{"input_ids": torch.arange(4), "labels": torch.arange(4)}] * 32
arguments = TrainingArguments(
    output_dir="out", max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=3, logging_steps=1,
    save_steps=2, report_to=[], disable_tqdm=True, use_cpu=True,
)
Trainer(model=model, args=arguments, train_dataset=rows).train()
"""
LOOP = """
import torch
weight = torch.nn.Parameter(torch.ones(9))
optimizer = torch.optim.SGD([weight], lr=0.25)
for step in range(6):
    loss = (weight * weight).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}/6 | loss {loss.item():.4f}", flush=True)
"""
OUTPUT = """
for step in range(1, 7):
    print(f"step {step}/6 loss: {1 / step:.4f} lr: 0.25", flush=True)
"""
KNOBS = {"batch", "accumulation", "seq_len", "eval_batch", "gradient_checkpointing", "optimizer"}


def document(runs: Runs, program: str) -> dict[str, Any]:
    (runs.root / "program.py").write_text(program)
    runs.memtop("train", "--headless", "--name", "a", "--", sys.executable, "program.py")
    found = runs.show("a", metrics=True)
    assert found["state"] == "finished"
    assert {"grip", "profile", "why", "knobs", "resumes", "checkpoint"} <= set(found["program"])
    assert set(found["program"]["knobs"]) >= KNOBS
    assert found["updates"] == found["total_updates"] == len(found["metrics"])
    assert found["loss"] == found["metrics"][-1]["loss"]
    assert all(row["loss"] is not None and row["learning_rate"] is not None for row in found["metrics"])
    return found


def test_a_program_with_the_trainer(runs: Runs) -> None:
    found = document(runs, TRAINER)
    program = found["program"]
    assert program["grip"] == "hooks"
    assert program["why"].startswith("transformers ")
    assert (found["updates"], found["effective_batch"], found["samples_seen"]) == (4, 6, 24)
    batch = {"value": 2, "name": "per_device_train_batch_size", "source": "TrainingArguments"}
    assert (program["knobs"]["batch"], program["knobs"]["accumulation"]["value"]) == (batch, 3)
    assert found["settings"].items() >= {"batch": 2, "accumulation": 3}.items()
    saved = str(runs.root / "out/checkpoint-4")
    assert program["checkpoint"] == {"path": saved, "update": 4, "complete": True}
    assert (found["checkpoint"]["path"], found["checkpoint"]["updates"], found["checkpoint"]["complete"]) == (saved, 4, True)
    lines = runs.memtop("show", "a").stdout
    assert "  settings    batch 2, accumulation 3, " in lines
    assert "; effective batch 6\n  known       transformers " in lines


@pytest.mark.parametrize(("code", "counted"), [(LOOP, True), (OUTPUT, False)], ids=["loop", "no optimizer"])
def test_a_program_that_is_read_from_its_output(runs: Runs, code: str, counted: bool) -> None:
    found = document(runs, code)
    program = found["program"]
    assert (program["grip"], found["updates"], found["learning_rate"]) == ("output", 6, 0.25)
    assert ("counted by memtop's agent" in program["why"]) == counted
    unknown = (found["settings"], found["effective_batch"], found["checkpoint"], program["checkpoint"], program["resumes"])
    assert unknown == (None,) * 5, "unknown is null, never 0"
    assert set(program["knobs"].values()) == {None}
