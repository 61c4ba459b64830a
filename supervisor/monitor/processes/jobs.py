"""Puts GPU processes together to jobs: a launcher, its ranks and their loader workers. Decides over a table's rows only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from memtop.supervisor.monitor.processes import roles
from memtop.supervisor.monitor.processes.proc import Row
from memtop.supervisor.monitor.processes.table import children_of

_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


class About(NamedTuple):
    """What a process was started with, and what its command line says: until it executes another program. See `about`."""

    words: tuple[str, ...] = ()
    marks: Mapping[str, str] = {}
    """The variables of its environment that matter; empty where it may not be read."""
    run: tuple[str, int | None] | None = None
    """The run's folder and attempt from its marker."""
    is_launcher: bool = False
    is_room: bool = False
    is_passage: bool = False
    helper: str | None = None
    """See roles.helper_of_multiprocessing."""
    title: str | None = None
    """See roles.title_role."""


def about(
    words: tuple[str, ...], comm: str, marks: Mapping[str, str] | None = None, run: tuple[str, int | None] | None = None
) -> About:
    """Reads a command line once, since a grouping asks often. `comm` is the kernel's name of the process."""
    return About(
        words,
        marks or {},
        run,
        roles.is_launcher(words),
        roles.is_room(words, comm),
        roles.is_passage(words, comm),
        roles.helper_of_multiprocessing(words),
        roles.title_role(words, comm),
    )


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """A job before anything is measured."""

    key: str
    leader: int
    pids: tuple[int, ...]
    """The leader first, then in order of start."""
    parts: dict[int, str]
    """The role of each."""
    run: tuple[str, int | None] | None = None

    @property
    def counts(self) -> dict[str, int]:
        """How many there are of each role, ranks and workers without their numbers."""
        found: dict[str, int] = {}
        for part in self.parts.values():
            role = part.split(" ", 1)[0] if part.startswith(("rank ", "worker ")) else part
            found[role] = found.get(role, 0) + 1
        return found


