"""What runs of the built-in trainer have measured on GPUs of this machine: `remember` keeps it for
the forecasts of later runs, which `learned` reads.

It is a file in the user's cache folder: runs are in many folders, a person deletes them, and their
records do not name the GPU. There is one row for each configuration; a newer measurement of the
same one takes its place. Two programs that write at the same moment may lose a row, which the next
run measures again.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from memtop.presets.fields import SPLIT, memory_shape
from memtop.presets.files import user_cache
from memtop.presets.parameters import stored_config
from memtop.presets.schema import Settings

KEPT = 100
"""Rows, the newest; a few kilobytes each."""
WHOLE_FROM = 2
"""The update that first computes gradients while the optimizer's moments exist."""
MOST_USED = 12
"""So many rows calibrate a forecast at most, the newest; each takes a millisecond."""
Likeness = Literal["same", "near", "model"]
"""Of settings: the same; the same but for the batch; others with the same model and method."""
_SHORT = 0.8
"""No estimate was found to be more than a quarter too high (`SURE` in supervisor/plan.py)."""
_ALIKE = 0.03
"""The driver and torch count the memory of one GPU with a small difference."""


class GpuKind(msgspec.Struct, frozen=True):
    """GPUs on which a training takes the same memory."""

    name: str
    total_bytes: int

    def is_like(self, other: GpuKind) -> bool:
        return self.name == other.name and abs(self.total_bytes - other.total_bytes) <= _ALIKE * self.total_bytes


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The peak of one configuration of a run."""

    run: str
    """Its folder."""
    time: float
    """Seconds since the epoch."""
    gpu: GpuKind
    torch: str | None = None
    """Its version; None: not known."""
    model: str
    """See `model_key`."""
    settings: Settings
    reserved_bytes: int
    """What torch's allocator held at the most."""
    outside_bytes: int | None = None
    """What the process held beside it: the CUDA context and libraries. None: not known."""
    updates: int = 0
    """How many were measured."""
    failed: bool = False
    """Whether it ran out of memory: it needed more."""

    def replaces(self, other: Measured) -> bool:
        """Whether both measure the same."""
        return (
            (self.model, self.torch, self.failed) == (other.model, other.torch, other.failed)
            and self.gpu.is_like(other.gpu)
            and memory_shape(self.settings, "peak") == memory_shape(other.settings, "peak")
            and self.settings.world_size == other.settings.world_size
        )

    def knows_less(self, other: Measured) -> bool:
        """Whether the other one saw more updates, and no smaller peak: the longest samples may come
        late."""
        return other.updates > self.updates and other.reserved_bytes >= self.reserved_bytes

    def counts_for(self, settings: Settings, ratio: float) -> bool:
        """Whether a peak of so many times its estimate says something about these settings. Far
        below it, the samples were shorter than T, and those of other data need not be."""
        return ratio >= _SHORT or _train_data(self.settings) == _train_data(settings)


def _train_data(settings: Settings) -> dict[str, Any]:
    return {name: value for name, value in settings.data.items() if name != "eval"}


def model_key(config: Mapping[str, Any]) -> str:
    """A key of what the model is made of, whatever its folder and the library that wrote it."""
    import hashlib  # loads OpenSSL: 4 MiB

    values = {name: value for name, value in config.items() if not name.startswith("_") and name != "transformers_version"}
    return hashlib.blake2b(msgspec.json.encode(values, order="deterministic"), digest_size=12).hexdigest()


class Learned(msgspec.Struct, frozen=True, kw_only=True):
    """What earlier runs have measured on one kind of GPU, oldest first."""

    rows: tuple[Measured, ...] = ()
    problem: str | None = None
    """Why some or all of it cannot be read, in one line."""

    def context_bytes(self, processes: int) -> int | None:
        """What a process held beside torch's memory in the newest run of any model; of several
        processes with NCCL's buffers. None: not measured."""
        several = processes > 1
        known = [row.outside_bytes for row in self.rows if (row.settings.world_size > 1) is several and row.outside_bytes]
        return known[-1] if known else None

    def of_model(self, settings: Settings, config: Mapping[str, Any] | None = None) -> tuple[Measured, ...]:
        """The rows of the same model and method. `config`: the model's configuration; None: its
        file is read."""
        config = stored_config(settings) if config is None else config
        if config is None or not self.rows:
            return ()
        key = model_key(config)
        return tuple(row for row in self.rows if row.model == key and row.settings.method == settings.method)

    def calibrating(self, settings: Settings, config: Mapping[str, Any] | None = None) -> tuple[list[Measured], Likeness]:
        """The newest whole peaks of the same model that say most about these settings, and how like
        them they are."""
        whole = [row for row in self.of_model(settings, config) if not row.failed]
        wanted = _shape(msgspec.json.encode(settings))
        near = [row for row in whole if _shape(msgspec.json.encode(row.settings)) == wanted]
        same = [row for row in near if (row.settings.batch, row.settings.rank_splits) == (settings.batch, settings.rank_splits)]
        return (same or near or whole)[-MOST_USED:], "same" if same else "near" if near else "model"


@functools.lru_cache(maxsize=4 * KEPT)
def _shape(settings: bytes) -> dict[str, Any]:
    """What shapes the peak, except the split. A forecast asks for that of every row."""
    values = memory_shape(msgspec.json.decode(settings, type=Settings), "peak")
    # Evaluations have a peak of their own.
    return {name: value for name, value in values.items() if name not in (*SPLIT, "eval_batch")}


def learned(gpu: GpuKind | None, torch: str | None = None, *, without: str = "") -> Learned:
    """What is known of this kind of GPU. It reads a file.

    `torch`: the version that will train; rows of another one do not count. `without`: the folder of
    a run that does not count.
    """
    path = place()
    if gpu is None or path is None:
        return Learned()
    rows, problem = _read(path)
    kept = [row for row in rows if row.gpu.is_like(gpu) and row.run != without and _same_release(row.torch, torch)]
    return Learned(rows=tuple(kept), problem=problem)


def _same_release(one: str | None, other: str | None) -> bool:
    return one is None or other is None or one.partition("+")[0] == other.partition("+")[0]


def place() -> Path | None:
    """The file; None for a user without a home folder."""
    folder = user_cache()
    return None if folder is None else folder / "measured.jsonl"


def remember(row: Measured) -> None:
    """Add a row, unless another one knows more. OSError if it cannot be written."""
    path = place()
    if path is None:
        return
    known = _read(path)[0]
    if any(row.replaces(other) and row.knows_less(other) for other in known):
        return
    rows = [other for other in known if not row.replaces(other)]
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(f".{os.getpid()}")
    new.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in [*rows, row][-KEPT:]))
    new.replace(path)


def _read(path: Path) -> tuple[list[Measured], str | None]:
    """The rows that can be read, and why others cannot."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return [], None
    except OSError as error:
        return [], f"{path}: cannot be read: {error.strerror}"
    rows, problems = [], []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(msgspec.json.decode(line, type=Measured))
        except msgspec.MsgspecError as error:
            problems.append(f"{path}: line {number} is left out: {error}")
    return rows, problems[0] if problems else None
