"""The failure logs of the tests and the benchmark, each with its expected diagnosis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from memtop.supervisor.diagnosis.diagnose import diagnose
from memtop.supervisor.diagnosis.values import Diagnosis, Evidence

GIB = 1 << 30
MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.23 GiB. GPU 0 has a total capacity of 19.58 GiB "
    "of which 1.06 GiB is free. Including non-PyTorch memory, this process has 18.50 GiB memory in use. Of the allocated "
    "memory 14.94 GiB is allocated by PyTorch, and 3.18 GiB is reserved by PyTorch but unallocated."
)
RAISED = f'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n{MESSAGE}\n'
STEPS = "".join(f"step {number}/9000 | loss 2.{number} | lr 1e-4 | 3.1 it/s\n" for number in range(400))

DATA = Path(__file__).parent / "data"
BYTES = ("requested_bytes", "total_bytes", "free_bytes", "process_bytes", "allocated_bytes", "reserved_unallocated_bytes")
# The phases' names in the data file, and the product's.
_PHASES = {"model_load": "load", "checkpoint": "save", "eval": "evaluation", "dataloader": "data"}


class Expected(msgspec.Struct, frozen=True):
    kind: str
    phase: str
    other_process_pids: tuple[int, ...]
    device_index: int | None = None
    requested_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    process_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_unallocated_bytes: int | None = None


class Log(msgspec.Struct, frozen=True):
    id: str
    text: str
    exit_code: int | None
    expected: Expected

    @property
    def data(self) -> bytes:
        return self.text.encode()

    @property
    def kind(self) -> str:
        return self.expected.kind.partition(":")[0]

    @property
    def reason(self) -> str | None:
        return self.expected.kind.partition(":")[2] or None

    @property
    def phase(self) -> str:
        return _PHASES.get(self.expected.phase, self.expected.phase)

    def wrong_bytes(self, found: Diagnosis) -> list[str]:
        """The byte fields that differ from the printed size by more than its rounding."""
        wrong = []
        for name in BYTES:
            found_bytes, wanted = getattr(found, name), getattr(self.expected, name)
            if (found_bytes is None) != (wanted is None) or (
                found_bytes is not None and abs(found_bytes - wanted) > _open(wanted)
            ):
                wrong.append(f"{name} {found_bytes}, not {wanted}")
        return wrong


def _open(size: int) -> float:
    unit = next((1 << shift for shift in (40, 30, 20, 10) if size >= 1 << shift), 1)
    return 0.005 * unit if unit > 1 else 0


def read(name: str) -> list[Log]:
    lines = (DATA / name).read_text(encoding="utf-8").splitlines()
    return [msgspec.json.decode(line, type=Log) for line in lines if line.strip()]


def of(text: str = "", **evidence: Any) -> Diagnosis:
    """The diagnosis of this text, with these fields of `Evidence`."""
    return diagnose([text.encode()], Evidence(**evidence))


PRINTED = "CUDA out of memory. Tried to allocate 30.00 MiB (GPU 0; 8.00 GiB total capacity; 7.50 GiB already allocated)\n"
