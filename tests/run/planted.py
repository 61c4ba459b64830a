"""A run that others may have planted: what it executes leaves a mark."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from memtop.supervisor.run.processes.attempt import ProcessFile
from memtop.supervisor.run.record.folder import RunFolder, RunSpec, StateFile, create_run, write_json
from memtop.supervisor.wire import Change, Phase, RunState
from tests.conftest import Runs

OTHER = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of another user")


def planted(runs: Runs, place: Path) -> RunFolder:
    """A run that is to be restarted with a command of its own, in a folder that has a module of its
    own. Both leave a mark if they run."""
    mark = f"open({str(runs.root / 'mark')!r}, 'a')"
    spec = RunSpec(
        name="a", created=1.0, settings=None, command=(sys.executable, "-c", mark), cwd=str(runs.root), memtop_version="0"
    )
    folder = create_run(place, spec, fresh=False)
    for module in ("msgspec", "asyncio", "memtop"):
        (folder.path / f"{module}.py").write_text(f"open({str(runs.root / 'imported')!r}, 'a')\n")
    attempt = folder.attempt(1)
    attempt.mkdir()
    write_json(attempt / "process.json", ProcessFile(1, 1, 1, 1))
    folder.ledger_path.touch()
    state = RunState(name="a", folder=str(folder.path), state=Phase.RESTARTING, created=1.0, attempt=1)
    write_json(folder.state_path, StateFile(run=state, socket="", pending=Change()))
    return folder


@contextmanager
def killed_at_the_end(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    with process:
        try:
            yield process
        finally:
            process.kill()
