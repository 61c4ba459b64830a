"""The loss has jumped and stayed high: go back to the state before it, or ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from memtop.supervisor.errors import MemtopError
from memtop.supervisor.run import explain
from memtop.supervisor.run.effects import DiscardBeforeSpike
from memtop.supervisor.run.model import Model, emit, note, warn
from memtop.supervisor.run.reports import Spiked, values
from memtop.supervisor.run.rules import configurations
from memtop.supervisor.wire import AcceptSpike, Change, Spike

ACCEPTED = "spike_accepted"
"""The kind of the event: its `time` is that of the spike's report."""


def reported(model: Model, spike: Spiked) -> Model:
    """Note the spike with the samples of its updates, and say what can be done."""
    if spike.time is not None and (ACCEPTED, spike.time) in model.announced:
        return _forget(model)
    text = _words(spike, model.run.name)
    return warn(configurations.announce(model, "spike", text, spike), "spike", text)


def proposed(model: Model) -> Spike | None:
    """What a person is asked about; None if nothing is open."""
    spike = model.progress.spike
    if spike is None or model.settings is None or _goes_back(spike):
        return None
    back = change_for(values(spike), model.settings.leave_out)
    words = f"memtop cannot go back: {spike.problem}" if back is None else _where(spike)
    return Spike(update=spike.update, message=_what(spike), back=back, back_words=words)


def accept(model: Model) -> Model:
    """A person goes on from after the spike. MemtopError if there is none, or the run is over."""
    spike = model.progress.spike
    if spike is None:
        raise MemtopError(f"the loss of run {model.run.name!r} has had no spike in this attempt")
    if model.phase.final:
        ended = model.attempt.ended if model.attempt is not None else None
        raise MemtopError(explain.over(model.run.name, model.word, ended, AcceptSpike))
    text = f"the training goes on after the spike of update {spike.update}; the state before it was deleted"
    return note(emit(_forget(model), DiscardBeforeSpike()), ACCEPTED, text, {"time": spike.time})


def _forget(model: Model) -> Model:
    return warn(replace(model, progress=replace(model.progress, spike=None)), "spike", None)


def _words(spike: Spiked, run: str) -> str:
    """One line: what happened, and what to do."""
    what = _what(spike)
    if spike.state_update is None:
        return f"{what}; memtop cannot go back: {spike.problem}"
    if _goes_back(spike):
        return f"{what}; the run goes back to {_where(spike)}"
    note_ = f" ({spike.problem})" if spike.problem else ""
    return f"{what}; `memtop rollback {run} --before-spike` goes back to {_where(spike)}{note_}"


def _goes_back(spike: Spiked) -> bool:
    return spike.action == "back" and spike.problem is None


def _what(spike: Spiked) -> str:
    return f"update {spike.update}: {spike.message or 'the loss jumped'} and stayed high"


def _where(spike: Spiked) -> str:
    left_out = f"{spike.samples} samples of the updates {spike.first_update} to {spike.update}"
    return f"the state of update {spike.state_update}, without the {left_out}"


def going_back(model: Model) -> Change | None:
    """The change with which a run that a spike has ended goes on; None if it does not by itself."""
    spike = model.progress.spike
    if spike is None or model.settings is None or not _goes_back(spike):
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
