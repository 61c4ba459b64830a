"""Small numbers that all ranks agree on, in memory that was taken at the start: it works where nothing else can be had."""

from __future__ import annotations

import torch
from accelerate import Accelerator

_SLOTS = 8


class Ranks:
    """Every method is called by all ranks alike. With one process it hands back what it was given."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._several = accelerator.num_processes > 1
        self._numbers = torch.zeros(_SLOTS, dtype=torch.float64, device=accelerator.device)
        # torch's own words: an operation of the library, whose class is known only where it is compiled in.
        self._sum, self._most = torch.distributed.ReduceOp.SUM, torch.distributed.ReduceOp.MAX

    def sums(self, *values: float) -> list[float]:
        """The sum over the ranks of each of up to eight values."""
        return self._reduce(values, self._sum)

    def most(self, value: float) -> float:
        """The largest value of any rank."""
        return self._reduce((value,), self._most)[0]

    def any(self, flag: bool) -> bool:
        """Whether any rank says so."""
        return self.most(float(flag)) > 0

    def _reduce(self, values: tuple[float, ...], operation: torch.distributed.ReduceOp.RedOpType) -> list[float]:
        if not self._several:
            return [float(value) for value in values]
        numbers = self._numbers[: len(values)]
        numbers.copy_(torch.tensor(values, dtype=torch.float64))
        torch.distributed.all_reduce(numbers, op=operation)
        return [float(number) for number in numbers.tolist()]
