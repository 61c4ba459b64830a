"""Remedies, forecasts, peaks and trends as values: shown to people, sent to dashboards, stored in
the ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Literal

import msgspec
from msgspec.structs import replace

from memtop.supervisor import units
from memtop.supervisor.language import Verbatim
from memtop.supervisor.monitor.values import Band

Class = Literal["none", "live", "resumes", "converts", "new run"]
"""What applying a remedy takes: a command that a person types (none), the next update boundary
(live), a restart that resumes exactly, a restart that converts the optimizer's state, or a new
run."""

Source = Literal["measured", "line", "estimate"]
"""What a forecast rests on: a peak that this run has measured with such settings, a line through
measured peaks, or an estimate."""

UPDATE_PHASES = ("forward", "backward", "optimizer")
"""Of an update: its memory has a peak in each."""


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """A predicted peak; never show it as a measurement."""

    peak_bytes: int
    """Of the run alone."""
    total_bytes: int | None = None
    fraction: float | None = None
    """Of the total, with what other processes hold."""
    band: Band = Band.UNKNOWN
    source: Source = "line"
    basis: str
    """The source in words, e.g. `line through peaks at B 16 and B 32`, `one peak at B 8, measured
    base 1.2 GiB`, `estimate, calibrated at B 4`."""
    least_bytes: int | None = None
    """The true peak is hardly below it, and hardly above `most_bytes`; None: not known."""
    most_bytes: int | None = None
    phases: dict[str, int] = {}
    """By each of `UPDATE_PHASES`, what torch allocates at the most on a GPU; empty if not known."""

    @property
    def taken_bytes(self) -> int | None:
        """The bytes behind `fraction`."""
        return None if self.fraction is None or self.total_bytes is None else round(self.fraction * self.total_bytes)

    @property
    def is_measured(self) -> bool:
        """Whether it is a peak that this run has measured with such settings, so nothing is
        foreseen."""
        return self.source == "measured"

    @property
    def runs_out(self) -> bool:
        """Whether even the least that is foreseen is more than the total."""
        if self.taken_bytes is None or self.total_bytes is None:
            return False
        spare = 0 if self.least_bytes is None else self.peak_bytes - self.least_bytes
        return self.taken_bytes - spare >= self.total_bytes


class Snippet(msgspec.Struct, frozen=True):
    """What a person writes somewhere else than in a shell."""

    place: str
    """e.g. `the submit file`, `PowerShell`."""
    text: str
    """One line or several, exactly as they are written there."""


class Remedy(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that can be done. `assignments` are its changes, as `--set KEY=VALUE` (batch and
    accumulation included)."""

    id: str
    """e.g. `allocator`, `smaller_batch`, `checkpointing`, `chunked_loss`, `offload_optimizer`,
    `eval_batch`, `seq_len`."""
    title: str
    """e.g. `batch 8 -> 4, accumulation 4 -> 8: effective batch stays 32`."""
    why: str = ""
    """What it does and why it can help here, in one sentence."""
    keeps_math: bool
    """Whether training is unchanged: every update stays the same up to rounding."""
    resumable: Class
    needs_consent: bool = False
    """Whether a person must confirm it: it changes training, or something outside the run."""
    assignments: dict[str, str] = {}
    preset: str | None = None
    forecast: Forecast | None = None
    """None if the measurements allow none; `forecast_unknown` gives the reason."""
    forecast_unknown: str | None = None
    speed: float | None = None
    """Expected speed as a factor of the current one (0.8: a fifth slower); None: not known."""
    speed_class: str | None = None
    """Compared with the present settings (`presets.comparison.Pace`); None: not known."""
    speed_basis: tuple[str, ...] = ()
    """What the class follows from, or why it is not known."""
    seconds_left: float | None = None
    """What the run then takes to its end, by its measured speed and `speed`; None: not known."""
    command: str | None = None
    """What a person types in a shell: `memtop restart RUN --batch 4 --accum 8`, or system commands,
    one a line, which memtop never runs."""
    writes: tuple[Snippet, ...] = ()
    """What a person writes elsewhere, before the command."""

    @property
    def predicted_peak_bytes(self) -> int | None:
        return self.forecast.peak_bytes if self.forecast is not None else None

    @property
    def to_type(self) -> Iterator[tuple[str | None, str]]:
        """The places where a person types or writes something, and exactly what; None: a shell."""
        yield from ((written.place, written.text) for written in self.writes)
        if self.command:
            yield None, self.command

    @property
    def instructions(self) -> Iterator[str]:
        """The same as lines to read: those for a file name it."""
        for place, text in self.to_type:
            yield from (Verbatim(line) if place is None else f"in {place}: {line}" for line in text.splitlines())

    @property
    def predicted_band(self) -> str | None:
        return self.forecast.band.value if self.forecast is not None else None


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """The largest measured use of one configuration, on the fullest GPU (in training on the CPU: of
    host memory)."""

    batch: int
    bytes: int
    updates: int
    """How many updates were measured."""
    failed: bool = False
    """Whether the configuration ran out of memory: it needed more."""
    outside_bytes: int | None = None
    """Of `bytes` on a GPU, what the process held outside torch's allocator: the CUDA context. None:
    not known; then it is not in `bytes`, unless the message of a failure has it there."""
    settings_key: str = ""
    """The settings that shape the peak, except the micro-batch, as one string: only peaks with one
    key lie on one line."""
    phases: dict[str, int] = {}
    """By each of `UPDATE_PHASES`, what torch allocated at the most on a GPU; empty if not
    measured."""

    def with_context(self, context_bytes: int) -> Peak:
        """On a GPU, with so much outside torch's allocator, if that is not known."""
        if self.outside_bytes is not None:
            return self
        return replace(self, bytes=self.bytes + context_bytes, outside_bytes=context_bytes)

    @property
    def words(self) -> str:
        """`17.1 GiB` if measured; `≥ 19.1 GiB` if the allocation failed."""
        return units.at_least(self.bytes) if self.failed else units.size(self.bytes)


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """What limits the run's speed, and what would make it faster.

    Never from utilisation alone.
    """

    bottleneck: str
    """data | compute | launch | swap | unknown"""
    summary: str
    evidence: tuple[str, ...] = ()
    proposals: tuple[Remedy, ...] = ()
    refused: tuple[str, ...] = ()
    """What seems to help but must not be done now, with the reason, one line each."""


