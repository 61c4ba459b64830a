"""Whether the program went on after a failure: a complete message does not mean that the run
failed."""

from __future__ import annotations

import re
from bisect import bisect_left

from memtop.supervisor.diagnosis.finding import Finding, Weight
from memtop.supervisor.diagnosis.text import TRACEBACK, LogLine, LogText
from memtop.supervisor.diagnosis.values import Kind

# How many bytes standard output can still hold back when the error stream is already in the log.
_BUFFER = 8 << 10
_NEAR = 12
_MANY_STEPS = 3
# How many lines around a message are compared, and how many lines are few.
_LOOP = 30
_FEW = 3
_LONG_TRACEBACK = 200
# A size in words that a person reads.
_SIZE = re.compile(r"\d ?[KMGT](?:i?B)?\b")
_WITH_NUMBER = re.compile(r"\S*\d\S*")
_WORD = re.compile(r"[^\W\d]{4,}")
# The words in front of the first number of a line, and what runs at the same time.
_PARALLEL = re.compile(r"(?i)\b(?:ranks?|workers?|process|nodes?|gpus?|devices?|local|threads?|hosts?|pid|port)\s*$")
_COUNTED = re.compile(r"([^\W\d]{4,20} (?:[^\W\d]{2,20} ){0,4})(\d{1,9})(?![\w.])")

