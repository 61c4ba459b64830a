"""A forked test program sees what a program sees that is started from scratch, and ends the same
way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.forking import Program, run

LOOK = """
import atexit, json, os, signal, sys, threading
from pathlib import Path
print(json.dumps({
    "parent": os.getppid(),
    "session": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "environment": sorted(Path("/proc/self/environ").read_bytes().decode().split("\\0")),
    "variables": dict(os.environ),
    "command": Path("/proc/self/cmdline").read_bytes().decode().split("\\0"),
    "words": [sys.argv, sys.orig_argv, sys.executable],
    "path": sys.path,
    "folder": os.getcwd(),
    "signals": {number.name: str(signal.getsignal(number)) for number in signal.Signals},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "descriptors": sorted(path.name for path in Path("/proc/self/fd").iterdir() if path.exists()),
    "streams": [[stream.encoding, stream.errors, stream.line_buffering] for stream in (sys.stdin, sys.stdout, sys.stderr)],
    "read": sys.stdin.read(),
    "main": [__name__, sys.modules["__main__"].__dict__ is globals(), threading.current_thread() is threading.main_thread()],
    "ours": sorted(name for name in sys.modules if name.partition(".")[0] in ("memtop", "tests", "sitecustomize")),
}))
"""


@pytest.mark.parametrize("own_session", [False, True])
@pytest.mark.parametrize("form", ["code", "script", "module"])
def test_a_program_finds_what_it_would_find_after_exec(tmp_path: Path, form: str, own_session: bool) -> None:
    (tmp_path / "look.py").write_text(LOOK)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import os\nos.environ['SITE'] = 'was here'\n")
    words = {"code": ["-c", LOOK], "script": [str(tmp_path / "look.py")], "module": ["-m", "look"]}[form]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "WHO": "me", "PYTHONUNBUFFERED": "1"}
    found: list[dict[str, Any]] = []
    for start in (subprocess.run, run):
        with (tmp_path / "in").open("w+") as file:
            file.write("hello")
            file.seek(0)
            options: dict[str, Any] = {"stdin": file, "env": environment, "cwd": tmp_path, "start_new_session": own_session}
            done = start([sys.executable, *words, "one", "two"], capture_output=True, text=True, **options)
        assert (done.returncode, done.stderr) == (0, "")
        found.append(json.loads(done.stdout))
    by_exec, forked = found
    assert forked == by_exec
    assert forked["parent"] == os.getpid()


@pytest.mark.parametrize(
    "code",
    [
        "pass",
        "import sys; print('last words', end=''); sys.exit(3)",
        "raise SystemExit('reason')",
        "1 / 0",
        "import atexit, threading, time; atexit.register(print, 'bye'); threading.Timer(0.1, print, ['late']).start()",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
        "import os; os._exit(7)",
        "import os, sys; os.close(1); os.open('/dev/full', os.O_WRONLY); print('lost')",
    ],
)
def test_a_program_ends_as_it_would_after_exec(code: str) -> None:
    ends = []
    for start in (subprocess.run, run):
        done = start([sys.executable, "-c", code], capture_output=True, text=True)
        ends.append((done.returncode, done.stdout, done.stderr.splitlines()[-1:]))
    assert ends[0] == ends[1]


def test_it_is_a_child_and_a_signal_ends_it() -> None:
    code = "import os, time; print(os.getppid(), flush=True); time.sleep(600)"
    process = Program([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert int(process.stdout.readline()) == os.getpid()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == -signal.SIGTERM


def test_other_programs_and_options_are_started_by_exec() -> None:
    for command in (["true"], [sys.executable, "-E", "-c", "import sys; sys.exit('torch' in sys.modules)"]):
        assert run(command).returncode == 0