class TrendKind(str, Enum):
    """Which measurement grows."""

    GPU_ALLOCATED = "gpu_allocated"
    """Tensors of one rank, as torch's allocator counts them."""
    GPU_RESERVED = "gpu_reserved"
    """Memory that torch's allocator of one rank holds, tensors and cache."""
    GPU_USED = "gpu_used"
    """Used memory of a whole GPU, as the driver reports it."""
    HOST_ANONYMOUS = "host_anonymous"
    """Private resident memory of processes that is backed by no file."""
    SWAP_IN = "swap_in"
    """Memory read back from swap."""

    @property
    def of_gpu(self) -> bool:
        return self in (TrendKind.GPU_ALLOCATED, TrendKind.GPU_RESERVED, TrendKind.GPU_USED)


class TrendSubject(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a trend is about. A field is None where it does not apply or is not known."""

    kind: TrendKind
    gpu_index: int | None = None
    gpu_uuid: str | None = None
    rank: int | None = None
    role: str | None = None
    """The role of the processes, one of `host_memory.ROLES`; "rank" with `rank` None means all
    ranks together."""


class Trend(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that grows steadily, or sustained swapping."""

    subject: TrendSubject
    what: str
    """The subject as text, for people only: `GPU 0`, `GPU 0 reserved by rank 0`, `anonymous memory
    of rank 0`, `swap-in`."""
    bytes_per_second: float
    bytes_per_update: float | None = None
    """None for a series that is sampled once a second instead of once per update."""
    confidence: float
    """0-1: the probability that the growth is real."""
    full_in_seconds: float | None = None
    """Time until the memory is full at this rate; None where there is no limit."""
    full_at_update: int | None = None
    message: str
    """One line for people."""


def trial_word(state: str) -> str:
    """The state of a trial (`wire.Trial`) as people read it: what is measured before or after."""
    words = {"measuring before": "measuring before the change", "measuring after": "measuring after the change"}
    return words.get(state, state)


def unknown_for_several(remedies: Iterable[Remedy]) -> list[str]:
    """Why there is no forecast: each reason that several of these remedies share."""
    reasons = Counter(remedy.forecast_unknown for remedy in remedies if remedy.forecast is None)
    return [reason for reason, times in reasons.items() if reason and times > 1]
