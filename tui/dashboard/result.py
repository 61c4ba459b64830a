"""How the dashboard was left, and what is printed then. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from memtop.supervisor.wire import Phase
from memtop.tui.store import Store


@dataclass(frozen=True)
class DashboardResult:
    """How the dashboard was left."""

    action: str
    """"detach": the run, if any, goes on; "ended": the run was over."""
    message: str = ""
    """What to print after the dashboard has closed."""
    exit_status: int = 0
    opens: Path | None = None
    """The folder of the run to show next."""


def result_of(store: Store) -> DashboardResult:
    """The result of leaving the dashboard in this state."""
    run = store.run
    if run is None:
        return DashboardResult("detach")
    if run.observed:
        again = "it has ended" if run.state.final else f"memtop watch --pid {run.trainer_pid} shows it again"
        return DashboardResult("detach", f"{run.name}: {again}")
    if run.state.final:
        message = f"{run.name}: {run.word}. More: memtop show {run.name}"
        if run.reason:
            message = f"{run.name}: {run.word} ({run.reason}). More: memtop show {run.name}"
        return DashboardResult("ended", message, exit_status=1 if run.state is Phase.FAILED else 0)
    return DashboardResult("detach", f"{run.name} continues; memtop watch {run.name} shows it again")
