"""The messages between supervisor, dashboards and command line: newline-delimited JSON over the
run's Unix socket.

A client sends a `Request`. The supervisor replies with `Answer`s: accepted, then done or failed; or
refused. After `Subscribe` it also streams `HistoryRows`, `StateUpdate`, `MetricRows`, `EventRows`
and `ConfigurationRows` until the client leaves. Agents use the plain JSON of `train/agent` there.
They write reports to `attempts/NNNN/rank-R.jsonl`.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum
from typing import Annotated, Any

import msgspec

from memtop.presets.schema import Settings
from memtop.supervisor.diagnosis.values import Diagnosis
from memtop.supervisor.killed import recorded_signal, state_word
from memtop.supervisor.monitor.values import MachineSnapshot
from memtop.supervisor.monitor.vram import RankMemory
from memtop.supervisor.program import Program
from memtop.supervisor.recovery.values import Advice, Forecast, Peak, Remedy, Trend
from memtop.supervisor.run_memory import HostMemory, RoleMemory, host_memory, together


class Phase(str, Enum):
    """The phase of a run. FINISHED, STOPPED and FAILED are final until the run is restarted."""

    CREATED = "created"
    QUEUED = "queued"
    """It waits for another run, or for a free GPU; nothing was started yet."""
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


class Stage(str, Enum):
    """What a program does before its first update."""

    STARTING = "starting"
    IMPORTING = "importing torch"
    LOADING_MODEL = "loading the model"
    COMPILING = "compiling parts of DeepSpeed"
    READING_DATA = "reading the data"
    LOADING = "loading"
    """Of a program that does not report it: torch, the model or the data."""
    FIRST_UPDATE = "first update"


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A `train_latest_state` folder, as described by its manifest."""

    path: str
    updates: int | None = None
    samples_seen: int | None = None
    saved_at: float | None = None
    size_bytes: int | None = None
    complete: bool
    problem: str | None = None
    """Why it is not complete, in one line."""
    step: int | None = None
    """Of the user's own program: its own count, if that is not updates."""
    epoch: int | None = None
    """Where that count begins again with each epoch."""


class StepSplit(msgspec.Struct, frozen=True, kw_only=True):
    """How the time of the newest update was spent, in seconds."""

    data_wait_seconds: float | None = None
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    optimizer_seconds: float | None = None


class Configuration(msgspec.Struct, frozen=True, kw_only=True):
    """A period of a run with the same settings: where it began and why, and how it ended."""

    number: int
    """From 1, in order of time. `memtop rollback RUN N` goes back to it."""
    attempt: int
    since_update: int | None = None
    until_update: int | None = None
    """None for the present configuration."""
    started: float
    """Seconds since the epoch."""
    reason: str
    settings: Settings | None = None
    knobs: dict[str, str] = {}
    """The settings that memtop gave to your own program."""
    uses: dict[str, int | bool | str] = {}
    """Those of your own program, by the names of `--set`, as far as memtop knows them."""
    foreseen: Forecast | None = None
    """The peak on its GPU, predicted before it was measured; None on the CPU, or if unknown."""
    peak: Peak | None = None
    samples_per_second: float | None = None
    outcome: str | None = None
    """replaced | finished | stopped | the kind of failure (`gpu_oom`, ...). None while it lasts."""
    by_words: bool = False
    """Nothing but the program's own words shows that it ended for lack of memory."""
    ended_by: int | None = None

    @property
    def word(self) -> str | None:
        """The outcome as people read it: `killed`, or its name. None while it lasts."""
        return None if self.outcome is None else state_word(self.outcome, self.ended_by)


