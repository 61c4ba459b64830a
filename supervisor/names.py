"""Names of runs, users and programs in a line with too little room."""

from __future__ import annotations

from rich.cells import cell_len


def shortened(text: str, width: int) -> str:
    """The text in at most `width` cells: its middle is replaced by an ellipsis."""
    if cell_len(text) <= width:
        return text
    start, end = "", ""
    while text and cell_len(start) + cell_len(end) + 1 <= width:
        kept = (start, end)
        if len(start) <= len(end):
            start, text = start + text[0], text[1:]
        else:
            end, text = text[-1] + end, text[:-1]
    return f"{kept[0]}…{kept[1]}" if width > 0 else ""
