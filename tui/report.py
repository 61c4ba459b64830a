"""What the screens of processes say above their keys: a word in passing, or the report of an ending, whole."""

from __future__ import annotations

from memtop.tui.line import Line, line, width_of, wrap

REPORTS = ("busy", "good", "failed")
"""What becomes of an ending: not gone with the next movement of the cursor."""
_MARKS = {"busy": ("…", "accent"), "good": ("✓", "good"), "note": ("·", "muted"), "bad": ("✗", "bad"), "failed": ("✗", "bad")}


def report_lines(text: str, kind: str, width: int) -> list[Line]:
    """The mark of its kind and the text, on as many lines as it takes."""
    mark, role = _MARKS[kind]
    head = line((f"{mark} ", role))
    wrapped = wrap(text, max(1, width - width_of(head)), "bad" if role == "bad" else "text")
    return [(*(head if number == 0 else line("  ")), *one) for number, one in enumerate(wrapped)]
