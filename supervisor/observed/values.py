"""What memtop sees of a training program that it did not start."""

from __future__ import annotations

import msgspec

from memtop.supervisor.wire import Checkpoint


class ObservedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the program."""

    pid: int
    parent_pid: int
    role: str
    """launcher | rank N | process | loader worker"""
    command: str
    rss_bytes: int
    gpu_bytes: int | None = None
    """None if no GPU lists the process, or if the driver does not report its memory."""


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """A program at one moment. None: it is not known, for the reason in `unknown`."""

    pid: int
    """The topmost process of the program."""
    started_ticks: int
    """Together with the pid, it identifies the process."""
    name: str
    """Its script or module."""
    command: tuple[str, ...]
    folder: str | None
    """Its working directory."""
    started: float
    """Seconds since the epoch."""
    alive: bool = True
    processes: tuple[ObservedProcess, ...] = ()
    rss_bytes: int | None = None
    """Resident bytes of all its processes, shared pages counted once."""
    gpu_bytes: int | None = None
    output: tuple[str, ...] = ()
    """The files with its output."""
    updates: int | None = None
    """As its output counts."""
    total_updates: int | None = None
    epoch: float | None = None
    loss: float | None = None
    best_loss: float | None = None
    learning_rate: float | None = None
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    eta_seconds: float | None = None
    example: str | None = None
    """The line by which memtop has learned where the numbers are."""
    checkpoint: Checkpoint | None = None
    """The newest complete one that was saved in its folders since its start."""
    unknown: dict[str, str] = {}
