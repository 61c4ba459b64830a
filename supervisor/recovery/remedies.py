"""The remedies for one failure, ranked by what they cost the user: a ladder for each way to run out. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from memtop.presets.schema import Settings
from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.recovery.forecast import settings_key
from memtop.supervisor.recovery.gpu_ladder import Rung, gpu_ladder
from memtop.supervisor.recovery.host_ladder import disk_ladder, host_ladder, pinned_ladder, shm_ladder
from memtop.supervisor.recovery.own_program import Seen, remedies_for_program
from memtop.supervisor.recovery.situation import HostFacts, KeptState, Situation
from memtop.supervisor.recovery.values import Peak, Remedy

__all__ = ["HostFacts", "KeptState", "Ladder", "Situation", "ladder", "remedies"]


class Ladder(msgspec.Struct, frozen=True, kw_only=True):
    """What can be done, the best first, and what seems to help and does not, each with its reason in one line."""

    remedies: tuple[Remedy, ...]
    left_out: tuple[str, ...] = ()


_LADDERS: dict[Kind, Callable[[Situation], Iterator[Rung]]] = {
    Kind.GPU_OOM: gpu_ladder,
    Kind.GPU_OOM_FRAGMENTED: gpu_ladder,
    Kind.GPU_OOM_OTHER_PROCESS: gpu_ladder,
    Kind.HOST_OOM_ALLOC: host_ladder,
    Kind.HOST_OOM_KILLED: host_ladder,
    Kind.PINNED_HOST_OOM: pinned_ladder,
    Kind.SHM_EXHAUSTED: shm_ladder,
    Kind.DISK_FULL: disk_ladder,
}


def remedies(
    diagnosis: Diagnosis,
    settings: Settings | None,
    *,
    peaks: Iterable[Peak] = (),
    total_bytes: int | None = None,
    run: str = "RUN",
    host: HostFacts | None = None,
    base_bytes: int | None = None,
    others_bytes: int | None = None,
    failed: Sequence[Settings] = (),
    alive: bool = False,
    on_gpu: bool | None = None,
    can_checkpoint: bool = True,
    deepspeed: bool = True,
    allocator: str = "",
    model_config: Mapping[str, Any] | None = None,
    seen: Seen | None = None,
) -> tuple[Remedy, ...]:
    """What can be done, ranked. See `Situation` for the arguments; `settings` None: a program of the user's own, of which
    `seen` is known. `failed`: every configuration that has run out before, so that none is offered again.
    """
    if settings is None:
        return remedies_for_program(diagnosis, run=run, seen=seen or Seen(), allocator=allocator, host=host)
    return ladder(
        situation_of(
            diagnosis,
            settings,
            peaks=peaks,
            total_bytes=total_bytes,
            run=run,
            host=host,
            base_bytes=base_bytes,
            others_bytes=others_bytes,
            failed=tuple(failed),
            alive=alive,
            on_gpu=on_gpu,
            can_checkpoint=can_checkpoint,
            deepspeed=deepspeed,
            allocator=allocator,
            model_config=model_config,
        )
    ).remedies


def ladder(situation: Situation) -> Ladder:
    """All rungs for this situation, in order, with the reasons of those left out."""
    climb = _LADDERS.get(situation.diagnosis.kind)
    found: list[Remedy] = []
    left_out: list[str] = []
    for rung in () if climb is None else climb(situation):
        if isinstance(rung, str):
            left_out.append(rung)
        elif rung is not None and all((rung.id, rung.assignments) != (one.id, one.assignments) for one in found):
            found.append(rung)
    return Ladder(remedies=_what_fits_first(found), left_out=tuple(dict.fromkeys(left_out)))


def _what_fits_first(found: Sequence[Remedy]) -> tuple[Remedy, ...]:
    """What is forecast to run out again comes after all else that can be done without asking, and before what must be asked."""
    hopeless = [one for one in found if not one.needs_consent and _runs_out(one)]
    rest = [one for one in found if one not in hopeless]
    free = [place for place, one in enumerate(rest) if not one.needs_consent]
    learnt = [place for place, one in enumerate(rest) if not one.keeps_math]
    at = free[-1] + 1 if free else min(learnt, default=len(rest))
    return (*rest[:at], *hopeless, *rest[at:])


def _runs_out(remedy: Remedy) -> bool:
    fraction = remedy.forecast.fraction if remedy.forecast is not None else None
    return fraction is not None and fraction >= 1


def situation_of(
    diagnosis: Diagnosis,
    settings: Settings,
    *,
    peaks: Iterable[Peak] = (),
    total_bytes: int | None = None,
    others_bytes: int | None = None,
    host: HostFacts | None = None,
    on_gpu: bool | None = None,
    **more: Any,
) -> Situation:
    """A situation with what the diagnosis itself tells filled in: the card's size, other processes, the peak that failed."""
    of_gpu, host = diagnosis.kind.of_gpu, host or HostFacts()
    gpu = _on_gpu(diagnosis, settings, total_bytes) if on_gpu is None else on_gpu
    if diagnosis.address_space_bytes is not None and not gpu:
        total_bytes = None  # what is measured is memory in use, of which no share tells when the address space is full
    elif total_bytes is None:
        total_bytes = diagnosis.total_bytes if of_gpu else None if gpu else host.limit_bytes
    if of_gpu and diagnosis.allowed_bytes is not None:
        total_bytes = min(total_bytes or diagnosis.allowed_bytes, diagnosis.allowed_bytes)
    if others_bytes is None and of_gpu:
        others_bytes = diagnosis.other_process_bytes
    own = _failed_peak(diagnosis, settings, on_gpu=gpu)
    return Situation(
        diagnosis=diagnosis,
        settings=settings,
        peaks=(*peaks, *(() if own is None else (own,))),
        total_bytes=total_bytes,
        others_bytes=others_bytes,
        host=host,
        on_gpu=gpu,
        **more,
    )


def _on_gpu(diagnosis: Diagnosis, settings: Settings, total_bytes: int | None) -> bool:
    if settings.device != "auto":
        return settings.device == "cuda"
    return diagnosis.kind.of_gpu or diagnosis.kind is Kind.PINNED_HOST_OOM or total_bytes is not None


def _failed_peak(diagnosis: Diagnosis, settings: Settings, *, on_gpu: bool) -> Peak | None:
    """What the process held and the request that it could not have: less than it would have needed."""
    if diagnosis.process_bytes is None or diagnosis.phase in ("evaluation", "load", "save"):
        return None
    if diagnosis.kind.of_gpu != on_gpu or not diagnosis.of_memory:
        return None
    wanted = diagnosis.process_bytes + (diagnosis.requested_bytes or 0)
    key = settings_key(settings, on_gpu=on_gpu)
    return Peak(batch=settings.batch, bytes=wanted, updates=0, failed=True, settings_key=key)
