"""A lack of memory in the words of a program that no pattern knows.

Any program that fails to allocate says so in similar words, mostly with a size. Such a line is
likely a lack of memory, but with a confidence too low to act on: the words can be about anything.
Lines that quote errors in a list are no failure at all.
"""

from __future__ import annotations

import re
from collections.abc import Container

from memtop.supervisor.diagnosis import figures
from memtop.supervisor.diagnosis.aftermath import is_mild
from memtop.supervisor.diagnosis.finding import UNCERTAIN, Figures, Finding, Weight, both_ends, is_supposed
from memtop.supervisor.diagnosis.text import TRACEBACK, LogLine, LogText
from memtop.supervisor.diagnosis.values import Kind

_MEMORY = r"(?:memory|ram|vram|hbm)\b"
# Words that say it by themselves.
_SHORT_OF_MEMORY = re.compile(
    rf"(?i)\bout of (?:[a-z]+ ){{0,4}}{_MEMORY}|\bout-of-memory\b"
    rf"|\b(?:not|n't) (?:have |be |provide )?enough (?:\w+[ -]){{0,3}}{_MEMORY}"
    rf"|\b(?:insufficient|too little|no (?:more|free|available)) (?:\w+ ){{0,2}}{_MEMORY}"
    rf"|(?-i:\b[A-Z]\w{{2,40}}_OUT_OF_(?:[A-Z]+_)?MEMORY\b)(?! ?[=,])"
    rf"|\b{_MEMORY}[^.]{{0,40}}\b(?:(?:is |are )?(?:not|n't) enough|exhausted|insufficient|ran out|too small)"
    rf"|\b{_MEMORY} (?:budget|pool|limit|fraction)\b.{{0,40}}\btoo (?:small|low)"
    rf"|\b(?:more|larger|greater|bigger) than (?:the )?(?:total|available|free|remaining) (?:\w+ ){{0,2}}mem(?:ory)?\b"
    rf"|\bmore (?:\w+ ){{0,2}}{_MEMORY} than\b|\bexceed\w* (?:the )?(?:\w+ ){{0,3}}{_MEMORY} (?:limit|size|capacity|available)"
    rf"|\bexceed\w* (?:the )?(?:total|available|free|physical|system) (?:\w+ )?{_MEMORY}"
    rf"|\b(?:fail\w*|unable|cannot|can't|could(?: not|n't))(?: to)? (?:alloc\w*|reserve|obtain) (?:[\w.]+ ){{0,5}}"
    rf"{_MEMORY}(?! (?:info|usage|stat|map))"
    rf"|\balloc\w* (?:\w+ ){{0,3}}{_MEMORY} (?:has |was )?(?:fail|refused)"
    rf"|\bmemory[ _]alloc\w*[ _](?:\w+ ){{0,2}}(?:fail|error)|\b(?:buffer|array|tensor|block|heap) allocation (?:failed|error)"
    rf"|\bbad allocation\b"
    rf"|\b{_MEMORY} (?:limit|quota|budget)\b.{{0,20}}(?<!not )\b(?:exceed|reached)"
    rf"|(?<!['\"`])\bOutOfMemory\w*|\bbad_alloc\b|\bAllocError\b"
)
# A failed allocation of something: a lack of memory if a size stands next to it.
_ALLOCATION = re.compile(
    r"(?i)\b(?:\w{0,10}[a-z_])?alloc(?:at\w*)?\b.{0,60}?\b(?:fail\w*|refused|denied|impossible|not possible)"
    r"|\b(?:fail\w*|unable|cannot|can't|can not|could(?: not|n't)|error)\b.{0,24}?\b(?:alloc(?:at\w*)?|reserv(?:e|ing)"
    r"|malloc)\b|\bexceed\w*\b(?! \d+ ?% of)[^%]{0,40}?\balloc\w*|\barray exceeds maximum\b"
    r"|\bcould(?: not|n't) be (?:allocated|reserved)\b"
)
_OF_FILES = re.compile(r"(?i)\b(?:download\w*|files?|dataset|quota|disk|storage|space)\b")
_ONLY = re.compile(r"(?i)\b(?:but|only|exceed\w*|(?:larger|more|greater|less|smaller) than)\b")
_OTHER_THINGS = re.compile(
    r"(?i)\b(?:ports?|address(?:es)?|ip|pty|tty|inodes?|disk|threads?|pids?|descriptors?|handles?|sockets?|gpus? to|nodes?"
    r"|shared memory|quota for|semaphores?)\b"
)
_DEVICE = re.compile(
    r"(?i)(?<![a-z])(?:gpus?|vram|hbm|video memory|accelerators?|device[ -]memory"
    r"|on (?:[a-z]+ ){0,2}device|metal|mps|vulkan|opencl|sycl"
    r"|level[_-]zero)(?![a-z])"
    r"|(?<![a-z])(?<!/local/)(?:cuda|cudnn|cublas|hip|rocm|xpu|npu|tpu|hpu|ascend|device:\d|torch\.outofmemory|tensorrt"
    r"|nccl|kv[ _-]?cache|rmm\b|thrust::|bfc_allocator|sglang|vllm|w(?:eb)?gpu|webgl"
    r"|directml|dmlexec|pooled_storage_manager|(?-i:G(?:pu|PU)[A-Z])|gpuassert|acl(?:rt|nn)|cnrt|musa"
    r"|(?<!/)nvidia|geforce|[rg]tx ?\d|radeon|intel arc"
    r"|malloc_device|neuron|mindspore|stream_?executor|popart|poplar)|device(?: memory)? alloc|device\(id\b|on card \d"
    r"|(?-i:[a-z](?:Cuda|Gpu|Hip)(?![a-z]))"
)
_MENTIONS = re.compile(
    # Not a part of a path or a name.
    r"(?i)(?<![/.\w-])(?:if|when|avoid|prevent|fix|fixes|usage|try|help|how|after|may|might|often|common|known|see|prone|skipping|means?|against|handles?"
    r"|on oom|in case)\b(?![/\w])|--\w+|^\s*(?:def|class|except|import|assert|if|#)\b"
    # Collectors of garbage and schedulers use the words for what is ordinary to them.
    r"|\b(?:GCs?|scavenge|mark-(?:sweep|compact)|nodes are available|scheduling|failedscheduling)\b"
)

