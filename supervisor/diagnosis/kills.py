"""Kills that a log reports: the kernel's records, the word that a shell prints, and the commands
that kill a program."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from memtop.supervisor.diagnosis.finding import NO_FIGURES, SUSPECTED, UNCERTAIN, Finding, Weight, both_ends
from memtop.supervisor.diagnosis.text import JoinedLines, LogLine, LogText
from memtop.supervisor.diagnosis.values import Kind

VICTIM = re.compile(r"Kill(?:ed)?process(\d{1,10}),?\(([^)]{1,40})\)|oom-kill:.{0,400}?task=([^,]{1,40}),pid=(\d{1,10})")
_LIMIT = re.compile(r"memory:usage\d{1,20}kB,limit(\d{1,20})kB,failcnt")
_UNLIMITED = 1 << 60
"""The kernel prints a number above this for a group without a limit."""
_OF_KERNEL = re.compile(
    r"\s*\[[^\]]{4,40}\]|.{0,60}\bkernel: |oom_reaper: |Memory cgroup out of memory|oom-kill:|Out of memory|Killed process"
)
_INVOKED = re.compile(r"invokedoom-killer:")
_MOST_VICTIMS = 60
_REPORT = 20_000
"""How many characters of the kernel's report can stand between the limit and the record."""
_OURS = re.compile(
    r"python|pt_data|pt_main|torchrun|deepspeed|ray::|train|accelerate|jupyter|ipykernel|mpirun|horovod", re.IGNORECASE
)
_NAMED_PIDS = re.compile(
    r"\bpid[=:( ]\s*(\d{2,10})|worker \(pid\(?s?\)? (\d{2,10})|local_rank: \d+ \(pid: (\d+)|Process (\d{2,10})\b"
)


def of_kernel(view: JoinedLines, page: LogText, member_pids: frozenset[int]) -> Iterator[Finding]:
    """The kernel's records. The victim can be another program: compare its pid, or else its
    name."""
    matches = list(VICTIM.finditer(view.text))
    if len(matches) > _MOST_VICTIMS:
        matches = matches[: _MOST_VICTIMS // 2] + matches[-_MOST_VICTIMS // 2 :]
    if not matches:
        yield from (_unknown_victim(view.line_at(match.start())) for match in list(_INVOKED.finditer(view.text))[-1:])
        return
    # The lines of the records themselves, which can be folded.
    indices = {
        index for match in matches for index in range(view.line_at(match.start()) - 1, view.line_at(match.end() - 1) + 3)
    }
    victims = {match[1] or match[4] for match in matches}
    known = member_pids | _pids(line.text for index, line in enumerate(page.lines) if index not in indices)
    for match in matches:
        pid, name = int(match[1] or match[4]), match[2] or match[3]
        line = view.line_at(match.start())
        ours = pid in known or (not member_pids and bool(_OURS.search(name)))
        if not ours and not member_pids and len(victims) == 1 and _is_kernel_log(page):
            yield _unknown_victim(line)
            continue
        yield Finding(
            kind=Kind.HOST_OOM_KILLED if ours else Kind.NOT_MEMORY,
            reason=None if ours else "oom_kill_of_other_process",
            confidence=0.97 if ours else 0.8,
            weight=Weight.CAUSE if ours else Weight.TERMINATED,
            phase="data" if name.startswith("pt_data") else "unknown",
            figures=replace(NO_FIGURES, allowed=_limit_of_group(view, match.start())),
            line=line,
            last_line=line,
        )


def _is_kernel_log(page: LogText) -> bool:
    """Whether all lines are the kernel's: then a single victim is likely the program that is
    meant."""
    lines = [line for line in page.lines if line.text.strip()]
    invoked_by_ours = any("invoked oom-killer" in line.text and _OURS.search(line.text) for line in lines)
    return not invoked_by_ours and all(_OF_KERNEL.match(line.shown) for line in lines)


def _limit_of_group(view: JoinedLines, end: int) -> int | None:
    """The limit of the memory group that was full, from the kernel's report in front of its
    record."""
    start = max(0, end - _REPORT)
    begin = max((match.end() for match in _INVOKED.finditer(view.text, start, end)), default=start)
    found = list(_LIMIT.finditer(view.text, begin, end))
    limit = int(found[-1][1]) << 10 if found else _UNLIMITED
    return limit if limit < _UNLIMITED else None


def _unknown_victim(line: int) -> Finding:
    """The kernel's record of a lack of memory, if the program may be the killed one."""
    return Finding(Kind.HOST_OOM_KILLED, None, UNCERTAIN, Weight.LIKELY, "unknown", line=line, last_line=line)


def _pids(texts: Iterable[str]) -> set[int]:
    found: set[int] = set()
    for text in texts:
        if "pid" in text or "Process" in text:
            found |= {int(number) for groups in _NAMED_PIDS.findall(text) for number in groups if number}
    return found


_KILLED_LINE = re.compile(
    r"(?:\[[\w.:-]{1,30}\]\s*)?"
    r"[*_`]{0,3}Killed(?:: 9)?[*_`]{0,3}$|zsh: killed\b|Killed (?!process\b|by\b)\S+ ?\S{0,40}$"
)
"""The word as shells print it."""
_AFTER_PROGRESS = re.compile(r"(?:[\d%\])|█-▏=>#.]|\d%\|[^|]{0,300})Killed(?:: 9)?$")
"""The same behind a progress bar or a step that had no end of line yet."""
_LONGEST_KILLED = 120


def of_shell(view: JoinedLines) -> Iterator[Finding]:
    """The one word that a shell prints, perhaps followed by the command."""
    short = (index for index, line in enumerate(view.lines) if len(line.text) < _LONGEST_KILLED)
    found = [index for index in short if _KILLED_LINE.match(view.lines[index].text)]
    found += [
        index
        for index, line in enumerate(view.lines)
        if line.text.endswith(("Killed", "Killed: 9")) and _AFTER_PROGRESS.search(line.text)
    ]
    yield from both_ends(
        sorted(found),
        lambda index: Finding(
            Kind.HOST_OOM_KILLED,
            confidence=SUSPECTED,
            weight=Weight.KILLED,
            phase="unknown",
            line=index,
            last_line=index,
        ),
    )


# Commands that kill a program, as a terminal shows them.
_BY_HAND = re.compile(
    r"^(?:\S{0,40}[$#+>%]\s*)?(?:sudo )?(?:kill (?:-9|-KILL|-s KILL)|p?kill(?:all)? -(?:9|KILL|SIGKILL)"
    r"|(?:docker|podman)(?:[ -]compose)? (?:\S+ ){0,4}(?:kill|stop|restart|rm -f)\b|kubectl delete|scancel|qdel|bkill"
    r"|(?:\S+ ){0,5}supervisorctl (?:restart|stop))\b"
)
_COMMAND_NEAR = 8
# Compose stops all containers, and kills those that do not end in time.
_STOPPING_ALL = re.compile(r"^(?:\^C)?(?:Gracefully stopping\.\.\.|Aborting on container exit)")


def by_hand(context: Sequence[LogLine]) -> bool:
    commanded = any(_BY_HAND.search(line.shown.strip()[:200]) for line in context[-_COMMAND_NEAR:])
    return commanded or any(_STOPPING_ALL.match(line.shown) for line in context)
