"""Takes in what the output of an attempt says about the training.

What was learned, and how far the output was read, is in `attempts/NNNN/output.json`: the next
supervisor goes on from there. Without that file it reads the output again.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from memtop.supervisor.errors import RunFolderError
from memtop.supervisor.run.output.learning import Learner, Row
from memtop.supervisor.run.output.own_log import OwnLog, OwnLogPosition
from memtop.supervisor.run.output.relation import Relation
from memtop.supervisor.run.output.tail import Tail
from memtop.supervisor.run.output.values import Seen
from memtop.supervisor.run.record.folder import open_to_read, read_derived, write_json
from memtop.supervisor.run.record.outbox import Outbox
from memtop.supervisor.run.reports import Step

_WAITING = 5_000
"""Rows that wait for the ledger, or until their update is known."""
_SAVE_SECONDS = 2.0
_HEAD_BYTES = 1 << 20
"""Of the output, in which the program may name its settings."""
_LAG_SECONDS = 1.0
"""How long after its update a line, or the agent's report, may be read."""


class OutputFile(msgspec.Struct, kw_only=True):
    """`output.json`."""

    offset: int = 0
    learner: Learner = msgspec.field(default_factory=Learner)
    relation: Relation = Relation()
    best_loss: float | None = None
    first: int | None = None
    """The first step of the attempt."""
    own_log: OwnLogPosition | None = None
    is_printed: bool | None = None
    """Whether the numbers are in the output; False if they are in the program's own log. None while
    neither has any."""
    by_workers: bool = False
    """The program's workers have begun again. The output knows where they go on; their agents,
    which count from their start, do not."""
    goes_back: bool = False
    """Their first step has not been read yet."""


