"""Saves a training's state while the training goes on, and reports the result.

At the end of an update the state is copied to host memory, and a thread writes the copy. So the
training stops for the copy only. It stops for the whole save if host memory cannot hold the copy,
and at its end.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import msgspec

from memtop.presets import Settings
from memtop.train.channel import Channel, warn
from memtop.train.checkpoint import (
    NoSpaceError,
    SavedProgress,
    SavedState,
    as_stored,
    best_loss,
    keep_best,
    make_room,
    manifest_of,
    state_bytes,
    write_state,
)
from memtop.train.engine import Engine
from memtop.train.exchange import Ranks
from memtop.train.host_copy import HostCopy
from memtop.train.state_files import Manifest, SavedTensors, at_once, in_thread, newest_update

ROUND_SECONDS = 1.0
"""While the last save waits for disk space, ranks meet this often, far below a group's time limit.
"""
_RETRY_SECONDS = 3.0
# The disk reports enough free space, yet the write fails: a quota, or no more inodes. Only another
# attempt can tell.
_HIDDEN_LIMIT_RETRY_SECONDS = 30.0
_REPEAT_MESSAGE_SECONDS = 60.0


class DiskWait:
    """After a save that failed for lack of space: when to retry and when to repeat the message.

    Only the first rank writes, so on the other ranks no retry is ever due. `monotonic` returns
    seconds.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._error: NoSpaceError | None = None
        self._tried_at = self._message_at = 0.0
        self._message: str | None = None

    def failed(self, error: NoSpaceError) -> None:
        """Note that a save has just failed."""
        self._error, self._tried_at = error, self._monotonic()

    def due(self, *, at_once: bool = False) -> bool:
        """Whether another attempt may succeed now.

        `at_once` skips the pause since the last one: it is the last chance.
        """
        error = self._error
        if error is None or shutil.disk_usage(error.folder).free < error.needed_bytes:
            return False
        since = self._monotonic() - self._tried_at
        return at_once or since >= (_HIDDEN_LIMIT_RETRY_SECONDS if error.hidden else _RETRY_SECONDS)

    def is_news(self, text: str) -> bool:
        """Whether to report this text: it is new, and the last one is a minute old."""
        now = self._monotonic()
        if text == self._message or (self._message is not None and now - self._message_at < _REPEAT_MESSAGE_SECONDS):
            return False
        self._message, self._message_at = text, now
        return True


class _Written(msgspec.Struct, frozen=True):
    manifest: Manifest
    ended: float
    """By time.perf_counter."""
    best_problem: str | None
    """Why the state is not kept as the best one, though it should be; else None."""


class _Save(msgspec.Struct):
    """A save in progress. All ranks have it, only the first one writes."""

    update: int
    best_loss: float | None
    """The evaluation loss if this state is to be kept as the best one; else None."""
    commands: tuple[int, ...]
    """This rank's commands to answer when the state is on the disk."""
    waiting: bool
    started: float
    """By time.perf_counter."""
    written: Future[_Written] | None
    """None on all ranks but the first."""
    pause_seconds: float = 0.0


