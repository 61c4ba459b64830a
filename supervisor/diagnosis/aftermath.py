"""Whether the program went on after what was found: a complete message does not mean a failed run."""

from __future__ import annotations

import re

from memtop.supervisor.diagnosis.cleaning import Line
from memtop.supervisor.diagnosis.finding import Finding, Weight
from memtop.supervisor.diagnosis.page import Page
from memtop.supervisor.diagnosis.values import Kind

# As much as a program's standard output may still hold when its error stream is already in the log.
_BUFFER = 8 << 10
_NEAR = 12

_RECOVERY = re.compile(
    r"(?i)batch[ _-]?size (?:will be |is |was )?(?:automatically )?(?:decreased|reduced|halved|lowered)|(?:decreas|reduc|halv|lower)ing (?:the )?(?:auto )?(?:micro)?[ _-]?batch(?:[ _-]?size)? (?:from|to|by)"
    r"|(?:recover(?:ed|ing)?|attempting to recover) from (?:an? )?(?:cuda )?(?:oom|out[- ]of[- ]memory)|batch size \d+ (?:failed|succeeded), trying|trying (?:with )?(?:a )?(?:smaller )?batch[ _-]?size|"
    r"(?<!not )(?<!no )\bretry(?:ing)?\b(?! (?:limit|count|failed|exceeded))|skip(?:ping|ped) (?:this |the )?(?:batch|sample|step|update|request|image|file|item)|trigger(?:ing|ed) (?:global )?restart|restart(?:ed)? (?:completed|succeeded|successful)"
    r"|fall(?:ing|s)? back to|falling back|will (?:be )?retr(?:y|ied)|switching to (?:cpu|tiled|smaller)|continuing (?:with|training|without)|ignored?,? continuing"
)
_GAVE_UP = re.compile(
    r"(?i)giving up|gave up|retr(?:y|ies) (?:limit|exhausted|failed|exceeded)|max(?:imum)? retries|no executable batch size|could not recover|unable to recover|failed after \d+"
)
_COMPLETED = re.compile(
    r"(?i)\bcompleted: true\b|training (?:has |is |was )?(?:successfully )?(?:complete|completed|finished|done)\b|'train_runtime'|\btrain_runtime\s*=|training completed|finished training|`?max_(?:steps|epochs)=\d+`? reached|all epochs (?:done|completed)"
)
_STEP = re.compile(
    r"(?i)(?:\b(?:step|iter|iteration|update|epoch|global_step|batch)s?\b[^0-9a-z]{0,4}\d+.*(?:loss|ppl|acc|lr|it/s|s/it|wps|tokens|time|elapsed|eta|\d\s*%))|^\W{0,2}\s*\d+\s*/\s*\d+\W|[\[(]\s*\d+\s*/\s*\d+\s*[\])]|'loss':|\"loss\":|\btrain_loss\b\W{1,3}\d"
)
_BAR_COUNT = re.compile(r"%\|[^|]*\|\s*(\d+)")
_RAISED = re.compile(r"^(?:E\s+)?(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)\b")
_MILD = re.compile(r"\b(?:WARNING|WARN|INFO|DEBUG|UserWarning|RuntimeWarning)\b")

_FROM_OUTSIDE = (Kind.HOST_OOM_KILLED,)
# Ends by their nature, whatever other ranks or buffers print after them.
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


def completed(page: Page) -> bool:
    return any(_COMPLETED.search(line.text) for line in page.lines)


def went_on(page: Page, finding: Finding, until: int) -> str | None:
    """`oom_retried`, `oom_handled`, or None where it may have ended the program. `until`: where the next failure begins."""
    if finding.kind in _FROM_OUTSIDE or (finding.reason in _ENDS) or finding.weight < Weight.BROKEN:
        return None
    here = page.lines[finding.line]
    after = page.lines[finding.last_line + 1 : until]
    near = [*page.lines[max(0, finding.line - 1) : finding.last_line + 1], *after[:_NEAR]]
    if finding.kind is not Kind.NOT_MEMORY and any(_RECOVERY.search(line.text) for line in near):
        # The words of giving up may also come after the last of several tries.
        if not any(_GAVE_UP.search(line.text) for line in [*near, *page.lines[until : until + _NEAR]]):
            return "oom_retried"
    steps = sum(_is_step(line) for line in after)
    raised = _RAISED.match(here.text) is not None and not _MILD.search(here.shown[:120])
    if not raised:
        return "oom_handled" if steps else None
    distance = after[-1].at - page.lines[finding.last_line].at if after else 0
    return "oom_handled" if steps >= 2 and distance > _BUFFER else None


def _is_step(line: Line) -> bool:
    if line.bar:
        count = _BAR_COUNT.search(line.text)
        return count is not None and int(count[1]) > 0
    return _STEP.search(line.text) is not None