# Words for going on after a lack of memory.
_RECOVERY = re.compile(
    r"(?i)batch[ _-]?size (?:will be |is |was )?(?:automatically )?(?:decreased|reduced|halved|lowered)"
    r"|(?:decreas|reduc|halv|lower)ing (?:the )?(?:auto )?(?:micro)?[ _-]?batch(?:[ _-]?size)? (?:from|to|by)"
    r"|(?:recover(?:ed|ing)?|attempting to recover) from (?:an? )?(?:cuda )?(?:oom|out[- ]of[- ]memory)"
    r"|batch size \d+ (?:failed|succeeded), trying|trying (?:with )?(?:a )?(?:smaller )?batch[ _-]?size"
    r"|(?:attempting|trying) to free (?:up )?(?:some )?memory|reclaiming memory"
    r"|skip(?:ping|ped) tactic"
    r"|trigger(?:ing|ed) (?:global )?restart|restart(?:ed)? (?:completed|succeeded|successful)|attempts? left; will restart"
)
# Words for going on after anything: they count on the message's own line, or where steps follow.
_ANOTHER_TRY = re.compile(
    r"(?i)(?<!not )(?<!no )\bretry(?:ing)?\b(?! (?:limit|count|failed|exceeded))|will (?:be )?retr(?:y|ied)"
    r"|(?:skip(?:ping|ped)|discard(?:ing|ed)?) (?:this |the )?(?:batch|sample|step|update|request|image|file|item)"
    r"|fall(?:ing|s)? back to|falling back|switching to (?:cpu|tiled|smaller)|continuing (?:with|training|without|anyway)"
    r"|ignored?,? continuing|\bmemory\b.{0,80}[.;,] will [^.]{1,60} instead\b"
    r"|^skip(?:ped|ping)? \S{1,80} (?:due to|because of)\b[^:]{0,40}:\s*$"
)
# A program can do without page-locked memory.
_DOES_WITHOUT = re.compile(
    r"(?i)\bfall(?:s|ing)? back|\bfell back|(?:safely|can) (?:be )?ignored?"
    r"|\b(?:started|ready|listening|loaded|running) (?:in|on|at)\b|startup complete|\bloaded runners\b"
)
_GAVE_UP = re.compile(
    r"(?i)giving up|gave up|retr(?:y|ies) (?:limit|exhausted|failed|exceeded)|max(?:imum)? retries|no"
    r" executable batch size|could not recover|unable to recover|failed after \d+"
)
_COMPLETED = re.compile(
    r"(?i)\bcompleted: true\b|training (?:has |is |was )?(?:successfully )?(?:complete|completed"
    r"|finished|done)\b|'train_runtime'|\btrain_runtime\s*=|training completed|finished training"
    r"|`?max_(?:steps|epochs)=\d+`? reached|all epochs (?:done|completed)"
)
# The last line of a program that reports its normal end.
_DONE = re.compile(r"(?i)(?:[\d:,./ -]{8,30})?\W*(?:all )?(?:done|finished|completed)(?: successfully)?\W*$")
_HAS_DONE = re.compile(r"(?i)(?<!not )\b(?:finished|completed|saved|succeeded|successful\w*)\b")
_READY = re.compile(r"(?<!not )(?:\bREADY\b|\bready\b(?: \(|$|\.))")
_FAILS = re.compile(r"\b(?:ERROR|FATAL|CRITICAL)\b|\[[EF]\]|\b[Ee]rror\b ?[:\[]|\b(?:could not|failed to|cannot) \w+")
_TROUBLE = re.compile(
    r"(?i)error|exception|traceback|fail|abort|killed|core dumped|segfault|fault\b|exit|memory|oom|panic|assert"
)
_NAMES_AN_END = re.compile(r"(?:Error|Exception)\b|(?i:\b(?:fatal|abort|panic|terminat|core dump))")
# Lines that belong to a message: frames, lists, quotations, advice.
_EXPLAINS = re.compile(
    r"^\s*(?:\[bt\]|\(?\d+[.)\s]|[-*#>`|@{}<\"'=~]|(?:at|in|File|frame|Stack|backtrace)\b)"
    r"|(?i:\b(?:please|solutions?|suggest|advice|recommend|consider|note|hint|tip|try|see|if)\b)"
)
# What a program or a scheduler prints at any end.
_OF_AN_END = re.compile(
    r"(?i)^\s*wandb:|\b(?:finish\w*|ended|released?|elapsed|wall ?time|cpu time|unload\w*|shutting|shut ?down|exiting|clean\w*"
    r"|clos(?:ed|ing)|terminated|stopp(?:ed|ing)|bye|real|user|sys|total|perf\w*|timings?|statistics|summary)\b"
)
_EPOCH_DONE = re.compile(r"(?i)\bepoch\W{0,4}\d+\b.{0,60}?\b(?:done|finished|completed?)\b|\bcompleted epoch \d+")
_STEP = re.compile(
    r"(?i)(?:\b(?:step|iter|iteration|update|epoch|global_step|batch)s?\b[^0-9a-z]{0,4}\d+.{0,300}(?:loss"
    r"|ppl|acc|lr|it/s|s/it|wps|tokens|time|elapsed|eta|\d\s*%))|^\W{0,2}\s*\d+\s*/\s*\d+(?!/| \d\d:\d\d:\d\d)\W"
    r"|[\[(]\s*\d+\s*/\s*\d+\s*[\])]|'loss':|\"loss\":|\btrain_loss\b\W{1,3}\d|(?<!\w)loss['\"]?\s?[:=]\s?\d"
)
# Characters of a line that are searched: a report of a step names it early, and a line can hold a
# thousand counts.
_STEP_WITHIN = 1000
_TRANSFER = re.compile(r"(?i)\W{0,4}(?:download|upload|fetch|copy|extract)ing\b")
_BAR_COUNT = re.compile(r"%\|[^|]*\|\s*(\d+)")
_RAISED = re.compile(r"^(?:E\s+)?(?:[A-Za-z_]\w*\.)*_?[A-Z]\w*(?:Error|Exception)\b|^terminate called|^\s*what\(\):")
_MILD = re.compile(
    r"^[Ww]arning:|[:)] warning ?:|\blevel=(?:warn|info)|^W: |^[Cc]aught (?:an? )?(?:exception|error)\b"
    r"|\b(?:WARNING|WARN|INFO|DEBUG|\w*Warning)\b|\[(?:warn|warning|info|debug)\]|\[W\b|: [WI] (?=[\w./])|^[WI]\d{4} |dlerror"
)

_FROM_OUTSIDE = (Kind.HOST_OOM_KILLED,)
# Failures that always end the program, whatever other ranks or buffers print after them.
_ENDS = frozenset(
    {
        "sigterm",
        "keyboard_interrupt",
        "preempted",
        "time_limit",
        "cancelled",
        "segfault",
        "nccl_timeout",
        "node_failure",
        "loss_nan",
    }
)


