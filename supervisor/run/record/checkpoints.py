"""The saved states of a run: reads their manifests, finds the newest, and goes back to an earlier
one.

Only the sizes of files are compared. The trainer compares the checksums when it resumes, because it
then reads all files.

Going back moves later states aside with a time stamp and deletes nothing. A run that is stopped for
this saves once more, and the trainer may then delete its oldest state. So the chosen state is first
kept in an additional folder, with hard links (or copies, if the file system has no hard links).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from memtop.presets.decoding import decoder_of
from memtop.supervisor.errors import RunFolderError, UsageError
from memtop.supervisor.run.record.folder import name_aside, open_to_read
from memtop.supervisor.run.record.whole_files import LIGHTNING, why_no_whole_folder, why_not_whole
from memtop.supervisor.run.reports import Count, Time, Word
from memtop.supervisor.wire import Checkpoint

# Errors of file systems that have no hard links, or none between two of their parts.
_NO_LINKS = {errno.EPERM, errno.EXDEV, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}

_MOST_WORDS = 2000


class _File(msgspec.Struct):
    name: Word
    size_bytes: Count


class _Manifest(msgspec.Struct):
    updates: Count
    samples_seen: Count
    saved_at: Time
    files: list[_File]


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """The checkpoint in a folder. None if there is no such folder."""
    if not folder.is_dir():
        return None
    manifest_path = folder / "manifest.json"
    try:
        with open_to_read(manifest_path) as file:
            manifest = decoder_of(_Manifest).decode(file.read())
    except FileNotFoundError:
        return Checkpoint(path=str(folder), complete=False, problem=f"{manifest_path} is missing: the save was interrupted")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        return Checkpoint(path=str(folder), complete=False, problem=f"{manifest_path}: cannot be decoded: {error}")
    problem = _damage(folder) or next((p for p in (_problem(folder, file) for file in manifest.files) if p), None)
    return Checkpoint(
        path=str(folder),
        updates=manifest.updates,
        samples_seen=manifest.samples_seen,
        saved_at=manifest.saved_at,
        size_bytes=sum(file.size_bytes for file in manifest.files),
        complete=problem is None,
        problem=problem,
    )


TRAINER_STATE = "trainer_state.json"
"""What Hugging Face's Trainer writes last into a checkpoint."""
RANDOM_STATE = "random_states_0.pkl"
"""What accelerate writes last into a state, except for objects of the program's own."""


def checked(reported: Checkpoint) -> Checkpoint:
    """A checkpoint that a program has reported: complete if what it writes last is there. That is a
    file in the folder of Hugging Face's Trainer or accelerate. A single file, or a folder of
    Lightning, is whole."""
    path = Path(reported.path)
    problem = None
    try:
        if path.is_dir() and (path / RANDOM_STATE).exists():
            path /= RANDOM_STATE
        if path.suffix == LIGHTNING and path.is_dir():
            problem = why_no_whole_folder(path)
        elif path.is_dir():
            path /= TRAINER_STATE
            with open_to_read(path) as file:
                msgspec.json.decode(file.read(), type=dict[str, msgspec.Raw])
        else:
            path.stat()
            problem = why_not_whole(path)
    except FileNotFoundError:
        problem = f"{path} is missing: the save was interrupted, or the checkpoint was removed"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        problem = f"{path}: cannot be decoded: {error}"
    return msgspec.structs.replace(reported, complete=problem is None, problem=problem)


def newest_checkpoint(latest: Path) -> Checkpoint | None:
    """The one that the trainer resumes from: `train_latest_state` if complete, else what a killed
    save left if that is complete, else the newest older one that is; else the newest incomplete
    one. None if there is none."""
    older = sorted(latest.parent.glob(f"{latest.name}.[0-9]*"), reverse=True)
    former = [latest.with_name(f"{latest.name}.previous"), *older]
    incomplete: Checkpoint | None = None
    for folder in (latest, *sorted(latest.parent.glob(f"{latest.name}.tmp-*")), *former):
        found = read_checkpoint(folder)
        if found is not None and found.complete:
            return found
        if ".tmp-" not in folder.name:
            incomplete = incomplete or found
    return incomplete


def kept_states(latest: Path) -> list[Checkpoint]:
    """All complete states of the run, the newest first. The `keep` setting limits their number."""
    older = (path for path in latest.parent.glob(f"{latest.name}.*") if ".tmp-" not in path.name)
    folders = (latest, *older)
    states = [state for folder in folders if (state := read_checkpoint(folder)) is not None and state.complete]
    return sorted(states, key=lambda state: state.updates or 0, reverse=True)


def _damage(folder: Path) -> str | None:
    """What the trainer found when it compared the checksums of a run without a complete state."""
    try:
        with open_to_read(folder / "damaged.txt") as file:
            return f"the trainer found it damaged: {file.read(_MOST_WORDS).decode(errors='replace')}"
    except OSError:
        return None  # Hardly any state has this file.