class Spike(msgspec.Struct, frozen=True, kw_only=True):
    """A spike of the loss, about which a person is asked."""

    update: int
    """The update that made it certain."""
    message: str
    """What happened, in one sentence."""
    back: Change | None = None
    """What a restart changes to return to the state before it; None if there is no such state."""
    back_words: str = ""
    """To which state, and which samples are left out; without `back`, why that cannot be done."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A change that was tried for speed, measured over as many updates before it as after it."""

    title: str
    """`batch 16 -> 20, accumulation 5 -> 4`"""
    started: float
    """Seconds since the epoch."""
    state: str
    """measuring before | measuring after | kept | undone | refused (nothing was changed) | failed
    (an error in memtop; the change was undone)"""
    reason: str | None = None
    before: dict[str, float] = {}
    """Medians and spreads by name: samples_per_second, samples_per_second_spread,
    tokens_per_second, peak_bytes, host_bytes, swap_bytes."""
    after: dict[str, float] = {}


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """Why the run ran out of memory, and what can be done."""

    diagnosis: Diagnosis
    causes: tuple[str, ...] = ()
    """What must be fixed first, one line each: a leak that filled the memory, an allocation larger
    than all memory."""
    remedies: tuple[Remedy, ...] = ()
    last_advice: tuple[str, ...] = ()
    """If no remedy fits: what a person can still do, in order."""
    waiting: str | None = None
    """Why memtop does not apply a remedy on its own: `--on-oom ask`, two restarts without progress,
    needs consent, ..."""
    begins: float | None = None
    """In auto mode: when the first remedy will be applied, in seconds since the epoch."""


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run at one moment, with everything that a dashboard shows."""

    name: str
    folder: str
    state: Phase
    reason: str | None = None
    """Why the run is in this state, if that is not obvious."""
    stage: Stage | None = None
    """While the state is `starting`; else None."""
    doing: str | None = None
    """evaluating | sampling | saving between two updates; copy if the folder is one; or None."""
    alive: bool = False
    """A training process of this run exists."""
    observed: bool = False
    """A program that memtop did not start and only reads. It has no supervisor and no folder."""
    adopted: bool = False
    """The present supervisor has taken over a trainer that another supervisor had started."""
    supervisor_pid: int | None = None
    trainer_pid: int | None = None
    attempt: int = 0
    created: float
    started: float | None = None
    """Start of the present attempt, seconds since the epoch."""
    earlier_seconds: float = 0.0
    """How long the attempts before the present one ran, together."""
    ended: float | None = None
    settings: Settings | None = None
    """None for external commands, whose settings are unknown."""
    command: tuple[str, ...] = ()
    program: Program | None = None
    """None for the built-in trainer."""
    choice: str | None = None
    """Which preset and GPU memtop chose when the run was created, and why. None if it chose
    neither, or if they have changed since."""
    batch_search: str | None = None
    """What `--batch auto` has tried and found in this attempt. None if it did not search."""
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
    padding_fraction: float | None = None
    """Share of padding among the tokens that the model computed in the newest update, 0-1."""
    step_seconds: float | None = None
    """Of the newest update."""
    pace_seconds: float | None = None
    """From one update to the next, with what is done between them: the mean over the newest 20. The
    samples and tokens per second are means over the same updates."""
    split: StepSplit = StepSplit()
    eta_seconds: float | None = None
    ranks: tuple[RankMemory, ...] = ()
    run_rss_bytes: int | None = None
    """Resident bytes of all processes of the run together (shared pages counted in each)."""
    run_memory: tuple[RoleMemory, ...] = ()
    """Memory by role, with shared pages counted once. Read every second, or less often if slow."""
    gpu_base_bytes: dict[str, int] = {}
    """By GPU uuid: the least memory that the run held outside torch's allocator in this attempt.
    This is the CUDA contexts and little else."""
    offers: tuple[str, ...] | None = None
    """The commands that the program supports: free_cache | checkpoint | stop | change. None until
    it has reported them. A program without memtop's agent never does."""
    checkpoint: Checkpoint | None = None
    exit_status: int | None = None
    """Of the training program; negative for a signal. None if unknown or still running."""
    ended_by: int | None = None
    """The signal that ended the program, or the first of its ranks that died. None if there was
    none, if it is not known, or if memtop sent it."""
    log_path: str | None = None
    warnings: tuple[str, ...] = ()
    """Oldest first. The warning about a failed save is the last one."""
    unsaved: str | None = None
    """Why the newest save failed, and what that means. None if it succeeded."""
    on_oom: str = "auto"
    """auto | ask | stop"""
    proposal: Proposal | None = None
    """Set after the run ran out of memory until it trains again."""
    spike: Spike | None = None
    """Set after the loss has jumped and stayed high, until a person decides or it starts anew."""
    trends: tuple[Trend, ...] = ()
    advice: Advice | None = None
    trial: Trial | None = None

    @property
    def word(self) -> str:
        """The state as people read it: `killed`, `evaluating`, or the name of the state."""
        return self.doing or state_word(self.state.value, self.ended_by)

    @property
    def host_memory(self) -> HostMemory:
        """The host memory of its processes together: the sum of `run_memory`, else the resident
        bytes."""
        return host_memory(together(self.run_memory), self.run_rss_bytes)

    @property
    def saves_when_stopped(self) -> bool:
        """See the function of this name."""
        return saves_when_stopped(self.settings, self.offers)

    @property
    def resumes(self) -> bool:
        """Whether the program is known to continue from what it has saved when it starts again."""
        return self.settings is not None or (self.program is not None and self.program.resumes is True)

    @property
    def checkpoint_words(self) -> str:
        """Where no checkpoint is known."""
        return ("none" if self.state.final else "none yet") if self.saves_are_seen else "none seen"

    @property
    def saves_are_seen(self) -> bool:
        """Whether memtop would know of a checkpoint that the program writes."""
        return not self.observed and (self.program is None or self.program.grip not in ("optimizer", "output"))


