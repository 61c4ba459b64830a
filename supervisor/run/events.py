"""What happens to a run, as values: everything that the supervisor's rules react to.

The loop collects these and gives them to `step` one at a time. An event carries all that the rules
need to know at that moment: rules read no file, no clock and no process.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from memtop.presets.measured import Learned
from memtop.supervisor.diagnosis.environment import Place
from memtop.supervisor.diagnosis.values import Diagnosis
from memtop.supervisor.monitor.values import MachineSnapshot
from memtop.supervisor.recovery.bottleneck import Measured
from memtop.supervisor.recovery.values import Forecast, Trend
from memtop.supervisor.run.grip import Grip
from memtop.supervisor.run.output.values import Seen
from memtop.supervisor.run.post_mortem.log_end import DeadWorker, LogEnd
from memtop.supervisor.run.record.configurations import ConfigurationRecord
from memtop.supervisor.run.record.folder import StateFile
from memtop.supervisor.run.record.ledger import Attempt
from memtop.supervisor.run.reports import Report
from memtop.supervisor.run_memory import HostMemory, RoleMemory, host_memory, together
from memtop.supervisor.wire import (
    AcceptSpike,
    Change,
    Checkpoint,
    CheckpointNow,
    Edit,
    FreeCache,
    Restart,
    Stop,
    Try,
)


class Now(msgspec.Struct, frozen=True):
    """The moment of an event."""

    time: float
    """Seconds since the epoch."""
    monotonic: float
    """Seconds of the monotonic clock, with which waits are measured."""


class States(msgspec.Struct, frozen=True, kw_only=True):
    """The saved states in the run's folder."""

    newest: Checkpoint | None = None
    """`train_latest_state` if it is complete, else the one before it; the broken one if neither
    is complete.
    """
    kept: tuple[Checkpoint, ...] = ()
    """All complete states, the newest first."""
    program: Checkpoint | None = None
    """The checkpoint from which the user's own program would resume."""


class RemedyFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What remedies depend on, read when an attempt has ended."""

    gpu_used_before_bytes: dict[str, int] = {}
    """By GPU uuid, the bytes used by other processes, when the attempt began."""
    in_own_group: bool = False
    """Whether a cgroup with only this program limited its memory."""
    host_limit_bytes: int | None = None
    kept_states: tuple[Checkpoint, ...] = ()
    disk_free_bytes: int | None = None
    """On the disk of the run's folder."""
    deepspeed: bool = False
    """DeepSpeed is installed."""
    inherited_allocator: str = ""
    """Allocator options in the supervisor's own environment."""
    model_config: dict[str, Any] | None = None
    """None if only the trainer knows it."""
    learned: Learned = Learned()
    """What earlier runs have measured on such a GPU."""
    has_loader_workers: bool = False
    environment: tuple[Place, ...] = ()
    """Where the supervisor itself runs."""


class AgentAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's answer to a command."""

    rank: int
    ok: bool
    message: str
    result: dict[str, Any] = {}


# --- how a supervisor begins ----------------------------------------------------------------------


class SupervisorStarted(msgspec.Struct, frozen=True, kw_only=True, tag="opened"):
    """A supervisor begins: what it found in the run's folder. Reports of the newest attempt follow,
    then `Replayed`.
    """

    attempts: tuple[Attempt, ...] = ()
    unstarted: frozenset[int] = frozenset()
    """Attempts that are open in the ledger and whose program was never started."""
    state: StateFile | None = None
    records: tuple[ConfigurationRecord, ...] = ()
    announced: frozenset[tuple[str, float]] = frozenset()
    """Events of the newest attempt that follow from a report: their kind, and the report's time."""
    best_loss: float | None = None
    peak_bytes: int | None = None
    """The highest peak of the newest attempt's updates."""
    trial: dict[str, Any] | None = None
    """The data of the newest event of the kind `trial`."""
    states: States = States()
    change: Change | None = None
    """The restart for which this supervisor was started."""
    after_kill: bool = False
    """It was started because the one before was killed: it starts no run that had not begun."""


class Replayed(msgspec.Struct, frozen=True, tag="replayed"):
    """All reports that an earlier supervisor had read have been replayed."""


# --- the program ----------------------------------------------------------------------------------


class RowsDropped(msgspec.Struct, frozen=True, kw_only=True, tag="rows_dropped"):
    """The training goes on from an earlier update: the updates after it do not count any more."""

    best_loss: float | None = None
    """Of the updates that still count."""


class Launched(msgspec.Struct, frozen=True, kw_only=True, tag="launched"):
    """The program of an attempt was started."""

    number: int
    started: float
    """Seconds since the epoch."""
    states: States = States()
    """The newest is the state that it resumes from."""
    set_aside: str | None = None
    """The folder into which newer states were moved when the run returned to an earlier one."""
    resumed: Checkpoint | None = None
    """The checkpoint from which the user's own program is made to resume."""
    grip: Grip | None = None
    """Of a program with a profile: how its command and files were read at this start."""


