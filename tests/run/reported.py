"""Reports as the supervisor decodes them, from the values that an agent would write."""

from __future__ import annotations

from typing import Any

import msgspec

from memtop.supervisor.run.progress import Progress
from memtop.supervisor.run.reports import Report, decode


def reported(values: dict[str, Any]) -> Report:
    """The report with these values; `type` is among them."""
    found = decode(msgspec.json.encode(values))
    assert found is not None
    return found


def heard(progress: Progress, values: dict[str, Any], rank: int = 0) -> Progress:
    """The progress after a rank has reported these values."""
    return progress.after(rank, reported(values))
