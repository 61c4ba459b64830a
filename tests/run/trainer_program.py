"""A program built on Hugging Face's Trainer that never passes a checkpoint.

usage: trainer_program.py [WORD ...]

ignores-batch: it sets its batch itself.
begins-again: when it is started again, it begins from zero.
fails-with-batch-2: it does not start with this batch.
never-saves: it saves no checkpoint.
saves-below: its Trainer saves into a folder below its output_dir.
runs-out: in update 7 the kernel refuses memory for a batch of more than 2.
catches: the same happens in update 3, but it goes on.
waits: after update 17, until there is a file `go`.
goes-on: after the training, until there is a file `go`.

It writes the samples of each update to updates.jsonl. If no memory is to run out, its first attempt
trains slowly from update 15 on, in the second epoch, so that a restart comes in between.
"""

import json
import os
import pathlib
import resource
import sys
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

SAMPLES, EPOCHS = 46, 4
first = os.environ["MEMTOP_ATTEMPT"] == "1"
set_seed(1)
seen: list[int] = []


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, at):
        row = (torch.arange(4) * at) % 64  # the second value tells which sample it is
        return {"input_ids": row, "labels": row}


def allocate(samples):
    """100 MiB for each sample, where 300 MiB are allowed."""
    used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (300 << 20), before[1]))
    try:
        torch.empty(samples * 100 << 20, dtype=torch.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class Recording(Trainer):
    def _get_output_dir(self, trial):
        folder = super()._get_output_dir(trial)
        return f"{folder}/exp1" if "saves-below" in sys.argv else folder

    def training_step(self, model, inputs, *others):
        if "catches" in sys.argv and self.state.global_step == 2:
            try:
                allocate(4)
            except RuntimeError as error:
                print("goes on after:", error, flush=True)
        if "runs-out" in sys.argv and self.state.global_step == 6:
            allocate(len(inputs["input_ids"]))
        seen.extend(inputs["input_ids"][:, 1].tolist())
        return super().training_step(model, inputs, *others)


class Written(TrainerCallback):
    def on_step_end(self, args, state, control, **others):
        with pathlib.Path("updates.jsonl").open("a") as file:
            file.write(json.dumps([state.global_step, args.per_device_train_batch_size, seen]) + "\n")
        seen.clear()
        if "waits" in sys.argv:
            while state.global_step == 17 and not pathlib.Path("go").exists():
                time.sleep(0.05)
        elif first and state.global_step >= 15 and not {"runs-out", "goes-on"} & {*sys.argv}:
            time.sleep(0.5)


model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=8, n_layer=1, n_head=1, n_positions=4))
arguments = TrainingArguments(
    output_dir="out",
    num_train_epochs=EPOCHS,
    per_device_train_batch_size=4,
    logging_steps=1,
    save_strategy="no" if "never-saves" in sys.argv else "steps",
    save_steps=2,
    save_total_limit=1,
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
)
if "ignores-batch" in sys.argv:
    arguments.per_device_train_batch_size = 4
if "fails-with-batch-2" in sys.argv and arguments.per_device_train_batch_size == 2:
    sys.exit("no batch of 2")
trainer = Recording(model=model, args=arguments, train_dataset=Rows(), callbacks=[Written()])
if "begins-again" in sys.argv and not first:
    Trainer.train.__wrapped__(trainer)  # not what memtop's agent has made of it
else:
    trainer.train()
if "goes-on" in sys.argv:
    print("trained", flush=True)
    while not pathlib.Path("go").exists():
        time.sleep(0.05)