def saves_when_stopped(settings: Settings | None, offers: Collection[str] | None) -> bool:
    """Whether a program is known to finish its update and save when it is stopped: the built-in
    trainer, or one that offers the command `stop`."""
    return settings is not None or "stop" in (offers or ())


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One update of the run's final history; of a long run's old updates one row for several."""

    update: int
    """The first, if it stands for several."""
    attempt: int
    updates: int = 1
    """How many updates it stands for. If several, loss, gradient norm, tokens and seconds are
    means, and `peak_bytes` is the highest."""
    loss: float | None = None
    learning_rate: float | None = None
    samples_seen: int | None = None
    sample_digest: str | None = None
    """SHA-256 of the sorted sample ids of the effective batch: equal digests prove equal data."""
    step_seconds: float | None = None
    data_wait_seconds: float | None = None
    peak_bytes: int | None = None
    time: float | None = None
    """When it was done, seconds since the epoch."""
    gradient_norm: float | None = None
    tokens: int | None = None
    """Of this update alone; if it stands for several, their mean."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """An event in the run's log: a band was crossed, an attempt started, a command was answered."""

    id: int = 0
    """Number in the ledger. Negative while the ledger cannot be written."""
    time: float
    attempt: int
    kind: str
    message: str
    data: dict[str, Any] = {}

    @property
    def word(self) -> str:
        """The kind as people read it: `killed`, or its name."""
        return state_word(self.kind, recorded_signal(self.data))


Whole = Annotated[int, msgspec.Meta(ge=-(1 << 53), le=1 << 53)]
"""A number that every reader of JSON can represent."""