class StepLines:
    """The lines of a log that report training steps."""

    def __init__(self, page: LogText) -> None:
        self._page = page
        self._steps = [index for index, line in enumerate(page.lines) if _is_step(line)]
        self.completed = any(_COMPLETED.search(line.text) for line in page.lines)
        """Whether the program reports that its training is complete."""

    def between(self, start: int, end: int) -> tuple[int, int]:
        """How many steps two lines have between them, and about how many bytes after the first line
        the last of them is."""
        first, last = bisect_left(self._steps, start), bisect_left(self._steps, end)
        if first == last:
            return 0, 0
        return last - first, self._page.lines[self._steps[last - 1]].at - self._page.lines[start - 1].at

    def tried_in_vain(self, line: int) -> bool:
        """Whether the last announcement of another try, next to a failure at this line or later, is
        followed by an error and by no step."""
        lines = self._page.lines
        tries = (index for index in range(len(lines) - 1, max(0, line - 1) - 1, -1) if _says_another_try(lines[index]))
        last = next(tries, line) + 1
        return self.between(last, len(lines))[0] == 0 and _fails_again(lines[last:])


def _fails_again(lines: list[LogLine]) -> bool:
    """Whether lines after an announcement of another try report an error about memory, or a
    traceback that was cut before its error."""
    raised = [index for index, line in enumerate(lines) if _RAISED.match(line.text)]
    traced = max((index for index, line in enumerate(lines) if TRACEBACK in line.text), default=-1)
    cut = traced >= 0 and not any(index > traced for index in raised)
    return cut or any("emory" in lines[index].text for index in raised) or _any_matches(_FAILS, lines)


def _says_another_try(line: LogLine) -> bool:
    return _RECOVERY.search(line.text) is not None or _ANOTHER_TRY.search(line.text) is not None


def seems_survived(page: LogText, finding: Finding) -> str | None:
    """The last line after a failure that suggests that the program went on, or None: it reports
    completion, or the message is no exception and only ordinary output follows it.

    It is a suspicion: buffered output can appear late, and the line can be about another program.
    """
    here, after = page.lines[finding.line], page.lines[finding.last_line + 1 :]
    raised = _RAISED.match(here.text) is not None and not is_mild(here)
    for line in reversed(after):
        if _COMPLETED.search(line.text) or (not raised and _EPOCH_DONE.search(line.text)):
            return line.shown.strip()
    if _is_logged(page, finding):
        after = [line for line in after if not _FAILS.search(line.text)]
    elif raised or _NAMES_AN_END.search(here.text) or has_traceback(page, finding):
        return None
    if _any_matches(_FAILS, after) or _any_matches(_TROUBLE, after):
        return None
    ordinary = [
        line
        for line in after
        if is_ordinary(line) and not any(each.search(line.shown) for each in (_SIZE, _EXPLAINS, _OF_AN_END))
    ]
    return ordinary[-1].shown.strip() if len(ordinary) >= _FEW - 1 else None


def has_traceback(page: LogText, finding: Finding) -> bool:
    """Whether a traceback leads to the message."""
    return any(TRACEBACK in line.text for line in page.context(finding.line))


def _is_logged(page: LogText, finding: Finding) -> bool:
    """Whether a warning stands directly above the traceback. Programs log an exception that they
    have caught in this way."""
    lines = page.lines[max(0, finding.line - _LONG_TRACEBACK) : finding.line]
    starts = [index for index, line in enumerate(lines) if TRACEBACK in line.text]
    return bool(starts) and starts[-1] > 0 and is_mild(lines[starts[-1] - 1])


def is_mild(line: LogLine) -> bool:
    """Whether the line is logged as a warning or less."""
    return _MILD.search(line.shown[:120]) is not None


# How a message closes after which the program goes on.
_GOES_ON = re.compile(
    r"(?i)[;,.:(] (?:(?:it|we|will|is|was|be|now) ){0,4}"
    r"(?:trying (?:the |an? )?(?:next|another|other|smaller|fewer|lower|half|tiles?|cpu)|skipping|splitting|rebalancing"
    r"|disabling|spill(?:ing|ed)|retracting|truncat(?:ing|ed)|restart(?:ing|ed)|evicting|moving|offloading"
    r"|using (?:[\w-]+ ){1,4}instead|using (?:math|sliced|slow\w*) attention"
    r"|using (?:the |an? )?(?:cpu|disk|host|small\w*|default\w*|lower|slower|fallback|system|swap))\b"
    r"|; (?:[\w-]+ ){1,3}(?:disabled|skipped)\b"
)
_AN_EARLIER_ONE = re.compile(r"(?i)\b(?:previous|last|earlier) (?:job|worker|container|pod|task|process|run|attempt|session)\b")
_NCCL_ERROR = "NCCL WARN"
"""How NCCL reports errors: it has no higher level."""
_OF_WORDS, _KILL_OF_WORDS = 0.9, 0.8
"""The most confidence of patterns that match ordinary words, and not a code or a size."""


