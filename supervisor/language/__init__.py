"""The texts of screen and command line in the reader's language.

memtop writes every text in English where it arises, also into records and answers. `tr` translates
it where it is shown. So a run that was recorded under one language is read under another, and JSON
is the same in all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size

if TYPE_CHECKING:
    from memtop.supervisor.language.catalogue import Catalogue

LANGUAGES = ("en", "zh")
_WIDE = r"[\u2e80-\uffef]"
_UNBROKEN = r"\s+|（?(?:[^\s\u2e80-\uffef]+|[\u2e80-\uffef])[，。；：、）？]*"
"""What stays on one line: a word, or a Chinese character; punctuation never begins a line, and a
bracket never ends one."""


class Verbatim(str):
    """A text that is not memtop's, such as the name of a run: `tr` leaves it as it is."""

    __slots__ = ()


def verbatim(text: str | None) -> Verbatim | None:
    """The same as a text that is not memtop's; None if it is not known."""
    return None if text is None else Verbatim(text)


def language_of(environment: Mapping[str, str]) -> str:
    """The language of MEMTOP_LANG or else of the locale; English if it has no catalogue."""
    names = ("MEMTOP_LANG", "LC_ALL", "LC_MESSAGES", "LANG")
    wanted = next((environment[name] for name in names if environment.get(name)), "en")
    language = re.split(r"[_.@-]", wanted)[0].lower()
    return language if language in LANGUAGES else "en"


def use(language: str) -> None:
    """Show texts in this language from now on: one of LANGUAGES."""
    global _catalogue, _current
    _current = language
    if language == "en":
        _catalogue = None
    else:
        # Its expressions take 10 ms to compile.
        from memtop.supervisor.language.catalogue import Catalogue, read_catalogue

        _catalogue = Catalogue(read_catalogue(language))


def current() -> str:
    """The language in which texts are shown: one of LANGUAGES."""
    return _current


def in_use() -> bool:
    """Whether texts are translated."""
    return _catalogue is not None


def tr(text: str) -> str:
    """The text in the reader's language, as far as the catalogue has it."""
    return text if _catalogue is None or isinstance(text, Verbatim) else _catalogue.translate(text)


def separator(english: str) -> str:
    """What joins two clauses in the reader's language: for `, `, `; `, `: ` or `. `."""
    return english if _catalogue is None else _catalogue.separator(english)


def has_wide(text: str) -> bool:
    """Whether it has Chinese characters, which may be parted anywhere."""
    return not text.isascii() and re.search(_WIDE, text) is not None


def wrapped_anywhere(text: str, width: int) -> Iterator[str]:
    """The lines of a text without blanks between its words, as Chinese has none."""
    row = ""
    for piece in re.findall(_UNBROKEN, text):
        if row and cell_len(row) + cell_len(piece.rstrip()) > width:
            yield row.rstrip()
            row = ""
        row += piece if row else piece.lstrip()
        while cell_len(row) > width:
            # A character can be wider than the whole line.
            start = set_cell_size(row, width).rstrip() or row[0]
            yield start
            row = row[len(start) :]
    if row.strip():
        yield row.rstrip()


_catalogue: Catalogue | None = None
_current = "en"
