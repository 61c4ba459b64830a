"""A program built on Hugging Face's Trainer that never passes a checkpoint.

usage: trainer_program.py [ignores-all] [fails-with-batch-2]

ignores-all: it sets its batch itself, and when it is started again it begins from zero. It writes
the samples of each update to updates.jsonl. Its first attempt trains slowly from update 5 on, so
that a restart comes in between.
"""

import json
import os
import pathlib
import sys
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

SAMPLES, EPOCHS = 48, 4
first = os.environ["MEMTOP_ATTEMPT"] == "1"
set_seed(1)
seen: list[int] = []


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, at):
        row = (torch.arange(4) * at) % 64  # the second value tells which sample it is
        return {"input_ids": row, "labels": row}


class Recording(Trainer):
    def training_step(self, model, inputs, *others):
        seen.extend(inputs["input_ids"][:, 1].tolist())
        return super().training_step(model, inputs, *others)


class Written(TrainerCallback):
    def on_step_end(self, args, state, control, **others):
        with pathlib.Path("updates.jsonl").open("a") as file:
            file.write(json.dumps([state.global_step, args.per_device_train_batch_size, seen]) + "\n")
        seen.clear()
        if first and state.global_step >= 5:
            time.sleep(0.2)


model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=8, n_layer=1, n_head=1, n_positions=4))
arguments = TrainingArguments(
    output_dir="out",
    num_train_epochs=EPOCHS,
    per_device_train_batch_size=4,
    logging_steps=1,
    save_steps=2,
    save_total_limit=1,
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
)
if "ignores-all" in sys.argv:
    arguments.per_device_train_batch_size = 4
if "fails-with-batch-2" in sys.argv and arguments.per_device_train_batch_size == 2:
    sys.exit("no batch of 2")
trainer = Recording(model=model, args=arguments, train_dataset=Rows(), callbacks=[Written()])
if "ignores-all" in sys.argv and not first:
    Trainer.train.__wrapped__(trainer)  # not what memtop's agent has made of it
else:
    trainer.train()
