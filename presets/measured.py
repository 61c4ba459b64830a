"""What runs of the built-in trainer have measured on GPUs of this machine: `remember` keeps it for
the forecasts of later runs, which `learned` reads.

It is a file in the user's cache folder: runs are in many folders, a person deletes them, and their
records do not name the GPU. There is one row for each configuration; its highest peak stays. Two
programs that write at the same moment may lose a row, which the next run measures again.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec.structs import replace

from memtop.presets.decoding import decoder_of
from memtop.presets.fields import SPLIT, memory_shape
from memtop.presets.files import user_cache
from memtop.presets.parameters import stored_config
from memtop.presets.schema import Settings

KEPT = 100
"""Rows, the newest; a few kilobytes each."""
WHOLE_FROM = 2
"""The update that first computes gradients while the optimizer's moments exist."""
ENOUGH_UPDATES = 100
"""After so many updates with samples of various lengths, a new highest peak is rare."""
MOST_USED = 12
"""So many rows calibrate a forecast at most, the newest; each takes a millisecond."""
Likeness = Literal["same", "near", "model"]
"""Of settings: the same; the same but for the batch; others with the same model and method."""
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
    reserved_bytes: Annotated[int, msgspec.Meta(gt=0)]
    """What torch's allocator held at the most."""
    outside_bytes: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """What the process held outside it: the CUDA context and libraries. None: not known."""
    updates: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """How many of one attempt it is the peak of; None: not known."""
    failed: bool = False
    """Whether it ran out of memory: it needed more."""

    def replaces(self, other: Measured) -> bool:
        """Whether both measure the same."""
        return (
            (self.model, self.torch, self.failed) == (other.model, other.torch, other.failed)
            and self.gpu.is_like(other.gpu)
            and memory_shape(self.settings, "peak") == memory_shape(other.settings, "peak")
            and self.settings.world_size == other.settings.world_size
            and self.settings.accumulates == other.settings.accumulates
        )

    def with_peak_of(self, other: Measured) -> Measured:
        """This row, with what an older one of the same shows beyond it: a higher peak, which is
        then that of the other run."""
        updates = max(self.updates or 0, other.updates or 0) or None
        outside = other.outside_bytes if self.outside_bytes is None else self.outside_bytes
        higher = max(other, self, key=lambda one: one.reserved_bytes)
        return replace(self, run=higher.run, reserved_bytes=higher.reserved_bytes, outside_bytes=outside, updates=updates)

    def is_whole_for(self, settings: Settings) -> bool:
        """Whether a training with these settings needs no more than this one, compared with their
        estimates. Otherwise it needs at least as much.

        The estimate is for samples of T tokens. Those of running text have them. Of others, a short
        run may not have seen the longest, and other data may have longer ones. In a smaller batch
        the longest counts for more.
        """
        own = self.settings
        if own.task == "causal":
            return True
        return (
            (self.updates or 0) >= ENOUGH_UPDATES
            and _samples(own) == _samples(settings)
            and own.seq_len <= settings.seq_len
            and (own.batch <= settings.batch or _likeness(own, settings) != "model")
        )


