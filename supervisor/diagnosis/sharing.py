"""Who holds what of a card: the run's other ranks on it are no strangers, although a message counts them as such."""

from __future__ import annotations

from dataclasses import replace

from memtop.supervisor.diagnosis.allocator import kind_of
from memtop.supervisor.diagnosis.finding import Figures
from memtop.supervisor.diagnosis.values import Evidence, Kind


def without_the_run(kind: Kind, figures: Figures, uuid: str | None, evidence: Evidence) -> tuple[Kind, Figures]:
    """The same, with what our samples saw the run's own processes hold taken out of what others hold."""
    figures = replace(figures, other_pids=tuple(pid for pid in figures.other_pids if pid not in evidence.member_pids))
    own, held = _own(figures), _held(uuid, evidence)
    if figures.other is None or own is None or held is None or held <= own:
        return kind, figures
    other = max(0, figures.other - (held - own))
    if kind is Kind.GPU_OOM_OTHER_PROCESS:
        kind = kind_of(figures.requested, figures.total, figures.reserved_unallocated, other)
    return kind, replace(figures, other=other)


def _own(figures: Figures) -> int | None:
    """What the message or the record says of the one process that failed."""
    if figures.process is not None or figures.allocated is None:
        return figures.process
    return figures.allocated + (figures.reserved_unallocated or 0)


def _held(uuid: str | None, evidence: Evidence) -> int | None:
    """By all processes of the run on the card; a message names its card only by an index of its own."""
    known = evidence.gpu_run_bytes
    if uuid is not None:
        return known.get(uuid)
    return next(iter(known.values())) if len(known) == 1 else None
