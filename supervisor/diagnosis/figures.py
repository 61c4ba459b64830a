"""The sizes that any message about memory prints, each with its meaning.

These rules work for any program. The word next to a size says what the size is: `requested`,
`free`, `total`, `allocated` or another word of the same meaning. The word stands behind the size
(`2 GiB free`), in front of it (`available memory is only 2 GiB`), or is its name (`free: 2 GiB`).
The rules leave out a size without such a word.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from dataclasses import replace
from typing import NamedTuple

from memtop.supervisor.diagnosis.finding import Figures, Finding, parse_size
from memtop.supervisor.diagnosis.text import LogText

LONGEST = 1000
"""Characters of a line that are searched."""
_BELOW = 6
"""The most lines below a message that can print its figures."""

_NUMBER = r"\d{1,24}(?:,\d{3}){0,8}(?:\.\d{0,9})?(?:[eE]\+?\d{1,2})?"
_UNIT = (
    r"(?:[ -]?(?:[KMGTPkmgt]i?[Bb]|[KMGT][Bb]?ytes?|(?:[Kk]ilo|[Mm]ega|[Gg]iga|[Tt]era)?[Bb]ytes?|[Bb])(?![A-Za-z0-9])"
    r"|[KMGT](?![A-Za-z0-9]))"
)
_RATE = r"(?! ?/ ?s| ?per s|ps\b)"
# One size, or two of which the second one is the whole: `3.2/4.0 GiB`, `Used 3G of 2G`.
_PRINTED = re.compile(
    rf"(?<![\w.,/×-])(?P<first>{_NUMBER})(?P<unit>{_UNIT})?{_RATE}"
    r"(?: ?(?P<between>free|available|left|used|in use|allocated)? ?(?:/|of|out of)"
    rf" ?(?P<whole>{_NUMBER})(?P<whole_unit>{_UNIT}){_RATE})?"
)
_BARE = re.compile(r"0|\d{5,20}|\d{1,3}(?:,\d{3}){1,8}")
"""A number without a unit that can be bytes."""
_LONG = 6
"""The digits of a number that is bytes whatever follows it: "556793856 in use"."""
_NAMED_UNIT = re.compile(r"[\[( _]([KMGTkmgt]i?[Bb]|[Bb]ytes)[\])]?['\"`]? ?[:=] ?$")
# What can stand behind a number of bytes that has no unit. Any other word is what it counts.
_NO_UNIT = re.compile(
    r"(?:[\s)\]}'\"`*]*(?:$|[\n,;.)|\]}\\])|\s*(?:is|are|was|on|from|for|failed|but|and|plus|while|which|when|with|by|to|in|of|exceeds|[<>])\b)"
)
_SHAPE = re.compile(r"shapes? ?(?:=|:|of)? ?[\[(][^\])\n]{0,200}[\])]|\([\d, ]{3,80}\)(?= and| with)")

# --- words ----------------------------------------------------------------------------------------

_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|_")
_WORD = re.compile(
    r"(?i)\b(?:(?P<requested>request\w*|(?:m|c|re)?alloc|(?:re)?allocat(?:e|ing|ion)|reserv(?:e|ing)|needs?|needed"
    r"|requir\w+|desired|mmap|map|commit|virtual ?alloc|attempt\w* to|tried to|wanted|obtain|malloc|rt ?malloc|upstream)"
    r"|(?P<free>free|available|unused|remaining|remains|left)"
    r"|(?P<allocated>(?:already |currently )?allocated|already reserved|in[ -]?use|used|usage|occupied|so far)"
    r"|(?P<total>total|capacity)"
    r"|(?P<size>sizes?|bytes)"
    r"|(?P<other>max\w*|peak|largest|biggest|min\w*|smallest|limit\w*|threshold|models?|weights?|temp\w*|files?|checkpoint|download\w*|disk"
    r"|swap|offset|line|pid|rounded|exceed\w*|utili[sz]ation|fraction|alignment|rate|speed|time|reserved|cached|address|fragment\w*"
    r"|batch|step|version|params?|parameters?|port|seed))\b"
)
_EXTREME = re.compile(r"(?i)\b(?:max\w*|peak|largest|biggest|min|minimum|smallest)\b")
_ONE_WORD = re.compile(r" ?(?:\w+ )?")
_SHARE = re.compile(r"% of (?:the |its )?$")
"""`80 % of 2 GiB`."""
_BOUND = re.compile(r"[<>]=? ?$")
"""`usage >= 2 GiB` gives no size."""
_DEVICE_LIMIT = re.compile(r"(?i)\b(?:device|gpu|card|hbm|cgroup|container)(?: memory)? limit")
_SUM = re.compile(r"(?i)\b(?:usage|utili[sz]ation|in use|used|allocated):\s*[-*]? {0,4}total\b[^\n]{0,20}$")
"""A total below such a heading is the sum of what is in use."""
_NOT_YET = re.compile(r"(?i)\b(?:not|n't|be|to be|can't|cannot) (?:be )?$")
# A name, as in `free memory: ` or `"free" = `, and the word in front of a number.
_NAME = re.compile(r"([A-Za-z][\w ()/#.-]{0,60}?)['\"`*]{0,3} {0,30}(?:::?|=>?|\|) {0,30}['\"(`*]{0,3}~?$")
_ENDS = re.compile(r"[.!?] |[;|\n]|\\n")
# The word behind a size: `2 GiB is free`, `2 GiB total capacity`, `2 GiB of memory in use`.
_FILLER = (
    r"(?:(?:of|in|is|are|was|were|has|have|been|already|currently|still|only|gpu|vram|ram|hbm|device|host|system|main|memory|mem"
    r"|space|kv|cache|cuda|on|the) ){0,6}"
)
_BEHIND = re.compile(
    rf"(?i)[ -]{{0,2}}{_FILLER}(?:(?P<free>free|available|unused|remaining|left)"
    r"|(?P<allocated>in[ -]use|used|allocated|occupied)|(?P<total>total|capacity)"
    r"|(?P<requested>needed|required|requested))\b(?! ?(?:\([^)]{0,40}\) ?)?(?:[:=]| is only| ?\(?\d))"
)
_REFUSED = re.compile(
    r"(?i)[ )]{0,2}(?:of (?:\w+ ){1,3})?(?:could not|cannot|can't|couldn't) be (?:allocated|reserved)|^ allocation failed"
)
# `allocating <= available failed, 30 > 20`
_COMPARED = re.compile(
    rf"\b(\w{{3,40}}) ?(?:<=?|>=?) ?(\w{{3,40}})\b[^\d\n]{{0,30}}\b({_NUMBER}) ?(?:[<>]=?|vs\.?) ?({_NUMBER})(?![\w.])"
)

_ADJACENT = 10
"""The most characters between `size` and a word that says of what it is the size."""
_NEAR, _NEAR_BARE, _NEAR_ZERO = 60, 25, 14
"""The most characters between a word and the size that it describes: with and without a unit, and
if it is 0 without a unit."""


class _Size(NamedTuple):
    start: int
    end: int
    bytes: int
    has_unit: bool
    whole: int | None
    """The second size of two."""
    between: str | None = None
    """The word between two sizes: `3 GiB free of 8 GiB`."""


def read(text: str, elsewhere: re.Pattern[str] | None = None) -> Figures:
    """The figures of one message. `text` can have several lines. What is free, in use or the total
    is left out if words in front of the size match `elsewhere`: it is of another memory."""
    text = _SHAPE.sub(lambda match: " " * len(match[0]), text)
    found: dict[str, int] = {}
    end = 0
    sizes = list(_sizes(text))
    for at, size in enumerate(sizes):
        following = sizes[at + 1].start if at + 1 < len(sizes) else len(text)
        role = _of_words(size.between) if size.between else _role(text[end : size.start], text[size.end : following + 1], size)
        if elsewhere is not None and role != "requested" and _names(elsewhere, text[end : size.start]):
            role = None
        if role == "total" and _SUM.search(text[end : size.start]):
            role = "allocated"
        end = size.end
        if size.whole is not None:
            if role in ("free", "allocated"):
                found.setdefault("total", size.whole)
            if role != "free":
                continue  # what is in use is not only the program's
        if role is not None and (size.bytes or role in ("free", "allocated")):
            found.setdefault(role, size.bytes)
    for compared in _COMPARED.finditer(text):
        for name, number in ((compared[1], compared[3]), (compared[2], compared[4])):
            role, value = _of_words(name), parse_size(number)
            if role is not None and value is not None:
                found.setdefault(role, value)
    return Figures(
        requested=found.get("requested"),
        free=found.get("free"),
        total=found.get("total"),
        allocated=found.get("allocated"),
        allowed=found.get("allowed"),
    )


def _sizes(text: str) -> Iterator[_Size]:
    for match in _PRINTED.finditer(text):
        unit = match["unit"] or match["whole_unit"] or _unit_of_name(text, match.start())
        whole = None if match["whole"] is None else _bytes(match["whole"], match["whole_unit"])
        has_unit = unit is not None
        if not has_unit and not _may_be_bytes(text, match):
            continue
        if unit is not None and unit.strip(" -") in ("B", "b") and 0 < float(match["first"].replace(",", "") or 0) < 1000:
            continue  # "a 7B model"
        value = _bytes(match["first"], unit or "")
        if value is not None:
            yield _Size(match.start(), match.end(), value, has_unit, whole, match["between"])


def _unit_of_name(text: str, start: int) -> str | None:
    """The unit that stands in the name of a number: `free memory (GiB): 3.5`."""
    match = _NAMED_UNIT.search(text[max(0, start - _NEAR) : start])
    return None if match is None else match[1]


def _may_be_bytes(text: str, match: re.Match[str]) -> bool:
    """Whether a number without a unit can be bytes: no word behind it says what it counts."""
    if not _BARE.fullmatch(match["first"].rstrip(".")):
        return False
    if _NO_UNIT.match(text, match.end()):
        return True
    return len(match["first"]) >= _LONG and _BEHIND.match(text, match.end()) is not None


def _bytes(number: str, unit: str) -> int | None:
    if "e" in number or "E" in number:
        number = f"{float(number.replace(',', '')):.3f}"
    return parse_size(number + unit.strip(" -"))


def _role(left: str, right: str, size: _Size) -> str | None:
    behind = _BEHIND.match(right)
    if behind is not None:
        return next(name for name, word in behind.groupdict().items() if word)
    if _REFUSED.match(right):
        return "requested"
    left = left[max((match.end() for match in _ENDS.finditer(left)), default=0) :]
    if _SHARE.search(left):
        return "total"
    if _BOUND.search(left):
        return None
    name = _NAME.search(left)
    if name is not None:
        return None if _EXTREME.search(_CAMEL.sub(" ", name[1])) else _of_words(name[1])
    return _of_words(left, _NEAR if size.has_unit else _NEAR_BARE if size.bytes else _NEAR_ZERO)


def _of_words(text: str, near: int | None = None) -> str | None:
    """What the last word of a text says about the size behind it."""
    text = _CAMEL.sub(" ", text)
    words = list(_WORD.finditer(text))
    if near is not None:
        words = [word for word in words if len(text) - word.end() <= near]
    roles = [word.lastgroup for word in words]
    if not roles:
        return None
    if roles[-1] == "other":
        if not words[-1][0].lower().startswith("limit"):
            return None
        return "total" if _DEVICE_LIMIT.search(text) else "allowed"
    size = words[-1]
    while len(roles) > 1 and roles[-1] == "size":
        size = words.pop()
        roles.pop()
    role = roles[-1]
    if len(words) > 1 and _EXTREME.fullmatch(words[-2][0]) and _ONE_WORD.fullmatch(text, words[-2].end(), words[-1].start()):
        return None  # "the max alloc size is 2 GiB"
    if role == "other" and size.start() - words[-1].end() > _ADJACENT:
        role = "size"  # the word is about something else than this size
    if role == "allocated" and _NOT_YET.search(text[: words[-1].start()]):
        return "requested"
    if role == "size":
        return "requested"
    return None if role == "other" else role


def _names(memory: re.Pattern[str], left: str) -> bool:
    return memory.search(left[max((match.end() for match in _ENDS.finditer(left)), default=0) :]) is not None


# --- the report of a failure ----------------------------------------------------------------------

_OF_THE_HOST = re.compile(r"(?i)\b(?:(?:host|cpu|system) mem\w*|swap)\b|(?-i:\bRAM\b)")
_OF_A_DEVICE = re.compile(r"(?i)\b(?:gpu|cuda|device) mem\w*\b|\b(?:vram|hbm)\b")
_NEW_RECORD = re.compile(r"\s*\[?\d{4}-\d\d-\d\d|\s*\[?\d\d:\d\d:\d\d|Traceback|.{0,60}(?:Error|Exception)\b")
_NAMED = re.compile(r"[^\w\n]{0,20}[A-Za-z][\w ()/.-]{0,60}['\"`*]{0,3} {0,30}[:=]")
# The end of a line on which a sentence does not end.
_UNFINISHED = re.compile(r"[,(]$|\b(?:is|are|was|of|only|the|than|which|by|to|an?|and|in|has|have|with|for|on|from)$")


def with_printed(page: LogText, finding: Finding, others: Container[int]) -> Finding:
    """The finding with the figures of its message that no pattern has read: on its own lines, or
    each on a line of its own below. `others` are the lines of all findings."""
    known = finding.figures
    if known.complete:
        return finding
    elsewhere = _OF_THE_HOST if finding.kind.of_gpu else _OF_A_DEVICE
    here = read(_report(page, finding, others) + _statistics(page, finding), elsewhere)
    taken = {known.requested, known.total, known.free, known.allocated, known.allowed, known.process}

    def more(mine: int | None, printed: int | None) -> int | None:
        return mine if mine is not None or printed in taken else printed

    device = known.device_index
    if device is None and finding.kind.of_gpu:
        device = _device(page, finding)
    figures = replace(
        known,
        device_index=device,
        requested=more(known.requested, here.requested),
        free=more(known.free, here.free),
        total=more(known.total, here.total),
        allocated=more(known.allocated, here.allocated),
        allowed=more(known.allowed, here.allowed),
    )
    return replace(finding, figures=figures)


_DEVICE_INDEX = re.compile(
    r"(?:\b(?i:gpu|npu|xpu|device|dev|device ordinal|device[ _]id) ?[:=#]? ?"
    r"|\b(?:cuda|hip|xpu|npu):|/device:(?!CPU)[A-Z]{2,4}:)"
    r"(\d{1,2})\b(?!\.\d| ?[KMGTkmgt%]|:\d)"
)


def _device(page: LogText, finding: Finding) -> int | None:
    """The device that the finding's lines name, if they name only one."""
    lines = page.lines[finding.line : finding.last_line + 1]
    named = {match[1] for line in lines for match in _DEVICE_INDEX.finditer(line.text[:LONGEST])}
    return int(named.pop()) if len(named) == 1 else None


