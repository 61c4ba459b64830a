"""A program that counts micro-batches of an epoch, also in its checkpoint. When it resumes, it
leaves out those that are done. Its samples are numbers in a fixed order."""

import argparse
import json
import os
import random
import time

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--save_weight", default="small")
parser.add_argument("--batch_size", type=int, default=4, help="of one process")
parser.add_argument("--accumulation_steps", type=int, default=2)
parser.add_argument("--hidden_size", type=int, default=8)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--from_resume", type=int, default=0)
args = parser.parse_args()
first = os.environ["MEMTOP_ATTEMPT"] == "1"
path = f"../checkpoints/{args.save_weight}_{args.hidden_size}_resume.pth"
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=0.01)


def lm_checkpoint(epoch, step):
    os.makedirs("../checkpoints", exist_ok=True)
    torch.save({"optimizer": optimizer.state_dict(), "epoch": epoch, "step": step}, path + ".tmp")
    os.replace(path + ".tmp", path)


start_epoch, start_step = 0, 0
if args.from_resume == 1 and os.path.exists(path):
    saved = torch.load(path)
    start_epoch, start_step = saved["epoch"], saved["step"]
for epoch in range(start_epoch, args.epochs):
    order = list(range(96))
    random.Random(epoch).shuffle(order)
    batches = [order[at : at + args.batch_size] for at in range(0, 96, args.batch_size)]
    skip = start_step if epoch == start_epoch else 0
    for step, batch in enumerate(batches[skip:], start=skip + 1):
        loss = ((torch.tensor(batch, dtype=torch.float32) / 96 - weight) ** 2).mean()
        (loss / args.accumulation_steps).backward()
        with open("samples.jsonl", "a") as file:
            file.write(json.dumps([epoch, step, batch]) + "\n")
        if step % args.accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
        if step % 4 == 0:
            lm_checkpoint(epoch, step)
        print(f"Epoch:[{epoch + 1}/{args.epochs}]({step}/{len(batches)}), loss: {loss.item():.4f}, lr: 0.01", flush=True)
        time.sleep(600 if first and step == 10 else 0.01)
