"""A program of somebody's own with a real loader and a real optimizer.

usage: waiting.py data|compute UPDATES

data: each batch takes the loader 50 ms, training next to nothing; compute: the other way round.
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
starved = sys.argv[1] == "data"
weight = torch.nn.Parameter(torch.zeros(1) if starved else torch.zeros(700, 700))
optimizer = torch.optim.SGD([weight], lr=0.1)
for batch in DataLoader(Batches(0.05 if starved else 0.0, int(sys.argv[2])), batch_size=1):
    ((weight @ weight).sum() if not starved else weight.sum() * batch).sum().backward()
    if not starved:
        for _ in range(8):
            torch.ones(500, 500) @ torch.ones(500, 500)
    optimizer.step()