_SENTENCE_END = re.compile(r"(?<!e\.g)(?<!i\.e)(?<!etc)[.!?;]\s|what\(\):\s")

_AROUND = 20
"""How many lines before and after a message are read for the name of a device."""
_HOST = re.compile(r"(?i)\b(?:host|cpu|system|physical|ram|swap|heap|malloc|mmap)\b|(?-i:\bRAM\b)")
# Somebody else ended it, rather than the program itself.
_KILLED = re.compile(
    r"(?i)\b(?:job|worker|container|pod|task|executor|been|was|were|being)"
    r" (?:killed|terminated|evicted|cancell?ed|stopped|ended|reaped)\b|\bkilled \d+ (?:task|process|job|worker)"
)
_WRAPPED = re.compile(r"\b\d{19,20}\b")
"""No size: mostly one below zero, printed as a number of 64 bits without a sign."""
_OTHER_MEMORY = re.compile(r"(?i)\b(?:replay|conversation|chat|agent|episodic|vector) memory")
_IS_QUESTION = re.compile(r"[^.!\n]{0,80}[?？](?:\s|$)")


def names_device(text: str) -> bool:
    """Whether a text names the memory of a device."""
    return _DEVICE.search(text[: figures.LONGEST]) is not None


def _names_device_near(page: LogText, index: int) -> bool:
    """Whether the message, or else a line next to it, or else its traceback names a device."""
    own = page.lines[index].text[: figures.LONGEST]
    if names_device(own) or _HOST.search(own):
        return names_device(own)
    around = page.lines[max(0, index - _AROUND) : index + _AROUND]
    return any(names_device(line.text) for line in around if not line.bar)


