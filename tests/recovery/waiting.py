"""An external command with a real loader and a real optimizer.

usage: waiting.py data|compute|swap UPDATES

data: each batch takes the loader 50 ms, training next to nothing; compute: the other way round;
swap: every update reads 384 MiB that were written once, which is no work where they are in memory.
"""

import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset


class Batches(Dataset):
    def __init__(self, seconds: float, updates: int) -> None:
        self.seconds, self.updates = seconds, updates

    def __len__(self) -> int:
        return self.updates

    def __getitem__(self, at: int) -> torch.Tensor:
        time.sleep(self.seconds)  # a slow disk
        return torch.full((1,), float(at))


torch.set_num_threads(1)
kind = sys.argv[1]
held = torch.ones(96 << 20 if kind == "swap" else 1)
weight = torch.nn.Parameter(torch.zeros(700, 700) if kind == "compute" else torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
for batch in DataLoader(Batches(0.05 if kind == "data" else 0.0, int(sys.argv[2])), batch_size=1):
    if kind == "compute":
        (weight @ weight).sum().backward()
        for _ in range(8):
            torch.ones(500, 500) @ torch.ones(500, 500)
    else:
        (weight.sum() * batch * held.sum()).sum().backward()
    optimizer.step()
