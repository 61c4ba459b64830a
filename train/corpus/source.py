"""Which file is read for which columns, and how messages name it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from memtop.train.errors import BadInputError


class Source(msgspec.Struct, frozen=True):
    """A file of rows; as text it is "data.train /x/y.parquet"."""

    setting: str
    path: Path
    roles: dict[str, str]
    """What each column is for, to its name in the file."""

    def __str__(self) -> str:
        return f"{self.setting} {self.path}"

    @property
    def columns(self) -> list[str]:
        """The names of the needed columns, each once."""
        return list(dict.fromkeys(self.roles.values()))

    def check_columns(self, found: Iterable[str], where: str = "") -> None:
        """BadInputError for the first needed column that is not among those found."""
        names = list(found)
        for role, name in self.roles.items():
            if name not in names:
                has = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
                raise BadInputError(
                    f"{self}: {where}no column '{name}'; it has {has or 'none'} (use --set data.columns.{role}=NAME)"
                )

    def stamp(self, path: Path) -> tuple[int, int]:
        """Size in bytes and modification time in ns: a file that is opened again must still be the same."""
        try:
            found = path.stat()
        except OSError as error:
            raise BadInputError(f"{self}: {path} cannot be read any more: {error.strerror}") from None
        return found.st_size, found.st_mtime_ns

    def check_unchanged(self, path: Path, stamp: tuple[int, int]) -> None:
        if self.stamp(path) != stamp:
            raise BadInputError(f"{self}: {path} was changed while it was in use; start the run anew with the new file")
