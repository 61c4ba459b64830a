"""A program with a training loop around accelerate: options of argparse, a folder for each
checkpoint, and a path from which it resumes. It does without accelerate here."""

import argparse
import os
import time
import zipfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accelerate import Accelerator

    def saves(accelerator: Accelerator) -> None:
        accelerator.save_state("step_1")
        accelerator.load_state("step_1")


parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=8)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
parser.add_argument("--output_dir", default=None)
parser.add_argument("--resume_from_checkpoint", default=None)
args = parser.parse_args()
batch, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
first = os.environ["MEMTOP_ATTEMPT"] == "1"
print(f"  Instantaneous batch size per device = {batch}")
print(f"  Total train batch size (w. parallel, distributed & accumulation) = {batch * accumulation}")
done = int(os.path.basename(args.resume_from_checkpoint).removeprefix("step_")) if args.resume_from_checkpoint else 0
for step in range(done + 1, 31):
    with open("updates.txt", "a") as file:
        file.write(f"{step} {batch} {accumulation}\n")
    print(f"step {step}/30 loss: {1 / step:.4f}", flush=True)
    if step % 4 == 0:
        for name in ("model.bin", "optimizer.bin", "random_states_0.pkl"):
            os.makedirs(f"{args.output_dir}/step_{step}", exist_ok=True)
            with zipfile.ZipFile(f"{args.output_dir}/step_{step}/{name}", "w") as saved:
                saved.writestr("archive/data.pkl", b"")
    time.sleep(600 if first and step == 10 else 0.01)
