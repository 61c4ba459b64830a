"""The life of a run as an explicit state machine."""

from __future__ import annotations

from collections.abc import Callable

from memtop.supervisor.wire import Phase

_NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.CREATED: frozenset({Phase.STARTING, Phase.FAILED, Phase.STOPPED}),
    Phase.STARTING: frozenset({Phase.TRAINING, Phase.STOPPING, Phase.RESTARTING, Phase.FINISHED, Phase.STOPPED, Phase.FAILED}),
    Phase.TRAINING: frozenset({Phase.STOPPING, Phase.RESTARTING, Phase.FINISHED, Phase.STOPPED, Phase.FAILED}),
    # A stop may come while a restart waits for the program to end, and the other way round.
    Phase.STOPPING: frozenset({Phase.RESTARTING, Phase.FINISHED, Phase.STOPPED, Phase.FAILED}),
    # What a restart changes may turn out to be impossible when the program has stopped.
    Phase.RESTARTING: frozenset({Phase.STARTING, Phase.STOPPING, Phase.STOPPED, Phase.FAILED}),
    # Final until someone takes the run up again.
    Phase.FINISHED: frozenset({Phase.STARTING}),
    Phase.STOPPED: frozenset({Phase.STARTING}),
    Phase.FAILED: frozenset({Phase.STARTING}),
}


class Lifecycle:
    """Holds the phase; every change goes through `move`, which refuses what cannot follow.

    `monotonic` gives seconds; it is passed in so that tests own the clock.
    """

    def __init__(self, phase: Phase, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self.phase = phase
        self.reason: str | None = None
        self.since = monotonic()

    def move(self, phase: Phase, reason: str | None = None) -> None:
        assert phase in _NEXT[self.phase], f"{self.phase.value} cannot become {phase.value}"
        self.phase, self.reason, self.since = phase, reason, self._monotonic()

    def can(self, phase: Phase) -> bool:
        return phase in _NEXT[self.phase]

    def seconds_in_phase(self) -> float:
        return self._monotonic() - self.since
