"""What the ranks report: one tagged union, decoded once where a journal is read.

The agent in each rank appends one JSON object a line to `attempts/NNNN/rank-R.jsonl` (see
`train/agent/__init__.py`). Any training program may write such lines, so each value has a type with
bounds. Fields that this version does not know are ignored. A report that cannot be understood, or
has a value out of bounds, becomes `Unknown`: the rules warn of it once and do not use it.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from memtop.presets.decoding import decoder_of
from memtop.supervisor.program import Knobs
from memtop.supervisor.recovery.values import UPDATE_PHASES

# Whatever is in bounds can be stored in SQLite and in state.json, added up, and shown.
Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Time = Annotated[float, Meta(ge=0, le=1e11)]
Number = Annotated[float, Meta(ge=-1e100, le=1e100)]
Word = Annotated[str, Meta(max_length=1000)]
Text = Annotated[str, Meta(max_length=100_000)]
Path = Annotated[str, Meta(max_length=4096)]
Words = Annotated[tuple[Word, ...], Meta(max_length=100)]
Changes = Annotated[dict[Word, Any], Meta(max_length=100)]
Named = Annotated[dict[Word, Word], Meta(max_length=100)]
_UNKNOWN_CHARACTERS = 200


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """What every report has, unless its program left it out."""

    time: Time | None = None
    """Seconds since the epoch."""
    clock: Seconds | None = None
    """Seconds of the monotonic clock, which no change of the date moves."""


class Hello(Timed, frozen=True, kw_only=True, tag="hello"):
    """The first report of each process."""

    pid: Count | None = None
    program_rank: Count | None = None
    local_rank: Count | None = None
    world_size: Count | None = None
    restarts: Count = 0
    """How often the launcher (torchrun) has started the workers again."""
    max_restarts: Count | None = None
    python: Word | None = None
    offers: Words = ()
    """The commands that the program carries out."""
    executable: Path | None = None
    system: Word | None = None
    cpus: Count | None = None
    memory_bytes: Count | None = None
    packages: Named = {}
    """The version of each that the program has imported."""
    cuda: Word | None = None
    """For which torch is built."""
    variables: Named = {}
    """Those of its environment that decide about memory and threads."""


class Offers(Timed, frozen=True, kw_only=True, tag="offers"):
    """The program offers more commands than its first report named."""

    offers: Words = ()


class Plan(Timed, frozen=True, kw_only=True, tag="plan"):
    """The built-in trainer, or the Trainer of a framework, has loaded everything and is about to
    train."""

    updates: Count = 0
    """The update that it resumes after."""
    total_updates: Count | None = None
    samples_seen: Count | None = None
    target_samples: Count | None = None
    resumed: bool = False
    trained_parameters: Count | None = None
    device_uuid: Word | None = None
    """None on the CPU."""
    framework: Word | None = None
    """The library whose Trainer calls memtop's callback, with its version; None for the built-in
    trainer."""
    effective_batch: Count | None = None
    """Samples of one update of all ranks."""
    knobs: Knobs = Knobs()


class LoopFound(Timed, frozen=True, kw_only=True, tag="loop"):
    """A program trains in a loop of its own, with a library that knows its settings."""

    framework: Word
    """The library, with its version."""
    effective_batch: Count | None = None
    """Samples of one update of all ranks."""
    resumed: bool = False
    """Whether it has loaded a state."""
    knobs: Knobs = Knobs()


class TrainerFound(Timed, frozen=True, kw_only=True, tag="trainer"):
    """A program begins to train with Hugging Face's Trainer."""

    output_dir: Text
    """Where it saves; an absolute path."""
    made_in: tuple[Text, Count] | None = None
    """The folder of its arguments before the program changed it, and which of the objects made with
    it they are."""
    batch: Count | None = None
    """Of one device."""
    accumulation: Count | None = None
    seq_len: Count | None = None
    """None if its arguments have no such field."""
    processes: Count = 1
    """Devices that train together."""
    peak_rate: Number | None = None
    schedule: Word | None = None
    """Of the learning rate: `linear`, `cosine`, ..."""
    warmup: Annotated[float, Meta(ge=0, le=1 << 53)] = 0.0
    """Updates; a share of all if below 1."""
    fixed_length: bool = False
    """Whether its length is given in updates."""
    earlier: dict[Word, Count] = {}
    """The checkpoints that are there already, by name: when they were saved, in microseconds since
    the epoch."""
    saves_on_sigterm: bool | None = None
    """Whether it saves after the present update when it gets SIGTERM (enable_jit_checkpoint). None
    if its version cannot."""


class PhaseChanged(Timed, frozen=True, kw_only=True, tag="phase"):
    """What begins: loading | compiling | data | training | evaluation | sampling | save"""

    phase: Word


