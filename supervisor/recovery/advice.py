"""Advice that fits the place (`advice.toml`), and the two cases in which a GPU refuses memory for
another reason than that it is full. Pure functions; memtop never runs the commands."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from memtop.presets.files import PresetFileError, parse
from memtop.supervisor.diagnosis.environment import MANAGED, PROGRAMS, Place
from memtop.supervisor.diagnosis.values import Diagnosis, Kind, size
from memtop.supervisor.recovery.situation import to_do
from memtop.supervisor.recovery.values import Remedy, Snippet

_FILE = Path(__file__).with_name("advice.toml")
_GROUPS = {"managed": MANAGED, "program": frozenset(PROGRAMS)}
About = Literal[
    "limit",
    "machine",
    "address_space",
    "unproven",
    "who_killed",
    "shm",
    "pinned",
    "disk",
    "others",
    "allocator",
    "program",
    "program_host",
    "inference",
    "perhaps",
    "loading",
    "ranks",
    "unknown",
    "recompute",
    "budget",
    "refused",
]
"""The question that a piece of advice answers; the file explains each."""


_UNKNOWN_LIMIT = "MORE_THAN_NOW"
"""What a person replaces with a limit, if the present one is not known."""
_LIMIT = re.compile(r"\{limit\}[A-Za-z]*")
"""The new limit in the text of the table, with its unit."""


class AdviceRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    about: About
    title: str
    why: str
    commands: tuple[str, ...] = ()
    file: str = ""
    lines: tuple[str, ...] = ()
    """What a person writes into `file`."""
    variables: tuple[str, ...] = ()
    """Environment variables, as NAME=VALUE."""
    places: tuple[Place, ...] = ()
    needs: tuple[Place, ...] = ()
    not_in: tuple[str, ...] = ()
    changes: bool = False
    first_in: tuple[str, ...] = ()
    """The phases in which it comes before the others."""

    def fits(self, environment: Sequence[Place]) -> bool:
        here = set(environment)
        return (not self.places or bool(here & set(self.places))) and here >= set(self.needs) and not here & self._elsewhere

    def remedy(self, environment: Sequence[Place], limit: int | None = None) -> Remedy:
        """`limit`: the memory limit to request, in bytes; None if it is not known."""
        lines = _with_limit("\n".join(self.lines), limit)
        written: tuple[Snippet, ...] = (Snippet(self.file, lines),) if self.lines else ()
        commands = [_with_limit(command, limit) for command in self.commands]
        for variable in self.variables:
            typed, elsewhere = set_variable(variable, environment)
            commands += typed
            written += elsewhere
        command = "\n".join(commands) or None
        return to_do(self.id, self.title, self.why, command, writes=written, keeps_math=not self.changes)

    @property
    def _elsewhere(self) -> frozenset[Place]:
        groups = (_GROUPS[name] if name in _GROUPS else {Place(name)} for name in self.not_in)
        return frozenset().union(*groups)


def _with_limit(text: str, limit: int | None) -> str:
    if limit is None:
        return _LIMIT.sub(_UNKNOWN_LIMIT, text)
    return text.replace("{limit}", str(max(1, math.ceil(limit / (1 << 30)))))


def raised(reached: int | None, requested: int | None) -> int | None:
    """A higher limit than the one that was reached, with room for the request that failed; None if
    the limit is not known."""
    return None if reached is None else max(reached * 3 // 2, reached + (requested or 0))


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    advice: tuple[AdviceRow, ...]


@cache
def table() -> tuple[AdviceRow, ...]:
    """All advice, in the order of the file."""
    try:
        return msgspec.convert(parse(_FILE), _Table).advice
    except msgspec.ValidationError as error:
        raise PresetFileError(f"{_FILE}: {error}") from None


def set_variable(assignment: str, environment: Sequence[Place]) -> tuple[tuple[str, ...], tuple[Snippet, ...]]:
    """The command that sets an environment variable, given as NAME=VALUE; on Windows, for each of
    its shells, what is written there."""
    if Place.WINDOWS not in environment:
        return (f"export {assignment}",), ()
    name, _, value = assignment.partition("=")
    return (), (Snippet("cmd.exe", f"set {assignment}"), Snippet("PowerShell", f"$env:{name} = '{value}'"))


def advice(about: About, environment: Sequence[Place], phase: str = "unknown", limit: int | None = None) -> Iterator[Remedy]:
    """What fits the environment, each id once, as remedies that only a person can apply.

    `limit`: the memory limit to request, in bytes.
    """
    given: set[str] = set()
    for one in sorted(table(), key=lambda one: phase not in one.first_in):
        if one.about == about and one.id not in given and one.fits(environment):
            given.add(one.id)
            yield one.remedy(environment, limit)


# --- a GPU that is not full ----------------------------------------------------------------------

_FAR, _LEAST_BYTES = 2, 256 << 20
"""Free memory is far above a request if it is this many times as large, and larger by so many
bytes: the allocator requests more than it prints, and memory can become free after the failure."""


_XPU_LIMIT = 4 << 30
"""The driver of Intel GPUs refuses larger allocations by default."""


def refusals(diagnosis: Diagnosis) -> tuple[Remedy, ...]:
    """What to do if the device had room, but a limit or the driver refused the request."""
    free, requested, allowed = diagnosis.free_bytes, diagnosis.requested_bytes, diagnosis.allowed_bytes
    if free is None and diagnosis.total_bytes is not None and diagnosis.allocated_bytes is not None:
        free = max(0, diagnosis.total_bytes - diagnosis.allocated_bytes) if Place.XPU in diagnosis.environment else None
    if not diagnosis.kind.of_gpu or free is None or requested is None or free <= requested:
        return ()
    if allowed is not None:
        return (_fraction(diagnosis, allowed, free),)
    far = free >= _FAR * requested and free - requested >= _LEAST_BYTES
    far = far or (Place.XPU in diagnosis.environment and requested >= _XPU_LIMIT)
    return tuple(advice("refused", diagnosis.environment)) if far and diagnosis.kind is Kind.GPU_OOM else ()


def _fraction(diagnosis: Diagnosis, allowed: int, free: int) -> Remedy:
    whole = Snippet("the program", "torch.cuda.set_per_process_memory_fraction(1.0)")
    return to_do(
        "memory_fraction",
        f"a larger memory fraction: the program may use only {size(allowed)}",
        f"{size(free)} were free: the program, or a library that it uses, limits itself to a share of the GPU",
        None,
        writes=(whole,) if Place.PYTORCH in diagnosis.environment else (),
    )


def larger_than_device(diagnosis: Diagnosis) -> Remedy | None:
    """The remedy for a single request that the whole device cannot hold; None for every other
    request."""
    requested, total = diagnosis.requested_bytes, diagnosis.total_bytes
    if not diagnosis.kind.of_gpu or requested is None or total is None or requested <= total:
        return None
    return to_do(
        "one_request",
        f"find what requests {size(requested)} at once: the whole device has {size(total)}",
        "no other program is in the way. Usual causes: attention over all pairs of tokens (use flash or SDPA attention), "
        "one very long sample, results of a whole evaluation in one tensor, a wrong shape or type",
        None,
    )