def _report(page: LogText, finding: Finding, others: Container[int]) -> str:
    """The finding's lines, and those below that go on with it."""
    first = page.lines[finding.line]
    own = [line for line in page.lines[finding.line : finding.last_line + 1] if line.rank == first.rank and not line.bar]
    text = " ".join(line.text[:LONGEST] for line in own or [first])
    without = 0
    for index in range(finding.last_line + 1, min(finding.last_line + 1 + _BELOW, len(page.lines))):
        line = page.lines[index]
        below = line.text[:LONGEST]
        if index in others or line.rank != first.rank or line.bar or line.gap or _NEW_RECORD.match(below):
            break
        if _UNFINISHED.search(text) is not None and (below[:1].islower() or below[:1].isdigit() or below[:1] == "("):
            text += f" {below}"
        elif _NAMED.match(below) and any(True for _ in _sizes(below)):
            text += f"\n{below}"
        elif without:
            break
        else:
            without += 1
    return text


_IN_USE = re.compile(r"(?:.{0,80}\] |[>|\s]{1,8})?InUse: +\d")
_LIMIT = re.compile(r"(?:.{0,80}\] |[>|\s]{1,8})?Limit: +(\d{5,20})$")
_ABOVE = 12
_DUMP = 2000
"""The most lines of the summary that TensorFlow's allocator prints."""


def _statistics(page: LogText, finding: Finding) -> str:
    """What TensorFlow's allocator prints: the line that says how much is in use, below the message,
    or that line and the limit, above it."""
    text = page.lines[finding.line].text
    if "bfc" in text:
        below = page.lines[finding.last_line + 1 : finding.last_line + 1 + _DUMP]
        in_use = next((line.text[:LONGEST] for line in below if _IN_USE.match(line.text)), None)
        if in_use is not None:
            return f"\n{in_use}"
    elif "OOM when allocating" not in text:
        return ""
    above = page.lines[max(0, finding.line - _ABOVE) : finding.line]
    limits = (match[1] for line in above if (match := _LIMIT.match(line.text)))
    used = (line.text[:LONGEST] for line in above if _IN_USE.match(line.text))
    return "".join(f"\n{text}" for text in (*(f"total: {limit}" for limit in limits), *used))
