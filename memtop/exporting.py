"""`memtop export`: the work is a child's, since whoever reads weights has to load torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from memtop.supervisor.errors import MemtopError, UsageError
from memtop.supervisor.run.record.folder import RunFolder


def command(folder: RunFolder, out: Path, *, adapter: bool, merge: bool) -> int:
    """Export the run's model into `out`; the exit status. stdout is the folder that was written."""
    if folder.spec().settings is None:
        raise UsageError(f"RUN {folder.name}: is a program of your own, which saves its model itself")
    written = sorted(folder.path.glob("attempts/*/settings.json"))
    if not written:
        raise UsageError(f"RUN {folder.name}: was never started, there is nothing to export")
    where = ("--settings", str(written[-1]), "--state-dir", str(folder.latest_state), "--out", str(out))
    form = [*(["--adapter"] if adapter else []), *(["--merge"] if merge else [])]
    done = subprocess.run(
        [sys.executable, "-m", "memtop.train.export", *where, *form],
        # As for the trainer: a folder called `tokenizers` where memtop was called must not shadow the library.
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode < 0:
        raise MemtopError(
            f"export of {folder.name}: ended by signal {-done.returncode}; 9 means that host memory ran out: the model needs "
            "4 bytes per parameter"
        )
    return done.returncode