def _problem(folder: Path, file: _File) -> str | None:
    path = folder / file.name
    try:
        found = path.stat().st_size
    except OSError as error:
        return f"{path}: {error.strerror}"
    except ValueError:
        return f"{folder / 'manifest.json'}: {file.name!r} is no name of a file"
    return None if found == file.size_bytes else f"{path}: {found} bytes, but the manifest lists {file.size_bytes}"


def state_at(latest: Path, update: int) -> Checkpoint:
    """The newest kept state at or before that update. Raises UsageError if there is none."""
    return newest_until(kept_states(latest), update)


def newest_until(kept: Sequence[Checkpoint], update: int) -> Checkpoint:
    """The newest of these states at or before that update. Raises UsageError if there is none."""
    fitting = [state for state in kept if state.updates is not None and state.updates <= update]
    if not fitting:
        there = ", ".join(str(state.updates) for state in kept) or "none"
        raise UsageError(
            f"--state: no kept state at or before update {update} (kept: {there}); without --state the newest one is used"
        )
    return max(fitting, key=lambda state: state.updates or 0)


def hold(latest: Path, update: int) -> None:
    """Keep the state that the run will go back to, whatever the program saves while it stops."""
    chosen, held = Path(state_at(latest, update).path), _held(latest)
    if chosen == held:
        return
    new = held.with_name(f"{held.name}.new")
    try:
        for leftover in (new, held):
            # deletes our links only; the linked files stay
            shutil.rmtree(leftover, ignore_errors=True)
        shutil.copytree(chosen, new, copy_function=link_or_copy)
        new.rename(held)
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        raise RunFolderError(f"{chosen}: cannot be kept: {why(error)}") from None


def discard_held(latest: Path) -> None:
    """Delete the additional folder, because the run no longer goes back."""
    shutil.rmtree(_held(latest), ignore_errors=True)


def discard_before_spike(latest: Path, *, alive: bool) -> None:
    """Delete the state that the trainer has kept from before a spike of the loss, and what a kill
    has left of it: the next start would put it back. What a living trainer may be writing stays.
    """
    kept, left = _before_spike(latest), "tmp-*.former" if alive else "tmp-*"
    for folder in (*latest.parent.glob(f"{kept.name}.{left}"), kept):
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def rolled_back(latest: Path, update: int | None) -> Iterator[Path | None]:
    """Go back to the newest state at or before that update. None changes nothing.

    Yields the folder to which later states were moved, None if there were none. If the block
    raises, all states are moved back. The run must not be running. Raises RunFolderError if a
    folder cannot be moved.
    """
    moves: list[tuple[Path, Path]] = []
    aside = name_aside(latest.with_name("set-aside"))
    try:
        if update is not None:
            _move(latest, update, aside, moves)
        yield aside if any(here.parent == aside for _, here in moves) else None
    except BaseException:
        _move_back(moves, aside)
        raise
    discard_held(latest)
    here, kept = read_checkpoint(latest), read_checkpoint(_before_spike(latest))
    if update is not None and here is not None and kept is not None:
        same = (here.updates, here.saved_at) == (kept.updates, kept.saved_at)
        if same:  # the run has gone back to it: it is the newest state now
            discard_before_spike(latest, alive=False)


def _move(latest: Path, update: int, aside: Path, moves: list[tuple[Path, Path]]) -> None:
    """Go back. Each move is added to `moves` as (from, to)."""
    chosen = Path(state_at(latest, update).path)

    def move(there: Path, here: Path) -> None:
        there.rename(here)
        moves.append((there, here))

    try:
        for folder in (latest, *_others(latest), latest.with_name("best_state")):
            state = read_checkpoint(folder)
            if state is None or folder == chosen or (state.complete and (state.updates or 0) <= update):
                continue
            aside.mkdir(exist_ok=True)
            move(folder, aside / folder.name)
        if chosen != latest:
            if latest.is_dir():
                # This is an older complete state. It is kept.
                move(latest, latest.with_name(f"{latest.name}.{time.time_ns()}"))
            move(chosen, latest)
    except OSError as error:
        raise RunFolderError(f"{error.filename or latest}: cannot be moved: {why(error)}") from None


def _move_back(moves: list[tuple[Path, Path]], aside: Path) -> None:
    for there, here in reversed(moves):
        try:
            here.rename(there)
        except OSError as error:
            raise RunFolderError(f"{here}: cannot be moved back to {there}: {why(error)}; move it there yourself") from error
    if aside.is_dir() and not any(aside.iterdir()):
        aside.rmdir()


def link_or_copy(source: str, target: str) -> None:
    """Give the file a second name; copy it if the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copy2(source, target)


def why(error: OSError) -> str:
    """The error of a copy of a folder, in words."""
    # copytree raises one error with a list of (from, to, reason) and without an errno.
    if isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list):
        return "; ".join(str(why) for *_, why in error.args[0][:2])
    return error.strerror or str(error)


def _held(latest: Path) -> Path:
    return latest.with_name(f"{latest.name}.held")


def _before_spike(latest: Path) -> Path:
    return latest.with_name(f"{latest.name}.before_spike")


def _others(latest: Path) -> list[Path]:
    return sorted(path for path in latest.parent.glob(f"{latest.name}.*") if path.is_dir() and path != _held(latest))
