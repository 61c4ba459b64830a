"""The loss has jumped and stayed high: go back to the state before it, or say how to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memtop.supervisor.run.model import Model, warn
from memtop.supervisor.run.reports import Spiked, values
from memtop.supervisor.run.rules import configurations
from memtop.supervisor.wire import Change


def reported(model: Model, spike: Spiked) -> Model:
    """Note the spike with the samples of its updates, and say what can be done."""
    text = _words(spike, model.run.name)
    return warn(configurations.announce(model, "spike", text, spike), "spike", text)


def _words(spike: Spiked, run: str) -> str:
    """One line: what happened, and what to do."""
    what = f"update {spike.update}: {spike.message or 'the loss jumped'} and stayed high"
    if spike.state_update is None:
        return f"{what}; memtop cannot go back: {spike.problem}"
    where = f"the state of update {spike.state_update}"
    left_out = f"{spike.samples} samples of the updates {spike.first_update} to {spike.update}"
    if spike.action == "back" and spike.problem is None:
        return f"{what}; the run goes back to {where} and leaves out the {left_out}"
    note_ = f" ({spike.problem})" if spike.problem else ""
    return f"{what}; `memtop rollback {run} --before-spike` goes back to {where} and leaves out the {left_out}{note_}"


def going_back(model: Model) -> Change | None:
    """The change with which a run that a spike has ended goes on; None if it does not by itself."""
    spike = model.progress.spike
    if spike is None or model.settings is None or spike.action != "back" or spike.problem is not None:
        return None
    return change_for(values(spike), model.settings.leave_out, reason=f"spike of the loss at update {spike.update}")


def change_for(spike: Mapping[str, Any], left_out: Sequence[tuple[int, int]], *, reason: str = "") -> Change | None:
    """The change that returns to the state before a spike without its samples; `spike` has the
    values of its report. None without such a state."""
    if spike["state_update"] is None:
        return None
    ranges = _joined([*left_out, (spike["begin"], spike["end"])])
    text = ",".join(f"{first}-{end}" for first, end in ranges)
    return Change(assignments={"leave_out": text}, state_before=spike["state_update"], reason=reason)


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same positions in order, without overlap."""
    found: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((first, end))
    return found
