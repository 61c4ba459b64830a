"""Ends from outside: the kernel's kills, the schedulers', the launchers' words about signals."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from memtop.supervisor.diagnosis.finding import Finding, Shape, Weight, both_ends, not_memory, shape
from memtop.supervisor.diagnosis.page import Page, View
from memtop.supervisor.diagnosis.values import Kind

_KILLED = Kind.HOST_OOM_KILLED
SUSPECTED = 0.4
"""Of SIGKILL alone: a hand's kill -9 prints exactly the same."""

SHAPES: tuple[Shape, ...] = (
    # Schedulers and containers about memory.
    shape(r"(?i:detected \d+ oom[-_]?kill events?)", _KILLED, confidence=0.97),
    shape(r"(?i:task \d+:? out of memory|tasks have been oom killed)", _KILLED, confidence=0.95),
    shape(
        r"(?i:(?:exceeded|over|above) (?:the )?(?:job|step|virtual|requested|its)? (?:memory|vmem|mem)"
        r" (?:limit|usage limit|request))",
        _KILLED,
        confidence=0.93,
    ),
    shape(
        r"(?i:(?:memory|vmem|mem|rss|pmem|pvmem) (?:usage )?\(?\d[\d.]{0,40}[kmg]?b?\)? exceeded (?:the )?(?:limit|request))",
        _KILLED,
        confidence=0.93,
    ),
    shape(r"(?:memory|mem|vmem) .{0,24}? exceeded limit|exceeded memory limit", _KILLED, confidence=0.93, needle="limit"),
    shape(r"TERM_MEMLIMIT|TERM_SWAP", _KILLED, confidence=0.97, needle="TERM_"),
    shape(r"OOM[Kk]illed(?!\"?:? ?\"?(?:false|False|0))", _KILLED, confidence=0.95, needle="OOM"),
    shape(r"(?<!_)OUT_OF_ME(?:MORY|\+)(?!_)", _KILLED, confidence=0.9, needle="OUT_OF_ME"),
    shape(r"node was low on resource:? memory", _KILLED, confidence=0.9, needle="lowonresource"),
    shape(r"killed by (?:the )?OOM[- ]?killer|result 'oom-kill'|systemd-oomd\S{0,20}? [Kk]illed", _KILLED, confidence=0.95),
    shape(r"earlyoom\S{0,40}? sending SIG(?:TERM|KILL) to process", _KILLED, confidence=0.9, needle="earlyoom"),
    shape(r"(?:node )?running low on memory(?!\.?if)", _KILLED, confidence=0.95, needle="lowonmemory"),
    shape(r"ray\.exceptions\.OutOfMemoryError|killed due to memory pressure", _KILLED, confidence=0.95),
    shape(
        r"(?i:(?:replica|container|worker|job|instance|process|pod) .{0,40}? ran out[- ]of[- ]memory)", _KILLED, confidence=0.9
    ),
    shape(r"using all (?:of (?:the|your) )?available RAM", _KILLED, confidence=0.9, needle="availableRAM"),
    shape(r"(?i:cgroup out[- ]of[- ]memory handler)", _KILLED, confidence=0.95),
    shape(
        r"DataLoader worker \(pid\(?s?\)? [\d,]{1,400}\) is killed by signal:? Killed",
        _KILLED,
        weight=Weight.ERROR,  # a launcher kills the workers, too, when it ends a program for another reason
        confidence=0.75,
        phase="data",
        needle="signal:Killed",
    ),
    # A compiler takes gigabytes: the kernel's likely victim, and why an extension was not built. Still words of SIGKILL alone.
    shape(
        r"fatal error: Killed signal terminated program|internal compiler error: Killed|terminated with signal 9 \[Killed\]"
        r"|clang\S{0,20}? error: unable to execute command: Killed|died due to signal 9",
        _KILLED,
        weight=Weight.ERROR,
        confidence=SUSPECTED,
    ),
    # SIGKILL, and nothing about who.
    shape(
        r"exitcode:? -9|exit(?:ed|s)? with (?:return )?code =? ?-9|exit(?:ed)? code:? =?-9",
        _KILLED,
        weight=Weight.KILLED,
        confidence=SUSPECTED,
    ),
    shape(r"return ?code =? ?-9|returned non-zero exit status (?:-9|137)", _KILLED, weight=Weight.KILLED, confidence=SUSPECTED),
    shape(
        r"Signal 9 \(SIGKILL\)|Signals\.SIGKILL|SIGKILL\(-9\)|signal:? killed|signal SIGKILL|signal:? 9|terminated by SIGKILL",
        _KILLED,
        weight=Weight.KILLED,
        confidence=SUSPECTED,
    ),
    shape(
        r"(?i:exit(?:ed)?(?: with)?(?: exit)?(?: status| code):?(?: of)? 137)|\*\*\* \[[^\]]{1,120}\] (?:Killed|Error 137)",
        _KILLED,
        weight=Weight.KILLED,
        confidence=SUSPECTED,
    ),
    shape(r":? line \d+:? \d+ Killed", _KILLED, weight=Weight.KILLED, confidence=SUSPECTED, needle="Killed"),
    shape(r"\[\d+\][+-]? (?:\d+)? Killed", _KILLED, weight=Weight.KILLED, confidence=SUSPECTED, needle="Killed"),
    shape(
        r"worker process managed by the executor was unexpectedly terminated",
        _KILLED,
        weight=Weight.KILLED,
        confidence=SUSPECTED,
        phase="data",
    ),
    shape(
        r"abruptly died during map operation",
        _KILLED,
        weight=Weight.KILLED,
        confidence=SUSPECTED,
        phase="data",
        needle="abruptly",
    ),
    not_memory(
        r"DataLoader worker \(pid\(?s?\)? [\d,]{1,400}\) exited unexpectedly",
        "worker_died",
        weight=Weight.BROKEN,
        confidence=0.5,
        phase="data",
        needle="exitedunexpectedly",
    ),
    # A time limit, a preemption, a person.
    not_memory(
        r"DUE TO PREEMPTION|(?:instance|VM|job|node|pod) (?:was |has been |is being )?(?i:preempt(?:ed|ing))|TERM_PREEMPT",
        "preempted",
        confidence=0.95,
    ),
    not_memory(r"(?i:spot instance (?:interruption|termination|reclaim))", "preempted", confidence=0.9),
    not_memory(
        r"DUE TO TIME LIMIT|TERM_RUNLIMIT|(?i:walltime \S{0,24}? exceeded|exceeded (?:its"
        r" )?wall-?(?:clock)?time)|DeadlineExceeded(?!:)",
        "time_limit",
        confidence=0.95,
    ),
    not_memory(r"DUE TO NODE FAILURE|NODE_FAIL", "node_failure", confidence=0.95),
    not_memory(r"CANCELLED AT|TERM_OWNER|TERM_FORCE_OWNER|TERM_ADMIN", "cancelled", weight=Weight.TERMINATED, confidence=0.8),
    not_memory(r"KeyboardInterrupt", "keyboard_interrupt", confidence=0.93, at_start=True),
    not_memory(r"\[\d+\][+-] Interrupt", "keyboard_interrupt", weight=Weight.TERMINATED, confidence=0.9, needle="Interrupt"),
    not_memory(
        r"got signal:? (?:15|SIGTERM)|SIGTERM death signal|signal:? 15|signal: terminated|exit(?:ed)?"
        r" (?:with )?(?:status|code):? 143|(?:exitcode:?|return code =) ?-15|Signal 15 \(SIGTERM\)|Received SIGTERM",
        "sigterm",
        weight=Weight.TERMINATED,
        confidence=0.85,
    ),
    not_memory(
        r"closing signal SIGTERM|\[\d+\][+-]? Terminated|line \d+: \d+ Terminated",
        "sigterm",
        weight=Weight.TERMINATED,
        confidence=0.7,
    ),
    not_memory(
        r"got signal:? (?:1|2|SIGHUP|SIGINT)|SIG(?:HUP|INT) death signal",
        "interrupted",
        weight=Weight.TERMINATED,
        confidence=0.85,
    ),
    not_memory(
        r"Segmentation fault|SIGSEGV|signal 11|(?:exitcode:?|return code =) ?-11|exit(?:ed)? (?:with )?(?:status|code):? 139",
        "segfault",
        weight=Weight.BROKEN,
        confidence=0.85,
    ),
    not_memory(
        r"\d Bus error|SIGBUS|(?:exitcode:?|return code =) ?-7|exit(?:ed)? (?:with )?(?:status|code):? 135",
        "bus_error",
        weight=Weight.BROKEN,
        confidence=0.5,
    ),
    not_memory(
        r"SIGABRT|(?:exitcode:?|return code =) ?-6|exit(?:ed)? (?:with )?(?:status|code):? 134",
        "aborted",
        weight=Weight.TERMINATED,
        confidence=0.6,
    ),
)

