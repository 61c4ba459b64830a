"""What a run's measured peaks say about settings that it does not have yet. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from memtop.presets.schema import Settings
from memtop.supervisor import units
from memtop.supervisor.monitor.bands import mark
from memtop.supervisor.recovery.forecast import forecast
from memtop.supervisor.recovery.values import Peak
from memtop.tui.bands import ROLES
from memtop.tui.line import MUTED, STRONG, Line, fit, line, wrap
from memtop.tui.store import Store


@dataclass(frozen=True)
class Outlook:
    """The peaks that were measured in this run, and of how much memory they are parts."""

    peaks: tuple[Peak, ...] = ()
    present: Peak | None = None
    total_bytes: int | None = None
    on_gpu: bool = False

    def lines(self, after: Settings, width: int) -> list[Line]:
        """`VRAM peak 17.1 GiB measured -> ~13.9 GiB predicted 70.9 % · safe`, and from what; or why that is not known."""
        what = "VRAM" if self.on_gpu else "RAM"
        found = forecast(after, self.peaks, self.total_bytes, on_gpu=self.on_gpu)
        if isinstance(found, str):
            return wrap(f"? peak of {what} not known beforehand: {found}", width, "unknown")
        before = "" if self.present is None else f"{units.size(self.present.bytes)} measured -> "
        share, band = "", ""
        if found.fraction is not None:
            share, band = f" {units.percent(found.fraction)} ", f"{mark(found.band)} {found.band.value}"
        head = line(
            (f"{what} peak ", MUTED),
            (before, STRONG),
            (f"~{units.size(found.peak_bytes)} predicted", "predicted"),
            (share, "predicted"),
            (band, ROLES[found.band]),
        )
        return [fit(head, width), *wrap(f"from: {found.basis}", width, MUTED)]


def outlook_of(store: Store) -> Outlook:
    """From the configurations that this dashboard was told of; of several cards the smallest counts."""
    run, rows = store.run, store.configurations
    used = {rank.device_uuid for rank in run.ranks if rank.device_uuid is not None} if run is not None else set()
    wants_gpu = run is not None and run.settings is not None and run.settings.device != "cpu"
    on_gpu = bool(used) or (wants_gpu and bool(store.gpus))
    if on_gpu:
        totals = [gpu.total_bytes for gpu in store.gpus if gpu.total_bytes and (not used or gpu.uuid in used)]
        total = min(totals, default=None)
    else:
        total = store.host.limit_bytes or store.host.total_bytes
    peaks = tuple(row.peak for row in rows if row.peak is not None)
    return Outlook(peaks, rows[-1].peak if rows else None, total, on_gpu)
