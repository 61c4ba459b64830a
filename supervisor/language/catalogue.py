"""Translates by a catalogue.

A catalogue is a folder of TOML files, `"English" = "translation"`. `{0}`, `{1}`, … stand for the
parts that vary; these are translated themselves, unless the translation has `{0!}`: a name. `{0#}`
stands for a number only, with its unit if it has one. A text that is not in the catalogue is looked
up in parts: columns, clauses, and what stands in brackets.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from rich.cells import cell_len

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_HERE = Path(__file__).resolve().parent
_PART = re.compile(r"\{(\d+)(#?)\}")
_NUMBER = re.compile(r"(?:(?:[-+~≥] ?)?(?:\d+d )?\d(?:[\d .,:/]*\d)?|[–?])(?: ?[A-Za-z%°/]{1,5})?")
_PLACE = re.compile(r"\{(\d+)(!?)\}")
"""A part in a translation; with `!` it stays as it is."""
_LETTER = re.compile(r"[A-Za-z]")
_WORD = re.compile(r"[A-Za-z]{2,}")
_CODE = re.compile(r"[/~`-].*|[a-z]+(?:[_.][a-z0-9]+)+(?: .*)?")
"""Paths, options, and settings with their values: they stay."""
_COLUMNS = re.compile(r"( {2,})")
_MARKED = re.compile(r"(memtop: |\d+\. |[^\w\s(\[{\"'`/<–-]{1,2} +)(?=\S)")
_INSIDE = r"\((?:[^()]|\([^()]*\))*\)"
"""Brackets, and what stands in them."""
_BRACKETS = re.compile(rf"((?:(?!\. |; ).)+?) ({_INSIDE})")

_BETWEEN = {". ": "。", "; ": "；", ": ": "：", ", ": "，"}
"""What joins two clauses, in the order in which a text is taken apart."""


def read_catalogue(language: str) -> dict[str, str]:
    """The translations by their English texts."""
    found: dict[str, str] = {}
    for path in sorted((_HERE / language).glob("*.toml")):
        found |= tomllib.loads(path.read_text(encoding="utf-8"))
    return found


class _Template(NamedTuple):
    """A text with parts that vary."""

    english: str
    translation: str
    pieces: tuple[str, ...]
    """What does not vary."""

    @property
    def literal(self) -> int:
        """Characters that do not vary: the text with the most of them is the right one."""
        return sum(map(len, self.pieces))

    def match(self, text: str, *, whole: bool) -> re.Match[str] | None:
        """The parts of this text; None if it is another one."""
        if not all(piece in text for piece in self.pieces):
            return None
        return _pattern(self.english, self.translation, whole=whole).fullmatch(text)


class Catalogue:
    """The translations into one language."""

    def __init__(self, entries: Mapping[str, str]) -> None:
        self._texts: dict[str, str] = {}
        self._templates: dict[str, list[_Template]] = {}
        """By a word that they contain."""
        for english, translation in entries.items():
            if english.endswith(".") and translation.endswith("。"):
                english, translation = english[:-1], translation[:-1]
            if _PART.search(english):
                pieces = tuple(_PART.split(english)[::3])
                self._templates.setdefault(_key_word(pieces), []).append(_Template(english, translation, pieces))
            else:
                self._texts[english] = translation
        self.translate = lru_cache(maxsize=8192)(self._translate)

    def separator(self, english: str) -> str:
        """What joins two clauses: for `, `, `; `, `: ` or `. `."""
        return _BETWEEN[english]

    def _translate(self, text: str) -> str:
        if not _LETTER.search(text):
            return text
        found = self._texts.get(text)
        if found is not None:
            return found
        core = text.strip()
        if core != text:
            shown = self.translate(core)
            return (text.lstrip() if shown[0] in "，；：。（" else text).replace(core, shown)
        for separator, translated in _BETWEEN.items():
            if text.startswith(separator):
                return translated + self.translate(text[len(separator) :])
        if text.endswith(".") and not text.endswith(".."):
            shown = self.translate(text[:-1])
            return f"{shown}。" if shown != text[:-1] else text
        small = text[0].lower() + text[1:] if text[0].isupper() and not text[1:2].isupper() else text
        if small in self._texts:
            return self._texts[small]
        mark = _MARKED.match(text)
        if mark is not None:
            return f"{mark[0]}{self.translate(text[mark.end() :])}"
        found = self._by_template(text) or self._by_template(small)
        if found is None and "; " in text:
            found = self._by_template(text, whole=True)
        return found if found is not None else self._in_parts(text)

    def _by_template(self, text: str, *, whole: bool = False) -> str | None:
        """The translation of the whole text by the template that fits best. `whole`: its parts may
        have several clauses if these are one text."""
        candidates = [one for word in {"", *_WORD.findall(text)} for one in self._templates.get(word, ())]
        for one in sorted(candidates, key=lambda template: -template.literal):
            match = one.match(text, whole=whole)
            if match is not None and not (whole and any("; " in part and not self._has(part) for part in match.groups())):
                return _PLACE.sub(lambda place: self._part(match, place), one.translation)  # noqa: B023 - called at once
        return None

    def _part(self, match: re.Match[str], place: re.Match[str]) -> str:
        part = match[f"p{place[1]}"]
        return part if place[2] else self.translate(part)

    def _in_parts(self, text: str) -> str:
        if "\n" in text:
            return "\n".join(map(self.translate, text.split("\n")))
        pieces = _COLUMNS.split(text)
        if len(pieces) > 1:
            return "".join(self._padded(pieces))
        # What is said about something, such as a setting and its value, may be one text with
        # several clauses.
        about, *said = _clauses(text, ": ", most=1)
        if said and (known := self._known(said[0])) is not None:
            return f"{self.translate(about)}{_BETWEEN[': ']}{known}"
        brackets = _BRACKETS.fullmatch(text)
        if brackets is not None and ", " not in brackets[1]:
            return self._with_brackets(brackets)
        for separator, translated in _BETWEEN.items():
            # What follows a colon may be a sentence with colons of its own.
            clauses = _clauses(text, separator, most=99 if separator == ", " else 1)
            if len(clauses) > 1:
                shown = [self.translate(clause) for clause in clauses]
                same = [one == clause and not self._has(clause) for one, clause in zip(shown, clauses, strict=True)]
                # What a sentence lists is translated whole or not at all.
                if shown == clauses or (any(same) and separator == ", "):
                    break
                return (separator if separator == ". " and same[1] else translated).join(shown)
        return text if brackets is None else self._with_brackets(brackets)

    def _known(self, text: str) -> str | None:
        """The translation of the whole text; None if it is not in the catalogue."""
        found = self._texts.get(text)
        return found if found is not None else self._by_template(text, whole=True)

    def _with_brackets(self, found: re.Match[str]) -> str:
        return f"{self.translate(found[1])} ({self.translate(found[2][1:-1])})"

    def _has(self, text: str) -> bool:
        """Whether nothing is left to translate: what has no words, and what is the same in both
        languages."""
        if _WORD.search(text) is None or _NUMBER.fullmatch(text) is not None:
            return True
        return bool(_CODE.fullmatch(text)) or text in self._texts or self._by_template(text) is not None

    def _padded(self, pieces: list[str]) -> Iterator[str]:
        """Columns keep their places where the translation is not longer."""
        for column, blanks in zip(pieces[::2], [*pieces[1::2], ""], strict=True):
            shown = self.translate(column)
            spare = cell_len(column) - cell_len(shown)
            yield shown + (" " * max(2, len(blanks) + spare) if blanks else "")


@cache
def _pattern(english: str, translation: str, *, whole: bool) -> re.Pattern[str]:
    """Compiled when a text may fit: there are many templates, and few are shown."""
    seen: set[str] = set()
    literals = _PART.split(english)[::3]
    # What varies is one clause at most, with whole brackets, and one sentence if it is translated.
    end = "" if whole or "; " in "".join(literals) else "(?!; )"

    def part(place: re.Match[str]) -> str:
        name = f"p{place[1]}"
        if name in seen:
            return f"(?P={name})"
        seen.add(name)
        if place[2]:
            return f"(?P<{name}>{_NUMBER.pattern})"
        is_kept = f"{{{place[1]}!}}" in translation
        within = end if is_kept else rf"{end}(?!\. [A-Z])"
        one = "." if is_kept and place.end() == len(english) else "[^()]"
        return f"(?P<{name}>(?:{_INSIDE}|{within}{one})*?)"

    places = [*map(part, _PART.finditer(english)), ""]
    return re.compile("".join(re.escape(piece) + place for piece, place in zip(literals, places, strict=True)), re.DOTALL)


def _clauses(text: str, separator: str, *, most: int) -> list[str]:
    """The text apart at up to so many of the separators that do not stand in brackets."""
    clauses: list[str] = []
    begin = depth = 0
    for match in re.finditer(rf"[()]|{re.escape(separator)}", text):
        depth += (match[0] == "(") - (match[0] == ")")
        if match[0] == separator and depth == 0 and len(clauses) < most:
            clauses.append(text[begin : match.start()])
            begin = match.end()
    return [*clauses, text[begin:]]


def _key_word(pieces: Sequence[str]) -> str:
    """The longest word of a template that no part that varies can touch."""
    words = []
    for number, piece in enumerate(pieces):
        begin = bool(number and piece[:1].isalpha())
        end = len(_words := _WORD.findall(piece)) - (number < len(pieces) - 1 and piece[-1:].isalpha())
        words += _words[begin:end]
    return max(words, key=len, default="")
