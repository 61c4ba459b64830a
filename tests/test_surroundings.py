"""The command line where what it needs is missing or broken: streams, folders, a home, a socket."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from memtop.cli import run
from tests.conftest import Runs
from tests.terminal import Terminal


@pytest.mark.parametrize("command", ["watch --once --json", "watch --csv", "strays --json", "doctor --json", "presets"])
def test_a_closed_pipe_is_no_error(runs: Runs, command: str) -> None:
    """`memtop ... | head -1` writes into a pipe without a reader."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "memtop", *command.split()],
            env=runs.environment,
            cwd=runs.root,
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


# A script starts its background jobs with SIGINT ignored.
DEAF = ("sh", "-c", 'trap "" INT; exec "$@"', "sh")


@pytest.mark.parametrize(("number", "before"), [(signal.SIGTERM, ()), (signal.SIGINT, ()), (signal.SIGTERM, DEAF)])
def test_a_dashboard_that_gets_a_signal_restores_the_terminal(
    runs: Runs, number: signal.Signals, before: tuple[str, ...]
) -> None:
    command = [*before, sys.executable, "-m", "memtop", "watch"]
    terminal = Terminal(command, columns=100, rows=30, cwd=str(runs.root), environment=runs.environment)
    try:
        echoed = terminal.echoes()
        terminal.wait_for("d Quit")
        assert (echoed, terminal.echoes()) == (True, False)
        terminal.process.send_signal(number)
        assert terminal.wait() == 0
        assert terminal.echoes()
    finally:
        terminal.close()


