"""How a program that memtop did not start can be started again, as a run of memtop."""

from __future__ import annotations

import glob
import os
import shutil
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from memtop.presets.program_profiles import ProgramProfile
from memtop.supervisor.errors import RefusedError, UsageError
from memtop.supervisor.monitor.processes.jobs import is_host, script
from memtop.supervisor.monitor.processes.proc import (
    PROC,
    RUN_VARIABLE,
    ProcessId,
    command_words,
    environment,
    environment_of,
    identify,
    is_alive,
    own_family,
    parent_of,
)
from memtop.supervisor.monitor.processes.signals import check_owner
from memtop.supervisor.observed.checkpoints import folders_below, folders_of, newest_checkpoint
from memtop.supervisor.observed.observer import observer_of
from memtop.supervisor.observed.values import Observed
from memtop.supervisor.profile.detection import propose
from memtop.supervisor.run.grip import Grip
from memtop.supervisor.run.profiled import grip_of
from memtop.supervisor.run.record import grip_checkpoints
from memtop.supervisor.run.record.folder import RunSpec
from memtop.supervisor.run.record.profile_checkpoints import place_of
from memtop.supervisor.wire import Checkpoint

_SHELLS = frozenset({"sh", "bash", "zsh", "dash", "fish"})


class Adoption(msgspec.Struct, frozen=True, kw_only=True):
    """What is needed to start the program again."""

    processes: tuple[ProcessId, ...]
    """All of them, the topmost first. The new run begins when they have ended."""
    command: tuple[str, ...]
    folder: str
    environment: dict[str, str]
    """With which the process was started."""
    started: float
    signal_number: int
    """What asks it to end."""
    notes: tuple[str, ...] = ()
    """What may differ from the first start, one line each."""


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """How memtop makes the program resume, and from what."""

    grip: Grip
    checkpoint: Checkpoint
    profile_why: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """How it resumes, and what a person must do, one line each."""
        profile = self.grip.profile
        if profile is None:
            return ("it is built on Hugging Face's Trainer, which memtop makes resume",)
        notes = (f"profile {profile.name}: {self.profile_why}",)
        answer = profile.stop.answer
        return notes if answer is None else (*notes, f"before it ends it asks on its terminal: answer {answer!r} there")

    def signal_of(self, adoption: Adoption) -> int:
        """What asks the program to end: what its profile says, unless it ignores SIGINT."""
        profile = self.grip.profile
        if profile is None or adoption.signal_number != signal.SIGINT:
            return adoption.signal_number
        return signal.Signals[profile.stop.signal]


def hold_of(adoption: Adoption, spec: RunSpec, run: Path, profiles: Iterable[ProgramProfile]) -> Hold | str:
    """How the program resumes in this run, or why it cannot."""
    folders = folders_of(adoption.command, Path(adoption.folder))
    saved = newest_checkpoint(folders, adoption.started, of_trainer=True)
    if saved is not None:
        return Hold(grip=Grip(output_dir=str(Path(saved.path).parent)), checkpoint=saved)
    chosen = propose(profiles, adoption.command, adoption.folder)
    grip = None if chosen is None else grip_of(replace(spec, profile=chosen.profile, profile_why=chosen.why), run, {}, None)
    if chosen is None or grip is None or chosen.profile.resume.how == "never":
        seen = newest_checkpoint(folders, adoption.started)
        if chosen is not None:
            return f"programs like this one do not resume (profile {chosen.profile.name}: {chosen.why})"
        if seen is None:
            return "it has saved no complete checkpoint since its start, as far as memtop can see"
        return f"memtop does not know how this program resumes from {seen.path}: no profile fits, and it is not the Trainer's"
    grip = replace(grip, since=adoption.started)
    newest = grip_checkpoints.newest_for(run, grip, grip.since)
    if newest is None or not newest.complete:
        tried = (grip_checkpoints.newest_for(run, replace(grip, seen=(path,)), grip.since) for path in _below(grip))
        below = [one for one in tried if one is not None and one.complete]
        if len({Path(one.path).parent for one in below}) > 1:
            # Of several trainings: which of them this one is, is not known.
            places = ", ".join(sorted({str(Path(one.path).parent) for one in below}))
            return f"there are checkpoints in several folders: {places}; which are its own is not known"
        if below:
            newest = max(below, key=lambda one: one.saved_at or 0.0)
            grip = grip.with_seen_at(newest.path)
    if newest is None or not newest.complete:
        problem = "" if newest is None or newest.problem is None else f" ({newest.problem})"
        return f"it has saved no complete checkpoint since its start{problem} (profile {chosen.profile.name})"
    return Hold(grip=grip, checkpoint=newest, profile_why=chosen.why)


def _below(grip: Grip) -> tuple[str, ...]:
    """The paths of the profile in the folders below those that they name."""
    place = place_of(grip)
    split = (os.path.split(path) for path in (() if place is None else place.paths))
    return tuple(
        os.path.join(glob.escape(str(folder)), name)  # noqa: PTH118 - of a pattern
        for top, name in split
        if not glob.has_magic(top)
        for folder in folders_below(Path(top))
    )


