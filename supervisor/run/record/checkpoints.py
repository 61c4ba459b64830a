"""What the supervisor knows of `train_latest_state`: its manifest, and whether the files it names are all there.

Sizes are compared here; the checksums are left to the trainer, which reads every byte anyway when it resumes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from memtop.supervisor.errors import UsageError
from memtop.supervisor.wire import Checkpoint


class _File(msgspec.Struct):
    name: str
    size_bytes: int


class _Manifest(msgspec.Struct):
    updates: int
    samples_seen: int
    saved_at: float
    files: list[_File]


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """The checkpoint in that folder; None if there is no such folder."""
    if not folder.is_dir():
        return None
    manifest_path = folder / "manifest.json"
    try:
        manifest = msgspec.json.decode(manifest_path.read_bytes(), type=_Manifest)
    except FileNotFoundError:
        return Checkpoint(path=str(folder), complete=False, problem=f"{manifest_path} is missing: the save was cut short")
    except (msgspec.DecodeError, UnicodeDecodeError, OSError) as error:
        return Checkpoint(path=str(folder), complete=False, problem=f"{manifest_path}: cannot be understood: {error}")
    problem = next((p for p in (_problem(folder, file) for file in manifest.files) if p), None)
    return Checkpoint(
        path=str(folder),
        updates=manifest.updates,
        samples_seen=manifest.samples_seen,
        saved_at=manifest.saved_at,
        size_bytes=sum(file.size_bytes for file in manifest.files),
        complete=problem is None,
        problem=problem,
    )


def newest_checkpoint(latest: Path) -> Checkpoint | None:
    """`train_latest_state` if it is complete, else the one before it if that is, else the broken one (or None)."""
    first = read_checkpoint(latest)
    if first is not None and first.complete:
        return first
    second = read_checkpoint(latest.with_name(latest.name + ".previous"))
    return second if second is not None and second.complete else first or second


def kept_states(latest: Path) -> list[Checkpoint]:
    """All whole states of the run, the newest first: the trainer keeps as many as it is told to."""
    older = (path for path in latest.parent.glob(f"{latest.name}.*") if ".tmp-" not in path.name)
    folders = (latest, *older)
    states = [state for folder in folders if (state := read_checkpoint(folder)) is not None and state.complete]
    return sorted(states, key=lambda state: state.updates or 0, reverse=True)


def newest_until(kept: Sequence[Checkpoint], update: int) -> Checkpoint:
    """The newest kept state at or before that update; UsageError if there is none."""
    fitting = [state for state in kept if state.updates is not None and state.updates <= update]
    if not fitting:
        there = ", ".join(str(state.updates) for state in kept) or "none"
        raise UsageError(f"--state: no kept state at or before update {update} (kept: {there}); without it the newest goes on")
    return max(fitting, key=lambda state: state.updates or 0)


def _problem(folder: Path, file: _File) -> str | None:
    path = folder / file.name
    try:
        found = path.stat().st_size
    except OSError as error:
        return f"{path}: {error.strerror}"
    return None if found == file.size_bytes else f"{path}: {found} bytes, the manifest says {file.size_bytes}"