@pytest.mark.parametrize(
    "closed",
    [">&-", "<&- >&- 2>&-", pytest.param("<&-", marks=pytest.mark.long), pytest.param("2>&-", marks=pytest.mark.long)],
)
def test_closed_streams_are_no_error(runs: Runs, closed: str) -> None:
    for command in ("watch --csv", "watch --once --json", "runs --json"):
        words = f'"{sys.executable}" -m memtop {command} {closed}'
        done = subprocess.run(["sh", "-c", words], env=runs.environment, cwd=runs.root, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert bool(done.stdout) == (">&-" not in closed.replace("2>&-", ""))


def test_folders_that_cannot_be_used_are_reported_in_one_line(runs: Runs) -> None:
    (runs.root / "file").write_text("")
    done = runs.memtop("train", "--runs-dir", str(runs.root / "file"), status=1)
    assert done.stderr == (
        f"memtop: {runs.root}/file/first-run: cannot be created: Not a directory; choose another --runs-dir\n"
    )
    assert "no runs in" in runs.memtop("show", "latest", status=1).stderr


def test_a_link_that_loops_is_reported_in_one_line(runs: Runs) -> None:
    runs.path.mkdir(exist_ok=True)
    loop = runs.path / "loop"
    loop.symlink_to(loop)
    for options in (["--name", "a"], []):
        done = runs.memtop("train", "--runs-dir", str(loop), *options, "--detach", "--", "/bin/true", status=1)
        name = options[-1] if options else "true"
        assert done.stderr == f"memtop: {loop}/{name}: cannot be created: Not a directory; choose another --runs-dir\n"
    unreadable = f"unreadable: {loop}/run.json: cannot be read: Too many levels of symbolic links\n"
    assert runs.memtop("runs").stdout.splitlines(keepends=True)[1:] == [f"loop  {unreadable}"]
    assert runs.memtop("show", "loop", status=2).stderr.startswith("memtop: run 'loop': not found in ")


def test_a_damaged_run_hides_no_other(runs: Runs) -> None:
    for name in ("a", "b", "c"):
        runs.memtop("train", "--headless", "--name", name, "--", "true")
    for name in ("a", "b", "c"):
        runs.wait(name, lambda d: d["supervisor_pid"] is None)
    whole = (runs.path / "a/state.json").read_text()
    (runs.path / "a/state.json").write_text("{")
    (runs.path / "b/run.json").write_text("{")
    (runs.path / "c/ledger.sqlite").write_bytes(b"no database" * 1000)
    for log in runs.path.glob("c/ledger.sqlite-*"):
        log.unlink()  # SQLite would read the pages in it
    listed = {row["name"]: row for row in json.loads(runs.memtop("runs", "--json").stdout)}
    # A damaged state.json counts as missing: the ledger says how the run ended.
    assert listed["a"]["state"] == "finished"
    assert listed["b"] == {
        "name": "b",
        "folder": str(runs.path / "b"),
        "error": f"{runs.path}/b/run.json: cannot be decoded: Input data was truncated",
    }
    assert listed["c"]["state"] == "finished"
    table = runs.memtop("runs").stdout
    assert re.search(rf"^b +unreadable: {re.escape(str(runs.path))}/b/run.json: cannot be decoded", table, re.MULTILINE)
    assert re.search(r"^c +finished", table, re.MULTILINE)
    once = runs.memtop("watch", "--once")
    assert re.search(r"^b +unreadable: ", once.stdout, re.MULTILINE)
    assert once.stderr == ""
    assert len(json.loads(runs.memtop("watch", "--once", "--json").stdout)["runs"]) == 3
    for command, name, file in (("restart", "b", "run.json"), ("show", "c", "ledger.sqlite")):
        done = runs.memtop(command, name, status=1)
        assert done.stderr.startswith(f"memtop: {runs.path}/{name}/{file}: cannot be "), done.stderr
        assert len(done.stderr.splitlines()) == 1
    (runs.path / "a/state.json").write_text(whole)


def test_a_folder_without_read_permission_is_named(runs: Runs) -> None:
    runs.path.mkdir()
    runs.path.chmod(0)
    prefix: list[str] = []
    if os.getuid() == 0:
        # Without these capabilities root cannot read every folder.
        prefix = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
        if (
            shutil.which("setpriv") is None
            or subprocess.run([*prefix, "ls", str(runs.path)], capture_output=True).returncode == 0
        ):
            pytest.skip("root cannot be kept out of a folder here")
    for arguments in (["train"], ["show", "a"], ["show", "latest"], ["runs"], ["watch", "--once"], ["doctor"]):
        done = subprocess.run(
            [*prefix, sys.executable, "-m", "memtop", *arguments],
            cwd=runs.root,
            env=runs.environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 1
        if arguments == ["doctor"]:
            assert "MISSING  runs folder" in done.stdout
            assert done.stderr == ""
        else:
            assert len(done.stderr.splitlines()) == 1
            assert done.stderr.startswith(f"memtop: {runs.path}")
            assert "Permission denied" in done.stderr
    runs.path.chmod(0o700)


@pytest.mark.usefixtures("homeless")
def test_a_user_without_a_home_folder_is_told_what_to_set(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--runs-dir", str(runs.path)]) == 0
    said = capsys.readouterr().out
    assert "note     prepared data    this user has no home folder" in said
    assert "-> set XDG_CACHE_HOME to a folder that you can write, before you train with data.train" in said


@pytest.mark.parametrize(
    "home",
    [None, "/dev/null", *(pytest.param(place, marks=pytest.mark.long) for place in ("", "/nonexistent/home", "relative"))],
)
def test_a_home_folder_that_cannot_be_used_stops_no_program(runs: Runs, home: str | None) -> None:
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        runs.environment.pop(name, None)
    runs.environment |= {} if home is None else {"HOME": home}
    said = runs.memtop("doctor").stdout
    if home == "/dev/null":
        assert "note     prepared data    /dev/null: not a folder" in said
    runs.memtop("train", "--headless", "--", "true")


def test_output_that_cannot_be_written_is_reported_in_one_line(runs: Runs) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "memtop", "presets"],
            env=runs.environment,
            cwd=runs.root,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "memtop: No space left on device"
    assert "Traceback" not in done.stderr


def test_output_into_a_closed_pipe_is_no_error(runs: Runs) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m memtop doctor | true"],
        env=runs.environment,
        cwd=runs.root,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == ""


def test_a_stale_socket_does_not_stop_a_new_run(runs: Runs) -> None:
    runs.memtop("train", "--name", "a", "--", "true")
    runs.wait("a", lambda d: d["supervisor_pid"] is None)
    path = Path(json.loads((runs.path / "a/state.json").read_text())["socket"])
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    runs.memtop("restart", "a")
    assert len(runs.show("a")["attempts"]) == 2


@pytest.mark.parametrize("limit", ["ulimit -n 20", "ulimit -v 200000", "unset PATH HOME LANG"])
def test_a_run_under_low_limits_and_without_an_environment(runs: Runs, limit: str) -> None:
    words = [sys.executable, "-m", "memtop", "train", "--name", "a", "--headless", "--", shutil.which("true") or "/bin/true"]
    done = subprocess.run(
        ["/bin/sh", "-c", f'{limit}; exec "$@"', "sh", *words],
        env=runs.environment,
        cwd=runs.root,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr.endswith("memtop: run a: finished; memtop show a\n")


def test_a_name_that_is_taken_says_what_can_be_done_with_that_run(runs: Runs) -> None:
    code = "import pathlib, time\nwhile not pathlib.Path('end').exists(): time.sleep(0.05)"
    again = ("train", "--name", "a", "--detach", "--", sys.executable, "-c", code)
    runs.memtop(*again)
    said = runs.memtop(*again, status=1).stderr
    assert said.endswith("/runs and is starting: `memtop watch a` shows it, --name chooses another name\n")
    runs.memtop("stop", "a")
    said = runs.memtop(*again, status=1).stderr
    assert "`memtop restart a` starts it again from the beginning, unless it resumes by itself; --fresh moves" in said
    (runs.root / "end").touch()
    runs.memtop("restart", "a", "--detach")
    runs.wait("a", lambda d: d["state"] == "finished")
    said = runs.memtop(*again, status=1).stderr
    assert said.endswith("/runs and is finished: --fresh moves it aside and starts a new run, --name chooses another name\n")
