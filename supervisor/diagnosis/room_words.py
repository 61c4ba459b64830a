"""No room in /dev/shm or on a disk."""

from __future__ import annotations

import re

from memtop.supervisor.diagnosis.finding import Shape, shape
from memtop.supervisor.diagnosis.values import Kind

_SHM, _DISK = Kind.SHM_EXHAUSTED, Kind.DISK_FULL
_FULL = r"(?:No space left on device|Disk quota exceeded|ENOSPC)"

SHAPES: tuple[Shape, ...] = (
    # torch's own names in /dev/shm, and Python's and NCCL's.
    shape(
        rf"(?:write|resize|open|allocate|truncate)[^<]{{0,50}}</?torch_\w+> .{{0,60}}? {_FULL}",
        _SHM,
        confidence=0.95,
        phase="data",
        needle="torch_",
    ),
    shape(r"unable to allocate shared memory\(shm\)", _SHM, confidence=0.85, phase="data", needle="(shm)"),
    shape(r"(?i:insufficient shared memory|out of shared memory(?!,))", _SHM, confidence=0.85, phase="data"),
    shape(
        r"DataLoader worker \(pid\(?s?\)? [\d,]{1,400}\) is killed by signal:? Bus error",
        _SHM,
        confidence=0.9,
        phase="data",
        needle="Buserror",
    ),
    shape(r"bus error encountered in worker", _SHM, confidence=0.9, phase="data", needle="buserror"),
    shape(rf"{_FULL}.{{0,30}}?/dev/shm|/dev/shm/\S{{0,120}}? {_FULL}", _SHM, confidence=0.95, needle="/dev/shm"),
    shape(rf"{_FULL}:? '?/(?:psm_|torch_|sem\.|loky)", _SHM, confidence=0.9),
    shape(
        r"(?:failed to|unable to|Error while) (?:extend|creating|attach\w* to|open|allocate) (?:shared"
        r" memory segment)? [^:]{0,20}?/dev/shm/nccl",
        _SHM,
        confidence=0.85,
        needle="/dev/shm/nccl",
    ),
    # The disk.
    shape(r"kind:? StorageFull|\(os error (?:28|122|112)\)|code: (?:28|122), kind", _DISK, confidence=0.95),
    shape(_FULL, _DISK, confidence=0.92),
    shape(r"\[Errno 28\](?! inotify)|\[Errno 122\]|\[WinError 112\]", _DISK, confidence=0.95),
    shape(r"not enough space on the disk|Not enough disk space|(?:database or )?disk is full|(?i:disk full)", _DISK),
    shape(r"PytorchStreamWriter failed", _DISK, confidence=0.7, phase="save", needle="StreamWriter"),
    shape(r"inline_container.{0,30}? unexpected pos \d+ vs \d+", _DISK, confidence=0.7, phase="save", needle="unexpectedpos"),
    shape(r"(?:ephemeral|local ephemeral|emptyDir).{0,40}?(?:storage|usage).{0,40}? exceeds", _DISK, confidence=0.85),
    shape(r"node was low on resource: ephemeral-storage", _DISK, confidence=0.9, needle="lowonresource"),
)

SHARED_FRAMES = re.compile(r"multiprocessing[/\\](?:shared_memory|synchronize|heap|reductions?)\.py")
"""An "OSError: No space left on device" without a path, from code that makes files in /dev/shm."""
