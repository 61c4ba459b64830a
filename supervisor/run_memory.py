"""The one number for the host memory of a run that every list, screen and report shows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec

from memtop.supervisor import units


class RoleMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Host memory of a run's processes of one role. Bytes."""

    role: str
    """launcher | rank | loader worker | other | memtop"""
    processes: int
    pss_bytes: int | None = None
    """Each shared page is divided among the processes that map it, so the roles add up to the run's
    total."""
    uss_bytes: int | None = None
    """Private pages: what is freed if these processes end."""
    shm_bytes: int | None = None
    """Shared memory (data-loader batches) as part of pss_bytes."""
    swap_bytes: int | None = None

    @property
    def words(self) -> str:
        """`1 rank`, `3 loader workers`."""
        several = self.processes != 1 and self.role in ("launcher", "rank", "loader worker")
        return f"{self.processes} {self.role}{'s' if several else ''}"


Measure = Literal["PSS", "RSS"]
"""PSS: a shared page is divided among the processes that map it. RSS: it counts in each of them."""


class HostMemory(NamedTuple):
    """Host memory of all processes of a run together: of its ranks, their loader workers, the
    launcher and the shim, but not of the supervisor and dashboards.

    `presets/host_estimate.py` foresees its peak. It is read once a second at most, so a short peak
    can be higher than what is recorded.
    """

    size: int | None = None
    """Bytes; None if they are not known."""
    measure: Measure | None = None

    @property
    def words(self) -> str:
        """`2.1 GiB RAM`, or `2.3 GiB RSS` where shared pages count more than once."""
        return f"{units.size(self.size)} {'RSS' if self.measure == 'RSS' else 'RAM'}"


def host_memory(pss_bytes: float | None, rss_bytes: float | None) -> HostMemory:
    """The PSS, or the resident bytes where the kernel does not report it."""
    if pss_bytes is not None:
        return HostMemory(int(pss_bytes), "PSS")
    return HostMemory() if rss_bytes is None else HostMemory(int(rss_bytes), "RSS")


def together(roles: Iterable[RoleMemory]) -> int | None:
    """The PSS of all processes. None if that of one role is not known, or without a role."""
    values = [role.pss_bytes for role in roles]
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
