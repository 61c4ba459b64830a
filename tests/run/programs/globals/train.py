"""A program whose settings are global variables, which a file and words `--name=value` override. It
draws its samples at random, and saves over its only checkpoint, in place."""

import os
import pathlib
import sys
import time

import torch

out_dir = "out"
eval_interval = 4
max_iters = 40
batch_size = 2
gradient_accumulation_steps = 2 * 2  # of all processes
block_size = 8
init_from = "scratch"
dies_with_batch = 0
ignores_batch = False
hangs_in_save = False
exec(pathlib.Path("configurator.py").read_text())

first = os.environ["MEMTOP_ATTEMPT"] == "1"
if ignores_batch:
    batch_size = 4
if batch_size == dies_with_batch:
    raise SystemExit(f"no batch of {batch_size}")
print(f"tokens per iteration will be: {gradient_accumulation_steps * batch_size * block_size:,}", flush=True)
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
iter_num, path = 0, os.path.join(out_dir, "ckpt.pt")
os.makedirs(out_dir, exist_ok=True)
if init_from == "resume":
    saved = torch.load(path)
    optimizer.load_state_dict(saved["optimizer"])
    weight.data.copy_(saved["model"]["weight"])
    iter_num = saved["iter_num"]


def hang(frame, event, function):
    """torch.save comes to a halt before its sixth record."""
    global records
    records += event == "c_call" and function.__name__ == "write_record"
    if records == 6:
        while not os.path.exists("stuck"):
            os.utime(path)
            time.sleep(0.05)
        time.sleep(600)


records = 0
while True:
    if hangs_in_save and first and iter_num == 2 * eval_interval:
        while not os.path.exists("go"):
            time.sleep(0.01)
        sys.setprofile(hang)
    if iter_num % eval_interval == 0 and iter_num:
        saved = {"model": {"weight": weight.data}, "optimizer": optimizer.state_dict(), "iter_num": iter_num}
        torch.save(saved | {"more": [torch.ones(9) for _ in range(9)]}, path)
    for _ in range(gradient_accumulation_steps):
        loss = ((torch.rand(batch_size) - weight) ** 2).mean() / gradient_accumulation_steps
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with open("updates.txt", "a") as file:
        file.write(f"{iter_num} {batch_size} {gradient_accumulation_steps}\n")
    print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.4f}, time 1.00ms", flush=True)
    time.sleep(600 if first and iter_num == 10 else 0.01)
    iter_num += 1
    if iter_num > max_iters:
        break