class WorkersStarted(msgspec.Struct, frozen=True, kw_only=True, tag="workers_started"):
    """The launcher (torchrun) has ended its workers and started them again, within the attempt."""

    restarts: int
    """How often, so far."""
    dead: DeadWorker | None = None
    """Which of them had ended; None if the output does not say."""
    known: bool = False
    """An earlier supervisor has seen it."""


class LaunchRefused(msgspec.Struct, frozen=True, kw_only=True, tag="launch_refused"):
    """The program could not be started."""

    number: int
    why: str
    usage: bool = False
    """Whether the request was invalid."""
    recorded: bool = False
    """Whether the ledger has the attempt, as one that never began. Its number is used up."""


class Reported(msgspec.Struct, frozen=True, kw_only=True, tag="reported"):
    """A rank has reported something."""

    rank: int
    report: Report
    replayed: bool = False
    """Whether an earlier supervisor had already read it."""


class OutputRead(msgspec.Struct, frozen=True, tag="output_read"):
    """The program's output has new numbers of its training."""

    seen: Seen


class CheckpointKept(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint_kept"):
    """The newest checkpoint of the user's own program was copied to the run's folder, as far as
    there is one."""

    problem: str | None = None
    """Why it could not be; None if it was."""


class StatesRead(msgspec.Struct, frozen=True, tag="states_read"):
    """The saved states were read."""

    states: States


class SavedChecked(msgspec.Struct, frozen=True, tag="saved_checked"):
    """The checkpoint of a program was read."""

    found: Checkpoint


class ProgramEnded(msgspec.Struct, frozen=True, kw_only=True, tag="program_ended"):
    """The program has ended, and its reports were read to the end."""

    ended: float
    """Seconds since the epoch."""
    status: int | None
    """Negative for a signal; None if it could not be collected."""


class LeftoversCleared(msgspec.Struct, frozen=True, kw_only=True, tag="leftovers_cleared"):
    """No process of the attempt is left, and their last reports were read."""

    log: LogEnd
    states: States
    saved: Checkpoint | None = None
    """The newest checkpoint that the user's own program has reported, if it is not there any
    more."""


class Examined(msgspec.Struct, frozen=True, kw_only=True, tag="examined"):
    """The post-mortem is finished."""

    diagnosis: Diagnosis
    facts: RemedyFacts
    problem: str | None = None
    """Why the post-mortem itself failed; None if it did not."""


class Foreseen(msgspec.Struct, frozen=True, kw_only=True, tag="foreseen"):
    """The predicted peak of a configuration, or why there is none."""

    number: int
    found: Forecast | str


class StoodStill(msgspec.Struct, frozen=True, tag="stood_still"):
    """The program has reported nothing for too long after these words in its output."""

    words: str


class NamedProcess(msgspec.Struct, frozen=True):
    pid: int
    name: str


class Absence(str, Enum):
    """Why a user's program has reported nothing."""

    ENVIRONMENT = "environment"
    """It has lost the environment: `env -i`."""
    OTHER_USER = "other_user"
    """It runs as root or another user, so that its environment cannot be read: sudo."""
    PYTHONPATH = "pythonpath"
    """It has a PYTHONPATH of its own."""
    ISOLATED = "isolated"
    """Python was started with -I, -E or -S."""
    NO_PYTHON = "no_python"
    """None of its processes is Python."""
    NO_UPDATE = "no_update"
    """The agent is there and has seen no update."""


class NotHeard(msgspec.Struct, frozen=True):
    absence: Absence
    process: NamedProcess | None = None
    """The process that cannot report."""


class LeftoversFound(msgspec.Struct, frozen=True, kw_only=True, tag="leftovers_found"):
    """Processes that the program left behind get a signal, or are still there after SIGKILL."""

    name: str | None
    """`SIGTERM`, `SIGKILL`; None if they are still there."""
    processes: tuple[NamedProcess, ...]


class Signalled(msgspec.Struct, frozen=True, kw_only=True, tag="signalled"):
    """A signal was sent."""

    name: str
    """`SIGTERM`"""
    processes: tuple[NamedProcess, ...]
    """The processes that it reached."""
    refused: tuple[str, ...] = ()
    """Why it could not be sent to the others."""


# --- the machine and the clock --------------------------------------------------------------------


class Sampled(msgspec.Struct, frozen=True, kw_only=True, tag="sampled"):
    """The machine was sampled, once a second."""

    machine: MachineSnapshot
    rss_bytes: dict[int, int] = {}
    """By pid, resident bytes of each process of the run."""
    run_memory: tuple[RoleMemory, ...] = ()
    pss_bytes: dict[int, int] = {}
    """By pid, what each process has of `run_memory`."""
    gpu_base_bytes: dict[str, int] = {}
    """By GPU uuid, the least that the run held outside torch's allocator in this attempt."""
    crossings: tuple[str, ...] = ()
    """One line for each gauge that changed its band."""
    dangers: tuple[str, ...] = ()
    """One line for each gauge that has stayed in its danger band."""
    measured: Measured | None = None
    """Medians of the newest updates and samples, every few samples."""
    model_config: dict[str, Any] = {}
    """The model's configuration, for forecasts on a GPU; empty if it is not known."""
    keep: bool = False
    """Whether this sample goes into the ledger."""

    @property
    def run_rss_bytes(self) -> int | None:
        return sum(self.rss_bytes.values()) if self.rss_bytes else None

    @property
    def run_pss_bytes(self) -> int | None:
        return together(self.run_memory)

    @property
    def host_memory(self) -> HostMemory:
        """The host memory of the run's processes together."""
        return host_memory(self.run_pss_bytes, self.run_rss_bytes)


class SamplingFailed(msgspec.Struct, frozen=True, tag="sampling_failed"):
    why: str


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """What a waiting run has found."""

    waits_for: str | None
    """Why it does not begin yet, in words; None if it may."""


class Tick(msgspec.Struct, frozen=True, kw_only=True, tag="tick"):
    """A fifth of a second has passed, and all new reports have been read."""

    watched: bool = False
    """A dashboard shows the run."""
    alive: bool = False
    """The training program exists."""
    trainer_pid: int | None = None
    trends: tuple[Trend, ...] = ()
    """All steady growth; memory that will be full first comes first."""
    own_trends: tuple[Trend, ...] = ()
    """The trends that a restart of the run would end."""
    trend_news: tuple[tuple[str, dict[str, Any]], ...] = ()
    """What has begun or stopped growing, as messages and data."""
    stopped: tuple[int, ...] = ()
    """The program or its ranks, as far as a signal has stopped them: SIGSTOP, Ctrl-Z."""
    torch_loaded: bool = False
    """While the program starts: one of its processes has loaded torch's library."""
    not_heard: NotHeard | None = None
    """Why the program has reported nothing for some time; None if it has, or is young."""
    disk_free: int | str | None = None
    """Bytes free on the run's disk, or why they cannot be read; None: not read, since no rule waits
    for it.
    """
    queue: Queue | None = None
    """None: the run does not wait, or nothing new is known."""
    saving: str | None = None
    """The checkpoint that the program saves at this moment; looked up before the first signal of a
    stop. Empty: that is not known yet."""


class CommandEnded(msgspec.Struct, frozen=True, kw_only=True, tag="command_ended"):
    """The command at the end of the run (`--then`) has ended."""

    words: str


# --- clients and agents ---------------------------------------------------------------------------


Command = FreeCache | CheckpointNow | Stop | Restart | Edit | Try | AcceptSpike
"""The requests that the rules answer."""


class Requested(msgspec.Struct, frozen=True, kw_only=True, tag="requested"):
    """A client sent a request."""

    client: int
    request: Command
    states: States = States()


class AgentConnected(msgspec.Struct, frozen=True, tag="agent_connected"):
    rank: int


class AgentGone(msgspec.Struct, frozen=True, tag="agent_gone"):
    rank: int


class Answered(msgspec.Struct, frozen=True, kw_only=True, tag="answered"):
    """All ranks have answered or are gone; empty if none of them was
    connected.
    """

    ask: int
    answers: tuple[AgentAnswer, ...]


# --- what could be written ------------------------------------------------------------------------


class StateHeld(msgspec.Struct, frozen=True, kw_only=True, tag="state_held"):
    """The earlier state is protected from later saves; `problem`: why that was not possible."""

    problem: str | None = None


class WriteChecked(msgspec.Struct, frozen=True, kw_only=True, tag="write_checked"):
    """A file of the run: `problem` is why it cannot be written, or how it was shortened; None if it
    is whole and can be written."""

    topic: str
    """ledger | state | log | notify, ..."""
    problem: str | None = None


Occurrence = (
    SupervisorStarted
    | Replayed
    | RowsDropped
    | Launched
    | LaunchRefused
    | Reported
    | OutputRead
    | StatesRead
    | CheckpointKept
    | SavedChecked
    | ProgramEnded
    | LeftoversCleared
    | Examined
    | Foreseen
    | StoodStill
    | WorkersStarted
    | LeftoversFound
    | Signalled
    | Sampled
    | SamplingFailed
    | Tick
    | Requested
    | AgentConnected
    | AgentGone
    | Answered
    | StateHeld
    | WriteChecked
    | CommandEnded
)
"""Every event. (`wire.Event` is a line of the run's log.)"""
