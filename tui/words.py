"""Words, ages and messages that several panels share."""

from __future__ import annotations

from collections.abc import Sequence

from memtop.supervisor import units
from memtop.supervisor.diagnosis.values import KINDS, SAID, Kind
from memtop.supervisor.wire import Configuration
from memtop.tui.line import Line, line, width_of, wrap

BOTTLENECKS = {"data": "data-bound", "compute": "compute-bound", "launch": "launch-bound", "swap": "swapping"}
"""The bottleneck of a run in one word; no entry if it is not known."""

OUTCOMES = {
    Kind.GPU_OOM: "out of VRAM",
    Kind.GPU_OOM_FRAGMENTED: "fragmented",
    Kind.GPU_OOM_OTHER_PROCESS: "VRAM, others",
    Kind.HOST_OOM_ALLOC: "out of RAM",
    Kind.HOST_OOM_KILLED: "RAM, killed",
    Kind.PINNED_HOST_OOM: "pinned RAM",
    Kind.SHM_EXHAUSTED: "shm full",
    Kind.DISK_FULL: "disk full",
    Kind.NOT_MEMORY: "failed",
}
"""How a configuration of a run failed, for a table column."""

_LACKS = {kind.value: words for kind, words in KINDS.items() if kind is not Kind.NOT_MEMORY}


def lack_of_memory(rows: Sequence[Configuration], *, starting: bool = False) -> tuple[str, Configuration | None] | None:
    """The newest lack of memory among a run's configurations in words, and the configuration with
    which the run went on (None: it has not). None if memory has not run out.

    `starting`: the newest attempt has done no update yet, so it only tries to go on.
    """
    at = next((at for at in range(len(rows) - 1, -1, -1) if rows[at].outcome in _LACKS), None)
    if at is None:
        return None
    failed, after = rows[at], rows[at + 1] if rows[at + 1 :] else None
    what = _LACKS[failed.outcome or ""] + (SAID if failed.by_words else "")
    if failed.until_update is not None:
        what = f"{what} at update {units.count(failed.until_update + 1)}"
    if after is None:
        return f"{what}, no remedy is known here", None
    tries = starting and after is rows[-1]
    if failed.settings is None or after.settings is None or failed.settings.split_text == after.settings.split_text:
        return f"{what}, {f'attempt {after.attempt} tries to go on' if tries else 'the run went on'}", after
    if tries:
        return f"{what}, attempt {after.attempt} tries {after.settings.split_text}", after
    return f"{what}, the run went on with {after.settings.split_text}", after


def age(seconds: float) -> str:
    """`12 s`, `4 min`, `3 h` or `2 days`."""
    for limit, divisor, unit in ((90, 1, "s"), (5400, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{max(0.0, seconds) / divisor:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"


REPORTS = ("busy", "good", "failed")
"""Kinds of messages about an ending: they stay when the cursor moves."""
LASTING = ("busy", "failed")
"""Kinds of messages that stay until another one comes; others are gone after a while, because they
need not be true any more."""
MESSAGE_SECONDS, BRIEF_SECONDS = 60.0, 10.0
_MARKS = {"busy": ("…", "accent"), "good": ("✓", "good"), "note": ("·", "muted"), "bad": ("✗", "bad"), "failed": ("✗", "bad")}


def message_seconds(kind: str) -> float:
    """How long a message stays: a note on why a key did nothing and a success briefly, what went
    wrong longer."""
    return BRIEF_SECONDS if kind in ("note", "good") else MESSAGE_SECONDS


def report_lines(text: str, kind: str, width: int) -> list[Line]:
    """The mark of the kind and the text, on as many lines as needed."""
    mark, role = _MARKS[kind]
    head = line((f"{mark} ", role))
    wrapped = wrap(text, max(1, width - width_of(head)), "bad" if role == "bad" else "text")
    return [(*(head if number == 0 else line("  ")), *one) for number, one in enumerate(wrapped)]