def is_taken_lightly(finding: Finding, here: LogLine) -> bool:
    """Whether the message is a warning in ordinary words, or says itself that the program goes
    on."""
    killed, page_locked = finding.kind is Kind.HOST_OOM_KILLED, finding.kind is Kind.PINNED_HOST_OOM
    exact = finding.confidence > (_KILL_OF_WORDS if killed else _OF_WORDS)
    if finding.kind is Kind.NOT_MEMORY or (exact and not page_locked):
        return False
    if is_mild(here) and _NCCL_ERROR not in here.text and (page_locked or finding.figures.known == 0):
        return True
    goes_on = _RAISED.match(here.text) is None and _GOES_ON.search(here.text) is not None
    return goes_on or (killed and _AN_EARLIER_ONE.search(here.text) is not None)


def went_on(page: LogText, progress: StepLines, finding: Finding, until: int, *, failed: bool) -> str | None:
    """How the program went on after the finding: `oom_retried` or `oom_handled`; None if it can
    have ended the program.

    `until`: the line where the next failure begins; `failed`: the program is known to have failed.
    """
    if finding.reason in _ENDS or finding.weight < Weight.BROKEN:
        return None
    if finding.kind in _FROM_OUTSIDE:
        # Many programs can do without what a killed compiler was building, but no data loader
        # without its workers.
        helper = finding.weight is Weight.ERROR and finding.phase != "data"
        return "oom_handled" if helper and progress.between(finding.last_line + 1, until)[0] >= _MANY_STEPS else None
    here = page.lines[finding.line]
    if finding.kind is Kind.PINNED_HOST_OOM and (
        _any_matches(_DOES_WITHOUT, page.lines[finding.last_line : until]) or (not failed and _ends_well(page, finding, until))
    ):
        return "oom_handled"
    after = finding.last_line + 1
    # The line above can say that the program goes on, but not where an exception follows it.
    raised = any(TRACEBACK in line.text for line in page.lines[after : after + 1])
    own = page.lines[finding.line if raised else max(0, finding.line - 1) : after]
    steps, distance = progress.between(after, until)
    if finding.kind is not Kind.NOT_MEMORY:
        # The program can also report that it gives up after the last of several tries.
        near, late = page.lines[after : min(until, after + _NEAR)], page.lines[until : until + _NEAR]
        earlier = page.lines[max(0, finding.line - _NEAR) : finding.line]
        tried = _any_matches(_RECOVERY, [*own, *near]) or _any_matches(_ANOTHER_TRY, [*own, *near] if steps else own)
        if tried and not _any_matches(_GAVE_UP, [*earlier, *own, *near, *late]) and not progress.tried_in_vain(finding.line):
            return "oom_retried"
    if is_mild(here) or _RAISED.match(here.text) is None:
        if finding.kind is not Kind.NOT_MEMORY and not failed and _seems_handled(page, finding, until):
            return "oom_handled"
        # One line can be another thread's. A warning says itself that the program goes on.
        return "oom_handled" if steps >= (_MANY_STEPS if failed else 1 if is_mild(here) else 2) else None
    # Output that was still buffered when the error was written follows it; more than a buffer was
    # computed later.
    return "oom_handled" if steps >= 2 and distance > _BUFFER else None


def _seems_handled(page: LogText, finding: Finding, until: int) -> bool:
    """Whether the lines after a message that is no exception show that the program handled it."""
    if _does_the_same_again(page, finding, until):
        return True
    after = page.lines[finding.last_line + 1 :]
    if until == len(page.lines) and after and (_DONE.match(after[-1].text) or after[-1].shown.lstrip().startswith("100%|")):
        return not _any_matches(_FAILS, after) and not _any_matches(_TROUBLE, after)
    if until == len(page.lines) and not _is_of_exception(page, finding) and _succeeds(after):
        return True
    return is_mild(page.lines[finding.line]) and _ends_well(page, finding, until)