class StateSaver:
    """Saves a training's state and reports the result.

    All ranks call `begin`, `finish` and `note` together; the first rank writes. At most one save is
    in progress. A save that becomes due meanwhile waits for it: so every state that is due is
    saved, and host memory never holds two copies.
    """

    def __init__(
        self,
        state_dir: Path,
        engine: Engine,
        channel: Channel,
        ranks: Ranks,
        disk_wait: DiskWait,
        saved_update: int,
        *,
        pin_memory: bool,
    ) -> None:
        self._state_dir = state_dir
        self._engine = engine
        self._channel = channel
        self._ranks = ranks
        self._disk_wait = disk_wait
        self._copy = HostCopy(pin=pin_memory)
        self._prepared: Future[None] | None = None
        self._told_why_not_copied = False
        self._save: _Save | None = None
        self._outcome = (True, "")
        self._best_loss = best_loss(state_dir)
        self.saved_update = saved_update
        """The update whose state is on the disk."""
        self.problem: str | None = None
        """Why the last save failed; None if it did not fail, and on all ranks but the first."""

    @property
    def best_loss(self) -> float | None:
        """The lowest evaluation loss whose state is saved or being saved; None without one."""
        if self._save is not None and self._save.best_loss is not None:
            return self._save.best_loss
        return self._best_loss

    def begin(
        self,
        progress: SavedProgress,
        settings: Settings,
        *,
        background: bool,
        best: bool = False,
        waiting: bool = False,
        commands: tuple[int, ...] = (),
    ) -> None:
        """Save the state: with `background` in a thread, if host memory allows it; else at once.

        Then call `finish`, or give what `ended` returns to all ranks at the end of each update.

        `best`: also keep it as the state with the lowest evaluation loss. `waiting`: if the disk is
        full, the training waits for space instead of ending. `commands`: answer them.
        """
        started = time.perf_counter()
        self.finish()
        # The journal must contain every update that the checkpoint covers before the checkpoint
        # exists.
        self._channel.flush()
        loss = progress.evaluation_loss if best else None
        written = self._write(progress, settings, best=best, background=background)
        self._save = _Save(progress.updates, loss, commands, waiting, started, written)
        self._save.pause_seconds = time.perf_counter() - started

    def prepare(self) -> None:
        """A save follows the next update: get memory for its copy meanwhile, once."""
        if self._prepared is None and self._engine.accelerator.is_main_process:
            needed = state_bytes(self._engine.model)
            self._prepared = in_thread(lambda: self._copy.prepare(needed), "memtop-save-memory")

    def ended(self) -> tuple[bool, bool]:
        """Whether the save in progress has ended, and whether it failed, on the first rank.

        Always False on the others. Raises the error of a write that failed for another reason than
        a full disk.
        """
        save = self._save
        if save is None or save.written is None or not save.written.done():
            return False, False
        self._outcome = self._reported(save, save.written)
        return True, not self._outcome[0]

    def note(self, *, failed: bool) -> None:
        """Note on all ranks that the save in progress has ended."""
        save, self._save = self._save, None
        assert save is not None
        if not failed:
            self.saved_update = save.update
            self._best_loss = self._best_loss if save.best_loss is None else save.best_loss
        words = "not saved" if failed else "saved"
        done = (not failed, f"update {save.update} {words}") if save.written is None else self._outcome
        for number in save.commands:
            self._channel.answer(number, *done)
        if save.written is not None:
            self._copy.release()

    def finish(self) -> None:
        """Wait for the save in progress, if there is one."""
        save = self._save
        if save is None:
            return
        if save.written is not None:
            self._outcome = self._reported(save, save.written)
        # The first rank writes for all ranks, so all of them must know whether it worked.
        self.note(failed=self._ranks.any(save.written is not None and not self._outcome[0]))

    def wait_after_failure(self) -> None:
        """Wait on this rank alone for the save in progress, and report it."""
        save, self._save = self._save, None
        if save is None or save.written is None:
            return
        try:
            self._reported(save, save.written)
        except Exception as error:  # noqa: BLE001 - the training's own error is raised
            print(f"memtop: update {save.update} not saved: {error}", flush=True)

    def retry_due(self, *, at_once: bool) -> bool:
        """Whether another attempt may succeed now, on the first rank; False on the others."""
        return self._disk_wait.due(at_once=at_once)

    def _write(self, progress: SavedProgress, settings: Settings, *, best: bool, background: bool) -> Future[_Written] | None:
        """Write the state on the first rank; return None on the others."""
        first = self._engine.accelerator.is_main_process
        if not first and not self._engine.sharded:
            return None
        tensors = self._engine.saved_tensors()
        if self._engine.sharded:
            tensors = self._together(tensors)
        try:
            if not first:
                return None
            manifest, needed = manifest_of(self._engine, progress, settings), state_bytes(self._engine.model)

            def write(found: SavedState) -> _Written:
                make_room(self._state_dir, needed)
                done = write_state(self._state_dir, found, manifest, keep=settings.save_total_limit, needed=needed)
                return _Written(done, time.perf_counter(), self._keep_best() if best else None)

            if background and self._can_copy(needed):
                held = self._copy.of(tensors)
                return in_thread(lambda: write(held), "memtop-save")
            return at_once(lambda: write(as_stored(tensors)))
        finally:
            # Under ZeRO the ranks gather every tensor together: one that left early would block the
            # others forever.
            if self._engine.sharded:
                for _ in tensors:
                    pass

    def _together(self, tensors: SavedTensors) -> SavedTensors:
        """The tensors, each gathered when all ranks are ready for it.

        The ranks wait on the CPU while the first one writes a tensor. A gather on the GPU that
        waited for a slow disk would exceed NCCL's time limit.
        """
        for found in tensors:
            yield found
            self._ranks.wait()

    def _can_copy(self, needed: int) -> bool:
        if self._prepared is not None:
            self._prepared.result()
        why = self._copy.reserve(needed)
        if why is not None and not self._told_why_not_copied:
            self._told_why_not_copied = True
            warn(self._channel, f"training stops while a state is saved: {why}")
        return why is None

    def _keep_best(self) -> str | None:
        try:
            keep_best(self._state_dir)
        except NoSpaceError as error:
            return str(error)
        return None

    def _reported(self, save: _Save, write: Future[_Written]) -> tuple[bool, str]:
        """Wait for the write, report its result; return whether it succeeded, and a message."""
        try:
            written = write.result()
        except NoSpaceError as error:
            return False, self._report_no_space(error, save.update, waiting=save.waiting)
        except BaseException:
            self._save = None
            raise
        self.problem = None
        if written.best_problem is not None:
            warn(self._channel, f"the state with the lowest evaluation loss is not kept: {written.best_problem}")
        return True, self._report_saved(written, save)

    def _report_no_space(self, error: NoSpaceError, update: int, *, waiting: bool) -> str:
        self._disk_wait.failed(error)
        kept = newest_update(self._state_dir)
        kept_words = "nothing saved yet" if kept is None else f"the state of update {kept} is kept"
        self.problem = f"{error}; {kept_words}"
        if waiting:
            text = f"finished update {update}, waiting for disk space: {error}; free some space or stop the run"
        else:
            text = f"update {update} not saved: {error}; {kept_words}; free some space"
        if not waiting or self._disk_wait.is_news(text):
            self._channel.report("save_failed", update=update, message=text, waiting=waiting)
            print(f"memtop: {text}", flush=True)
        return text

    def _report_saved(self, written: _Written, save: _Save) -> str:
        manifest = written.manifest
        size = sum(file.size_bytes for file in manifest.files)
        self._channel.report(
            "checkpoint",
            path=str(self._state_dir),
            updates=manifest.updates,
            samples_seen=manifest.samples_seen,
            seconds=written.ended - save.started,
            pause_seconds=save.pause_seconds,
            size_bytes=size,
        )
        return f"checkpoint at update {manifest.updates}: {_size(size)} in {self._state_dir.name}"


def _size(size_bytes: int) -> str:
    """As the screens show it: whole KiB or MiB, or GiB with a digit."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
