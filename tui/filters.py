"""What every line passes before it is drawn: control characters are removed, and in ASCII mode the
glyphs of bars, borders, charts and marks are replaced."""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Mapping

from rich.cells import cell_len
from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

from memtop.supervisor.clean import clean

VARIABLE = "MEMTOP_ASCII"

_GLYPHS = {
    "█": "#", "▓": "=", "▒": "%", "░": ":", "┆": "|", "┊": "!", "━": "=", "╸": "-", "╍": "-", "┄": ".",
    "╭": "+", "╮": "+", "╰": "+", "╯": "+", "─": "-", "│": "|", "┤": "+", "├": "+", "┌": "+", "┐": "+", "└": "+", "┘": "+",
    "▸": ">", "±": "~", "≥": ">", "▾": "v", "▴": "^", "▼": "v", "▲": "^", "←": "<", "→": ">", "↑": "^", "↓": "v", "↻": "@",
    "○": "o", "◌": "o", "●": "*", "◆": "*", "◐": "*", "■": "#", "✓": "+", "✗": "X", "·": ".", "…": "~", "–": "-", "°": " ",
    "▁": "_", "▂": "_", "▃": "_", "▄": "-", "▅": "-", "▆": "#", "▇": "#", "▔": "-", "▎": "|", "▊": "#", "▌": "|", "▐": "|",
}  # fmt: skip
# Signs that one ASCII character would turn into another statement take the blanks beside them.
_SIGNS = {"≥ ": ">=", " ± ": "+/-"}
# For a braille cell: by the number of its set dots.
_DENSITY = " ..::||##"
_BRAILLE = {0x2800 + bits: _DENSITY[bits.bit_count()] for bits in range(256)}
_TABLE = {ord(glyph): plain for glyph, plain in _GLYPHS.items()} | _BRAILLE


def wanted(environment: Mapping[str, str] = os.environ, encoding: str | None = None) -> bool:
    """Whether to draw only ASCII: MEMTOP_ASCII is set, or the terminal's encoding is not UTF-8."""
    value = environment.get(VARIABLE, "")
    if value:
        return value not in ("0", "no", "false")
    return not _is_utf8(encoding or getattr(sys.__stdout__, "encoding", None) or "utf-8")


def _is_utf8(encoding: str) -> bool:
    try:
        return codecs.lookup(encoding).name == "utf-8"
    except LookupError:
        # Python does not know the encoding, so memtop cannot write it.
        return False


class CleanFilter(LineFilter):
    """Removes what could control the terminal; every line keeps its width.

    Those characters have no width. `line` and `wrap` also remove whole escape sequences.
    """

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [s if s.text.isprintable() else Segment(_visible(s.text), s.style, s.control) for s in segments]


def _visible(text: str) -> str:
    return "".join(c if clean(c) == c else clean(c)[: cell_len(c)] for c in text)


class AsciiFilter(LineFilter):
    """Replaces each glyph with an ASCII character; every line keeps its width."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [s if s.text.isascii() else Segment(to_ascii(s.text), s.style, s.control) for s in segments]


def to_ascii(text: str) -> str:
    """The text in ASCII with the same width.

    Characters without a replacement become one question mark per cell.
    """
    for sign, plain in _SIGNS.items():
        text = text.replace(sign, plain)
    known = text.translate(_TABLE)
    return known if known.isascii() else "".join(c if c.isascii() else "?" * cell_len(c) for c in known)
