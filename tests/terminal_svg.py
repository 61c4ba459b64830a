"""A terminal's screen as a small SVG: the same bytes on any machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from rich.cells import cell_len

WIDTH, HEIGHT = 8.4, 18.0
"""Of a cell, in the SVG's units."""
_BASELINE = 14.0


class Piece(NamedTuple):
    """Text of one style, side by side in a row."""

    text: str
    colour: str
    """As `#rrggbb`."""
    background: str
    bold: bool = False
    italic: bool = False


Screen = Sequence[Sequence[Piece]]
"""Rows from the top."""


def document(body: str, columns: int, rows: int, background: str, style: str = "") -> str:
    """An SVG of this many cells."""
    width, height = _number(columns * WIDTH), _number(rows * HEIGHT)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" xml:space="preserve"'
    fonts = "font-family=\"'DejaVu Sans Mono','Menlo','Consolas',monospace\" font-size=\"14\""
    # Browsers no longer follow xml:space, and other programs know nothing else.
    styles = f"<style>text{{white-space:pre}}{style}</style>"
    return f'{head} {fonts}>\n{styles}\n<rect width="100%" height="100%" fill="{background}"/>\n{body}</svg>\n'


def drawn(screen: Screen, background: str) -> str:
    """The elements of a screen."""
    return "".join(f"{element}\n" for y, pieces in enumerate(screen) for element in row(pieces, y, background))


def row(pieces: Sequence[Piece], y: int, background: str) -> Iterable[str]:
    """The elements of one row."""
    at, texts = 0, []
    for piece in _merged(pieces):
        cells = cell_len(piece.text)
        x, width = _number(at * WIDTH), _number(cells * WIDTH)
        at += cells
        if piece.background != background:
            place = f'x="{x}" y="{_number(y * HEIGHT)}" width="{width}" height="{_number(HEIGHT)}"'
            yield f'<rect {place} fill="{piece.background}"/>'
        if piece.text.strip():
            more = ' font-weight="bold"' * piece.bold + ' font-style="italic"' * piece.italic
            place = f'x="{x}" y="{_number(y * HEIGHT + _BASELINE)}" textLength="{width}"'
            texts.append(f'<text {place} fill="{piece.colour}"{more}>{escape(piece.text, quote=False)}</text>')
    yield from texts


def _merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbours of one style as one piece; the colour of blanks does not matter."""
    found: list[Piece] = []
    for piece in pieces:
        before = found[-1] if found else None
        if before is not None and (
            piece[1:] == before[1:] or (not piece.text.strip() and piece.background == before.background)
        ):
            found[-1] = before._replace(text=before.text + piece.text)
        elif piece.text:
            found.append(piece)
    return found


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
