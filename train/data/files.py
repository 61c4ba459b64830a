"""A run's data files, and files derived from them once for all ranks and later runs."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from memtop.presets import user_cache
from memtop.train import BadInputError


class DataFile(msgspec.Struct, frozen=True):
    """A file of rows. As text it is "data.train /x/y.parquet", for messages."""

    setting: str
    path: Path
    roles: dict[str, str]
    """Maps each role ("prompt") to the name of its column in the file."""

    def __str__(self) -> str:
        return f"{self.setting} {self.path}"

    @property
    def columns(self) -> list[str]:
        """The names of the needed columns, each once."""
        return list(dict.fromkeys(self.roles.values()))

    def check_columns(self, found: Iterable[str], where: str = "") -> None:
        """BadInputError for the first needed column that is missing in `found`."""
        names = list(found)
        for role, name in self.roles.items():
            if name not in names:
                has = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
                raise BadInputError(
                    f"{self}: {where}no column '{name}'; it has {has or 'none'} (use --set data.columns.{role}=NAME)"
                )

    def stamp(self, path: Path) -> tuple[int, int]:
        """Size in bytes and modification time in ns, to detect a change at the next opening."""
        try:
            found = path.stat()
        except OSError as error:
            raise BadInputError(f"{self}: {path} can no longer be read: {error.strerror}") from None
        return found.st_size, found.st_mtime_ns

    def check_unchanged(self, path: Path, stamp: tuple[int, int]) -> None:
        if self.stamp(path) != stamp:
            raise BadInputError(f"{self}: {path} was changed while it was in use; start the run again with the new file")


def cache_folder() -> Path:
    """The user's folder for derived files; BadInputError for a user without a home folder."""
    found = user_cache()
    if found is None:
        raise BadInputError("XDG_CACHE_HOME: not set, and this user has no home folder; set it to a folder")
    return found


def fingerprint(path: Path, *parts: str) -> str:
    """A name (hex) for a file derived from this one.

    It changes with path, size, modification time and each part.
    """
    found = path.stat()
    return digest(str(path.resolve()), str(found.st_size), str(found.st_mtime_ns), *parts)


def digest(*parts: str) -> str:
    """128 bits of SHA-256 (hex) over the parts and their lengths: ("ab", "c") != ("a", "bc")."""
    return hashlib.sha256("".join(f"{len(part)}:{part}" for part in parts).encode()).hexdigest()[:32]


def built_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Return `target`, a file or folder, after one process has built it.

    `build` gets a temporary path.

    A kernel lock makes other processes wait. The target appears only when it is complete, and the
    leftovers of a killed process are removed by the next one. BadInputError if it cannot be
    written, or if `build` cannot read a file.
    """
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_name(f"{target.name}.lock").open("w") as lock:
            # Held until the file is closed, also by a crash.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _build(target, build)
    except OSError as error:
        if isinstance(error.filename, str) and not _concerns(target.parent, Path(error.filename)):
            raise BadInputError(
                f"{error.filename}: cannot be read while its data is prepared: {error.strerror}; "
                "check that file, then start again"
            ) from None
        refused = isinstance(error, (PermissionError, FileNotFoundError, NotADirectoryError)) or error.errno == errno.EROFS
        advice = "set XDG_CACHE_HOME to a folder that you can write" if refused else "free some space there"
        reason = error.strerror or error
        raise BadInputError(f"{target.parent}: prepared data cannot be written there: {reason}; {advice}") from None
    return target


def _concerns(folder: Path, path: Path) -> bool:
    """Whether this path is the folder, in it, or above it."""
    return path == folder or folder in path.parents or path in folder.parents


def _build(target: Path, build: Callable[[Path], None]) -> None:
    # A fixed name is enough because the lock is held.
    temporary = target.with_name(f"{target.name}.part")
    _remove(temporary)
    try:
        build(temporary)
        for file in [*temporary.iterdir(), temporary] if temporary.is_dir() else [temporary]:
            _flush(file)
        temporary.replace(target)
        _flush(target.parent)
    finally:
        _remove(temporary)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
