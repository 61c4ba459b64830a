"""Builds the scripted driver library and writes its script, so that the real NVML bindings run without a GPU.

    library = build(tmp_path)
    script = Script(tmp_path / "script").gpu(0, total=24 * GIB, used=20 * GIB).process(0, pid=4242, used=GIB)
    script.write()
    subprocess.run([...], env={**os.environ, **script.env(library)})

Within one process use `in_process(library)` with NVML_DOUBLE_SCRIPT set. The fixtures `nvml_library` and `driver` do that;
a conftest.py elsewhere takes them with `from tests.nvml_double.double import driver, nvml_library`.
"""

from __future__ import annotations

import ctypes
import importlib
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).with_name("nvml_double.c")
LIBRARY = "libnvidia-ml.so.1"


def available() -> bool:
    """Whether a C compiler is here to build the library with."""
    return shutil.which("gcc") is not None


def build(folder: Path) -> Path:
    """Compile the library into the folder (once) and return its path.

    It carries no soname: loaded by its path, it is never mistaken for the machine's own library later on.
    """
    library = folder / LIBRARY
    if not library.exists():
        command = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-pthread"]
        subprocess.run([*command, "-o", str(library), str(SOURCE)], check=True)
    return library


@contextmanager
def in_process(library: Path) -> Iterator[ctypes.CDLL]:
    """Let the real bindings of this process use the library, and take it away again afterwards."""
    pynvml: Any = importlib.import_module("pynvml")
    before = pynvml.nvmlLib, pynvml._nvmlGetFunctionPointer_cache
    loaded = ctypes.CDLL(str(library))
    pynvml.nvmlLib, pynvml._nvmlGetFunctionPointer_cache = loaded, {}
    try:
        yield loaded
    finally:
        pynvml.nvmlLib, pynvml._nvmlGetFunctionPointer_cache = before


class Script:
    """What the driver says. Chain calls, then `write()`; write again to change it while a program is running.

    Sizes in bytes, `util` in percent, `temp` in degrees Celsius, `power` and `limit` in milliwatts.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: list[str] = []
        self.library: ctypes.CDLL | None = None

    def calls(self, function: str) -> int:
        """How often the bindings of this process have called the function since the library was loaded."""
        assert self.library is not None, "calls are counted within one process only"
        self.library.nvmlDoubleCalls.restype = ctypes.c_ulong
        return int(self.library.nvmlDoubleCalls(function.encode()))

    def clear(self) -> Script:
        """Forget all lines: the next ones describe the machine anew."""
        self._lines.clear()
        return self

    def gpu(self, index: int, **fields: int | str) -> Script:
        """A GPU; `error=15` makes every call about it fail with that code."""
        return self._line(f"gpu {index}", fields)

    def process(self, gpu: int, *, pid: int, used: int | None, kind: str = "compute") -> Script:
        """A process on a GPU; used None is what a driver says that does not tell memory per process."""
        return self._line(f"process {gpu}", {"pid": pid, "used": "na" if used is None else used, "kind": kind})

    def init_error(self, code: int) -> Script:
        """NVML cannot be started."""
        return self._line("init", {"error": code})

    def missing(self, function: str) -> Script:
        """The driver is too old for this function."""
        return self._line(f"missing {function}", {})

    def fail(self, function: str, gpu: int, code: int) -> Script:
        """This function fails for this GPU."""
        return self._line(f"fail {function} {gpu} {code}", {})

    def driver(self, version: str) -> Script:
        """The driver's version; 550.54.14 unless said otherwise."""
        return self._line(f"driver {version}", {})

    def delay(self, milliseconds: int) -> Script:
        """How long every call takes."""
        return self._line(f"delay_ms={milliseconds}", {})

    def write(self) -> Script:
        """Put the script in place in one step, so that a running program never reads half of it."""
        beside = self.path.with_name(f"{self.path.name}.new")
        beside.write_text("\n".join(self._lines) + "\n")
        beside.replace(self.path)
        return self

    def env(self, library: Path, *, trust_pids: bool = True) -> dict[str, str]:
        """Environment additions for a program that is to see the scripted driver. `trust_pids`: the scripted process
        ids are real ones of this machine, although they have no GPU device open."""
        added = {"LD_LIBRARY_PATH": str(library.parent), "NVML_DOUBLE_SCRIPT": str(self.path)}
        return added | ({"MEMTOP_NVML_TRUST_PIDS": "1"} if trust_pids else {})

    def _line(self, start: str, fields: dict[str, int | str]) -> Script:
        words = [start, *(f"{key}={str(value).replace(' ', '_')}" for key, value in fields.items())]
        self._lines.append(" ".join(words))
        return self


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripted library, built once."""
    if not available():
        pytest.skip("no gcc to build the scripted driver library with")
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def driver(nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    """A script that this process's NVML bindings follow, empty at first."""
    script = Script(tmp_path / "nvml-script").write()
    monkeypatch.setenv("NVML_DOUBLE_SCRIPT", str(script.path))
    with in_process(nvml_library) as library:
        script.library = library
        yield script
