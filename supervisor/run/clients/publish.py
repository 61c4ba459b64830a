"""Sends news to the subscribers: the state at least once and at most five times a second, metric
rows and events at once."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from memtop.supervisor.monitor.history import label_of
from memtop.supervisor.monitor.values import MachineSnapshot
from memtop.supervisor.run.clients.server import ControlServer, Peer
from memtop.supervisor.run.record.ledger import Ledger
from memtop.supervisor.run.reports import Step
from memtop.supervisor.wire import (
    Configuration,
    ConfigurationRows,
    Event,
    EventRows,
    HistoryRows,
    Message,
    Metric,
    MetricRows,
    RunState,
    StateUpdate,
)

_STATE_FILE_SECONDS = 1.0
_METRIC_FIELDS = tuple(name for name in Metric.__struct_fields__ if name != "attempt")


class Publisher:
    """Collects news and sends it to every subscribed peer. Each message is encoded once."""

    def __init__(
        self, ledger: Ledger, server: ControlServer, configurations: Callable[[], tuple[Configuration, ...]] = tuple
    ) -> None:
        self._ledger = ledger
        self._server = server
        self._configurations = configurations
        self._reconfigured = False
        self._dirty = True
        self._file_written = float("-inf")
        self._rows: list[Metric] = []
        self._reset_from: int | None = None
        self._events: list[Event] = []

    def changed(self) -> None:
        """The state has changed."""
        self._dirty = True

    def add_steps(self, attempt: int, steps: list[Step]) -> None:
        for step in steps:
            self._rows.append(Metric(attempt=attempt, **{name: getattr(step, name) for name in _METRIC_FIELDS}))

    def take_back_from(self, update: int) -> None:
        """A restart resumed before this update: later rows do not count any more."""
        self._rows = [row for row in self._rows if row.update < update]
        self._reset_from = update if self._reset_from is None else min(update, self._reset_from)

    def add_event(self, event: Event) -> None:
        self._events.append(event)

    def configurations_changed(self) -> None:
        """A configuration has begun or ended."""
        self._reconfigured = True

    def greet(self, peer: Peer, history: int, state: RunState, machine: MachineSnapshot | None) -> None:
        """Start a subscription: send the state, the newest metric rows and events, and the
        machine's last hour.

        With `history` 0 neither metric rows nor the last hour are sent.
        """
        self._flush_rows()
        peer.send(StateUpdate(run=state, machine=machine))
        peer.send(MetricRows(rows=tuple(self._ledger.metrics(history)), reset_from=0))
        peer.send(EventRows(rows=tuple(self._ledger.events())))
        peer.send(ConfigurationRows(rows=self._configurations()))
        if history:
            for key, index, times, columns in self._ledger.recorder.history.dump():
                peer.send(HistoryRows(key=key, gpu_index=index, label=label_of(index), times=times, columns=columns))
        peer.subscribed = True

    def tick(self, state: Callable[[], RunState], machine: MachineSnapshot | None) -> None:
        if not any(peer.subscribed for peer in self._server.peers):
            self._rows.clear()
            self._events.clear()
            self._reset_from = None
            self._reconfigured = False
            return
        self._flush_rows()
        if self._dirty:
            self._dirty = False
            self._send(StateUpdate(run=state(), machine=machine))

    def state_file_due(self) -> bool:
        """Whether state.json is old.

        Urgent changes are written at once, see `Supervisor.save_state`.
        """
        return time.monotonic() - self._file_written >= _STATE_FILE_SECONDS

    def state_file_written(self) -> None:
        self._file_written = time.monotonic()

    def _flush_rows(self) -> None:
        if self._rows or self._reset_from is not None:
            self._send(MetricRows(rows=tuple(self._rows), reset_from=self._reset_from))
            self._rows, self._reset_from = [], None
        if self._events:
            self._send(EventRows(rows=tuple(self._events)))
            self._events = []
        if self._reconfigured:
            self._reconfigured = False
            self._send(ConfigurationRows(rows=self._configurations()))

    def _send(self, message: Message) -> None:
        line = msgspec.json.encode(message) + b"\n"
        for peer in self._server.peers:
            if peer.subscribed:
                peer.send_encoded(line)
