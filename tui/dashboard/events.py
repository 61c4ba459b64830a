"""The panel of the run's newest events."""

from __future__ import annotations

import time

from memtop.supervisor.diagnosis.values import in_words
from memtop.supervisor.monitor.values import Band, mark
from memtop.supervisor.wire import Event
from memtop.tui.line import MUTED, Line, line, width_of, wrap_within
from memtop.tui.store import READING, Store


def draw_events(store: Store, width: int, height: int) -> list[Line]:
    """Newest first; long messages are wrapped, and the last one ends with an ellipsis if it has no
    room.

    Of several routine events in a row only the newest is shown.
    """
    if not store.events:
        return [line((READING if store.is_being_read else "nothing yet", MUTED))]
    lines: list[Line] = []
    above: str | None = None
    for event in reversed(store.events):
        if len(lines) >= height:
            break
        if event.kind in _ROUTINE and event.kind == above:
            continue
        above = event.kind
        lines += _event(event, width, height - len(lines))
    return lines


# Frequent saves would push all other events off the screen; the ledger has them all.
_ROUTINE = ("checkpoint", "memory")


def _event(event: Event, width: int, most: int) -> list[Line]:
    clock = time.strftime("%H:%M:%S", time.localtime(event.time))
    sign, role = event_look(event)
    head = line((f"{clock} ", MUTED), (f"{sign:<2} ", role))
    indent = line(" " * width_of(head))
    parts = wrap_within(in_words(event.message), max(1, width - width_of(head)), most, role)
    return [(*(indent if number else head), *part) for number, part in enumerate(parts)]


_EVENT_LOOKS = {
    "oom": ("✗", "bad"),
    "spike": ("✗", "bad"),
    "failed": ("✗", "bad"),
    "error": ("✗", "bad"),
    "survived": ("✓", "good"),
    "remedy": ("↻", "accent"),
    "workers": ("↻", "edge"),
    "settings": ("▸", "accent"),
    "batch_search": ("▸", "accent"),
    "trial": ("◌", "accent"),
    "trend": ("^", "edge"),
    "pressure": ("^", "edge"),
    "warning": ("!", "edge"),
}


def event_look(event: Event) -> tuple[str, str]:
    """The sign of an event, and the role of its words."""
    if event.kind == "band":
        # The message names the new band: "GPU 1: safe -> edge, 86.2 %".
        for band, role in ((Band.DANGER, "bad"), (Band.EDGE, "edge"), (Band.SAFE, "safe")):
            if f"-> {band.value}" in event.message:
                return (mark(band), role)
    return _EVENT_LOOKS.get(event.kind, ("", "text"))
