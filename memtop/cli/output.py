"""What several commands print: JSON documents, one line per run, and what can be done after a
failure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from memtop.cli.lookup import Unreadable
from memtop.supervisor import units
from memtop.supervisor.recovery.values import Remedy
from memtop.supervisor.run import view
from memtop.supervisor.wire import Proposal, RunState

_EVIDENCE_LINES = 3


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=2, allow_nan=False))


def summary(state: RunState | Unreadable) -> dict[str, Any]:
    """One run as it appears in JSON lists, or why it cannot be read."""
    return msgspec.structs.asdict(state) if isinstance(state, Unreadable) else view.summary(state)


def run_line(state: RunState | Unreadable) -> str:
    """One run in one line."""
    if isinstance(state, Unreadable):
        return f"{state.name:<20} unreadable: {state.error}"
    total = "" if state.total_updates is None else f"/{state.total_updates}"
    loss = "" if state.loss is None else f"  loss {state.loss:.4f}"
    where = "no updates yet" if state.updates is None else f"update {state.updates}{total}{loss}"
    adopted = "  (adopted)" if state.adopted else ""
    return f"{state.name:<20} {state.state.value:<10} attempt {state.attempt}  {where}{adopted}"


def proposal_lines(proposal: Proposal) -> Iterator[str]:
    """Why a run ran out of memory, what memtop does about it, and what else can be done."""
    diagnosis = proposal.diagnosis
    yield f"{diagnosis.kind.value}: {diagnosis.summary}"
    for line in diagnosis.evidence[:_EVIDENCE_LINES]:
        yield f"  evidence: {line.strip()}"
    yield from proposal.causes
    if proposal.waiting:
        yield f"memtop does nothing yet: {proposal.waiting}"
    elif proposal.begins is not None:
        yield "memtop applies the first of these"
    for number, remedy in enumerate(proposal.remedies, start=1):
        yield f"  {number}. {remedy.title} [{', '.join(_price(remedy))}]"
        yield f"     {_peak(remedy)}"
        for line in (remedy.command or "").splitlines():
            yield f"     {line}"
    for advice in proposal.last_advice:
        yield f"  - {advice}"


def _price(remedy: Remedy) -> Iterator[str]:
    yield "training unchanged" if remedy.keeps_math else "changes training"
    yield "for you to do" if remedy.resumable == "none" else remedy.resumable
    if remedy.needs_consent and remedy.resumable != "none":
        yield "needs your consent"


def _peak(remedy: Remedy) -> str:
    forecast = remedy.forecast
    if forecast is None:
        return f"peak not known: {remedy.forecast_unknown or 'there are no measurements for a forecast'}"
    share = "" if forecast.fraction is None else f" of {units.size(forecast.total_bytes)} ({units.percent(forecast.fraction)})"
    return f"predicted peak {units.size(forecast.peak_bytes)}{share}: {forecast.basis}"