class Grouping:
    """One grouping of one table. `gpu` are the pids that compute on a GPU; `about` is asked only of their relatives."""

    def __init__(self, rows: Mapping[int, Row], gpu: frozenset[int], about: Callable[[int], About]) -> None:
        self._rows = rows
        self._gpu = gpu
        self._about = about
        self._children = children_of(rows)
        self.relatives: set[int] = set(gpu)
        """Everyone whose row was looked at: what must be fresh at the next look."""

    def drafts(self) -> list[Draft]:
        """All jobs, each GPU process in exactly one."""
        bands: dict[tuple[object, ...], list[int]] = {}
        for pid in sorted(self._gpu):
            if pid in self._rows:
                band, top = self._band(pid)
                tops = bands.setdefault(band, [])
                if top not in tops:
                    tops.append(top)
        owned = {top: band for band, tops in bands.items() for top in tops}
        return [self._draft(band, tops, owned) for band, tops in bands.items()]

    # --- who leads ---

    def _band(self, pid: int) -> tuple[tuple[object, ...], int]:
        """What the process shares with the others of its job, and its topmost relative in it."""
        about, uid = self._about(pid), self._rows[pid].file_uid
        if about.run is not None:
            return ("run", *about.run, uid), self._top_of_run(pid, about.run)
        top = self._top(pid)
        marks = about.marks
        tasks = marks.get("SLURM_NTASKS", "")
        # Every task of a step hangs below the batch system's daemon alone; an interactive shell is no such step.
        if "SLURM_STEP_ID" in marks and tasks.isdecimal() and int(tasks) > 1 and "SLURM_PTY_PORT" not in marks:
            return ("slurm", marks.get("SLURM_JOB_ID", ""), marks["SLURM_STEP_ID"], uid), top
        return ("pid", self._rows[top].identity), top

    def _top_of_run(self, pid: int, run: tuple[str, int | None]) -> int:
        top = pid
        for above in self._above(pid):
            if self._about(above).run != run:
                break
            top = above
        return top

    def _top(self, pid: int) -> int:
        """The launcher above, the program that forked it, or itself."""
        top = child = pid
        for above in self._above(pid):
            about = self._about(above)
            if self._rows[above].file_uid != self._rows[pid].file_uid or about.run is not None:
                break
            if about.is_room:
                break
            if about.is_launcher or above in self._gpu or self._is_fork(child, above):
                top = above
            elif not about.is_passage:
                break
            child = above
        return top

    def _above(self, pid: int) -> list[int]:
        found: list[int] = []
        current = self._rows[pid].parent_pid
        while current > 1 and current in self._rows and current not in found and current != pid:
            found.append(current)
            self.relatives.add(current)
            current = self._rows[current].parent_pid
        return found

    def _is_fork(self, child: int, parent: int) -> bool:
        """Whether the child is the same program: forked by it, or started by its multiprocessing."""
        mine = self._about(child)
        if self._rows[child].comm == "pt_data_worker" or mine.helper == "spawn" or roles.is_part_of_parent(mine.title):
            return True
        # The subshells of a script have its words too, and may run programs that have nothing to do with each other.
        return bool(mine.words) and not mine.is_passage and mine.words == self._about(parent).words

    # --- who belongs to it ---

    def _draft(self, band: tuple[object, ...], tops: list[int], owned: Mapping[int, tuple[object, ...]]) -> Draft:
        leader = min(tops, key=lambda pid: (self._rows[pid].identity.started_ticks, pid))
        pids = dict.fromkeys([leader, *tops])
        for top in tops:
            pids |= dict.fromkeys(self._below(top, band, owned))
        if band[0] == "run" and self._rows[leader].session == leader:
            # Loader workers of a rank that has died: nobody's children any more, but of the run's session.
            pids |= dict.fromkeys(pid for pid, row in self._rows.items() if row.session == leader and pid not in owned)
        living = [pid for pid in pids if not self._rows[pid].is_dead or pid in self._gpu]
        order = [leader, *sorted((pid for pid in living if pid != leader), key=self._start)]
        self.relatives.update(order)
        run = (str(band[1]), band[2] if isinstance(band[2], int) else None) if band[0] == "run" else None
        identity = self._rows[leader].identity
        key = f"slurm {band[1]}.{band[2]}" if band[0] == "slurm" else f"pid {leader}@{identity.started_ticks}"
        return Draft(key=key, leader=leader, pids=tuple(order), parts=self._parts(order), run=run)

    def _start(self, pid: int) -> tuple[int, int]:
        return self._rows[pid].identity.started_ticks, pid

    def _below(self, top: int, band: tuple[object, ...], owned: Mapping[int, tuple[object, ...]]) -> list[int]:
        """All descendants, without those that lead a job of their own (and theirs)."""
        found: list[int] = []
        waiting, seen = [top], {top}
        while waiting:
            # A table that is read row by row may hold a circle: never follow one twice.
            below = [pid for pid in self._children.get(waiting.pop(), ()) if pid not in seen and owned.get(pid, band) == band]
            seen.update(below)
            waiting += below
            found += below
        return found

    # --- which part each has ---

    def _parts(self, pids: list[int]) -> dict[int, str]:
        members = set(pids)
        parts: dict[int, str] = {}
        for pid in pids:
            parts[pid] = self._part(pid, members, parts)
        self._number_ranks(parts)
        return parts

    def _part(self, pid: int, members: set[int], parts: Mapping[int, str]) -> str:
        about, row = self._about(pid), self._rows[pid]
        parent = row.parent_pid if row.parent_pid in members else None
        if about.title is not None:
            return about.title
        if about.is_launcher:
            return "launcher"
        rank = next((about.marks[name] for name in _RANK_VARIABLES if name in about.marks), None)
        if rank is None and "SLURM_STEP_ID" in about.marks and "SLURM_PTY_PORT" not in about.marks:
            rank = about.marks.get("SLURM_PROCID")
        below_rank = self._is_below_rank(pid, members, parts)
        if rank is not None and not below_rank and (pid in self._gpu or parent is None or parts.get(parent) == "launcher"):
            return f"rank {rank}"
        if pid in self._gpu:
            return "rank" if parent is not None and parts.get(parent) == "launcher" else "process"
        if self._starts_ranks(pid):
            return "launcher"
        return "loader worker" if self._is_loader(pid, parent) else "process"

    def _is_below_rank(self, pid: int, members: set[int], parts: Mapping[int, str]) -> bool:
        """Whatever a rank starts inherits its environment, and its number with it."""
        return any(
            above in self._gpu or parts.get(above, "").startswith("rank") for above in self._above(pid) if above in members
        )

    def _starts_ranks(self, pid: int) -> bool:
        """A program without a GPU of its own whose forks compute: it does what a launcher does."""
        return any(child in self._gpu and self._is_fork(child, pid) for child in self._children.get(pid, ()))

    def _is_loader(self, pid: int, parent: int | None) -> bool:
        if self._rows[pid].comm == "pt_data_worker":
            return True
        if parent is None or self._about(pid).helper == "resource_tracker":
            return False
        if self._about(parent).helper == "forkserver":
            return True
        return self._about(pid).helper != "forkserver" and self._is_fork(pid, parent)

    def _number_ranks(self, parts: dict[int, str]) -> None:
        """Launchers start their ranks in order: where none tells its number, the order does."""
        nameless = [pid for pid, part in parts.items() if part == "rank"]
        told = any(part.startswith("rank ") for part in parts.values())
        for place, pid in enumerate(sorted(nameless, key=self._start)):
            parts[pid] = "process" if told else f"rank {place}"