_VICTIM = re.compile(r"Kill(?:ed)?process(\d{1,10}),?\(([^)]{1,40})\)|oom-kill:.{0,400}?task=([^,]{1,40}),pid=(\d{1,10})")
_MOST_VICTIMS = 60
_OURS = re.compile(
    r"python|pt_data|pt_main|torchrun|deepspeed|ray::|train|accelerate|jupyter|ipykernel|mpirun|horovod", re.IGNORECASE
)
_NAMED_PIDS = re.compile(
    r"\bpid[=:( ]\s*(\d{2,10})|worker \(pid\(?s?\)? (\d{2,10})|local_rank: \d+ \(pid: (\d+)|Process (\d{2,10})\b"
)


def kernel_kills(view: View, page: Page, member_pids: frozenset[int]) -> Iterator[Finding]:
    """The kernel's own records. Its victim may be a stranger's process: compared by pid, else by name."""
    matches = list(_VICTIM.finditer(view.text))
    if len(matches) > _MOST_VICTIMS:
        matches = matches[: _MOST_VICTIMS // 2] + matches[-_MOST_VICTIMS // 2 :]
    if not matches:
        return
    # The record's own lines, folded as they may be.
    indices = {
        index for match in matches for index in range(view.line_at(match.start()) - 1, view.line_at(match.end() - 1) + 3)
    }
    known = member_pids | _pids(line.text for index, line in enumerate(page.lines) if index not in indices)
    for match in matches:
        pid, name = int(match[1] or match[4]), match[2] or match[3]
        line = view.line_at(match.start())
        ours = pid in known or (not member_pids and bool(_OURS.search(name)))
        yield Finding(
            line=line,
            kind=_KILLED if ours else Kind.NOT_MEMORY,
            reason=None if ours else "oom_kill_of_other_process",
            weight=Weight.CAUSE if ours else Weight.TERMINATED,
            confidence=0.97 if ours else 0.8,
            phase="data" if name.startswith("pt_data") else "unknown",
            last_line=line,
        )


def _pids(texts: Iterable[str]) -> set[int]:
    found: set[int] = set()
    for text in texts:
        if "pid" in text or "Process" in text:
            found |= {int(number) for groups in _NAMED_PIDS.findall(text) for number in groups if number}
    return found


_KILLED_LINE = re.compile(r"Killed(?:: 9)?$|zsh: killed\b|Killed (?!process\b)\S+ ?\S{0,40}$")


def bare_killed(view: View) -> Iterator[Finding]:
    """The one word that a shell prints, perhaps with the command."""
    if "illed" not in view.text:
        return
    found = [index for index, line in enumerate(view.lines) if "illed" in line.text and _KILLED_LINE.match(line.text)]
    yield from both_ends(
        found, lambda index: Finding(index, _KILLED, None, Weight.KILLED, SUSPECTED, "unknown", last_line=index)
    )
