"""Follows a program that memtop did not start: its processes, its output, its checkpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from memtop.supervisor.monitor.processes.jobs import JobDraft, job_name
from memtop.supervisor.monitor.processes.outputs import OutputFile, output_files
from memtop.supervisor.monitor.processes.proc import (
    PROC,
    TICKS_PER_SECOND,
    ProcessId,
    boot_time,
    command_words,
    is_alive,
    readable,
)
from memtop.supervisor.monitor.processes.table import resident_bytes
from memtop.supervisor.monitor.values import MachineSnapshot
from memtop.supervisor.observed.checkpoints import folders_of, newest_checkpoint
from memtop.supervisor.observed.find import Programs
from memtop.supervisor.observed.values import Observed, ObservedProcess
from memtop.supervisor.run.output.tail import LAST_BYTES, Tail
from memtop.supervisor.wire import Checkpoint

if TYPE_CHECKING:
    from memtop.supervisor.run.output.learning import Row

_CHECKPOINT_SECONDS = 10.0
_HEAD_BYTES = 64 << 10
_LONGEST_LINE = 64 << 10
_BLOCKS = 8
"""A look reads at most so many blocks of each file."""


class Output:
    """The numbers in the output files of a program."""

    def __init__(self) -> None:
        from memtop.supervisor.run.output.learning import Learner  # compiles expressions for 5 ms

        self.learner = Learner()
        self.best_loss: float | None = None
        self._tails: dict[tuple[int, int], Tail] = {}

    def read(self, files: Sequence[OutputFile], now: float) -> list[Row]:
        """The new rows."""
        rows: list[Row] = []
        for file in files:
            tail = self._tails.get(file.identity)
            if tail is None:
                tail = self._tails[file.identity] = self._begin(file.path, now)
            for _ in range(_BLOCKS):
                before = tail.offset
                try:
                    rows += self.learner.take(tail.read(), now)
                except OSError:
                    break  # it was removed meanwhile; the next look finds another, or none
                if tail.offset == before:
                    break
        losses = [row.loss for row in rows if row.loss is not None]
        self.best_loss = min([*losses, *([] if self.best_loss is None else [self.best_loss])], default=None)
        return rows

    def _begin(self, path: Path, now: float) -> Tail:
        """Of a long output, its end is read. The settings are at its beginning."""
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size <= LAST_BYTES:
                    return Tail(path)
                self.learner.take(file.read(_HEAD_BYTES).decode(errors="replace").splitlines(), now)
                file.seek(size - LAST_BYTES)
                return Tail(path, size - LAST_BYTES + len(file.readline(_LONGEST_LINE)))
        except OSError:
            return Tail(path)


class Observer:
    """Follows one program."""

    def __init__(self, draft: JobDraft, programs: Programs, proc_root: Path = PROC) -> None:
        row = programs.rows[draft.leader]
        self.leader = row.identity
        self._root = proc_root
        self._main = _main(draft)
        """The process whose output is that of the training."""
        words = command_words(self._main, proc_root) or command_words(draft.leader, proc_root) or ()
        self._name = job_name(words, row.comm)
        self._command = command_words(draft.leader, proc_root) or ()
        self._folder = _folder(draft.leader, proc_root)
        self.started = boot_time() + row.identity.started_ticks / TICKS_PER_SECOND
        self._programs = programs
        self._output = Output()
        self._checkpoint: Checkpoint | None = None
        self._checkpoint_due = float("-inf")
        self._rows: list[Row] = []
        self._files: list[OutputFile] = []

    def look(self, now: float, machine: MachineSnapshot | None = None, programs: Programs | None = None) -> Observed:
        """The program now. Reads files, so it may take a moment."""
        programs = self._programs = programs or Programs(self._root, self._programs)
        draft = programs.with_process(self.leader.pid) if is_alive(self.leader, self._root) else None
        pids = () if draft is None else draft.pids
        unknown: dict[str, str] = {}
        if draft is not None:
            found = output_files(dict.fromkeys([_main(draft), *pids]), programs.tees, self._root)
            if isinstance(found, str):
                unknown["output"] = found
            self._files = [] if isinstance(found, str) else found
        # After the end, the rest of the output is read.
        self._rows += self._output.read(self._files, now)
        if draft is not None and now >= self._checkpoint_due and self._folder is not None:
            self._checkpoint_due = now + _CHECKPOINT_SECONDS
            self._checkpoint = newest_checkpoint(folders_of(self._command, Path(self._folder)), self.started)
        return self._observed(draft, programs, machine, unknown)

    def take_rows(self) -> list[Row]:
        """What was read since this was called before."""
        rows, self._rows = self._rows, []
        return rows

    def _observed(
        self,
        draft: JobDraft | None,
        programs: Programs,
        machine: MachineSnapshot | None,
        unknown: dict[str, str],
    ) -> Observed:
        newest, learner = self._output.learner.newest, self._output.learner
        if newest is None:
            unknown["updates"] = unknown.get("output", "its output has no step with a loss yet, as far as memtop can read it")
        if self._checkpoint is None:
            unknown["checkpoint"] = "no complete one was saved in its folders since its start"
        processes = () if draft is None else _processes(draft, programs, machine, self._root)
        on_gpu = [process.gpu_bytes for process in processes if process.gpu_bytes is not None]
        total, seconds = (newest.total, learner.step_seconds) if newest is not None else (None, None)
        return Observed(
            pid=self.leader.pid,
            started_ticks=self.leader.started_ticks,
            name=readable(self._name),
            command=tuple(readable(word) for word in self._command),
            folder=self._folder,
            started=self.started,
            alive=draft is not None,
            processes=processes,
            rss_bytes=resident_bytes([process.pid for process in processes], self._root),
            gpu_bytes=sum(on_gpu) if on_gpu else None,
            output=tuple(readable(str(file.path)) for file in self._files),
            updates=None if newest is None else newest.step,
            total_updates=total,
            epoch=None if newest is None else newest.epoch,
            loss=None if newest is None else newest.loss,
            best_loss=self._output.best_loss,
            learning_rate=None if newest is None else newest.learning_rate,
            step_seconds=seconds,
            tokens_per_second=None if newest is None else newest.tokens_per_second,
            eta_seconds=(total - newest.step) * seconds if newest is not None and total and seconds else None,
            example=learner.example,
            checkpoint=self._checkpoint,
            unknown=unknown,
        )


class Observers:
    """Follows every program on the machine that uses torch and that memtop did not start."""

    def __init__(self, proc_root: Path = PROC) -> None:
        self._root = proc_root
        self._known: dict[ProcessId, Observer] = {}
        self._programs: Programs | None = None

    def look(self, now: float, machine: MachineSnapshot | None = None) -> list[Observed]:
        """All of them now. Those that are seen to train come first."""
        programs = self._programs = Programs(self._root, self._programs)
        known, found = self._known, []
        self._known = {}
        for draft in programs.of_others:
            leader = programs.rows[draft.leader].identity
            observer = self._known[leader] = known.get(leader) or Observer(draft, programs, self._root)
            found.append(observer.look(now, machine, programs))
            observer.take_rows()
        return sorted(found, key=lambda seen: seen.updates is None)


def observer_of(pid: int) -> Observer | None:
    """For the training program of this process: it uses torch, or its output shows a training. None
    if it is something else, or one of memtop's runs."""
    programs = Programs()
    draft = programs.with_process(pid)
    if draft is None:
        return None
    observer = Observer(draft, programs)
    if draft in programs.of_others or observer.look(time.time(), programs=programs).updates is not None:
        return observer
    return None


