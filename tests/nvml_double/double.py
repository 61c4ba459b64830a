"""Builds the scripted driver library and writes its script, so that the real NVML bindings run without a GPU.

    library = build(tmp_path)
    script = Script(tmp_path / "script").gpu(0, total=24 * GIB, used=20 * GIB).process(0, pid=4242, used=GIB)
    script.write()
    subprocess.run([...], env={**os.environ, **script.env(library)})

In one process the library can be loaded once only (the bindings keep it): `preload(library)` makes the bindings find it,
and every later change goes through the script.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("nvml_double.c")
LIBRARY = "libnvidia-ml.so.1"


def available() -> bool:
    """Whether a C compiler is here to build the library with."""
    return shutil.which("gcc") is not None


def build(folder: Path) -> Path:
    """Compile the library into the folder (once) and return its path."""
    library = folder / LIBRARY
    if not library.exists():
        command = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", f"-Wl,-soname,{LIBRARY}", "-pthread"]
        subprocess.run([*command, "-o", str(library), str(SOURCE)], check=True)
    return library


def preload(library: Path) -> ctypes.CDLL:
    """Load the library into this process: the bindings' own `CDLL("libnvidia-ml.so.1")` then finds it by its soname."""
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


class Script:
    """What the driver says. Chain calls, then `write()`; write again to change it while a program is running.

    Sizes in bytes, `util` in percent, `temp` in degrees Celsius, `power` and `limit` in milliwatts.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: list[str] = []

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
