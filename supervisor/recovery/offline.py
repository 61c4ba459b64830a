"""What can be done, for `memtop diagnose LOG` without a run: general, but with the log's own numbers."""

from __future__ import annotations

from memtop.supervisor.diagnosis.values import Diagnosis
from memtop.supervisor.recovery.own_program import remedies_for_program
from memtop.supervisor.recovery.values import Remedy


def remedies_for(diagnosis: Diagnosis) -> tuple[Remedy, ...]:
    """Ranked by what they cost; () where it was not memory. None of them can be carried out by memtop: there is no run."""
    return remedies_for_program(diagnosis)