class Step(Timed, frozen=True, kw_only=True, tag="step"):
    """One update. Bytes are those of this rank; device bytes are None on the CPU."""

    update: Count
    samples_seen: Count | None = None
    epoch: Number | None = None
    loss: Number | None = None
    logged: bool = True
    """False where the program has not logged a loss with this update, as it does once in
    several."""
    learning_rate: Number | None = None
    gradient_norm: Number | None = None
    tokens: Count | None = None
    padding_fraction: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Of the tokens that the model computes."""
    skipped: bool = False
    """Whether the optimizer step was skipped because a gradient is not finite."""
    sample_digest: Word | None = None
    """SHA-256 of the sorted sample ids of the whole effective batch."""
    dropped: Count | None = None
    """Reports lost so far because the journal could not be written."""
    batch: Count | None = None
    accumulation: Count | None = None
    step_seconds: Seconds | None = None
    data_wait_seconds: Seconds | None = None
    forward_seconds: Seconds | None = None
    backward_seconds: Seconds | None = None
    optimizer_seconds: Seconds | None = None
    allocated_bytes: Count | None = None
    reserved_bytes: Count | None = None
    peak_bytes: Count | None = None
    """The most that was allocated during this update (of a program without memtop's commands:
    ever).
    """
    peak_reserved_bytes: Count | None = None
    forward_peak_bytes: Count | None = None
    """What was allocated at the most in this phase of the update; None if it was not measured."""
    backward_peak_bytes: Count | None = None
    optimizer_peak_bytes: Count | None = None
    allocation_retries: Count | None = None
    """How often the allocator had to free its cache and try again, since the process began."""
    rss_bytes: Count | None = None
    anonymous_bytes: Count | None = None
    device_uuid: Word | None = None

    @property
    def phases(self) -> dict[str, int]:
        """The peaks of the phases that were measured."""
        sizes = (self.forward_peak_bytes, self.backward_peak_bytes, self.optimizer_peak_bytes)
        return {phase: size for phase, size in zip(UPDATE_PHASES, sizes, strict=True) if size is not None}


class Oom(Timed, frozen=True, kw_only=True, tag="oom"):
    """An allocation failed; bytes are what was held then."""

    update: Count | None = None
    phase: Word = "unknown"
    """forward | backward | optimizer | evaluation | data | load | save | unknown"""
    error: Word | None = None
    """The error's class."""
    message: Text | None = None
    survived: bool | None = False
    """True where the trainer repeats the work in smaller pieces, False where the failure ends the
    process, None where it ended one thread: only the program knows what that means."""
    batch: Count | None = None
    accumulation: Count | None = None
    allocated_bytes: Count | None = None
    reserved_bytes: Count | None = None
    free_bytes: Count | None = None
    total_bytes: Count | None = None
    rss_bytes: Count | None = None
    device_uuid: Word | None = None


class SettingsChanged(Timed, frozen=True, kw_only=True, tag="settings"):
    """From this update on the built-in trainer runs with these values."""

    update: Count = 0
    changes: Changes = {}
    reason: Word | None = None
    """allocation failure | pressure | asked | grown back | batch search"""
    total_updates: Count | None = None


class Pressure(Timed, frozen=True, kw_only=True, tag="pressure"):
    """In two consecutive updates the allocator found memory only after it had freed its cache."""

    update: Count | None = None
    allocation_retries: Count | None = None


class BatchSearched(Timed, frozen=True, kw_only=True, tag="batch_search"):
    """The trainer has found the batch to start with (`--batch auto`)."""

    message: Text | None = None
    batch: Count | None = None
    accumulation: Count | None = None
    rank_splits: Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=10_000)] = ()
    """Batch and accumulation of each process, if they differ; the ones above are the largest."""
    tried: Annotated[tuple[dict[Word, float | None], ...], Meta(max_length=1000)] = ()
    """{batch, share, own_share} of what this rank has tried: how full (0-1) its memory was, and
    that of the fullest rank that has tried it; None if memory ran out."""
    samples_per_second: Number | None = None
    """Of this rank, with the largest batch that fits; None with a single process."""
    remembered: bool = False
    """An earlier start has found it, and nothing was tried."""
    forecast_batch: Count | None = None
    """The next larger batch, if it was not tried."""
    forecast_share: Number | None = None
    total_bytes: Count | None = None
    """Of this rank's memory."""


class Saved(Timed, frozen=True, kw_only=True, tag="checkpoint"):
    """A state was written."""

    updates: Count | None = None
    samples_seen: Count | None = None
    seconds: Seconds | None = None
    """From the end of the update until the state was on the disk."""
    pause_seconds: Seconds | None = None
    """How long training stopped for it."""
    size_bytes: Count | None = None
    path: Path | None = None
    """The folder or file of the checkpoint, if the program has named it."""


