"""Diagnoses the end of an attempt: gathers the evidence and gives it to `supervisor.diagnosis`."""

from __future__ import annotations

import contextlib
import shutil
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from memtop.presets.schema import Settings
from memtop.supervisor import units
from memtop.supervisor.diagnosis.diagnose import diagnose, diagnose_file
from memtop.supervisor.diagnosis.values import Diagnosis, Evidence, Kind, OomRecord
from memtop.supervisor.run.post_mortem.evidence import RELATED_SECONDS, AttemptEvidence, MachineMoment, kernel_lines
from memtop.supervisor.run.post_mortem.log_end import error_files, first_dead_rank
from memtop.supervisor.run.reports import Oom

# With less free space than this, neither output nor the exit file can be written.
_FULL_BYTES = 1 << 20


class AttemptEnd(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor knows about the end of an attempt."""

    folder: Path
    log: Path
    state_folder: Path
    """Where states are saved. The free space of this disk counts."""
    ended: float
    status: int | None
    asked_to_stop: bool
    settings: Settings | None
    reports: Sequence[tuple[int, Oom]]
    """The `oom` reports of the attempt, with their ranks."""
    newest_step: float | None = None
    """When the last update was reported, in seconds since the epoch."""


def examine(end: AttemptEnd, seen: AttemptEvidence) -> Diagnosis:
    """Why the attempt ended. Reads the whole log, so call it in a thread.

    Never raises, because no log must end the supervisor. An error in memtop becomes a diagnosis
    that names it.
    """
    try:
        return _examine(end, seen)
    except Exception as error:  # noqa: BLE001 - any unforeseen error
        # the disk of the supervisor's log may be full; the diagnosis also contains the error
        with contextlib.suppress(OSError):
            traceback.print_exc()
        return _not_examined(end, error)


def _not_examined(end: AttemptEnd, error: Exception) -> Diagnosis:
    words = " ".join(": ".join(filter(None, (type(error).__name__, str(error)))).split())[:300]
    place = traceback.extract_tb(error.__traceback__)[-1:]
    return Diagnosis(
        kind=Kind.NOT_MEMORY,
        reason=f"not_examined ({words})",
        confidence=0.1,
        summary=f"memtop could not find out why the program ended: an error occurred while it read {end.log} ({words}).",
        source="exit_status",
        evidence=tuple(f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}: {words}" for frame in place),
    )


def _examine(end: AttemptEnd, seen: AttemptEvidence) -> Diagnosis:
    evidence = evidence_of(end, seen)
    try:
        found = diagnose_file(end.log, evidence)
    except OSError:
        found = diagnose((), evidence)  # there is no log: use the other evidence
    free = evidence.disk_free_bytes
    if found.reason == "no_evidence" and evidence.exit_status is None and free is not None and free < _FULL_BYTES:
        return _silenced(end.state_folder, free)
    first = first_dead_rank(end.log)
    if found.of_memory and found.rank is None and first is not None:
        # The kernel log has the pid, and torchrun's error files have its rank.
        found = msgspec.structs.replace(found, rank=first[0])
    return found


def _silenced(folder: Path, free: int) -> Diagnosis:
    """Nothing could be written any more, not even the exit status: the full disk itself is the
    evidence."""
    summary = f"The disk of {folder} is full ({units.size(free)} free): neither states nor output could be written."
    return Diagnosis(
        kind=Kind.DISK_FULL,
        confidence=0.6,
        summary=summary,
        phase="save",
        source="samples",
        evidence=(f"{units.size(free)} free on the run's disk", "no exit status and no message was written"),
    )


def evidence_of(end: AttemptEnd, seen: AttemptEvidence) -> Evidence:
    """All evidence except the log."""
    moments = seen.moments
    fractions = [sight.host_fraction for sight in moments if sight.host_fraction is not None]
    shm = [sight.shm_free_bytes for sight in moments if sight.shm_free_bytes is not None]
    settings, kills = end.settings, seen.kills()
    return Evidence(
        exit_status=end.status,
        asked_to_stop=end.asked_to_stop,
        records=tuple(_not_survived(end)),
        error_files=tuple(error_files(end.folder)),
        cgroup_oom_kills=kills,
        cgroup_killed_near_end=seen.killed_near(end.ended),
        in_own_group=seen.in_own_group,
        kernel_lines=kernel_lines(max(seen.baseline.started, end.ended - RELATED_SECONDS), end.ended, time.time()),
        member_pids=frozenset(seen.pids),
        host_peak_fraction=max(fractions, default=None),
        address_space_bytes=seen.address_space_bytes,
        shm_free_bytes=min(shm, default=None),
        disk_free_bytes=free_bytes(end.state_folder),
        gpu_run_bytes=_most_held(moments),
        batch=settings.batch if settings else None,
        seq_len=settings.seq_len if settings else None,
        vocabulary=vocabulary(settings) if settings else None,
    )


def _not_survived(end: AttemptEnd) -> Iterator[OomRecord]:
    for rank, report in end.reports:
        record = oom_record(rank, report)
        if record is None or record.survived:
            continue
        # It is unknown whether the failure of a thread ended the program. Later updates show that
        # it did not.
        if record.survived is False or end.newest_step is None or record.time > end.newest_step:
            yield record


def _most_held(moments: Sequence[MachineMoment]) -> dict[str, int]:
    """By uuid, the most memory that the run's processes held.

    At the end some of them may already have been gone.
    """
    uuids = {uuid for sight in moments for uuid in sight.gpu_run_bytes}
    return {uuid: max(sight.gpu_run_bytes.get(uuid, 0) for sight in moments) for uuid in uuids}


def oom_record(rank: int, report: Oom) -> OomRecord | None:
    """The evidence in an `oom` report. None if it has no time or no message."""
    if report.time is None or report.message is None or report.error is None:
        return None
    names = (name for name in OomRecord.__struct_fields__ if name != "rank")
    return OomRecord(rank=rank, **{name: getattr(report, name) for name in names})


def model_config(settings: Settings) -> dict[str, Any] | None:
    """The model's configuration. None if only the trainer can know it (a hub name)."""
    config, path = settings.model.get("config"), settings.model.get("path")
    if config is None and isinstance(path, str):
        try:
            config = msgspec.json.decode((Path(path) / "config.json").read_bytes())
        except (OSError, msgspec.DecodeError):
            return None  # no such folder, or it cannot be read
    return config if isinstance(config, dict) else None


def vocabulary(settings: Settings) -> int | None:
    """The model's vocabulary size. None if only the trainer can know it."""
    size = (model_config(settings) or {}).get("vocab_size")
    return size if isinstance(size, int) else None


def free_bytes(folder: Path) -> int | None:
    """The free bytes of the folder's disk."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
