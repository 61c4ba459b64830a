"""What memtop would say of the demo's run: how it died of memory, what can be done, how it went. Every number is invented."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from memtop.presets.schema import Settings
from memtop.supervisor import units, wire
from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.monitor.bands import band_of
from memtop.supervisor.recovery.configuration import settings_key
from memtop.supervisor.recovery.forecast import forecast
from memtop.supervisor.recovery.values import Peak, Remedy
from memtop.tui.demo_machine import CARD, CONTEXT_BYTES, demo_uuid

GIB = units.GIB
_BASE, _PER_SAMPLE = 7.4, 1.02
"""GiB: what the invented model needs without a batch, and for each sample of it."""


def peak_of(settings: Settings, *, updates: int, failed: bool = False) -> Peak:
    """What the invented run needs with these settings; never more than the card has."""
    needed = _BASE + _PER_SAMPLE * settings.batch * settings.seq_len / 1024 * (0.3 if settings.gradient_checkpointing else 1)
    size = min(int(needed * GIB), CARD - int(0.4 * GIB))
    return Peak(batch=settings.batch, bytes=size, updates=updates, failed=failed, settings_key=settings_key(settings))


def too_large(settings: Settings) -> bool:
    """Whether the invented card does not hold it."""
    return peak_of(settings, updates=0).bytes >= CARD - int(0.5 * GIB)


def earlier_configurations(settings: Settings, began: float) -> tuple[wire.Configuration, ...]:
    """What the run had been through before the dashboard opened: careful at first, then too large, then halved while it ran."""
    splits = [replace(settings, batch=b, accumulation=settings.accumulation * settings.batch // b) for b in (2, 16, 8)]
    begins = (0, 120, 137, None)
    reasons = (
        "the run began",
        "asked for: batch 2 -> 16, accumulation 16 -> 2",
        "allocation failure survived at update 137: batch 16 -> 8, accumulation 2 -> 4",
    )
    return tuple(
        wire.Configuration(
            number=n + 1,
            attempt=min(2, n + 1),
            since_update=begins[n],
            until_update=begins[n + 1],
            started=began + 180 * n,
            reason=reasons[n],
            settings=split,
            peak=peak_of(split, updates=(120, 17, 60)[n], failed=n == 1),
            samples_per_second=(41.7, 57.3, None)[n],
            outcome=("replaced", "replaced", None)[n],
        )
        for n, split in enumerate(splits)
    )


def after(
    rows: Sequence[wire.Configuration], settings: Settings, *, attempt: int, update: int, now: float, reason: str, outcome: str
) -> tuple[wire.Configuration, ...]:
    """The configurations once another one has begun; the one before ends with `outcome`."""
    *earlier, last = rows
    rate = 62.0 - 60 / settings.batch
    rate = last.samples_per_second or rate
    ended = replace(last, until_update=update, outcome=last.outcome or outcome, samples_per_second=rate)
    begun = wire.Configuration(
        number=last.number + 1,
        attempt=attempt,
        since_update=update,
        started=now,
        reason=reason,
        settings=settings,
        peak=peak_of(settings, updates=0),
    )
    return (*earlier, ended, begun)


def proposal(settings: Settings, rows: Sequence[wire.Configuration], *, update: int, gpus: int) -> wire.Proposal:
    """The card: a backward pass that asked for more than was left, and what can be done about it."""
    peaks = [row.peak for row in rows if row.peak is not None]
    return wire.Proposal(
        diagnosis=_diagnosis(settings, update) if gpus else _host_diagnosis(update),
        remedies=tuple(_remedies(settings, peaks)),
        waiting="--on-oom ask",
    )


def _diagnosis(settings: Settings, update: int) -> Diagnosis:
    asked, free = int(2.1 * GIB), int(0.42 * GIB)
    others = int(0.55 * GIB)
    cached = int(0.8 * GIB)
    allocated = CARD - free - others - cached - CONTEXT_BYTES
    return Diagnosis(
        kind=Kind.GPU_OOM,
        confidence=0.99,
        summary=f"GPU 0 ran out of memory in the backward pass of update {units.count(update)}: 2.1 GiB asked, 0.4 GiB free.",
        phase="backward",
        rank=0,
        device_index=0,
        device_uuid=demo_uuid(0),
        requested_bytes=asked,
        requested_for=f"the logits' gradient (B {settings.batch} x T {settings.seq_len} x V 151 936, bf16)",
        total_bytes=CARD,
        free_bytes=free,
        process_bytes=allocated + cached + CONTEXT_BYTES,
        allocated_bytes=allocated,
        reserved_unallocated_bytes=cached,
        context_bytes=CONTEXT_BYTES,
        other_process_bytes=others,
        source="record",
        evidence=(
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.10 GiB. GPU 0 has a total capacity of 19.60 GiB"
            " of which 430.08 MiB is free.",
        ),
    )


def _host_diagnosis(update: int) -> Diagnosis:
    return Diagnosis(
        kind=Kind.HOST_OOM_KILLED,
        confidence=0.98,
        summary=f"The kernel killed rank 0 at update {units.count(update)}: host memory was full (31.0 of 31.2 GiB).",
        total_bytes=int(31.2 * GIB),
        free_bytes=int(0.2 * GIB),
        process_bytes=int(14.1 * GIB),
        source="kernel",
        evidence=("memory.events: oom_kill rose from 0 to 1 during attempt 2",),
    )


def _remedies(settings: Settings, peaks: Sequence[Peak]) -> list[Remedy]:
    half = replace(settings, batch=max(1, settings.batch // 2), accumulation=settings.accumulation * 2)
    found = [
        Remedy(
            id="allocator",
            title="allocator: expandable_segments:True",
            why="0.8 GiB are reserved in pieces; the allocator can then join them. It may not be enough by itself.",
            keeps_math=True,
            resumable="resumes",
            assignments={"allocator": "expandable_segments:True"},
            forecast_unknown="how much the pieces would give back is not known beforehand",
            speed=1.0,
        ),
        Remedy(
            id="checkpointing",
            title="gradient checkpointing on",
            why="Activations are computed again in the backward pass instead of being kept.",
            keeps_math=True,
            resumable="live",
            assignments={"gradient_checkpointing": "true"},
            forecast_unknown="nothing was measured yet with checkpointing",
            speed=0.75,
        ),
        Remedy(
            id="seq_len",
            title=f"T {settings.seq_len} -> {settings.seq_len // 2}",
            why="Half the tokens of each sample: what is cut off is not learnt from.",
            keeps_math=False,
            resumable="resumes",
            needs_consent=True,
            assignments={"seq_len": str(settings.seq_len // 2)},
            forecast_unknown=f"nothing was measured yet at T {settings.seq_len // 2}",
        ),
        Remedy(
            id="who_else",
            title="see who else holds the card",
            why="0.6 GiB of the card are held by other processes.",
            keeps_math=True,
            resumable="none",
            command="memtop strays",
        ),
    ]
    if half.batch < settings.batch:
        held = settings.effective_batch
        split = f"batch {settings.batch} -> {half.batch}, accumulation {settings.accumulation} -> {half.accumulation}"
        numbers = {"batch": str(half.batch), "accumulation": str(half.accumulation)}
        why = "Half the samples at a time, twice as often: each update stays what it was, up to rounding."
        found.insert(0, _predicted("smaller_batch", f"{split}: effective batch stays {held}", why, half, peaks, numbers, 0.92))
    return found


def _predicted(
    name: str, title: str, why: str, settings: Settings, peaks: Sequence[Peak], numbers: dict[str, str], speed: float
) -> Remedy:
    """A split whose peak the line through the invented peaks foretells."""
    foretold = forecast(settings, peaks, CARD)
    unknown = foretold if isinstance(foretold, str) else None
    return Remedy(
        id=name,
        title=title,
        why=why,
        keeps_math=True,
        resumable="live",
        assignments=numbers,
        forecast=None if isinstance(foretold, str) else foretold,
        forecast_unknown=unknown,
        speed=speed,
    )


def advice(settings: Settings, rows: Sequence[wire.Configuration]) -> wire.Advice:
    """The run waits for nobody: a larger micro-batch would help, as far as the card allows."""
    peaks = [row.peak for row in rows if row.peak is not None]
    larger = replace(settings, batch=settings.batch * 2, accumulation=max(1, settings.accumulation // 2))
    title = f"batch {settings.batch} -> {larger.batch}, accumulation {settings.accumulation} -> {larger.accumulation}"
    numbers = {"batch": str(larger.batch), "accumulation": str(larger.accumulation)}
    why = "Fewer, larger micro-batches: less is launched for the same work."
    remedy = _predicted("grow", title, why, larger, peaks, numbers, 1.08)
    fraction = peak_of(larger, updates=0).bytes / CARD
    refused: tuple[str, ...] = (f"batch {larger.batch * 2}: its peak would be far beyond the card",)
    proposals: tuple[Remedy, ...] = (remedy,)
    if band_of(fraction).value != "safe":
        proposals, refused = (), (f"{title}: predicted at {units.percent(fraction)} of the card, more than 85 %", *refused)
    workers = Remedy(
        id="workers",
        title="workers 4 -> 2 per process",
        why="They wait for the GPUs, not the other way round: half of them would give 4.1 GiB of host memory back.",
        keeps_math=True,
        resumable="live",
        assignments={"workers": "2"},
        forecast_unknown="the GPU's peak does not depend on it",
        speed=1.0,
    )
    return wire.Advice(
        bottleneck="compute",
        summary="The GPUs compute nearly all the time: only fewer or cheaper computations make an update faster.",
        evidence=(
            "83 % of an update are forward and backward passes, 4 % waiting for data (medians of 50 updates)",
            "94 % utilisation at 211 of 230 W: the card is busy, not only occupied",
        ),
        proposals=(*proposals, workers),
        refused=refused,
    )


def trial(started: float) -> wire.Trial:
    """A change that was tried, and undone since it did not help."""
    return wire.Trial(
        title="workers 2 -> 4",
        started=started,
        state="undone",
        reason="samples/s rose by less than the spread: 0.4 ± 0.9",
        before={
            "samples_per_second": 55.2,
            "samples_per_second_spread": 0.9,
            "tokens_per_second": 56_500.0,
            "peak_bytes": 16.7 * GIB,
            "host_bytes": 21.1 * GIB,
            "swap_bytes": 0.5 * GIB,
        },
        after={
            "samples_per_second": 55.6,
            "samples_per_second_spread": 0.8,
            "tokens_per_second": 56_900.0,
            "peak_bytes": 16.7 * GIB,
            "host_bytes": 25.2 * GIB,
            "swap_bytes": 0.5 * GIB,
        },
    )


def trend(update: int, step_seconds: float, bytes_per_update: int, left_bytes: int) -> wire.Trend:
    """The loader workers' memory grows, slowly; `left_bytes` is what the host has left for it."""
    updates = left_bytes // bytes_per_update
    seconds, at = updates * step_seconds, update + updates
    what = "anonymous memory of the loader workers"
    grows = f"{what} grows by {bytes_per_update / 1024**2:.1f} MiB per update"
    return wire.Trend(
        subject=wire.TrendSubject(kind=wire.TrendKind.HOST_ANONYMOUS, role="loader worker"),
        what=what,
        bytes_per_second=bytes_per_update / step_seconds,
        bytes_per_update=bytes_per_update,
        confidence=0.93,
        full_in_seconds=seconds,
        full_at_update=at,
        message=f"{grows}: host RAM is full in {seconds / 60:.0f} min, at update {at}",
    )
