"""Gives an import of the program memtop's changed copy of a file.

The environment variable MEMTOP_SOURCES is a JSON object: by the path of a Python file, that of the
copy. The module keeps the name and the path of the user's file, so what it computes from its own
path, and a traceback, are the same.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
from types import ModuleType
from typing import Any, Sequence

VARIABLE = "MEMTOP_SOURCES"


def install() -> None:
    """Replace these files from now on."""
    text = os.environ.get(VARIABLE)
    if not text:
        return
    try:
        copies = {os.path.realpath(path): str(copy) for path, copy in json.loads(text).items()}
    except Exception as error:  # noqa: BLE001 - the program must run, whatever goes wrong here
        sys.stderr.write("memtop: its settings could not be changed: %r\n" % (error,))
        return
    sys.meta_path.insert(0, _Finder(copies))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, copies: "dict[str, str]") -> None:
        self._copies = copies
        self._names = {os.path.splitext(os.path.basename(path))[0] for path in copies}

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None", target: "ModuleType | None" = None
    ) -> "importlib.machinery.ModuleSpec | None":
        if fullname.rpartition(".")[2] not in self._names:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        copy = None if spec is None or spec.origin is None else self._copies.get(os.path.realpath(spec.origin))
        if spec is None or spec.origin is None or copy is None:
            return None
        spec.loader = _Loader(fullname, spec.origin, copy)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    """Reads the copy in place of the file, and leaves the compiled file of the user alone."""

    def __init__(self, fullname: str, path: str, copy: str) -> None:
        super().__init__(fullname, path)
        self._copy = copy

    def get_data(self, path: Any) -> bytes:
        return super().get_data(self._copy if os.fspath(path) == self.path else path)

    def path_stats(self, path: Any) -> "dict[str, Any]":
        raise OSError("compiled anew")
