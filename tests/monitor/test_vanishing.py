"""A process ends while it is read: before each of its files is opened, one after the other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.nvml_double.double import Script

MOMENTS = """
import os, subprocess, sys
from memtop.supervisor.monitor.nvml import events
from memtop.supervisor.monitor.sampler import Sampler
from tests.monitor.test_fuzz import check
from tests.nvml_double.double import Script

script, moment, seen, doomed = Script(__import__("pathlib").Path(sys.argv[1])), 0, 0, None

def hook(event, arguments):
    global seen
    if doomed is None or event not in ("open", "os.scandir", "os.listdir", "os.readlink"):
        return
    if str(arguments[0]).startswith(f"/proc/{doomed.pid}/"):
        seen += 1
        if seen == moment:
            doomed.kill()
            (doomed.wait if sys.argv[2] == "collected" else lambda: os.waitid(os.P_PID, doomed.pid, os.WEXITED | os.WNOWAIT))()

events.WAIT_MILLISECONDS = 5
sys.addaudithook(hook)
while seen >= moment:
    moment, seen = moment + 1, 0
    doomed = subprocess.Popen(["sleep", "60"], env={"MEMTOP_RUN": "/nowhere/run", "MEMTOP_ATTEMPT": "1", "RANK": "0"})
    script.clear().gpu(0, total=2**30, used=5).process(0, pid=doomed.pid, used=5).write()
    watcher = Sampler()
    for _ in range(3):
        watcher.nvml.refresh()
        check(watcher.sample())
    watcher.close()
    victim, doomed = doomed, None
    victim.kill()
    victim.wait()
print(moment)
"""


def test_a_process_may_vanish_at_any_moment(nvml_library: Path, tmp_path: Path) -> None:
    script = Script(tmp_path / "script").write()
    environment = {**os.environ, **script.env(nvml_library), "PYTHONPATH": os.pathsep.join(sys.path)}
    for left in ("collected", "zombie"):
        done = subprocess.run(
            [sys.executable, "-c", MOMENTS, str(script.path), left],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) > 8, "at least as many files are read for a new process on a GPU"