class Change(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The settings that a restart changes: first the GPUs, then by the preset, then one by one."""

    preset: str | None = None
    assignments: dict[str, str] = {}
    """Settings by the names of `--set`, as text: {"batch": "4", "lora.r": "16"}."""
    gpus: str | None = None
    """The new CUDA_VISIBLE_DEVICES: indices or UUIDs with commas between them, one process each."""
    max_updates: Whole | None = None
    configuration: Whole | None = None
    """Go back to the settings of this configuration. The other fields change those settings."""
    state_before: Whole | None = None
    """Also go back to the newest kept state at or before this update. Later states are moved aside,
    not deleted."""
    reason: str = ""
    """Why memtop changes the settings on its own: `gpu_oom at update 812`."""


# --- client -> supervisor -------------------------------------------------------------------------


class Subscribe(msgspec.Struct, frozen=True, kw_only=True, tag="subscribe"):
    """Start the stream. `history` is the number of newest metric rows to send first."""

    id: Whole
    history: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 2000


class FreeCache(msgspec.Struct, frozen=True, kw_only=True, tag="free"):
    """Run gc, torch's empty_cache and malloc_trim in every rank after its current update."""

    id: Whole


class CheckpointNow(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint"):
    id: Whole


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    id: Whole


class Restart(msgspec.Struct, frozen=True, kw_only=True, tag="restart"):
    id: Whole
    change: Change = Change()


class Edit(msgspec.Struct, frozen=True, kw_only=True, tag="edit"):
    """Change the split, evaluation batch, checkpointing or workers at the next update boundary,
    without a restart.

    Refused if that is not possible (external command, ZeRO, another setting). Use Restart then.
    """

    id: Whole
    change: Change


class Try(msgspec.Struct, frozen=True, kw_only=True, tag="try"):
    """Try a change for speed: measure before, change, measure after, keep it or undo it.

    `change` None: the first proposal of the advice.
    """

    id: Whole
    change: Change | None = None


class AcceptSpike(msgspec.Struct, frozen=True, kw_only=True, tag="accept_spike"):
    """Go on after a spike of the loss, and delete the state before it."""

    id: Whole


class Status(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """Request one StateUpdate."""

    id: Whole


class Look(msgspec.Struct, frozen=True, kw_only=True, tag="look"):
    """GPU details are displayed: for 10 s, also read what is expensive for the driver (PCIe)."""

    id: Whole


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag="leave"):
    """The run is over: its supervisor ends at once, because another run takes the name. Refused if
    the run is not over.
    """

    id: Whole


Request = Subscribe | FreeCache | CheckpointNow | Stop | Restart | Edit | Try | AcceptSpike | Status | Look | Leave


# --- supervisor -> client -------------------------------------------------------------------------


class Outcome(str, Enum):
    ACCEPTED = "accepted"
    """The request was started. DONE or FAILED follows."""
    REFUSED = "refused"
    DONE = "done"
    FAILED = "failed"


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    id: int
    outcome: Outcome
    message: str
    """One line for a person."""
    usage: bool = False
    """The request was wrong: exit status 2 on the command line."""
    data: dict[str, Any] = {}


class StateUpdate(msgspec.Struct, frozen=True, kw_only=True, tag="state"):
    run: RunState
    machine: MachineSnapshot | None = None


class MetricRows(msgspec.Struct, frozen=True, kw_only=True, tag="metrics"):
    """New rows in order.

    `reset_from`: a restart has rolled back the rows from this update on. Drop them first.
    """

    rows: tuple[Metric, ...]
    reset_from: int | None = None


class EventRows(msgspec.Struct, frozen=True, kw_only=True, tag="events"):
    rows: tuple[Event, ...]


class HistoryRows(msgspec.Struct, frozen=True, kw_only=True, tag="history"):
    """The newest hour of one GPU, or of the host (`monitor.history`), sent after `Subscribe`."""

    key: str
    """The GPU's uuid, or "host"."""
    gpu_index: int | None
    """None for the host."""
    label: str
    """The same as text, for people only: `GPU 0`."""
    times: bytes
    """Seconds since the epoch, as native doubles."""
    columns: dict[str, bytes]
    """By the name of the series: one native float for each time, NaN if unknown."""


class ConfigurationRows(msgspec.Struct, frozen=True, kw_only=True, tag="configurations"):
    """All configurations of the run, oldest first.

    Sent after `Subscribe` and whenever one begins or ends.
    """

    rows: tuple[Configuration, ...]


Message = Answer | StateUpdate | MetricRows | EventRows | HistoryRows | ConfigurationRows