class OutputIntake:
    """The output of one attempt of a user's program."""

    def __init__(
        self,
        folder: Path,
        number: int,
        outbox: Outbox,
        *,
        pattern: str | None = None,
        settings: Mapping[str, str] | None = None,
        command: Sequence[str] = (),
        on_steps: Callable[[int, list[Step]], None],
        on_own_counter: Callable[[bool], None],
        on_back: Callable[[int], None],
    ) -> None:
        """`settings`: regular expressions of lines that name what the program uses. `on_steps`
        receives new rows, for the viewers; `on_own_counter` is called if the agent's updates do not
        count, with whether that is new; `on_back` with the update from which the rows do not count
        any more.
        """
        self.number = number
        self.problem: str | None = None
        """Why the output could not be read the last time."""
        self._path = folder / "output.json"
        self._outbox = outbox
        self._pattern = re.compile(pattern) if pattern else None
        self._on_steps, self._on_own_counter, self._on_back = on_steps, on_own_counter, on_back
        self._state = read_derived(self._path, OutputFile) or _begun(folder, number, command)
        self._tail = Tail(folder / "output.log", self._state.offset)
        self._own_log: OwnLog | None = None
        self._stored = (self._state.offset, 0)
        self._waiting: list[Row] = []
        self._saved = 0.0
        self._settings = {name: re.compile(text.encode(), re.MULTILINE) for name, text in (settings or {}).items()}
        self._printed: dict[str, int] | None = None
        self._per_update = 1
        self._updates: int | None = None
        self._again = self._state.learner.newest is not None
        if self._state.relation.agrees is False or self._state.by_workers:
            on_own_counter(False)

    def begin_again(self) -> None:
        """The program's workers have begun again. What was learned of their lines stays."""
        state = self._state
        self._relate(self._updates, 0.0, last=True)
        self._store(self._updates)
        state.by_workers = state.goes_back = state.learner.newest is not None or state.by_workers
        if state.by_workers:
            self._on_own_counter(False)
        else:
            state.relation = Relation()
        state.learner.begin_again()
        self._waiting = []
        self._save()

    def read(
        self,
        now: float,
        *,
        updates: int | None,
        step_seconds: float | None,
        has_loss: bool,
        own_log: str | None = None,
        steps_per_update: int = 1,
        to_the_end: bool = False,
    ) -> Seen | None:
        """What the output says now; None if it says nothing new.

        `updates`: how many updates the agent has counted, `step_seconds` each, with their loss or
        without. `own_log`: where the program writes a log of its own. `steps_per_update`: by its
        profile; it counts if the agent's updates do not.
        """
        self._per_update, self._updates = max(1, steps_per_update), updates
        if own_log is not None and self._own_log is None:
            self._own_log = OwnLog(own_log, self._state.own_log)
            self._stored = self._offsets
            self._state.own_log = self._own_log.position
        before = self._offsets
        rows = self._rows(now, updates, to_the_end)
        while to_the_end and self._offsets != before:
            before = self._offsets
            rows += self._rows(now, updates, to_the_end)
        state, again, self._again = self._state, self._again, False
        lag = _LAG_SECONDS / step_seconds if step_seconds else 0.0
        for row in rows:
            if row.loss is not None:
                state.best_loss = min(row.loss, row.loss if state.best_loss is None else state.best_loss)
            if state.first is None:
                state.first = row.step
        is_decided = self._relate(updates, lag, last=to_the_end)
        if rows and state.goes_back:
            self._go_back(self._step(rows[0], updates).update)
            state.best_loss = min((row.loss for row in rows if row.loss is not None), default=None)
            is_decided = True
        if not has_loss:
            self._waiting = [*self._waiting, *(row for row in rows if row.loss is not None)][-_WAITING:]
        self._store(updates)
        # A decision is stored at once: the next supervisor must not remove rows again.
        is_due = to_the_end or is_decided or abs(now - self._saved) >= _SAVE_SECONDS
        if self._offsets != self._stored and not self._waiting and is_due:
            state.offset, self._stored, self._saved = self._tail.offset, self._offsets, now
            self._save()
        return self._seen(updates, again=again) if rows or again or is_decided else None

    def _go_back(self, update: int) -> None:
        """What the workers before had done after this update does not count any more."""
        if self._outbox.write(lambda: self._outbox.ledger.take_back(self.number, update)):
            self._state.goes_back = False
            self._on_back(update)

    @property
    def _offsets(self) -> tuple[int, int]:
        return self._tail.offset, 0 if self._own_log is None else self._own_log.position.offset

    def _relate(self, updates: int | None, lag: float, *, last: bool) -> bool:
        """Whether it is known from now on how steps and updates relate."""
        state, newest = self._state, self._state.learner.newest
        if newest is None or state.relation.agrees is not None or state.by_workers:
            return False
        state.relation = state.relation.after(newest.step, updates, begins_at=state.first or 0, lag=lag, last=last)
        if state.relation.agrees is False:
            self._on_own_counter(True)
        return state.relation.agrees is not None

    def _rows(self, now: float, updates: int | None, to_the_end: bool) -> list[Row]:
        all_lines, own, state = self._pattern is not None, self._own_log, self._state
        rows: list[Row] = []
        try:
            if not state.is_printed and own is not None:
                lines = own.read(now, all_lines=all_lines, to_the_end=to_the_end)
                rows += state.learner.take(lines, now, updates=updates, pattern=self._pattern)
                state.is_printed = False if rows else state.is_printed
            lines = self._tail.read(all_lines=all_lines, to_the_end=to_the_end)
        except OSError as error:
            self.problem = f"{error.filename or self._tail.path}: cannot be read: {error.strerror}; what is in it is not seen"
            return rows
        self.problem = None
        if state.is_printed is not False:
            rows += state.learner.take(lines, now, updates=updates, pattern=self._pattern)
            state.is_printed = True if rows else state.is_printed
        return rows

    def _store(self, updates: int | None) -> None:
        """Give the ledger the rows whose update is known."""
        known = updates is None or self._state.relation.agrees is not None or self._state.by_workers
        if not self._waiting or not self._outbox.due or not known or self._state.goes_back:
            return
        steps = [self._step(row, updates) for row in self._waiting]
        if self._outbox.write(lambda: self._outbox.ledger.add_from_output(self.number, steps)):
            self._on_steps(self.number, steps)
            self._waiting = []

    def _step(self, row: Row, updates: int | None) -> Step:
        relation = self._state.relation
        related = (updates is not None or self._state.by_workers) and relation.agrees
        return Step(
            time=row.time,
            update=relation.update(row.step) if related else row.step // self._per_update,
            loss=row.loss,
            learning_rate=row.learning_rate,
            epoch=row.epoch,
            step_seconds=None if related or row.step_seconds is None else row.step_seconds * self._per_update,
        )

    def _named_settings(self) -> dict[str, int]:
        """What the program has printed of its settings, before its first step."""
        if self._printed is None:
            self._printed = {}
            with contextlib.suppress(OSError), open_to_read(self._tail.path) as file:
                head = file.read(_HEAD_BYTES)
                for name, pattern in self._settings.items():
                    found = [match["value"].decode(errors="replace") for match in pattern.finditer(head)]
                    number = found[-1].replace(",", "").replace("_", "") if found else ""
                    if number.isdecimal():
                        self._printed[name] = int(number)
        return self._printed

    def _save(self) -> None:
        try:
            write_json(self._path, self._state, sync=False)
        except RunFolderError as error:
            self.problem = str(error)

    def _seen(self, updates: int | None, *, again: bool) -> Seen | None:
        learner, relation = self._state.learner, self._state.relation
        row = learner.newest
        if row is None:
            return None
        by_workers = self._state.by_workers
        related = (updates is not None or by_workers) and relation.agrees is True
        seconds, steps, updates_of_step = learner.step_seconds, self._per_update, 1
        if related:
            steps, updates_of_step = relation.steps_per_update, relation.updates_per_step
        total = row.total
        if total is not None:
            total = relation.total(total) if related else total // steps
        shape = learner.shapes.get(learner.counts or "")
        return Seen(
            attempt=self.number,
            first=self._state.first or 0,
            steps_of_epoch=shape.total if shape is not None and shape.per_epoch else None,
            step=row.step,
            update=relation.update(row.step) if related else row.step // steps,
            total_updates=total,
            agrees=False if by_workers else relation.agrees,
            steps_per_update=steps,
            loss=row.loss,
            best_loss=self._state.best_loss,
            not_finite=row.not_finite,
            learning_rate=row.learning_rate,
            epoch=row.epoch,
            step_seconds=None if seconds is None else seconds * steps / updates_of_step,
            tokens_per_second=row.tokens_per_second,
            time=row.time,
            example=learner.example or "",
            printed=self._named_settings(),
            again=again,
            log=self._own_log.path if self._own_log is not None and self._state.is_printed is False else None,
        )


def _begun(folder: Path, number: int, command: Sequence[str]) -> OutputFile:
    """Before the first line of an attempt: what the earlier ones have shown of the program."""
    # An attempt that ended before it printed a number has no such file.
    earlier = (read_derived(folder.with_name(f"{n:04d}") / "output.json", OutputFile) for n in range(number - 1, 0, -1))
    before = next((found for found in earlier if found is not None), None)
    return OutputFile(learner=Learner.of(command, None if before is None else before.learner))
