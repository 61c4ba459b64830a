"""An external command that steps a real optimizer while its memory grows.

usage: leaking.py KIND UPDATES SECONDS_PER_UPDATE

KIND: leak (each update keeps 1 MiB, and the loader worker keeps 1 MiB of each batch), sawtooth
(each update keeps 1 MiB, and every 40 updates all of it is freed).
"""

import os
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

MIB = 1 << 20


class Batches(Dataset):
    """One batch per update. The worker process may keep its batches."""

    def __init__(self, kind: str, updates: int) -> None:
        self.kind, self.updates = kind, updates
        self.kept: list[bytearray] = []

    def __len__(self) -> int:
        return self.updates

    def __getitem__(self, at: int) -> torch.Tensor:
        if self.kind == "leak":
            self.kept.append(bytearray(os.urandom(1)) * MIB)
        return torch.ones(1)


kind, updates, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
kept: list[bytearray] = []
for update, batch in enumerate(DataLoader(Batches(kind, updates), batch_size=1, num_workers=1, prefetch_factor=2), start=1):
    (weight * batch).sum().backward()
    optimizer.step()
    kept.append(bytearray(b"x") * MIB)
    if kind == "sawtooth" and update % 40 == 0:
        kept.clear()
    time.sleep(seconds)
