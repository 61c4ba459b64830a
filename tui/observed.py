"""What the dashboard shows of training programs that memtop did not start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memtop.supervisor import wire
from memtop.supervisor.monitor.values import MachineSnapshot
from memtop.supervisor.observed.shown import line_of, state_of
from memtop.tui.feed import FeedMessage, Others

if TYPE_CHECKING:
    from memtop.supervisor.observed.observer import Observer, Observers

_LOOK_SECONDS = 5.0


class OneProgram:
    """The program that `--pid` names: its Training panel and its loss curve."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def __call__(self, machine: MachineSnapshot) -> Sequence[FeedMessage]:
        seen = self._observer.look(machine.time, machine)
        rows = tuple(
            wire.Metric(
                update=row.step,
                attempt=1,
                loss=row.loss,
                learning_rate=row.learning_rate,
                step_seconds=row.step_seconds,
            )
            for row in self._observer.take_rows()
            if row.loss is not None
        )
        state = wire.StateUpdate(run=state_of(seen, machine.time))
        return (state, wire.MetricRows(rows=rows)) if rows else (state,)


class AllPrograms:
    """While the machine is shown: which training programs are on it."""

    def __init__(self) -> None:
        self._due = float("-inf")
        self._observers: Observers | None = None
        """None before the first look, which comes after the first frame."""

    def __call__(self, machine: MachineSnapshot) -> Sequence[FeedMessage]:
        if machine.time < self._due:
            return ()
        self._due = machine.time + _LOOK_SECONDS
        if self._observers is None:
            from memtop.supervisor.observed.observer import Observers

            self._observers = Observers()
        lines = (f"memtop watch --pid {seen.pid}: {line_of(seen)}" for seen in self._observers.look(machine.time, machine))
        return (Others(tuple(lines)),)
