"""A run that has run out of memory, as its supervisor reports it, and one with several configurations."""

from __future__ import annotations

from msgspec.structs import replace

from memtop.supervisor import wire
from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.monitor.values import Band
from memtop.supervisor.recovery.configuration import settings_key
from memtop.supervisor.recovery.values import Forecast, Peak, Remedy
from tests.tui.support import GIB, NOW, SETTINGS, gpu, running

DIAGNOSIS = Diagnosis(
    kind=Kind.GPU_OOM,
    confidence=0.99,
    summary="GPU 0 ran out of memory in the backward pass of update 24: 2.1 GiB asked, 0.5 GiB free.",
    phase="backward",
    rank=0,
    device_index=0,
    device_uuid="GPU-0000-0000",
    requested_bytes=int(2.1 * GIB),
    requested_for="the logits (B 8 x T 128 x V 50 257, fp32)",
    total_bytes=20 * GIB,
    free_bytes=GIB // 2,
    allocated_bytes=17 * GIB,
    reserved_unallocated_bytes=GIB,
    context_bytes=GIB // 2,
    other_process_bytes=GIB,
    source="record",
    evidence=("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.10 GiB.", "a second line"),
)
SMALLER = Remedy(
    id="smaller_batch",
    title="batch 8 -> 4, accumulation 4 -> 8: effective batch stays 32",
    why="Half the samples at a time, twice as often.",
    keeps_math=True,
    resumable="live",
    assignments={"batch": "4", "accumulation": "8"},
    forecast=Forecast(
        peak_bytes=12 * GIB, total_bytes=20 * GIB, fraction=0.6, band=Band.SAFE, basis="line through peaks at B 2 and B 8"
    ),
    speed=0.9,
)
ALLOCATOR = Remedy(
    id="allocator",
    title="allocator: expandable_segments:True",
    keeps_math=True,
    resumable="resumes",
    assignments={"allocator": "expandable_segments:True"},
    forecast_unknown="the pieces were not counted",
)
SHORTER = Remedy(
    id="seq_len",
    title="T 128 -> 64",
    why="Half the tokens of each sample.",
    keeps_math=False,
    resumable="resumes",
    needs_consent=True,
    assignments={"seq_len": "64"},
    forecast_unknown="nothing was measured at T 64",
)
BY_HAND = Remedy(
    id="swap",
    title="more swap",
    keeps_math=True,
    resumable="none",
    command="sudo fallocate -l 8G /swapfile",
)
PROPOSAL = wire.Proposal(diagnosis=DIAGNOSIS, remedies=(SMALLER, ALLOCATOR, SHORTER, BY_HAND), waiting="--on-oom ask")


def dead(proposal: wire.Proposal | None = PROPOSAL, **fields: object) -> wire.StateUpdate:
    """A run that has failed for lack of memory."""
    known: dict[str, object] = {"state": wire.Phase.FAILED, "alive": False, "on_oom": "ask", "proposal": proposal}
    return running(gpu(), **{**known, **fields})


def configuration(number: int, batch: int, **fields: object) -> wire.Configuration:
    settings = replace(SETTINGS, batch=batch, accumulation=32 // batch)
    known: dict[str, object] = {
        "attempt": number,
        "since_update": 10 * number,
        "until_update": 10 * number + 10,
        "started": NOW - 1000 + number,
        "reason": f"reason {number}",
        "settings": settings,
        "peak": Peak(batch=batch, bytes=(2 + batch) * GIB, updates=10, settings_key=settings_key(settings, on_gpu=True)),
        "samples_per_second": 30.0 + number,
        "outcome": "replaced",
    }
    return wire.Configuration(number=number, **{**known, **fields})  # type: ignore[arg-type]


CONFIGURATIONS = wire.ConfigurationRows(
    rows=(
        configuration(1, 16, outcome="gpu_oom"),
        configuration(2, 4),
        configuration(3, 8, until_update=None, outcome=None, samples_per_second=None),
    )
)
