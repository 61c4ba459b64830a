"""What can be done about a shortage, as values: shown to people, sent to dashboards, kept in the ledger."""

from __future__ import annotations

from typing import Literal

import msgspec

from memtop.supervisor.monitor.values import Band

Class = Literal["none", "live", "resumes", "converts", "new run"]
"""What it takes: nothing of the run (a command for the person), the next update boundary, a restart that resumes exactly, one
that converts the optimizer's state, or a run that starts anew."""


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """A predicted peak. `basis` says from what: never to be shown as a measurement."""

    peak_bytes: int
    total_bytes: int | None = None
    fraction: float | None = None
    band: Band = Band.UNKNOWN
    basis: str
    """e.g. `line through peaks at B 16 and B 32`, `one peak at B 8, base from the context`."""


class Remedy(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that can be done. `assignments` is what changes, as `--set KEY=VALUE` (batch and accumulation included)."""

    id: str
    """e.g. `allocator`, `smaller_batch`, `checkpointing`, `chunked_loss`, `offload_optimizer`, `eval_batch`, `seq_len`."""
    title: str
    """e.g. `batch 8 -> 4, accumulation 4 -> 8: effective batch stays 32`."""
    why: str = ""
    """What it does and why it may help here, one sentence."""
    keeps_math: bool
    """Whether every update stays what it was, up to rounding."""
    resumable: Class
    needs_consent: bool = False
    """Never done by itself: it changes what is learnt, or something outside the run."""
    assignments: dict[str, str] = {}
    preset: str | None = None
    forecast: Forecast | None = None
    """None where nothing measured allows one; `forecast_unknown` says why."""
    forecast_unknown: str | None = None
    speed: float | None = None
    """Expected speed as a factor of the present one (0.8: a fifth slower); None: not known."""
    command: str | None = None
    """What a person would type: `memtop restart RUN --batch 4 --accum 8`, or a system command to copy (never run by memtop)."""

    @property
    def predicted_peak_bytes(self) -> int | None:
        return self.forecast.peak_bytes if self.forecast is not None else None

    @property
    def predicted_band(self) -> str | None:
        return self.forecast.band.value if self.forecast is not None else None


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """The most that one configuration was measured to need, on the fullest card (or in host memory, on the CPU)."""

    batch: int
    bytes: int
    updates: int
    """Updates over which it was measured."""
    failed: bool = False
    """It was the peak of a configuration that ran out: more was wanted."""
    settings_key: str = ""
    """Everything but the split that shapes the peak (T, checkpointing, ZeRO, ...), as one string: only peaks of one key fit a
    line."""
