"""Diagnoses the end of an attempt: gathers the evidence and gives it to `supervisor.diagnosis`.

A `StallWatch` detects a program that ran out of memory and hangs: other ranks wait for a rank that
has died, or a trainer waits for a loader worker whose batch did not fit into /dev/shm.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from memtop.presets.parameters import stored_config
from memtop.presets.schema import Settings
from memtop.supervisor import units
from memtop.supervisor.diagnosis.diagnose import diagnose, diagnose_file
from memtop.supervisor.diagnosis.values import Diagnosis, Evidence, Kind, OomRecord
from memtop.supervisor.recovery.policy import SURE
from memtop.supervisor.run.post_mortem.evidence import RELATED_SECONDS, AttemptEvidence, MachineMoment, kernel_lines
from memtop.supervisor.run.post_mortem.log_end import error_files, first_dead_rank
from memtop.supervisor.run.record.folder import open_to_read
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
    has_gpu: bool = False
    """Whether the newest sample of the machine shows a GPU."""
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
        with open_to_read(end.log) as log:
            found = diagnose_file(log, evidence)
    except OSError:
        found = diagnose((), evidence)  # there is no log: use the other evidence
    free = evidence.disk_free_bytes
    if found.reason == "no_evidence" and evidence.exit_status is None and free is not None and free < _FULL_BYTES:
        return _silenced(end.state_folder, free)
    first = first_dead_rank(end.log)
    if found.of_memory and found.rank is None and first is not None:
        # The kernel log has the pid, and torchrun's error files have its rank.
        found = msgspec.structs.replace(found, rank=first[0])
    return msgspec.structs.replace(found, snapshot_file=_snapshot(end, found)) if found.kind.of_gpu else found


def _snapshot(end: AttemptEnd, found: Diagnosis) -> str | None:
    """The file that the agent of the failed rank has kept (`train/agent/snapshot.py`). It is whole
    if it is there."""
    ranks = [rank for rank, report in end.reports if not report.survived]
    for rank in ([found.rank] if found.rank in ranks else []) + ranks:
        path = end.folder / f"rank-{rank}-memory.pickle"
        if path.is_file():
            return str(path.absolute())
    return None


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
        killed_in_own_group=seen.killed_in_own_group(end.ended),
        kernel_lines=kernel_lines(max(seen.baseline.started, end.ended - RELATED_SECONDS), end.ended, time.time()),
        member_pids=frozenset(seen.pids),
        host_peak_fraction=max(fractions, default=None),
        address_space_bytes=seen.address_space_bytes,
        shm_free_bytes=min(shm, default=None),
        disk_free_bytes=free_bytes(end.state_folder),
        has_gpu=end.has_gpu or any(sight.has_gpu for sight in moments),
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


def vocabulary(settings: Settings) -> int | None:
    """The model's vocabulary size. None if only the trainer can know it."""
    size = (stored_config(settings) or {}).get("vocab_size")
    return size if isinstance(size, int) else None


def free_bytes(folder: Path) -> int | None:
    """The free bytes of the folder's disk."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


_WORDS = re.compile(
    rb"out of memory|OutOfMemoryError|MemoryError|allocate memory|allocate shared memory|insufficient shared memory"
    rb"|No space left on device|Bus error",
    re.IGNORECASE,
)
_BLOCK_BYTES = 1 << 20
_TAIL_BYTES = 64 << 10
SECONDS, FIRST_SECONDS = 30.0, 60.0
"""How many seconds without reports count as hanging after such a message, and before the first
update, which takes longer."""
_UPDATES, _PAUSES = 5.0, 3.0
"""Programs with long updates get the time of this many updates, or this many times their longest
pause so far."""
ASIDE_SECONDS = 600.0
"""An evaluation or a save may take this long without a report. For external commands it is unknown
when they do this."""
MOST_SECONDS = 3600.0


class StallWatch:
    """Reads the new output of one attempt, and the end of what an earlier supervisor has read.

    Do not use it for a program that is being stopped."""

    def __init__(self, log: Path, monotonic: Callable[[], float]) -> None:
        self._log = log
        self._monotonic = monotonic
        self._offset = max(0, _size(log) - _TAIL_BYTES)
        self._heard: int | None = None
        """Reports until the message; None before they are counted."""
        self._since: float | None = None
        self._words = ""

    def read(self) -> bool:
        """Read the new output, before `look`. True if such a message is in it: then all reports
        must be read before `look`, because one that came before the message is no sign of life."""
        before, words = self._offset, self._new_words()
        if words is not None:
            self._since, self._words, self._heard = self._monotonic(), words, None
        elif self._since is not None and self._offset != before:
            self._since = self._monotonic()  # the program still writes output
        return words is not None

    def look(self, heard: int, update_seconds: float | None, *, longest_pause: float = 0.0, aside: bool = False) -> str | None:
        """The message after which nothing more was reported for too long, else None.

        `heard`: number of reports so far. `update_seconds`: duration of the newest update, None
        before the first. `longest_pause`: the longest time between two reports so far. `aside`: the
        program may be evaluating or saving.
        """
        if self._heard is None:
            self._heard = heard
        elif heard != self._heard:
            # The program continues, so it has handled the error.
            self._since, self._heard = None, heard
        # Silence of a program that never reports anything means nothing.
        if self._since is None or not heard:
            return None
        patience = _patience(update_seconds, longest_pause, aside=aside)
        return self._words if self._monotonic() - self._since > patience else None

    def is_of_memory(self) -> bool:
        """Whether the end of the output really is about a lack of memory.

        If not, the message is ignored.
        """
        with open_to_read(self._log) as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            found = diagnose([file.read()])
        if found.of_memory and found.confidence >= SURE:
            return True
        self._since = None
        return False

    def _new_words(self) -> str | None:
        """The newest line with such a message in the new output (only in the end of it, if there is
        very much)."""
        try:
            with open_to_read(self._log) as file:
                end = file.seek(0, 2)
                file.seek(max(self._offset, end - _BLOCK_BYTES))
                block = file.read(_BLOCK_BYTES)
        except OSError:
            return None  # there is no output yet
        self._offset = end
        lines = [line for line in block.splitlines() if _WORDS.search(line)]
        return lines[-1].decode(errors="replace").strip()[:300] if lines else None


def _patience(update_seconds: float | None, longest_pause: float, *, aside: bool) -> float:
    if update_seconds is None:
        return FIRST_SECONDS
    own_pace = max(_UPDATES * update_seconds, min(_PAUSES * longest_pause, MOST_SECONDS))
    return max(ASIDE_SECONDS if aside else SECONDS, own_pace)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