def adoption_of(pid: int) -> tuple[Adoption, Observed]:
    """Read from /proc how the program of this process was started.

    UsageError if there is no such program; RefusedError if it is not the caller's, or if it cannot
    be started again.
    """
    given = identify(pid)
    if given is None or not is_alive(given):
        raise UsageError(f"PID {pid}: no such process")
    if (run := (environment(pid) or {}).get(RUN_VARIABLE)) is not None:
        raise UsageError(f"PID {pid}: belongs to memtop's run {Path(run).name}; see memtop show {run}")
    check_owner(pid)
    observer = observer_of(pid)
    if observer is None:
        raise UsageError(f"PID {pid}: no training that memtop can see: it does not use torch, and its output has no steps")
    seen, leader = observer.look(time.time()), observer.leader
    try:
        return _adoption(leader, seen), seen
    except RefusedError as error:
        raise RefusedError(about(pid, leader.pid, str(error))) from None


def about(pid: int, leader: int, text: str) -> str:
    """What is said of the training process, with why it is not the process that was named."""
    return text if pid == leader else f"{text} (PID {pid} belongs to this training)"


def _adoption(leader: ProcessId, seen: Observed) -> Adoption:
    check_owner(leader.pid)
    _refuse_strange(leader.pid)
    variables = environment_of(leader)
    if isinstance(variables, str):
        raise RefusedError(f"PID {leader.pid}: {variables}; so it cannot be started again as it was")
    if variables.get("SLURM_JOB_ID") != os.environ.get("SLURM_JOB_ID"):
        raise RefusedError(f"PID {leader.pid}: runs in a Slurm job; start memtop inside that job")
    folder = _folder(leader.pid)
    command, notes = _command(leader.pid, folder, variables)
    number, why = _signal(leader.pid)
    identities = [leader, *(found for one in seen.processes if (found := identify(one.pid)) is not None)]
    return Adoption(
        processes=tuple(dict.fromkeys(identities)),
        command=command,
        folder=folder,
        environment=variables,
        started=seen.started,
        signal_number=number,
        notes=(*notes, *why, *_parent(leader.pid)),
    )


def _refuse_strange(pid: int) -> None:
    """RefusedError for a program that its command line does not start again."""
    words = command_words(pid) or ()
    if pid in own_family():
        raise RefusedError(f"PID {pid}: this memtop was started from it")
    try:
        elsewhere = (PROC / str(pid) / "ns/mnt").readlink() != (PROC / "self/ns/mnt").readlink()
    except OSError as error:
        raise RefusedError(f"PID {pid}: cannot be examined: {error.strerror}") from None
    if elsewhere:
        raise RefusedError(f"PID {pid}: runs in a container with files of its own; start memtop there")
    if is_host(words, ""):
        raise RefusedError(f"PID {pid}: is a notebook or an editor, which its command line does not bring back: {words[0]}")
    found, _ = script(words)
    if Path(words[0] if words else "").name.startswith("python") and found is None and "-c" not in words:
        raise RefusedError(f"PID {pid}: reads its program from its input, so it cannot be started again")


def _folder(pid: int) -> str:
    link = PROC / str(pid) / "cwd"
    try:
        folder, same = link.readlink(), link.stat()
        there = folder.stat()
    except OSError:
        raise RefusedError(f"PID {pid}: its working directory does not exist any more") from None
    if (there.st_dev, there.st_ino) != (same.st_dev, same.st_ino):
        raise RefusedError(f"PID {pid}: its working directory was replaced: {folder}")
    return str(folder)


def _command(pid: int, folder: str, variables: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The words of its command line, and what is to be said about them."""
    raw = (PROC / str(pid) / "cmdline").read_bytes()
    if not raw.endswith(b"\0"):
        raise RefusedError(f"PID {pid}: has written a title over its command line, so it cannot be started again")
    words = tuple(os.fsdecode(word) for word in raw[:-1].split(b"\0"))
    try:
        "".join(words).encode()
    except UnicodeEncodeError:
        raise RefusedError(f"PID {pid}: its command line has bytes that are not UTF-8") from None
    name = words[0]
    path = os.path.join(folder, name) if "/" in name else shutil.which(name, path=variables.get("PATH", os.defpath))  # noqa: PTH118
    if path is not None and os.access(path, os.X_OK):
        return words, ()
    try:
        program = str((PROC / str(pid) / "exe").readlink())
    except OSError:
        program = ""
    if not os.access(program, os.X_OK):
        raise RefusedError(f"PID {pid}: its program does not exist any more: {name}")
    return (program, *words[1:]), (f"{name} is not found any more; {program} is started in its place",)


def _signal(pid: int) -> tuple[int, tuple[str, ...]]:
    """SIGINT, as Ctrl-C sends it; SIGTERM for a process that ignores SIGINT, as a background job of
    a shell script does."""
    mask = 0
    for line in (PROC / str(pid) / "status").read_text(errors="replace").splitlines():
        if line.startswith("SigIgn:"):
            mask = int(line.split()[1], 16)
    if not mask >> (signal.SIGINT - 1) & 1:
        return signal.SIGINT, ()
    return signal.SIGTERM, ("it ignores SIGINT, as background jobs do, so SIGTERM ends it: it may save nothing more",)


def _parent(pid: int) -> tuple[str, ...]:
    """A script that started it goes on when it has ended."""
    parent = parent_of(pid)
    words = command_words(parent) if parent is not None and parent > 1 else None
    if not words or len(words) < 2 or Path(words[0]).name not in _SHELLS:
        return ()
    return (f"{' '.join(words)[:200]} (pid {parent}) has started it, and goes on when it has ended",)
