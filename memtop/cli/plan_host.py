"""The part of `memtop plan` about host memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from memtop.cli.wrapping import wraps_on_terminal
from memtop.presets import Settings
from memtop.presets.host_estimate import HostEstimate, host_estimate
from memtop.presets.parameters import stored_config
from memtop.presets.states import UnknownMemoryError
from memtop.supervisor import units
from memtop.supervisor.language import separator, tr
from memtop.supervisor.monitor.values import band_of, mark

if TYPE_CHECKING:
    from memtop.supervisor.monitor.values import HostSample

_GIB = 1 << 30
_ASSUMED = "what Python and CUDA take in host memory is an assumption"


class PlannedHost(NamedTuple):
    """Host memory of a run. Bytes; None: not known."""

    foreseen: HostEstimate | None
    reason: str
    """Why it is not known, or what is assumed; else empty."""
    total: int | None
    """Of the machine, or of the cgroup if that is less."""
    available: int | None

    @property
    def fraction(self) -> float | None:
        """The part of the memory that is taken with the run."""
        if self.foreseen is None or self.total is None or self.available is None:
            return None
        return (self.total - self.available + self.foreseen.peak) / self.total

    @property
    def is_too_little(self) -> bool:
        """Whether the run is foreseen to need more than there is."""
        return self.fraction is not None and self.fraction > 1

    @property
    def row(self) -> dict[str, Any]:
        found = self.foreseen
        return {
            "peak_bytes": None if found is None else found.peak,
            "least_bytes": None if found is None else found.least,
            "most_bytes": None if found is None else found.most,
            "with_files_bytes": None if found is None else found.with_files,
            "components": {} if found is None else dict(found.components),
            "total_bytes": self.total,
            "available_bytes": self.available,
            "fraction": self.fraction,
            "fits": None if self.fraction is None else not self.is_too_little,
            "band": band_of(self.fraction).value,
            "reason": self.reason,
        }


def planned_host(settings: Settings | None, host: HostSample, host_ram: float | None, *, on_gpu: bool) -> PlannedHost:
    """`settings`: None if they are refused. `host_ram`: GiB of another machine, of which nothing is
    taken; None: this one."""
    if host_ram is None:
        total, available = host.limit_bytes or host.total_bytes, host.available_bytes
    else:
        total = available = round(host_ram * _GIB)
    if settings is None:
        return PlannedHost(None, "the settings are refused", total, available)
    config = stored_config(settings)
    if config is None:
        return PlannedHost(None, "the configuration of the model is not known before it is downloaded", total, available)
    try:
        found = host_estimate(settings, config, on_gpu=on_gpu, available=available)
    except UnknownMemoryError as error:
        return PlannedHost(None, str(error), total, available)
    reason = _ASSUMED if on_gpu else ""
    return PlannedHost(found, reason, total, available)


@wraps_on_terminal
def host_text(host: PlannedHost, *, on_gpu: bool) -> Iterator[str]:
    found = host.foreseen
    if found is None:
        yield f"host memory {units.UNKNOWN}: {host.reason}"
        return
    yield f"host memory {_host_share(host)}"
    least, most = units.size(found.least), units.size(found.most)
    if on_gpu:
        yield f"by          estimate, {host.reason}: between {least} and {most}"
    else:
        yield f"by          estimate, trained on this CPU: between {least} and {most}"
    if host.is_too_little:
        yield "fits        no: the run needs more host memory than there is"
    parts = sorted(found.components.items(), key=lambda one: -one[1])
    yield f"parts       {separator(', ').join(_part(name, units.size(size)) for name, size in parts)}"
    if found.with_files > found.peak:
        most = units.size(found.with_files)
        yield f"while read  up to {most} with the model's file, which the system drops if memory is short"


def _part(name: str, size: str) -> str:
    if name == "copy for saving":
        return tr(f"copy for saving {size} (made only if there is room; else memtop saves without it)")
    return f"{tr(name)} {size}"


def _host_share(host: PlannedHost) -> str:
    """`1.5 / 23.5 GiB; with 0.4 GiB of other programs 8.1 % · safe`"""
    assert host.foreseen is not None
    if host.total is None or host.available is None:
        return units.size(host.foreseen.peak)
    band, taken = band_of(host.fraction), host.total - host.available
    return share_text(host.foreseen.peak, host.total, taken, f"{units.percent(host.fraction)} {mark(band)} {tr(band.value)}")


def share_text(peak: int, total: int, others: int, share: str) -> str:
    """`share`: the part that is taken together with other programs, and its band."""
    text = units.used_of(peak, total)
    if not others:
        return f"{text}{separator(', ')}{share}"
    return f"{text}{separator('; ')}{tr(f'with {units.size(others)} of other programs {share}')}"
