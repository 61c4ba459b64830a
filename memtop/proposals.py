"""What a run died of and what can be done about it, in text."""

from __future__ import annotations

from collections.abc import Iterator

from memtop.supervisor import units
from memtop.supervisor.recovery.values import Remedy
from memtop.supervisor.wire import Proposal

_EVIDENCE_LINES = 3


def proposal_lines(proposal: Proposal) -> Iterator[str]:
    """Why a run died of memory, what is done about it, and what can be done: for a person without a dashboard."""
    diagnosis = proposal.diagnosis
    yield f"{diagnosis.kind.value}: {diagnosis.summary}"
    for line in diagnosis.evidence[:_EVIDENCE_LINES]:
        yield f"  evidence: {line.strip()}"
    yield from proposal.causes
    if proposal.waiting:
        yield f"nothing is done by itself: {proposal.waiting}"
    elif proposal.begins is not None:
        yield "the first of these is applied by itself"
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
        return f"peak not known: {remedy.forecast_unknown or 'nothing that was measured allows a forecast'}"
    share = "" if forecast.fraction is None else f" of {units.size(forecast.total_bytes)} ({units.percent(forecast.fraction)})"
    return f"predicted peak {units.size(forecast.peak_bytes)}{share}: {forecast.basis}"