def find(page: LogText, known: Container[int]) -> list[Finding]:
    """The lines that likely report a lack of memory, except the `known` ones, which a pattern
    explains."""
    candidates = [index for index, line in enumerate(page.lines) if index not in known and not line.bar and _may_be(line.text)]
    return both_ends(candidates, lambda index: _read(page, index))


def _may_be(text: str) -> bool:
    return any(part in text for part in ("emor", "EMOR", "lloc", "RAM", "HBM", "vailable", "array exceeds"))


def _read(page: LogText, index: int) -> Finding | None:
    line = page.lines[index]
    text = line.text[: figures.LONGEST]
    if text.startswith("##") or _ROW.match(text) or is_mild(line):
        return None
    found = figures.read(text)
    sized = found.requested is not None or _WRAPPED.search(text) is not None
    if not (_is_stated(text) or (sized and _is_refused(text)) or _exceeds(found, text)):
        return None
    kind = Kind.GPU_OOM if _names_device_near(page, index) else Kind.HOST_OOM_ALLOC
    if kind is Kind.HOST_OOM_ALLOC and _KILLED.search(text):
        kind = Kind.HOST_OOM_KILLED
    return Finding(kind, None, UNCERTAIN, Weight.LIKELY, figures=found, line=index, last_line=index)


def _is_stated(text: str) -> bool:
    """Whether a line states a lack of memory in so many words."""
    words = _SHORT_OF_MEMORY.search(text)
    if words is None or _OTHER_MEMORY.search(words[0]):
        return False
    return not _is_mentioned(text[: words.start()]) and _IS_QUESTION.match(text, words.end()) is None


def _is_refused(text: str) -> bool:
    """Whether a line reports that something was not allocated."""
    words = _ALLOCATION.search(text)
    if words is None or _is_mentioned(text[: words.start()]):
        return False
    return _OTHER_THINGS.search(text, words.start(), words.end() + 40) is None


def _exceeds(found: Figures, text: str) -> bool:
    """Whether a line says that more was requested than is free: `requested 12 GiB, but only 8 GiB
    are available`."""
    words = _ONLY.search(text)
    if not re.search(_MEMORY, text, re.IGNORECASE) or _OF_FILES.search(text):
        return False
    more = found.requested is not None and found.free is not None and found.requested > found.free
    return more and words is not None and not _is_mentioned(text[: words.start()])


def _is_mentioned(before: str) -> bool:
    before = _SENTENCE_END.split(before)[-1]
    return is_supposed(before) or _MENTIONS.search(before) is not None


# --- errors in a list -----------------------------------------------------------------------------

_ROW = re.compile(r"\|.*\|")
_ITEM = re.compile(r"\s*(?:[-*•·–]|\|(?=.*\|)|\d{1,2}[.)])\s+['\"`*]{0,3}(?=\S)")
_NEAR = 4
# A list names its errors; a sentence tells about one.
_WITHIN_SENTENCE = re.compile(r"(?i)\b(?:I|we|my|keeps?|always) (?:\w+ ){0,2}(?:get|gets|getting|got|see|receive)\b")
_OTHER_ERROR = re.compile(r"[Ee]rror|[Ee]xception|Killed|[Mm]emory|OOM|timeout")


def is_listed(page: LogText, finding: Finding) -> bool:
    """Whether the message is an item of a list of errors, as advice and summaries print it. A
    message with several figures is none."""
    line = page.lines[finding.line]
    item = _ITEM.match(line.shown)
    if item is None or finding.kind is Kind.NOT_MEMORY or finding.figures.known > 1 or _WITHIN_SENTENCE.search(line.shown):
        return False
    if any(TRACEBACK in each.text for each in [*page.context(finding.line), *page.lines[finding.line : finding.line + 3]]):
        return False
    near = page.lines[max(0, finding.line - _NEAR) : finding.line + _NEAR + 1]
    return any(each is not line and _same_list(item, each) for each in near)


def _same_list(item: re.Match[str], line: LogLine) -> bool:
    other = _ITEM.match(line.shown)
    return other is not None and other[0].strip()[:1] == item[0].strip()[:1] and _OTHER_ERROR.search(line.shown) is not None