def _is_of_exception(page: LogText, finding: Finding) -> bool:
    """Whether the message names an exception, or repeats the message of one just above."""
    above = page.lines[max(0, finding.line - 2 * _FEW) : finding.line]
    raised = any(_RAISED.match(line.text) and "emory" in line.text for line in above)
    return raised or _NAMES_AN_END.search(page.lines[finding.line].text) is not None


def _succeeds(after: list[LogLine]) -> bool:
    """Whether one of the last lines reports success, and no line reports a failure."""
    ends = [line for line in after if line.text.strip()][-_FEW:]
    others = [line for line in ends if not _is_success(line)]
    return len(others) < len(ends) and not _any_matches(_FAILS, after) and not _any_matches(_TROUBLE, others)


def _is_success(line: LogLine) -> bool:
    """Whether a program reports that it is ready, or at a level of its own log that it has done its
    work. Any batch script prints "finished"."""
    return _READY.search(line.text) is not None or (is_mild(line) and _HAS_DONE.search(line.text) is not None)


def _does_the_same_again(page: LogText, finding: Finding, until: int) -> bool:
    """Whether a line after the message reports the same work as one before it, with other numbers:
    `reading 3.jpg`, the message, `reading 4.jpg`."""
    lines = page.lines[max(0, finding.line - _LOOP) : finding.line]
    before, texts = {_work(line) for line in lines} - {None}, {line.text for line in lines}
    counted = {_count(line) for line in lines} - {None}
    after = page.lines[finding.last_line + 1 : min(until, finding.last_line + 1 + _LOOP)]
    return any((_work(line) in before and line.text not in texts) or _count(line, -1) in counted for line in after)


def is_repeated(page: LogText, earlier: Finding, finding: Finding) -> bool:
    """Whether a message about memory that is no exception has the words of an earlier one: a
    program that survived one of them may have survived the other, too."""
    one, other = page.lines[earlier.line].text, page.lines[finding.line].text
    same = earlier.line < finding.line and _WITH_NUMBER.sub("#", one) == _WITH_NUMBER.sub("#", other)
    return same and finding.kind is not Kind.NOT_MEMORY and _RAISED.match(other) is None


def is_ordinary(line: LogLine) -> bool:
    """Whether the line is neither part of a traceback nor about a failure."""
    about_failure = _FAILS.search(line.text) or _TROUBLE.search(line.text) or is_mild(line)
    return not about_failure and not line.shown[:1].isspace() and _WORD.search(line.text) is not None


def _work(line: LogLine) -> str | None:
    """What a line reports, without its numbers. None for a line without a number or without a
    word, and for one that is part of a traceback or about a failure."""
    if line.bar or not is_ordinary(line):
        return None
    work, numbers = _WITH_NUMBER.subn("#", line.text[:_STEP_WITHIN].strip())
    return work if numbers and _WORD.search(work) else None


def _count(line: LogLine, add: int = 0) -> tuple[str, int] | None:
    """The words in front of the first number of an ordinary line, and that number plus `add`:
    `Running stage 2: faces` comes after `Running stage 1: restoration`."""
    match = _COUNTED.match(line.text) if not line.bar and is_ordinary(line) else None
    return None if match is None or _PARALLEL.search(match[1]) else (match[1], int(match[2]) + add)


def _ends_well(page: LogText, finding: Finding, until: int) -> bool:
    """Whether several lines follow the message up to the end of the log, and none of them is about
    a failure."""
    after = page.lines[finding.last_line + 1 : until]
    own = [line for line in after[:_LOOP] if line.text.strip() and not line.shown[:1].isspace()]
    if finding.kind.of_gpu:
        own = [line for line in own if not _SIZE.search(line.text)]  # they explain the message
    if until < len(page.lines) or len(own) < _FEW or _RAISED.match(page.lines[finding.line].text):
        return False
    return not any(_FAILS.search(line.text) or _TROUBLE.search(line.text) or is_mild(line) for line in after)


def _is_step(line: LogLine) -> bool:
    if line.text.startswith("wandb:") or _TRANSFER.match(line.text):
        return False  # a summary repeats the last values, and a transfer is no training
    if line.bar:
        count = _BAR_COUNT.search(line.text)
        return count is not None and int(count[1]) > 0
    return _STEP.search(line.text, 0, _STEP_WITHIN) is not None


def _any_matches(pattern: re.Pattern[str], lines: list[LogLine]) -> bool:
    return any(pattern.search(line.text) for line in lines)
