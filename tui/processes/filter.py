"""The filter of the process list: words, and keys such as `user:bob gpu:1 vram>2g -job:old`.

A row must match all.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from memtop.supervisor import units
from memtop.tui.processes.rows import MARKS, ProcessRow

_COMPARISON = re.compile(r"(?P<key>[a-z]+)(?P<sign>>=|<=|>|<|=)(?P<number>\d+(?:\.\d+)?)(?P<unit>[a-z%]*)", re.IGNORECASE)
_BEGUN = re.compile(r"(?P<key>[a-z]+)[<>=]+")
_BYTES = {"": units.GIB, "b": 1, "k": 1024, "m": 1024**2, "g": units.GIB, "kib": 1024, "mib": 1024**2, "gib": units.GIB}
_SHARES = {"": 0.01, "%": 0.01}
_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_SIGNS: Mapping[str, Callable[[float, float], bool]] = {
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    "=": lambda a, b: a == b,
}
_NUMBERS: Mapping[str, tuple[str, Mapping[str, float]]] = {
    "vram": ("vram", _BYTES),
    "rss": ("rss", _BYTES),
    "sm": ("sm", _SHARES),
    "bw": ("bw", _SHARES),
    "cpu": ("cpu", _SHARES),
    "time": ("time", _SECONDS),
    "pid": ("pid", {"": 1}),
}
_WORDS: Mapping[str, Callable[[ProcessRow], str]] = {
    "user": lambda row: row.user,
    "pid": lambda row: str(row.pid),
    "gpu": lambda row: row.where,
    "job": lambda row: row.job_name,
    "run": lambda row: (row.process.run if row.process is not None else None) or "",
    "role": lambda row: (row.process.role if row.process is not None else None) or "",
    "kind": lambda row: row.process.kind if row.process is not None else "",
    "container": lambda row: row.container,
    "command": lambda row: row.command,
    "is": lambda row: row.marks,
}
_WHOLE = ("pid", "gpu")
"""Keys that match whole values only: GPU 1 is not GPU 11."""


Term = Callable[[ProcessRow], "bool | None"]
"""Whether a row matches one word of the filter. None if unknown: it matches neither the word nor
its negation."""


@dataclass(frozen=True)
class Filter:
    """A valid filter; without terms every row matches."""

    terms: tuple[Term, ...] = ()

    def matches(self, row: ProcessRow) -> bool:
        return all(term(row) is True for term in self.terms)


def parse(text: str) -> Filter | str:
    """The filter, or one line on what is wrong with the text."""
    terms: list[Term] = []
    # Chinese keyboards type `：` and `＞`.
    for word in unicodedata.normalize("NFKC", text).casefold().split():
        negated = word.startswith("-") and len(word) > 1
        term = _term(word[1:] if negated else word)
        if isinstance(term, str):
            return term
        terms.append(_not(term) if negated else term)
    return Filter(tuple(terms))


def _term(word: str) -> Term | str:
    key, colon, value = word.partition(":")
    if key == "is" and colon and not any(value in mark for mark in MARKS):
        return f"filter: nothing is {value!r}; there are {', '.join(f'is:{mark}' for mark in MARKS)}"
    if colon and key in _WORDS:
        return _equal(_WORDS[key], value) if key in _WHOLE else _within(_WORDS[key], value)
    if colon and key.isalpha():
        return f"filter: no key {key!r}; there are {', '.join({**_WORDS, **_NUMBERS})}"
    found = _COMPARISON.fullmatch(word)
    if found is not None:
        return _comparison(found["key"], found["sign"], float(found["number"]), found["unit"])
    begun = _BEGUN.match(word)
    if begun is not None and begun["key"] in _NUMBERS:
        return f"filter: {begun[0]} needs a number, as in {begun['key']}>2"
    return _anywhere(word)


def _comparison(key: str, sign: str, number: float, unit: str) -> Term | str:
    if key not in _NUMBERS:
        return f"filter: {key!r} is no number; there are {', '.join(_NUMBERS)}"
    column, scales = _NUMBERS[key]
    if unit not in scales:
        return f"filter: {key} has no unit {unit!r}; there are {', '.join(u for u in scales if u)}"
    limit = number * scales[unit]

    def holds(row: ProcessRow) -> bool | None:
        value = row.number(column)
        # An unknown value is neither more nor less than the limit.
        return None if value is None else _SIGNS[sign](value, limit)

    return holds


def _anywhere(word: str) -> Term:
    return lambda row: word in row.searchable


def _within(of: Callable[[ProcessRow], str], value: str) -> Term:
    return lambda row: value in of(row).casefold()


def _equal(of: Callable[[ProcessRow], str], value: str) -> Term:
    def holds(row: ProcessRow) -> bool:
        whole = of(row).casefold().split(",")
        # `gpu:0` matches the card and all its MIG instances; `gpu:0:2` matches one instance.
        return value in whole or value in (one.partition(":")[0] for one in whole)

    return holds


def _not(term: Term) -> Term:
    def holds(row: ProcessRow) -> bool | None:
        met = term(row)
        return None if met is None else not met

    return holds
