"""Which of a program's processes this one is: torch.distributed knows it best, else the launcher's variables tell."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, Mapping, NamedTuple

# Rank, rank on this machine, number of processes. mpirun inside a Slurm job leaves Slurm's own variables, which are then the
# same in all of its processes: they come last.
_LAUNCHERS = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
    ("PMIX_RANK", "", ""),
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
)


class Place(NamedTuple):
    """The rank, the rank on this machine (None where nothing tells it), and how many processes there are at least."""

    rank: int
    local_rank: int | None
    world_size: int


def said_by_launcher() -> dict[str, str]:
    """What the environment says at this moment of the place of this process."""
    names = {name for row in _LAUNCHERS for name in row if name}
    return {name: os.environ[name] for name in names if name in os.environ}


def find(at_start: Mapping[str, str]) -> Place:
    """The place of this process, as far as it is known now. `at_start`: what the launcher had said when the process began; the
    program may have set or cleared these variables since."""
    said = dict(at_start, **said_by_launcher())
    place = next((place for row in _LAUNCHERS for place in _of_row(said, *row)), None)
    group = _group()
    if group is not None and (place is None or place.rank != group[0]):
        # Started by the program itself (torch.multiprocessing): the launcher speaks of its parent.
        local = _number(said, "LOCAL_RANK") if place is None else None
        place = Place(group[0], 0 if group[1] == 1 else local, group[1])
    return place or Place(0, 0, 1)


def _of_row(said: Mapping[str, str], *names: str) -> list[Place]:
    """The place that one launcher's variables tell; none where they are not there."""
    rank, local, size = (_number(said, name) for name in names)
    # What is started within a job of one Slurm task inherits that it is the first.
    if rank is None or (names[0] == "SLURM_PROCID" and (size or 1) < 2):
        return []
    size = max(size or 1, rank + 1)
    return [Place(rank, 0 if local is None and size == 1 else local, size)]


def _group() -> tuple[int, int] | None:
    """Rank and size by torch's default process group, if this process is in one."""
    distributed: Any = sys.modules.get("torch.distributed")
    # A group that breaks just now must not take the report along: the launcher's word is good, too.
    with contextlib.suppress(Exception):
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_rank()), int(distributed.get_world_size())
    return None


def _number(said: Mapping[str, str], name: str) -> int | None:
    text = said.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None
