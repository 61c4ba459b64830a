"""A lack of memory in the words of a program that no pattern knows.

Any program that fails to allocate says so in similar words, mostly with a size. Such a line is
likely a lack of memory, but with a confidence too low to act on: the words can be about anything.
Lines that quote errors in a list are no failure at all.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import replace

from memtop.supervisor.diagnosis.aftermath import is_mild
from memtop.supervisor.diagnosis.finding import SIZE, UNCERTAIN, Figures, Finding, Weight, both_ends, is_supposed, parse_size
from memtop.supervisor.diagnosis.text import LogLine, LogText
from memtop.supervisor.diagnosis.values import Kind

_LONGEST = 1000
"""Characters of a line that are searched."""

_PRINTED_SIZE = SIZE.replace(r"(?:\.\d{0,6})?", r"(?:\.\d{0,6})? ?")
_MEMORY = r"(?:memory|ram|vram|hbm)\b"
# Words that say it by themselves.
_SHORT_OF_MEMORY = re.compile(
    rf"(?i)\bout of (?:\w+ ){{0,2}}{_MEMORY}|\bout-of-memory\b|\b(?:not|n't) (?:have |be )?enough (?:\w+ ){{0,3}}{_MEMORY}"
    rf"|\b(?:insufficient|too little|no (?:more|free|available)) (?:\w+ ){{0,2}}{_MEMORY}"
    rf"|\b{_MEMORY}[^.]{{0,20}}\b(?:(?:is |are )?(?:not|n't) enough|exhausted|insufficient|ran out|too small)"
    rf"|\b{_MEMORY} (?:budget|pool|limit|fraction)\b.{{0,40}}\btoo (?:small|low)"
    rf"|\b(?:more|larger|greater|bigger) than (?:the )?(?:total|available|free|remaining) (?:\w+ ){{0,2}}mem(?:ory)?\b"
    rf"|\bmore (?:\w+ ){{0,2}}{_MEMORY} than\b|\bexceed\w* (?:the )?(?:\w+ ){{0,3}}{_MEMORY} (?:limit|size|capacity|available)"
    rf"|\b(?:fail\w*|unable|cannot|can't|could(?: not|n't))(?: to)? (?:alloc\w*|reserve|obtain) (?:\w+ ){{0,3}}{_MEMORY}"
    rf"|\bmemory[ _]alloc\w*[ _](?:\w+ ){{0,2}}(?:fail|error)|\b(?:buffer|array|tensor|block|heap) allocation (?:failed|error)"
    rf"|\bbad allocation\b"
    rf"|\b{_MEMORY} (?:limit|quota|budget)\b.{{0,20}}(?<!not )\b(?:exceed|reached)"
    rf"|(?<!['\"`])\bOutOfMemory\w*|\bbad_alloc\b|\bAllocError\b"
)
# A failed allocation of something: a lack of memory if a size stands next to it.
_ALLOCATION = re.compile(
    r"(?i)\b(?:m|c|re)?alloc(?:at\w*)?\b.{0,60}?\b(?:fail\w*|refused|denied|impossible|not possible)"
    r"|\b(?:fail\w*|unable|cannot|can't|can not|could(?: not|n't)|error)\b.{0,24}?\b(?:alloc(?:at\w*)?|reserv(?:e|ing)"
    r"|malloc)\b|\bexceed\w*\b(?! \d+ ?% of)[^%]{0,40}?\balloc\w*|\barray exceeds maximum\b"
    r"|\bcould(?: not|n't) be (?:allocated|reserved)\b"
)
_OTHER_THINGS = re.compile(
    r"(?i)\b(?:ports?|address(?:es)?|ip|pty|tty|inodes?|disk|threads?|pids?|descriptors?|handles?|sockets?|gpus? to|nodes?"
    r"|shared memory|quota for|semaphores?)\b"
)
_DEVICE = re.compile(
    r"(?i)(?<![a-z])(?:gpus?|vram|hbm|video memory|accelerators?|device memory|on (?:the )?device|metal|mps|vulkan|opencl|sycl"
    r"|level[_-]zero)(?![a-z])"
    r"|(?<![a-z])(?<!/local/)(?:cuda|cudnn|cublas|hip|rocm|xpu|npu|tpu|hpu|ascend|device:\d|torch\.outofmemory|tensorrt"
    r"|nccl|kv[ _-]?cache|rmm\b|thrust::|bfc_allocator|sglang|vllm)"
)
# A statement: an error's name or verb in front of the words, or the words at the start of the line.
_STATES = re.compile(
    r"(?i)error|exception|\bfatal\b|\bfail|\babort|\bpanic|\bterminat|\bcrash|\bcould(?: not|n't)|\bcannot|\bunable|[^\w'\"`]*$"
)
_MENTIONS = re.compile(
    # Not a part of a path or a name.
    r"(?i)(?<![/.\w-])(?:if|when|avoid|prevent|fix|fixes|usage|try|help|how|after|may|might|often|common|known|see|prone|skipping|means?|against|handles?"
    r"|on oom|in case)\b(?![/\w])|--\w+|^\s*(?:def|class|except|import|assert|if|#)\b"
    # Collectors of garbage and schedulers use the words for what is ordinary to them.
    r"|\b(?:GCs?|scavenge|mark-(?:sweep|compact)|nodes are available|scheduling|failedscheduling)\b"
)

_PRINTED = rf"({_PRINTED_SIZE}|\d{{5,20}})(?!\d| ?/ ?\d)"
_REQUESTED = re.compile(
    rf"(?i:\b(?:request\w*|(?:m|c|re)?alloc(?:at\w+)?|of size|size|needs?|requires?)\b)"
    rf"[^\d\n]{{0,40}}?{_PRINTED}"
    rf"|(?i:\brequest\w*)[^\n]{{0,40}}?\({_PRINTED}\)"
    rf"|(?i:\b(?:buffer|block|tensor|array|chunk) of) {_PRINTED}"
)
_FREE = re.compile(
    rf"(?i:\b(?:free|available)(?:(?: \w+){{0,2}} memory| size)*\W{{1,4}}(?:is |only |of )*){_PRINTED}"
    rf"|{_PRINTED} (?:is |are )?(?i:free|available)\b"
)
_TOTAL = re.compile(rf"{_PRINTED} (?:in )?(?i:total|capacity)\b")
# `requestedSpace: 44135424 B` on a line of its own.
_NAMED = re.compile(rf"\W*([A-Za-z][\w ()]{{2,60}}?)\s*[:=]\s*{_PRINTED}\W*$")
_BELOW = 6
_AROUND = 20
"""How many lines before and after a message are read for the name of a device."""
_HOST = re.compile(r"(?i)\b(?:host|cpu|system|physical|ram|swap|heap|malloc|mmap)\b|(?-i:\bRAM\b)")
# Somebody else ended it, rather than the program itself.
_KILLED = re.compile(
    r"(?i)\b(?:job|worker|container|pod|task|executor|been|was|were|being)"
    r" (?:killed|terminated|evicted|cancell?ed|stopped|ended|reaped)\b"
)
_IS_QUESTION = re.compile(r"[^.!\n]{0,80}[?？]\s*$")


def names_device(text: str) -> bool:
    """Whether a text names the memory of a device."""
    return _DEVICE.search(text[:_LONGEST]) is not None


def _names_device_near(page: LogText, index: int) -> bool:
    """Whether the message, or else a line next to it, or else its traceback names a device."""
    own = page.lines[index].text[:_LONGEST]
    if names_device(own) or _HOST.search(own):
        return names_device(own)
    around = page.lines[max(0, index - _AROUND) : index + _AROUND]
    return any(names_device(line.text) for line in around if not line.bar)


def figures_of(page: LogText, finding: Finding) -> Figures:
    """The figures of a message without a pattern for them: on its line, or each on a line of its
    own below."""
    own = _figures(page.lines[finding.line].text[:_LONGEST])
    if own.known:
        return replace(own, device_index=finding.figures.device_index)
    return _figures_below(page, finding)


def _figures_below(page: LogText, finding: Finding) -> Figures:
    found: dict[str, int | None] = {}
    for line in page.lines[finding.last_line + 1 : finding.last_line + 1 + _BELOW]:
        named = _NAMED.match(line.text[:_LONGEST])
        if named is None:
            break
        field = _field(named[1].lower())
        if field is not None and (field not in found or "total" in named[1].lower()):
            found[field] = parse_size("".join(named[2].split()))
    given = replace(finding.figures, requested=found.get("requested"), free=found.get("free"))
    return replace(given, allocated=found.get("allocated"), total=found.get("total"))


def _field(name: str) -> str | None:
    if "request" in name:
        return "requested"
    if "free" in name or "available" in name:
        return "free"
    if "allocated" in name:
        return "allocated"
    return "total" if "total" in name or "device limit" in name or "capacity" in name else None


def find(page: LogText, known: Container[int]) -> list[Finding]:
    """The lines that likely report a lack of memory, except the `known` ones, which a pattern
    explains."""
    candidates = [index for index, line in enumerate(page.lines) if index not in known and not line.bar and _may_be(line.text)]
    return both_ends(candidates, lambda index: _read(page, index))


def _may_be(text: str) -> bool:
    return "emor" in text or "lloc" in text or "RAM" in text or "array exceeds" in text


def _read(page: LogText, index: int) -> Finding | None:
    line = page.lines[index]
    text = line.text[:_LONGEST]
    words = _SHORT_OF_MEMORY.search(text)
    allocation = None if words else _ALLOCATION.search(text)
    match = words or allocation
    if match is None or text.startswith(("##", "|")) or is_mild(line) or is_supposed(text[: match.start()]):
        return None
    if _MENTIONS.search(text[: match.start()]) or _IS_QUESTION.match(text, match.end()):
        return None
    figures = _figures(text)
    # The size can be too large to be one: a negative number without its sign.
    if allocation is not None and _REQUESTED.search(text) is None:
        return None
    if allocation is not None and _OTHER_THINGS.search(text, match.start(), match.end() + 40):
        return None
    if words is not None and not _STATES.search(text[: match.start()]):
        return None
    kind = Kind.GPU_OOM if _names_device_near(page, index) else Kind.HOST_OOM_ALLOC
    if kind is Kind.HOST_OOM_ALLOC and _KILLED.search(text):
        kind = Kind.HOST_OOM_KILLED
    return Finding(kind, None, UNCERTAIN, Weight.LIKELY, figures=figures, line=index, last_line=index)


def _figures(text: str) -> Figures:
    return Figures(requested=_first(_REQUESTED, text), free=_first(_FREE, text), total=_first(_TOTAL, text))


def _first(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    return None if match is None else parse_size("".join(next(group for group in match.groups() if group).split()))


# --- errors in a list -----------------------------------------------------------------------------

_ITEM = re.compile(r"\s*(?:[-*•·–|]|\d{1,2}[.)])\s+['\"`*]{0,3}(?=\S)")
_NEAR = 4
_OTHER_ERROR = re.compile(r"[Ee]rror|[Ee]xception|Killed|[Mm]emory|OOM|timeout")


def is_listed(page: LogText, finding: Finding) -> bool:
    """Whether the message is an item of a list of errors, as advice and summaries print it."""
    line = page.lines[finding.line]
    item = _ITEM.match(line.shown)
    if item is None or finding.kind is Kind.NOT_MEMORY:
        return False
    if any("Traceback (" in each.text for each in page.context(finding.line)):
        return False
    near = page.lines[max(0, finding.line - _NEAR) : finding.line + _NEAR + 1]
    return any(each is not line and _same_list(item, each) for each in near)


def _same_list(item: re.Match[str], line: LogLine) -> bool:
    other = _ITEM.match(line.shown)
    return other is not None and other[0].strip()[:1] == item[0].strip()[:1] and _OTHER_ERROR.search(line.shown) is not None
