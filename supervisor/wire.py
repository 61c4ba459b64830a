"""The messages between supervisor, dashboards and command line: newline-delimited JSON over the run's Unix socket.

A client sends a `Request`, the supervisor answers every one with `Answer`s (accepted, then done or failed; or refused). After
`Subscribe` it also streams `HistoryRows`, `StateUpdate`, `MetricRows` and `EventRows` until the client leaves. Agents speak
the plain JSON of `train/agent` on the same socket and append their reports to `attempts/NNNN/rank-R.jsonl`.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from memtop.presets.schema import Settings
from memtop.supervisor.monitor.values import MachineSnapshot


class Phase(str, Enum):
    """Where a run is. FINISHED, STOPPED and FAILED are final until someone restarts the run."""

    CREATED = "created"
    STARTING = "starting"
    TRAINING = "training"
    STOPPING = "stopping"
    RESTARTING = "restarting"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def final(self) -> bool:
        return self in (Phase.FINISHED, Phase.STOPPED, Phase.FAILED)


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A `train_latest_state` folder as its manifest tells it."""

    path: str
    updates: int | None = None
    samples_seen: int | None = None
    saved_at: float | None = None
    size_bytes: int | None = None
    complete: bool
    problem: str | None = None
    """Why it is not complete, in one line."""


class StepSplit(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of the newest update, by what they went into."""

    data_wait_seconds: float | None = None
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    optimizer_seconds: float | None = None


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent inside one rank measured at its newest update; device bytes are None on CPU."""

    rank: int
    pid: int
    connected: bool
    device_uuid: str | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_bytes: int | None = None
    """The most allocated during that update (in a program of the user's own: ever)."""
    peak_reserved_bytes: int | None = None
    """The most that its allocator held meanwhile: what the card had to have, beside the context."""
    rss_bytes: int | None = None


class RoleMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Host memory of a run's processes of one role. Bytes."""

    role: str
    """launcher | rank | loader worker | other"""
    processes: int
    pss_bytes: int | None = None
    """Shared pages divided among those who map them: the roles add up to what the run takes."""
    uss_bytes: int | None = None
    """Private pages: what their death would give back."""
    shm_bytes: int | None = None
    """Shared memory (data-loader batches) as part of pss_bytes."""
    swap_bytes: int | None = None


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """All that a dashboard shows of a run, at one moment."""

    name: str
    folder: str
    state: Phase
    reason: str | None = None
    """Why the run is in this state, where that is not obvious."""
    alive: bool = False
    """True while a training process of this run exists."""
    adopted: bool = False
    """True if the present supervisor took over a trainer that another supervisor had started."""
    supervisor_pid: int | None = None
    trainer_pid: int | None = None
    attempt: int = 0
    created: float
    started: float | None = None
    """Start of the present attempt, seconds since the epoch."""
    ended: float | None = None
    settings: Settings | None = None
    """None for a program of the user's own, whose settings are not known."""
    command: tuple[str, ...] = ()
    effective_batch: int | None = None
    updates: int | None = None
    total_updates: int | None = None
    samples_seen: int | None = None
    target_samples: int | None = None
    epoch: float | None = None
    loss: float | None = None
    best_loss: float | None = None
    learning_rate: float | None = None
    gradient_norm: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    split: StepSplit = StepSplit()
    eta_seconds: float | None = None
    ranks: tuple[RankMemory, ...] = ()
    run_rss_bytes: int | None = None
    """Resident bytes of all processes of the run together (shared pages counted in each)."""
    run_memory: tuple[RoleMemory, ...] = ()
    """The same by role, shared pages counted once; read every 10 s, since the kernel walks all pages for it."""
    gpu_base_bytes: dict[str, int] = {}
    """By GPU uuid: the least GPU memory of this run's processes outside torch's allocator seen in this attempt, which is
    the CUDA contexts and little else."""
    checkpoint: Checkpoint | None = None
    exit_status: int | None = None
    """The training program's own exit status; negative is the signal that ended it; None if unknown or still running."""
    log_path: str | None = None
    warnings: tuple[str, ...] = ()


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One update that counts in the run's final history."""

    update: int
    attempt: int
    loss: float | None = None
    learning_rate: float | None = None
    samples_seen: int | None = None
    sample_digest: str | None = None
    """SHA-256 of the sorted sample ids of the whole effective batch: equal digests prove equal data."""
    step_seconds: float | None = None
    data_wait_seconds: float | None = None
    peak_bytes: int | None = None


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something worth remembering: a band crossed, an attempt started, a command answered."""

    id: int = 0
    """Number in the ledger; below zero while the ledger cannot be written."""
    time: float
    attempt: int
    kind: str
    message: str
    data: dict[str, Any] = {}


class Change(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a restart edits; None leaves a setting as it is."""

    batch: int | None = None
    accumulation: int | None = None
    seq_len: int | None = None
    preset: str | None = None
    max_updates: int | None = None
    assignments: dict[str, str] = {}
    """--set KEY=VALUE."""


# --- client -> supervisor -------------------------------------------------------------------------------------------


class Subscribe(msgspec.Struct, frozen=True, kw_only=True, tag="subscribe"):
    """Ask for the stream; `history` is how many of the newest metric rows to send at once."""

    id: int
    history: int = 2000


class FreeCache(msgspec.Struct, frozen=True, kw_only=True, tag="free"):
    """Run gc, torch's empty_cache and malloc_trim in every rank at its next update."""

    id: int


class CheckpointNow(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint"):
    id: int


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    id: int


class Restart(msgspec.Struct, frozen=True, kw_only=True, tag="restart"):
    id: int
    change: Change = Change()


class Status(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """Ask for one StateUpdate."""

    id: int


class Look(msgspec.Struct, frozen=True, kw_only=True, tag="look"):
    """Somebody has a GPU's details open: read what costs the driver much (PCIe throughput), too, for the next 10 s."""

    id: int


Request = Subscribe | FreeCache | CheckpointNow | Stop | Restart | Status | Look


# --- supervisor -> client -------------------------------------------------------------------------------------------


class Outcome(str, Enum):
    ACCEPTED = "accepted"
    """Understood and begun; a DONE or FAILED follows."""
    REFUSED = "refused"
    DONE = "done"
    FAILED = "failed"


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    id: int
    outcome: Outcome
    message: str
    """One line for a person."""
    usage: bool = False
    """True where a refusal is the fault of what was asked: exit status 2 on the command line."""
    data: dict[str, Any] = {}


class StateUpdate(msgspec.Struct, frozen=True, kw_only=True, tag="state"):
    run: RunState
    machine: MachineSnapshot | None = None


class MetricRows(msgspec.Struct, frozen=True, kw_only=True, tag="metrics"):
    """New rows in order. `reset_from`: rows with an update >= this were taken back by a restart and are to be dropped first."""

    rows: tuple[Metric, ...]
    reset_from: int | None = None


class EventRows(msgspec.Struct, frozen=True, kw_only=True, tag="events"):
    rows: tuple[Event, ...]


class HistoryRows(msgspec.Struct, frozen=True, kw_only=True, tag="history"):
    """The newest hour of one GPU, or of the host, as `monitor.history.History` keeps it. Sent once after `Subscribe`."""

    key: str
    """The GPU's uuid, or "host"."""
    label: str
    """e.g. `GPU 0`"""
    times: bytes
    """Seconds since the epoch, as native doubles."""
    columns: dict[str, bytes]
    """By the name of the series: one native float for each time, NaN where it was not known."""


Message = Answer | StateUpdate | MetricRows | EventRows | HistoryRows
