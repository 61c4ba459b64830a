"""Real third-party trainers and launchers: each of their ranks reports its own steps, and no other
process does.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.test_agent_ranks import hellos, program, updates

HUGGING_FACE = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

class Rows(torch.utils.data.Dataset):
    def __len__(self): return 16
    def __getitem__(self, at):
        row = torch.arange(8) + at
        return {"input_ids": row, "labels": row}

model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=8, n_layer=1, n_head=1, n_positions=8))
arguments = TrainingArguments(
    output_dir="out", max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=0.5,
    lr_scheduler_type="constant", report_to=[], save_strategy="no", dataloader_num_workers=1, disable_tqdm=True, use_cpu=True,
)
Trainer(model=model, args=arguments, train_dataset=Rows()).train()
"""

ACCELERATE = """
import torch
from accelerate import Accelerator

def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.num_processes == PROCESSES
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    loader = torch.utils.data.DataLoader(torch.arange(16.0).unsqueeze(1), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()

if __name__ == "__main__":
    START
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_hugging_faces_trainer(tmp_path: Path, ranks: int) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    found = program(tmp_path, HUGGING_FACE, *(torchrun if ranks > 1 else ()), HF_HUB_OFFLINE="1")
    assert {number: updates(reports) for number, reports in found.items()} == {rank: [1, 2, 3] for rank in range(ranks)}
    assert hellos(found) == [(rank, rank, rank, rank, ranks) for rank in range(ranks)]
    rates = {report["learning_rate"] for reports in found.values() for report in reports if report["type"] == "step"}
    assert rates == {0.5}


def test_ranks_that_accelerate_launch_starts(tmp_path: Path) -> None:
    """The one of its launchers for ranks without GPUs that needs no MPI."""
    launch = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1")
    rest = ("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0")
    code = ACCELERATE.replace("PROCESSES", "2").replace("START", "main()")
    found = program(tmp_path, code, *launch, *rest, ACCELERATE_USE_CPU="true")
    assert {number: updates(reports) for number, reports in found.items()} == {0: [1, 2], 1: [1, 2]}
    assert hellos(found) == [(rank, rank, rank, rank, 2) for rank in (0, 1)]


def test_ranks_that_a_notebook_starts(tmp_path: Path) -> None:
    """Forked from a process that has loaded all libraries."""
    start = "from accelerate import debug_launcher\n    debug_launcher(main, num_processes=2)"
    found = program(tmp_path, ACCELERATE.replace("PROCESSES", "2").replace("START", start))
    assert {number: updates(reports) for number, reports in found.items()} == {0: [1, 2], 1: [1, 2]}
    # They cannot know which machine they are on.
    assert [row[:3] + row[4:] for row in hellos(found)] == [(rank, rank, rank, 2) for rank in (0, 1)]
