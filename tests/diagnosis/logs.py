"""The failure logs that the tests and the benchmark read: what each says, and what a diagnosis must say of it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from memtop.supervisor.diagnosis.values import Diagnosis

DATA = Path(__file__).parent / "data"
BYTES = ("requested_bytes", "total_bytes", "free_bytes", "process_bytes", "allocated_bytes", "reserved_unallocated_bytes")
# The data file's names of the phases, and the product's.
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
        """The byte fields that are not as printed: two decimals of a unit leave no more than half a hundredth of it open."""
        wrong = []
        for name in BYTES:
            told, wanted = getattr(found, name), getattr(self.expected, name)
            if (told is None) != (wanted is None) or (told is not None and abs(told - wanted) > _open(wanted)):
                wrong.append(f"{name} {told}, not {wanted}")
        return wrong


def _open(size: int) -> float:
    unit = next((1 << shift for shift in (40, 30, 20, 10) if size >= 1 << shift), 1)
    return 0.005 * unit if unit > 1 else 0


def read(name: str) -> list[Log]:
    lines = (DATA / name).read_text(encoding="utf-8").splitlines()
    return [msgspec.json.decode(line, type=Log) for line in lines if line.strip()]
