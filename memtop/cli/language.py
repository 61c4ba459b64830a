"""The language of the command line: the option `--lang`, the configuration, the locale, and help in
that language."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

import click
import platformdirs
from rich.cells import cell_len

from memtop.supervisor import language
from memtop.supervisor.errors import UsageError
from memtop.supervisor.language import tr

LANGUAGE_OPTION = "--lang"


def without_language(arguments: list[str]) -> tuple[list[str], str | None]:
    """The arguments without `--lang L`, which may stand anywhere, and the language. UsageError if
    memtop has no texts in it."""
    given, rest = None, list(arguments)
    for at, word in reversed(list(enumerate(arguments))):
        if word == LANGUAGE_OPTION or word.startswith(f"{LANGUAGE_OPTION}="):
            taken = rest[at : at + 1 + (word == LANGUAGE_OPTION)]
            del rest[at : at + len(taken)]
            given = word.partition("=")[2] if "=" in word else taken[-1]
            if given not in language.LANGUAGES:
                raise UsageError(f"--lang {given}: unknown; there are {' and '.join(language.LANGUAGES)}")
    return rest, given


def chosen_language() -> str:
    """The language of MEMTOP_LANG, of the user's file or of the locale. English where the terminal
    cannot show another."""
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    if encoding != "utf8" or os.environ.get("MEMTOP_ASCII"):
        return "en"
    if not os.environ.get("MEMTOP_LANG") and _has_user_file():
        from memtop.cli.configuration import configured

        try:
            found = configured("lang").value
        except UsageError:
            found = None  # the command itself says it
        if found in language.LANGUAGES:
            return str(found)
    return language.language_of(os.environ)


def _has_user_file() -> bool:
    try:
        return platformdirs.user_config_path("memtop").joinpath("config.toml").is_file()
    except RuntimeError:
        return False  # a user without a home folder


class HelpFormatter(click.HelpFormatter):
    """Help in the reader's language."""

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        super().write_usage(prog, args, prefix or tr("Usage: "))

    def write_heading(self, heading: str) -> None:
        super().write_heading(tr(heading))

    def write_text(self, text: str) -> None:
        if not language.in_use():
            super().write_text(text)
            return
        for number, paragraph in enumerate(text.split("\n\n")):
            if number:
                self.write_paragraph()
            self._write_wrapped(" ".join(paragraph.split()), "", 0)

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        rows = list(rows)
        if not language.in_use():
            super().write_dl(rows, col_max, col_spacing)
            return
        first = min(max(cell_len(term) for term, _ in rows), col_max) + col_spacing
        for term, words in rows:
            self._write_wrapped(words, term, first)

    def _write_wrapped(self, text: str, term: str, first: int) -> None:
        """The text in a column that begins after `first` cells, below or beside the term."""
        indent = " " * self.current_indent
        if first and cell_len(term) + 2 > first:
            self.write(f"{indent}{term}\n")
            term = ""
        rows = language.wrapped_anywhere(tr(text), max(10, self.width - self.current_indent - first))
        for number, row in enumerate(rows):
            head = "" if number else term
            self.write(f"{indent}{head}{' ' * (first - cell_len(head))}{row}\n")


class HelpContext(click.Context):
    formatter_class = HelpFormatter
