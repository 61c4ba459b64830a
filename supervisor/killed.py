"""Exit statuses: in words, and whether something killed the program. Pure."""

from __future__ import annotations

import signal
from typing import Any

_OWN_SIGNALS = frozenset(
    (
        *(signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGBUS),
        *(signal.SIGFPE, signal.SIGSEGV, signal.SIGSYS, signal.SIGPIPE),
        *(signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF),
    )
)
"""The signals of a crash, and of a timer that the program has set. All others come from outside: a
person, the kernel, a batch system."""
_REPORTED_BY_SHELLS = _OWN_SIGNALS | frozenset(
    (
        *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGKILL),
        *(signal.SIGTERM, signal.SIGXCPU, signal.SIGXFSZ),
    )
)
"""The signals that end programs. Any other exit status above 128 is the program's own number."""

# Status codes of Windows (NTSTATUS) that are like a signal: access violation, stack overflow, page
# error, heap corruption, buffer overrun, Ctrl-C.
_OF_WINDOWS = {
    0xC0000005: -11,
    0xC00000FD: -11,
    0xC0000006: -7,
    0xC0000374: -6,
    0xC0000409: -6,
    0xC000013A: -2,
}


def signal_status(status: int | None) -> int | None:
    """Negative for a signal: a shell reports signal N as 128 + N, a batch system as 256 + N,
    Windows a status code of its own."""
    if status is not None and abs(status) >= 1 << 16:
        return _OF_WINDOWS.get(status & 0xFFFFFFFF, status)
    if status is not None and (status - 128 in _REPORTED_BY_SHELLS or 256 < status < 256 + 65):
        return (128 if status < 256 else 256) - status
    return status


def describe_status(status: int | None) -> str:
    if status is None:
        return "exit status unknown (the process and its shim were both killed)"
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = "?"
        return f"ended by signal {-status} ({name})"
    if status == 0:
        return "exit status 0 without having finished"
    return f"exit status {status}"


def state_word(state: str, ended_by: int | None) -> str:
    """A state as people read it. What failed because a signal from outside ended it says `killed`;
    in JSON it is `failed`. `ended_by`: the signal of its end, None if there was none."""
    killed = state == "failed" and ended_by is not None and ended_by not in _OWN_SIGNALS
    return "killed" if killed else state


def status_suffix(outcome: str | None, status: int | None) -> str:
    """`, exit status 1` after the outcome of an attempt; empty if it is not known, or if it is the
    SIGINT with which memtop stopped the program as requested."""
    asked = outcome in ("stopped", "restarted") and signal_status(status) == -signal.SIGINT
    return "" if status is None or asked else f", exit status {status}"


def recorded_signal(data: dict[str, Any] | None) -> int | None:
    """The signal of an attempt's end, from its diagnosis in the ledger or from the event of its
    end."""
    number = (data or {}).get("ended_by")
    return number if isinstance(number, int) else None