def _samples(settings: Settings) -> tuple[object, ...]:
    """What the lengths of micro-batches depend on, besides T and the batch."""
    train = {name: value for name, value in settings.data.items() if name != "eval"}
    return settings.task, train, settings.packing


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
        """What a process held outside torch's memory in the newest run of any model; of several
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
        return _most_like([row for row in self._peaks(settings, config) if row.is_whole_for(settings)], settings)

    def bounding(self, settings: Settings, config: Mapping[str, Any] | None = None) -> list[Measured]:
        """Those at least as like these settings that are not whole: they can raise a forecast and
        never lower it."""
        chosen, _ = _most_like(self._peaks(settings, config), settings)
        return [row for row in chosen if not row.is_whole_for(settings)]

    def of_same(self, settings: Settings, config: Mapping[str, Any] | None = None) -> list[Measured]:
        """The newest peaks with the same settings, whole or not."""
        found = [row for row in self._peaks(settings, config) if _likeness(row.settings, settings) == "same"]
        return found[-MOST_USED:]

    def _peaks(self, settings: Settings, config: Mapping[str, Any] | None) -> list[Measured]:
        return [row for row in self.of_model(settings, config) if not row.failed]


def _most_like(rows: Sequence[Measured], settings: Settings) -> tuple[list[Measured], Likeness]:
    """The newest of those that are most like these settings."""
    by_likeness: dict[Likeness, list[Measured]] = {"same": [], "near": [], "model": []}
    for row in rows:
        by_likeness[_likeness(row.settings, settings)].append(row)
    for likeness, found in by_likeness.items():
        if found:
            return found[-MOST_USED:], likeness
    return [], "model"


def _likeness(one: Settings, other: Settings) -> Likeness:
    if _shape(msgspec.json.encode(one)) != _shape(msgspec.json.encode(other)):
        return "model"
    return "same" if (one.batch, _batches(one)) == (other.batch, _batches(other)) else "near"


def _batches(settings: Settings) -> list[int]:
    return [batch for batch, _ in settings.splits]


@functools.lru_cache(maxsize=4 * KEPT)
def _shape(encoded: bytes) -> dict[str, Any]:
    """What shapes the peak, except the micro-batch. A forecast asks for that of every row."""
    settings = decoder_of(Settings).decode(encoded)
    # Evaluations have a peak of their own.
    left_out = (*SPLIT, "eval_batch")
    values = {name: value for name, value in memory_shape(settings, "peak").items() if name not in left_out}
    return {**values, "processes": settings.world_size, "accumulates": settings.accumulates}


def learned(gpu: GpuKind | None, torch: str | None = None, *, without: str = "") -> Learned:
    """What is known of this kind of GPU. It reads a file.

    `torch`: the version that will train; rows of another one do not count. `without`: the folder of
    a run that does not count.
    """
    path = place()
    if gpu is None or path is None:
        return Learned()
    try:
        lines, problem = _read(path)
    except OSError as error:
        return Learned(problem=f"{path}: cannot be read: {error.strerror}")
    rows = [row for _, row in lines if row is not None]
    kept = [row for row in rows if row.gpu.is_like(gpu) and row.run != without and _same_release(row.torch, torch)]
    return Learned(rows=tuple(kept), problem=problem)


def _same_release(one: str | None, other: str | None) -> bool:
    return one is None or other is None or one.partition("+")[0] == other.partition("+")[0]


def place() -> Path | None:
    """The file; None for a user without a home folder."""
    folder = user_cache()
    return None if folder is None else folder / "measured.jsonl"


def remember(row: Measured) -> None:
    """Add a row. OSError if the file cannot be read or written: then it stays as it is."""
    import tempfile  # loads OpenSSL, with `random`

    path = place()
    if path is None:
        return
    kept = []
    for line, other in _read(path)[0]:
        if other is not None and row.replaces(other):
            row = row.with_peak_of(other)
        else:
            # Also what this version cannot read.
            kept.append(line)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Other hosts may have the same folder: the number of a process is not enough of a name.
    opened, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}.")
    new = Path(name)
    try:
        os.close(opened)
        new.write_bytes(b"".join(line + b"\n" for line in [*kept, msgspec.json.encode(row)][-KEPT:]))
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _read(path: Path) -> tuple[list[tuple[bytes, Measured | None]], str | None]:
    """The lines, each with its row if it can be read; and why the first one cannot."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return [], None
    rows: list[tuple[bytes, Measured | None]] = []
    problem = None
    for number, line in enumerate(lines, start=1):
        try:
            rows.append((line, decoder_of(Measured).decode(line)))
        except msgspec.MsgspecError as error:
            rows.append((line, None))
            problem = problem or f"{path}: line {number} is left out: {error}"
    return rows, problem