class SaveFailed(Timed, frozen=True, kw_only=True, tag="save_failed"):
    """A state could not be written for lack of space."""

    update: Count | None = None
    message: Text | None = None
    waiting: bool = False
    """True at the end of training: the trainer waits until there is space or until it is stopped.
    """


class Warned(Timed, frozen=True, kw_only=True, tag="warning"):
    """Something that the person should know."""

    message: Text | None = None
    topic: Word | None = None
    """It stays a warning of this topic until the next attempt begins. None: it is an event only."""


class MemoryRecord(Timed, frozen=True, kw_only=True, tag="memory"):
    """Memory at a stage of the training, such as "after model load"."""

    message: Text | None = None
    stage: Word | None = None
    used_bytes: Count | None = None
    total_bytes: Count | None = None
    allocated_bytes: Count | None = None
    reserved_bytes: Count | None = None


class Evaluated(Timed, frozen=True, kw_only=True, tag="evaluation"):
    """An evaluation; `loss` in nats per token."""

    update: Count | None = None
    loss: Number | None = None
    samples: Count | None = None
    tokens: Count | None = None
    seconds: Seconds | None = None
    peak_bytes: Count | None = None
    peak_reserved_bytes: Count | None = None


Sample = Annotated[str, Meta(max_length=8000)]


class Written(Timed, frozen=True, kw_only=True, tag="sample"):
    """What the model has written for the prompts after this update."""

    update: Count
    prompts: Annotated[tuple[Sample, ...], Meta(max_length=16)] = ()
    texts: Annotated[tuple[Sample, ...], Meta(max_length=16)] = ()
    """Of the first prompts; fewer than prompts if there was a problem."""
    tokens: Count = 0
    max_new_tokens: Count = 0
    seconds: Seconds | None = None
    peak_bytes: Count | None = None
    """The most that was allocated meanwhile; None on the CPU."""
    peak_reserved_bytes: Count | None = None
    problem: Text | None = None
    """Why texts are missing."""


class Spiked(Timed, frozen=True, kw_only=True, tag="spike"):
    """The loss has jumped and stayed high. The positions [begin, end) of the samples' order are
    those of the updates `first_update` to `update`, which going back leaves out."""

    update: Count
    first_update: Count
    begin: Count
    end: Count
    samples: Count = 0
    sample_ids: Annotated[tuple[Count, ...], Meta(max_length=10_000)] = ()
    """The ids of these samples; of very many the first ones."""
    sample_digest: Word | None = None
    """SHA-256 of all of their sorted ids."""
    loss: Number | None = None
    """None if it is not finite."""
    usual_loss: Number | None = None
    state_update: Count | None = None
    """The update of the newest state from before `first_update`; None without one."""
    action: Word = "ask"
    """ask | back | stop"""
    problem: Text | None = None
    """Why the run cannot go back; None if it can."""
    message: Text | None = None


class End(Timed, frozen=True, kw_only=True, tag="end"):
    """The program's last report."""

    outcome: Word | None = None
    """finished | stopped | failed"""
    saved: bool = True
    """False where the program could not save its state; `message` says why."""
    message: Text | None = None


class Unknown(Timed, frozen=True, kw_only=True, tag="unknown"):
    """A report of a kind that this version does not know, or with values of other types than it
    expects.
    """

    kind: Word
    problem: Text


Report = (
    Hello
    | Offers
    | Plan
    | LoopFound
    | TrainerFound
    | PhaseChanged
    | Step
    | Oom
    | SettingsChanged
    | Pressure
    | BatchSearched
    | Saved
    | SaveFailed
    | Warned
    | MemoryRecord
    | Evaluated
    | Spiked
    | Written
    | End
    | Unknown
)


def decode(line: bytes) -> Report | None:
    """The report in one line of a journal; None if the line is no JSON object (a full disk cuts
    lines).
    """
    try:
        report: Report = decoder_of(Report).decode(line)
    except msgspec.ValidationError as error:
        return _not_understood(line, str(error))
    except RecursionError:
        return Unknown(kind="unknown", problem="its values are nested too deeply")
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return report


def _not_understood(line: bytes, problem: str) -> Unknown | None:
    try:
        found = msgspec.json.decode(line)
    except (msgspec.ValidationError, RecursionError):
        found = {"type": "unknown"}
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if not isinstance(found, dict):
        return None
    kind = str(found.get("type"))[:_UNKNOWN_CHARACTERS]
    return Unknown(kind=kind, problem=problem[:_UNKNOWN_CHARACTERS])


def values(report: Report) -> dict[str, Any]:
    """What an event or a diagnosis keeps of a report: its values without type, clock and words."""
    found: dict[str, Any] = msgspec.to_builtins(report)
    return {name: value for name, value in found.items() if name not in ("type", "clock", "message")}
