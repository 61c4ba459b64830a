"""Builds the scripted driver library and writes its script, so that the real NVML bindings run
without a GPU.

    library = build(tmp_path)
    script = Script(tmp_path / "script").gpu(0, total=24 * GIB, used=20 * GIB)
    script.process(0, pid=4242, used=GIB)
    script.write()
    subprocess.run([...], env={**os.environ, **script.env(library)})

Within one process use `in_process(library)` with NVML_DOUBLE_SCRIPT set. The fixtures
`nvml_library` and `driver` do that; a conftest.py elsewhere takes them with `from
tests.nvml_double.double import driver, nvml_library`.
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

from memtop.supervisor.monitor.nvml import events

SOURCES = [Path(__file__).with_name(name) for name in ("nvml_script.c", "nvml_double.c", "nvml_lists.c")]
LIBRARY = "libnvidia-ml.so.1"


def available() -> bool:
    """Whether a C compiler is here to build the library with."""
    return shutil.which("gcc") is not None


def build(folder: Path, *options: str) -> Path:
    """Compile the library into the folder (once) and return its path. The option
    -DLONG_PROCESS_ROWS makes it one of the first 535 drivers, with their process rows.

    It carries no soname: loaded by its path, it is never mistaken for the machine's own library
    later on.
    """
    library = folder / LIBRARY
    if not library.exists():
        command = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-pthread", *options]
        subprocess.run([*command, "-o", str(library), *map(str, SOURCES)], check=True)
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
    """The answers of the driver. Chain calls, then `write()`; write again to change them while a
    program is running.

    Sizes in bytes, `util` in percent, `temp` in degrees Celsius, `power` and `limit` in milliwatts.
    The other fields of a GPU and their defaults: `usual` in nvml_script.c.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: list[str] = []
        self._events = 0
        self.library: ctypes.CDLL | None = None

    def calls(self, function: str) -> int:
        """How often the bindings of this process have called the function since the library was
        loaded."""
        assert self.library is not None, "calls are counted within one process only"
        self.library.nvmlDoubleCalls.restype = ctypes.c_ulong
        return int(self.library.nvmlDoubleCalls(function.encode()))

    def clear(self) -> Script:
        """Forget all lines: the next ones describe a new machine."""
        self._lines.clear()
        return self

    def gpu(self, index: int, **fields: int | str) -> Script:
        """A GPU; `error=15` makes every call about it fail with that code."""
        return self._line(f"gpu {index}", fields)

    def mig(self, gpu: int, position: int, **fields: int | str) -> Script:
        """A MIG instance at this index below the GPU, which needs `mig=1`; gaps between indices are
        normal."""
        return self._line(f"mig {gpu} {position}", fields)

    def process(
        self, gpu: int, *, pid: int, used: int | None, kind: str = "compute", mig: int | None = None, sm: int | None = None
    ) -> Script:
        """A process on a GPU or on one of its MIG instances. `used` is None if the driver does not
        report the memory of processes. `kind`: compute | graphics | mps. `sm`: utilisation of the
        multiprocessors, in percent."""
        where = f"{gpu}" if mig is None else f"{gpu}.{mig}"
        self._line(f"process {where}", {"pid": pid, "used": "na" if used is None else used, "kind": kind})
        return self if sm is None else self.busy(gpu, pid=pid, sm=sm, mem=sm // 2)

    def busy(self, gpu: int, *, pid: int, **percent: int) -> Script:
        """A utilisation sample of a process: sm, mem, enc, dec in percent. `stamp` in microseconds
        since the epoch; the time of the call by default."""
        return self._line(f"busy {gpu}", {"pid": pid, **percent})

    def field(self, gpu: int, number: int, value: int = 0, *, scope: int = 0, status: int = 0) -> Script:
        """A field value; fields that are not scripted are not supported."""
        return self._line(f"field {gpu}", {"id": number, "scope": scope, "value": value, "status": status})

    def event(self, gpu: int, kind: int, data: int = 0) -> Script:
        """The driver announces something: an event type of NVML and its data (the Xid's number).
        Every event reaches the event sets that were created before it was written."""
        self._events += 1
        return self._line(f"event {gpu}", {"id": self._events, "type": kind, "data": data})

    def init_error(self, code: int) -> Script:
        """NVML cannot be started."""
        return self._line("init", {"error": code})

    def missing(self, function: str) -> Script:
        """The driver is too old for this function."""
        return self._line(f"missing {function}", {})

    def fail(self, function: str, gpu: int, code: int, *, mig: int | None = None) -> Script:
        """This function fails for this GPU, or for this MIG instance of it; GPU -1: for all of
        them, and for a function that is about none."""
        where = f"{gpu}" if mig is None else f"{gpu}.{mig}"
        return self._line(f"fail {function} {where} {code}", {})

    def driver(self, version: str) -> Script:
        """The driver's version; 550.54.14 by default."""
        return self._line(f"driver {version}", {})

    def cuda(self, version: int) -> Script:
        """The newest CUDA version that the driver supports, in NVML's form; 12040 by default."""
        return self._line(f"cuda {version}", {})

    def delay(self, milliseconds: float, function: str | None = None) -> Script:
        """The duration of every call, or of every call of one function."""
        return self._line(f"delay_ms={milliseconds}" if function is None else f"delay {function} {milliseconds}", {})

    def write(self) -> Script:
        """Replace the script in one step, so that a running program never reads half of it."""
        new = self.path.with_name(f"{self.path.name}.new")
        # "\udcff": a byte that is not text.
        new.write_text("\n".join(self._lines) + "\n", errors="surrogateescape")
        new.replace(self.path)
        return self

    def env(self, library: Path, *, trust_pids: bool = True) -> dict[str, str]:
        """Environment variables for a program that uses the scripted driver. `trust_pids`: the
        scripted pids are real processes of this machine, although they have no GPU device open."""
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
    """The script of this process's NVML bindings, empty at first."""
    script = Script(tmp_path / "nvml-script").write()
    monkeypatch.setenv("NVML_DOUBLE_SCRIPT", str(script.path))
    # A reader that is closed waits for the thread that waits for events.
    monkeypatch.setattr(events, "WAIT_MILLISECONDS", 5)
    with in_process(nvml_library) as library:
        script.library = library
        yield script
