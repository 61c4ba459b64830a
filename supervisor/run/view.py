"""Reads runs from their folders, with or without a supervisor."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from memtop.supervisor.errors import RefusedError, RunFolderError
from memtop.supervisor.killed import describe_status
from memtop.supervisor.monitor.processes.proc import TICKS_PER_SECOND, ProcessId, boot_time
from memtop.supervisor.monitor.strays import KnownRun, RecordedAttempt
from memtop.supervisor.program import known, start_is_known
from memtop.supervisor.run.grip import Grip, of_program
from memtop.supervisor.run.last_update import lacks_update, with_last_update
from memtop.supervisor.run.post_mortem.log_end import read_log_end
from memtop.supervisor.run.processes.attempt import UNKNOWN_STATUS, ExitFile, ProcessFile, RunningAttempt
from memtop.supervisor.run.processes.members import RANKS_FILE, RanksFile, living_supervisor, original_of, refused_copy
from memtop.supervisor.run.record.checkpoints import checked, newest_checkpoint
from memtop.supervisor.run.record.folder import RunFolder, RunLock, RunSpec, StateFile, read_derived, read_json
from memtop.supervisor.run.record.grip_checkpoints import newest_for
from memtop.supervisor.run.record.ledger import Attempt, reading_ledger
from memtop.supervisor.run.record.ownership import require_own, why_not_own
from memtop.supervisor.run.speed import ran_seconds
from memtop.supervisor.wire import Configuration, Event, Metric, Phase, RunState

# The shim writes its process file as soon as the program has started.
_SAME_BOOT_SECONDS = 5.0
# Processes that started in the last moments do not count, because two clocks are compared.
_CLOCK_TICKS = TICKS_PER_SECOND // 2


def read_state(folder: RunFolder) -> RunState:
    """The run as its folder describes it, corrected by which processes run now."""
    file = folder.state()
    newest = folder.newest_attempt()
    state = file.run if file is not None else _without_state_file(folder)
    if not state.state.final and (original := original_of(folder, file)) is not None:
        still = dict.fromkeys(("supervisor_pid", "trainer_pid", "stage", "eta_seconds", "proposal", "log_path"))
        still |= {"name": folder.name, "folder": str(folder.path), "alive": False, "doing": "copy"}
        return msgspec.structs.replace(state, reason=f"it is a copy of {original}, which runs; use that one", **still)
    if newest > state.attempt:
        state = _just_begun(folder, state, newest)
    elif state.attempt == 0:
        if state.state is Phase.QUEUED and not supervisor_alive(folder):
            why = f"the supervisor is gone: memtop watch {folder.name} starts a new one"
            return msgspec.structs.replace(state, supervisor_pid=None, reason=why)
        return state
    supervised = supervisor_alive(folder)
    training = trainer_alive(folder, state.attempt)
    # A run that was moved aside has another name and folder than when the file was written.
    changes: dict[str, Any] = {"name": folder.name, "folder": str(folder.path)}
    if state.log_path is not None:
        changes["log_path"] = str(folder.attempt(state.attempt) / "output.log")
    changes |= {"alive": training, **_saved(folder, state, file.grip if file is not None else None)}
    if training and state.trainer_pid is None:
        # It has begun since the first look.
        trainer = RunningAttempt(folder, state.attempt, shim_pid=None).trainer
        changes["trainer_pid"] = trainer.pid if trainer is not None else None
    if not (supervised and training):
        changes |= _after_the_end(state, supervised) | {"doing": None}
    if not supervised and state.proposal is not None:
        # There is no supervisor that would do it.
        changes["proposal"] = msgspec.structs.replace(state.proposal, begins=None)
    if not training:
        changes |= {"trainer_pid": None, "eta_seconds": None} | _nothing_unsaved(state)
    if not supervised and not training and file is not None and _has_pending_restart(folder, file, newest):
        changes |= {
            "state": Phase.RESTARTING,
            "reason": f"a restart is pending, but the supervisor is gone: memtop watch {folder.name} starts a new one",
        }
    elif not supervised and not training and not state.state.final:
        stalled = file is not None and file.stalled is not None and file.run.attempt == state.attempt
        changes |= _unrecorded_end(folder, state, stalled=stalled)
    elif not supervised and training:
        changes["reason"] = f"the supervisor is gone, training continues: memtop watch {folder.name} starts a new one"
    if changes.get("state", state.state) is not Phase.STARTING:
        changes["stage"] = None
    state = msgspec.structs.replace(state, **changes)
    if lacks_update(state):
        # Who reads the ledger for itself names its damage.
        with contextlib.suppress(RunFolderError), reading_ledger(folder) as ledger:
            state = state if ledger is None else with_last_update(state, ledger)
    return state


def _unrecorded_end(folder: RunFolder, state: RunState, *, stalled: bool) -> dict[str, Any]:
    """How the program has ended, if its supervisor was gone by then. `stalled`: memtop was ending
    it because it hung."""
    ended = read_derived(folder.attempt(state.attempt) / "exit.json", ExitFile)
    again = f"memtop restart {folder.name}"
    if ended is None:
        return {"state": Phase.FAILED, "reason": f"supervisor and trainer are both gone: {again}"}
    status = None if ended.status == UNKNOWN_STATUS else ended.status
    words = "exit status 0" if status == 0 else describe_status(status)
    reason = f"the program ended, and no supervisor has recorded that ({words}): {again} goes on"
    values = {"reason": reason, "ended": ended.ended, "exit_status": status}
    if ended.status != 0:
        # A program that was being stopped may have got its signal from memtop.
        asked = stalled or state.state in (Phase.STOPPING, Phase.RESTARTING)
        log = folder.attempt(state.attempt) / "output.log"
        return {"state": Phase.FAILED, "ended_by": None if asked else read_log_end(log).fatal_signal(status), **values}
    # The built-in trainer also ends like this when it is stopped.
    is_whole = state.settings is None or (state.updates is not None and state.updates == state.total_updates)
    return {"state": Phase.FINISHED if is_whole else Phase.STOPPED, **values}


def _saved(folder: RunFolder, state: RunState, grip: Grip | None) -> dict[str, Any]:
    """The newest checkpoint, as it is on the disk now."""
    newest = newest_checkpoint(folder.latest_state)
    if newest is not None or state.program is None or state.checkpoint is None:
        return {"checkpoint": newest}
    if grip is not None and grip.profile is not None:
        found = newest_for(folder.path, grip, grip.since)
        if found is None:
            return {"checkpoint": None}
    else:
        found = checked(state.checkpoint)
    return {"checkpoint": found, "program": msgspec.structs.replace(state.program, checkpoint=of_program(found))}


def _created_only(folder: RunFolder) -> RunState:
    """A run that was created but never started."""
    spec = folder.spec()
    return RunState(
        name=folder.name,
        folder=str(folder.path),
        state=Phase.CREATED,
        created=spec.created,
        settings=spec.settings,
        command=spec.command,
        choice=spec.choice,
        on_oom=spec.on_oom,
    )


def _without_state_file(folder: RunFolder) -> RunState:
    """The run as its ledger describes it, if it was started and the ledger can be read."""
    state, row, metric, earlier = _created_only(folder), None, None, None
    with contextlib.suppress(RunFolderError), reading_ledger(folder) as ledger:
        if ledger is not None:
            attempts = ledger.attempts()
            row = next((row for row in reversed(attempts) if row.launched), None)
            earlier = ran_seconds(attempts[: attempts.index(row)]) if row is not None else None
            metric = next(iter(ledger.metrics(1)), None)
    if row is None:
        return state
    trainer = RunningAttempt(folder, row.number, shim_pid=None).trainer
    values = {name: getattr(metric, name) for name in ("update", "samples_seen", "loss", "learning_rate")} if metric else {}
    living = Phase.STARTING if metric is None or metric.attempt != row.number else Phase.TRAINING
    return msgspec.structs.replace(
        state,
        state=Phase(row.outcome) if row.outcome in ("finished", "stopped", "failed") else living,
        reason=(row.diagnosis or {}).get("summary"),
        attempt=row.number,
        trainer_pid=trainer.pid if trainer is not None else None,
        settings=row.settings,
        started=row.started,
        earlier_seconds=earlier or 0.0,
        ended=row.ended,
        exit_status=row.exit_status,
        ended_by=row.ended_by,
        updates=values.pop("update", row.updates),
        log_path=str(folder.attempt(row.number) / "output.log"),
        effective_batch=row.settings.effective_batch if row.settings is not None else None,
        **values,
    )


def _just_begun(folder: RunFolder, state: RunState, attempt: int) -> RunState:
    """The run with an attempt that was started but is not in state.json yet."""
    trainer = RunningAttempt(folder, attempt, shim_pid=None).trainer
    return msgspec.structs.replace(
        state,
        state=Phase.STARTING,
        reason=None,
        attempt=attempt,
        trainer_pid=trainer.pid if trainer is not None else None,
        log_path=str(folder.attempt(attempt) / "output.log"),
        started=None,
        ended=None,
        exit_status=None,
        ended_by=None,
        ranks=(),
        proposal=None,
        **_nothing_unsaved(state),
    )


def _nothing_unsaved(state: RunState) -> dict[str, Any]:
    """A program that has ended will not repeat a failed save."""
    return {"unsaved": None, "warnings": tuple(text for text in state.warnings if text != state.unsaved)}


def _after_the_end(state: RunState, supervised: bool) -> dict[str, Any]:
    """Values that are not valid any more once the trainer is gone or no supervisor measures it.

    Peaks stay valid.
    """
    changes: dict[str, Any] = {"run_rss_bytes": None, "run_memory": ()}
    changes["ranks"] = tuple(
        msgspec.structs.replace(
            rank, connected=False, allocated_bytes=None, reserved_bytes=None, rss_bytes=None, pss_bytes=None
        )
        for rank in state.ranks
    )
    return changes if supervised else changes | {"supervisor_pid": None}


def read_run(path: Path) -> tuple[RunState, list[Metric], list[Event]]:
    """State, final metric history and events of a run, read without its supervisor."""
    folder = RunFolder(path)
    with reading_ledger(folder) as ledger:
        if ledger is None:
            return read_state(folder), [], []
        return read_state(folder), ledger.metrics(), ledger.events()


def read_configurations(path: Path) -> tuple[Configuration, ...]:
    """The configurations of a run, oldest first, read without its supervisor."""
    with reading_ledger(RunFolder(path)) as ledger:
        return tuple(record.configuration for record in ledger.configurations()) if ledger else ()


def show(folder: RunFolder) -> dict[str, Any]:
    """The document of `memtop show --json`, without the metric rows."""
    state = read_state(folder)
    with reading_ledger(folder) as ledger:
        attempts = ledger.attempts() if ledger else []
        configurations = [record.configuration for record in ledger.configurations()] if ledger else []
    return {
        "name": state.name,
        "folder": state.folder,
        "state": state.state.value,
        "reason": state.reason,
        "alive": state.alive,
        "adopted": state.adopted,
        "supervisor_pid": state.supervisor_pid,
        "trainer_pid": state.trainer_pid,
        "attempts": [_attempt(attempt, state) for attempt in attempts],
        "updates": state.updates,
        "total_updates": state.total_updates,
        "samples_seen": state.samples_seen,
        "target_samples": state.target_samples,
        "loss": state.loss,
        "learning_rate": state.learning_rate,
        "samples_per_second": state.samples_per_second,
        "eta_seconds": state.eta_seconds,
        "effective_batch": state.effective_batch,
        "settings": msgspec.to_builtins(state.settings) or (None if state.program is None else known(state.program.knobs)),
        "command": list(state.command),
        "program": msgspec.to_builtins(state.program),
        "choice": state.choice,
        "checkpoint": msgspec.to_builtins(state.checkpoint),
        "on_oom": state.on_oom,
        "proposal": msgspec.to_builtins(state.proposal),
        "configurations": msgspec.to_builtins(configurations),
        "exit_status": state.exit_status,
        "ended_by": state.ended_by,
    }


def summary(state: RunState) -> dict[str, Any]:
    """One run in `memtop runs --json` and in the `runs` of `memtop watch --once --json`."""
    names = (
        *("name", "folder", "alive", "adopted", "reason", "supervisor_pid", "trainer_pid", "attempt", "updates"),
        *("total_updates", "samples_seen", "loss", "effective_batch", "samples_per_second", "eta_seconds", "exit_status"),
        "ended_by",
    )
    return {"state": state.state.value, **{name: getattr(state, name) for name in names}}


# Inode, size and time of a file. A replaced file has others.
_Stamp = tuple[int, int, int]


def known_runs(runs_dir: Path) -> list[KnownRun]:
    """What the monitor must know about the runs to recognize strays.

    Called every two seconds. For a run that is over, only its lock and the time stamps of its files
    are read again.
    """
    known = []
    try:
        names = sorted(os.listdir(runs_dir))  # noqa: PTH208 - names alone, a hot path
    except OSError:
        return []  # no runs yet, or this user may not read them
    for name in names:
        try:
            run = _known_run(f"{runs_dir}/{name}")
        except (RunFolderError, OSError):
            # Nothing can be proven about this folder (damaged, no run), so its processes are not
            # strays.
            continue
        if run is not None:
            known.append(run)
    return sorted(known, key=lambda run: run.created or 0.0)


class _Over(NamedTuple):
    """A run that is over, with the time stamps of its files."""

    stamps: tuple[_Stamp | None, ...]
    lock: RunLock
    run: KnownRun


_over: dict[str, _Over] = {}


def _known_run(path: str) -> KnownRun | None:
    """The run in a folder. None if it was never started, or if another user may have written its
    files."""
    spec_stamp, state_stamp = _stamp(f"{path}/run.json"), _stamp_if_any(f"{path}/state.json")
    # Each new attempt changes the time stamp of the attempts folder.
    stamps = spec_stamp, state_stamp, _stamp_if_any(f"{path}/attempts")
    remembered = _over.get(path)
    # A restarted run is locked before its attempt is started.
    if remembered is not None and remembered.stamps == stamps and not remembered.lock.is_held():
        return remembered.run
    if why_not_own(Path(path)) is not None:
        return None
    folder = RunFolder(Path(path))
    written = 0 if state_stamp is None else _number_in(folder.state_path, state_stamp)
    number, lock = max(written, folder.newest_attempt()), RunLock(folder)
    if not number and state_stamp is None:
        return None
    living = trainer_alive(folder, number) or lock.is_held()
    spec = _spec(folder.spec_path, spec_stamp)
    run = KnownRun(
        name=folder.name,
        folder=str(folder.path),
        alive=living,
        attempt=number,
        id=spec.id,
        created=spec.created,
        recorded=tuple(_recorded_attempts(folder, number, living)),
    )
    _over.pop(path, None)
    # The folder of an attempt exists before its program writes its process file.
    starting = any(other > number for other in folder.attempt_numbers())
    if not living and not starting and all(attempt.ended_ticks is not None for attempt in run.recorded):
        _over[path] = _Over(stamps, lock, run)
    return run


def _stamp(path: Path | str) -> _Stamp:
    status = os.stat(path)  # noqa: PTH116 - a hot path
    return status.st_ino, status.st_size, status.st_mtime_ns


def _stamp_if_any(path: str) -> _Stamp | None:
    try:
        return _stamp(path)
    except FileNotFoundError:
        return None


@functools.lru_cache(maxsize=4096)
def _spec(path: Path, stamp: _Stamp) -> RunSpec:
    return read_json(path, RunSpec)


@functools.lru_cache(maxsize=4096)
def _number_in(path: Path, stamp: _Stamp) -> int:
    file = read_derived(path, StateFile)
    return 0 if file is None else file.run.attempt


def _recorded_attempts(folder: RunFolder, newest: int, living: bool) -> Iterator[RecordedAttempt]:
    """The processes that the run has recorded on this machine since it was booted."""
    for number in range(1, newest + 1):
        process_path, exit_path = folder.attempt(number) / "process.json", folder.attempt(number) / "exit.json"
        try:
            stamp = _stamp(process_path)
            found = _process_file(process_path, stamp)
        except (FileNotFoundError, RunFolderError):
            found = None
        if found is None:
            continue  # the program was never started, or its record is damaged and proves nothing
        written = stamp[2] / 1e9
        if abs(boot_time() + found.started_ticks / TICKS_PER_SECOND - written) > _SAME_BOOT_SECONDS:
            # Written on another machine that shares the disk, before a reboot, or copied: its pids
            # mean nothing here.
            continue
        # Ranks are recorded while the program runs, so on the same machine and since the same boot.
        leader = ProcessId(found.pid, found.started_ticks)
        ranks = _ranks_recorded(folder.attempt(number) / RANKS_FILE)
        yield RecordedAttempt(
            number=number,
            over=not living or number < newest,
            processes=frozenset({leader, ProcessId(found.shim_pid, found.shim_started_ticks), *ranks}),
            leader=leader,
            ended_ticks=_ended_ticks(exit_path),
        )


def _ranks_recorded(path: Path) -> tuple[ProcessId, ...]:
    try:
        found = _ranks_file(path, _stamp(path))
    except (FileNotFoundError, RunFolderError):
        found = None
    # None: no rank has reported, or the record is damaged and proves nothing.
    return () if found is None else found.processes


@functools.lru_cache(maxsize=4096)
def _ranks_file(path: Path, stamp: _Stamp) -> RanksFile | None:
    return read_derived(path, RanksFile)


@functools.lru_cache(maxsize=4096)
def _process_file(path: Path, stamp: _Stamp) -> ProcessFile | None:
    return read_derived(path, ProcessFile)


@functools.lru_cache(maxsize=4096)
def _exit_file(path: Path, stamp: _Stamp) -> ExitFile | None:
    return read_derived(path, ExitFile)


def _ended_ticks(path: Path) -> int | None:
    """When the program ended according to its exit file, in clock ticks since boot.

    None if there is no such file, or if it is damaged.
    """
    try:
        found = _exit_file(path, _stamp(path))
    except FileNotFoundError:
        return None
    return None if found is None else int((found.ended - boot_time()) * TICKS_PER_SECOND) - _CLOCK_TICKS


def trainer_alive(folder: RunFolder, attempt: int) -> bool:
    return attempt > 0 and RunningAttempt(folder, attempt, shim_pid=None).alive()


def is_ending(folder: RunFolder) -> bool:
    """Whether the program has ended, and its supervisor is about to conclude how and to leave."""
    file = folder.state()
    if file is None or file.restarts or file.run.state is Phase.RESTARTING:
        return False
    attempt = file.run.attempt
    ended = attempt > 0 and (folder.attempt(attempt) / "exit.json").exists() and folder.newest_attempt() <= attempt
    return ended and supervisor_alive(folder) and not trainer_alive(folder, attempt)


def refuse_living(folder: RunFolder) -> None:
    """RefusedError if the program or the supervisor of the run lives. The lock alone does not show
    that: a person may have removed its file."""
    require_own(folder.path)
    file = folder.state()
    # The supervisor of a run that is over is about to end.
    goes_on = file is not None and (file.restarts or not file.run.state.final)
    if trainer_alive(folder, folder.newest_attempt()) or (goes_on and supervisor_alive(folder)):
        if (original := original_of(folder, file)) is not None:
            raise refused_copy(folder, original)
        raise RefusedError(f"run {folder.name!r} is in use: `memtop stop {folder.name}` first")


def needs_supervisor(folder: RunFolder) -> bool:
    """True if the run is to continue (its trainer runs, or a restart is pending) and its supervisor
    is gone."""
    file, newest = folder.state(), folder.newest_attempt()
    if supervisor_alive(folder):
        return False
    if file is not None and file.run.state is Phase.QUEUED:
        return True
    written = file.run.attempt if file is not None else 0
    return trainer_alive(folder, max(written, newest)) or (file is not None and _has_pending_restart(folder, file, newest))


def _has_pending_restart(folder: RunFolder, file: StateFile, newest: int) -> bool:
    """A restart was decided and no program was started since.

    Does not apply to a run that was moved aside.
    """
    return file.restarts and newest <= file.run.attempt and file.run.folder == str(folder.path)


def supervisor_alive(folder: RunFolder) -> bool:
    """Whether the run has a supervisor now."""
    file = folder.state()
    # Not written yet, lost or damaged: the next write replaces it.
    return RunLock(folder).is_held() if file is None else living_supervisor(file) > 0


def _attempt(attempt: Attempt, state: RunState) -> dict[str, Any]:
    row: dict[str, Any] = msgspec.to_builtins(attempt)
    if attempt.number == state.attempt and attempt.ended is None:
        row["updates"], row["samples_seen"] = state.updates, state.samples_seen
    if state.settings is None and attempt.number > 1 and not start_is_known(state.program, attempt.start_updates):
        row["start_updates"] = None
    return row