def _main(draft: JobDraft) -> int:
    """The process that prints the training: rank 0, or else the first that is no launcher."""
    ranks = [pid for pid in draft.pids if draft.roles.get(pid) == "rank 0"]
    others = [pid for pid in draft.pids if draft.roles.get(pid) not in ("launcher", "loader worker")]
    return next(iter([*ranks, *others]), draft.leader)


def _folder(pid: int, proc_root: Path) -> str | None:
    try:
        return readable(str((proc_root / str(pid) / "cwd").readlink()))
    except OSError:
        return None


def _processes(
    draft: JobDraft, programs: Programs, machine: MachineSnapshot | None, proc_root: Path
) -> tuple[ObservedProcess, ...]:
    held: dict[int, int] = {}
    for gpu in machine.gpus if machine is not None else ():
        for process in gpu.processes:
            if process.used_bytes is not None:
                held[process.pid] = held.get(process.pid, 0) + process.used_bytes
    return tuple(
        ObservedProcess(
            pid=pid,
            parent_pid=programs.rows[pid].parent_pid,
            role=draft.roles.get(pid, "process"),
            command=" ".join(command_words(pid, proc_root) or (programs.rows[pid].comm,)),
            rss_bytes=programs.rows[pid].rss_bytes,
            gpu_bytes=held.get(pid),
        )
        for pid in draft.pids
        if pid in programs.rows
    )
