"""The end of a program is certain: its exit status on a full disk, programs that resist a stop, and
what they leave behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from memtop.supervisor.monitor.processes.proc import ProcessId, identify
from memtop.supervisor.run.client import AsyncRunClient
from memtop.supervisor.run.processes import attempt as attempt_module
from memtop.supervisor.run.processes.attempt import UNKNOWN_STATUS, ExitFile, RunningAttempt, clear_leftovers
from memtop.supervisor.run.processes.members import SHIM, alive, family, named
from memtop.supervisor.run.processes.shim import write_json
from memtop.supervisor.run.record.folder import RunFolder, RunSpec, create_run
from memtop.supervisor.wire import Phase, StateUpdate, Subscribe
from tests.conftest import Runs, wait_for_file
from tests.run.test_supervisor import hasty

READY = "import time; print(flush=True); time.sleep(600)"

# Takes all space of the disk, and ends well.
FILLS = """
import os, sys
with open(sys.argv[1], "wb", buffering=0) as file:
    for size in (1 << 20, 1 << 12, 1):
        try:
            while file.write(bytes(size)):
                pass
        except OSError:
            pass
"""


def test_a_program_that_ends_well_on_a_full_disk_has_finished(runs: Runs, small_disk: Path) -> None:
    runs.path, filler = small_disk / "runs", small_disk / "filler"
    runs.environment["MEMTOP_RUNS_DIR"] = str(runs.path)
    runs.memtop("train", "--name", "a", "--detach", "--", sys.executable, "-c", FILLS, str(filler))
    wait_for_file(runs.path / "a/attempts/0001/exit.json")
    filler.unlink()
    document = runs.wait("a", lambda d: d["state"] in ("finished", "failed"))
    assert (document["state"], document["exit_status"], len(document["attempts"])) == ("finished", 0, 1)


def test_without_an_exit_file_the_shims_status_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone" / "exit.json"
    assert not write_json(str(gone), {"status": 3}, seconds=0)
    shim = subprocess.Popen(["sleep", "600"])
    attempt = RunningAttempt(RunFolder(tmp_path), 1, shim.pid)
    shim.kill()
    shim.wait()
    clock = SimpleNamespace(monotonic=lambda: 5.0, time=lambda: 1.0)
    monkeypatch.setattr(attempt_module, "time", clock)
    assert attempt.ended() is None, "the file may just be written"
    clock.monotonic = lambda: 10.0
    for status, known in ((-9, UNKNOWN_STATUS), (3, 3), (137, -9), (192, -64), (193, 193), (128, 128)):
        attempt.note_reaped({shim.pid: status})
        assert attempt.ended() == ExitFile(known, 1.0)


@pytest.mark.parametrize("program", ["kill -STOP $PPID; exit 3", "sleep 0.5; kill -STOP $PPID; exit 3"])
def test_a_program_that_stops_the_shim_has_an_end(runs: Runs, program: str) -> None:
    runs.memtop("train", "--name", "a", "--headless", "--", "sh", "-c", program, status=1, timeout=60)
    assert runs.show("a")["exit_status"] == 3


def test_a_search_forgets_no_process_that_another_thread_has_found_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt, me = RunningAttempt(RunFolder(tmp_path), 1, 1), identify(os.getpid())
    assert me is not None
    known_then: list[frozenset[ProcessId]] = []

    def search(*_: object, known: frozenset[ProcessId], **__: object) -> list[ProcessId]:
        known_then.append(known)
        if len(known_then) > 1:
            return [me]
        assert attempt.processes() == [me], "a search that begins later and ends earlier"
        return []

    monkeypatch.setattr(attempt_module, "family", search)
    assert attempt.processes() == []
    attempt.processes()
    assert known_then == [frozenset(), frozenset(), {me}]


def test_a_program_without_a_process_file_is_searched_until_it_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    command = [sys.executable, "-c", READY, str(SHIM), str(folder.attempt(1)), folder.id]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"
            leader = identify(process.pid)
            found: list[list[ProcessId | None]] = [[], [leader]]
            monkeypatch.setattr(attempt_module, "family", lambda *_, **__: found.pop(0))
            attempt = RunningAttempt(folder, 1, None)
            assert [attempt.trainer, attempt.trainer, attempt.trainer] == [None, leader, leader]
            # A view makes a new object each time, which searches only if the attempt has not ended.
            folder.attempt(1).mkdir(parents=True)
            write_json(str(folder.attempt(1) / "exit.json"), {"status": 0, "ended": 1.0})
            assert RunningAttempt(folder, 1, None).trainer is None
        finally:
            process.kill()


# Loses the marker, ignores what can be ignored, and tells its pid.
RESISTS = """
import os, pathlib, signal, sys, time
{before}
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
path = pathlib.Path(sys.argv[1])
path.with_suffix(".tmp").write_text(str(os.getpid()))
path.with_suffix(".tmp").rename(path)
time.sleep(600)
"""
DETACHES = """
if os.fork(): {parent}
os.setsid()
if os.fork(): os._exit(0)
os.closerange(0, 3)
"""


def resisting(before: str, pid_file: Path) -> list[str]:
    return ["env", "-i", sys.executable, "-c", RESISTS.format(before=before), str(pid_file)]


def started(pid_file: Path) -> ProcessId:
    wait_for_file(pid_file)
    found = identify(int(pid_file.read_text()))
    assert found is not None
    return found


@pytest.mark.parametrize("before", ["", DETACHES.format(parent="time.sleep(600)")], ids=["without a marker", "a daemon"])
def test_a_program_that_resists_is_killed_and_named(runs: Runs, before: str) -> None:
    with hasty(runs, "a", *resisting(before, runs.root / "pid")):
        program = started(runs.root / "pid")
        stopped = runs.memtop("stop", "a")
    assert not alive(program)
    document = runs.show("a")
    assert document["state"] == "stopped"
    said = stopped.stderr + stopped.stdout + "".join(event.message for event in runs.events("a", "leftovers"))
    assert f"pid {program.pid} (python" in said
    assert "SIGKILL" in said


def test_a_daemon_is_ended_and_named_when_the_main_program_ends(runs: Runs) -> None:
    done = runs.memtop("train", "--name", "a", "--", *resisting(DETACHES.format(parent="os._exit(0)"), runs.root / "pid"))
    pid = int((runs.root / "pid").read_text())
    assert identify(pid) is None
    assert f"SIGKILL to what the program left behind: pid {pid} (python" in done.stderr
    assert f"finished (the main program ended; memtop ended the processes that it left behind: pid {pid} (python" in done.stderr


# A launcher that waits for its rank, which leads a session of its own, as under torchrun. If it
# only led a group, it would get SIGHUP from the kernel when the launcher ends while it is stopped.
# The rank saves on SIGTERM.
LAUNCHES = """
import os, pathlib, signal, sys, time
def forward(*_):
    os.kill(rank, signal.SIGTERM)
    os.waitpid(rank, 0)
    sys.exit(3)
def save(*_):
    pathlib.Path("saved").touch()
    sys.exit(0)
ready, tell = os.pipe()
rank = os.fork()
if not rank:
    os.setsid()
    signal.signal(signal.SIGTERM, save)
    os.write(tell, b"x")
    time.sleep(600)
os.read(ready, 1)
signal.signal(signal.SIGINT, forward)
if sys.argv[1] == "leaves":
    os.kill(rank, signal.SIGSTOP)
    os.waitpid(rank, os.WUNTRACED)
    sys.exit(0)
path = pathlib.Path("rank")
path.with_suffix(".tmp").write_text(str(rank))
path.with_suffix(".tmp").rename(path)
time.sleep(600)
"""


def test_a_stop_reaches_a_rank_that_is_stopped(runs: Runs) -> None:
    with hasty(runs, "a", sys.executable, "-c", LAUNCHES, "waits", interrupt=20, terminate=20):
        rank = started(runs.root / "rank")
        os.kill(rank.pid, signal.SIGSTOP)
        stopped = runs.memtop("stop", "a")
    assert (runs.root / "saved").exists()
    assert f"stopped by a signal (SIGSTOP or Ctrl-Z): SIGCONT sent to pid {rank.pid} (python" in stopped.stderr
    assert stopped.stdout.startswith("stopped as requested: exit status 3")


def test_a_stopped_process_that_is_left_behind_may_save_too(runs: Runs) -> None:
    runs.memtop("train", "--name", "a", "--headless", "--", sys.executable, "-c", LAUNCHES, "leaves")
    assert (runs.root / "saved").exists()
    said = [event.message for event in runs.events("a", "leftovers")]
    assert any(message.startswith("SIGCONT to what the program left behind: pid ") for message in said)


# On SIGTERM it works for longer than a leftover that sleeps may live, then saves.
WORKS = """
import os, pathlib, signal, time
def save(*_):
    while time.process_time() < 1:
        pass
    pathlib.Path("saved").touch()
    os._exit(0)
signal.signal(signal.SIGTERM, save)
print(flush=True)
time.sleep(600)
"""
SLEEPS = WORKS.replace("time.process_time() < 1", "True").replace("pass", "time.sleep(600)")
# The main thread only waits for the thread that saves.
THREAD = "import threading" + WORKS.replace("def save", "def work").replace(
    "signal.signal", "def save(*_):\n    threading.Thread(target=work).start()\nsignal.signal"
)


@pytest.mark.parametrize(
    ("program", "saves"), [(WORKS, True), (SLEEPS, False), (THREAD, True)], ids=["works", "sleeps", "thread"]
)
async def test_what_is_left_behind_may_work_longer_than_sleep(tmp_path: Path, program: str, saves: bool) -> None:
    environment = {**os.environ, "MEMTOP_RUN": str(tmp_path), "MEMTOP_RUN_ID": "", "MEMTOP_ATTEMPT": "1"}
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"
            said: list[str | None] = []
            attempt = RunningAttempt(RunFolder(tmp_path), 1, None)
            await clear_leftovers(attempt, 0.0, 0.2, lambda found: said.append(found.name))
        finally:
            process.kill()
    assert (tmp_path / "saved").exists() == saves
    assert said == (["SIGTERM"] if saves else ["SIGTERM", "SIGKILL"])


async def test_a_killed_process_gets_no_time_to_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may wait for a disk for long, and count as one that works."""
    process, clock = ProcessId(1 << 30, 1), [0.0]
    attempt: Any = SimpleNamespace(processes=lambda: [process], stopped=list, note_reaped=lambda _: None)

    async def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(attempt_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(attempt_module, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(attempt_module, "alive", lambda _: True)
    monkeypatch.setattr(attempt_module, "is_working", lambda _: True)
    said: list[tuple[str | None, int]] = []
    await clear_leftovers(attempt, 0.0, 3.0, lambda found: said.append((found.name, round(clock[0]))))
    assert said == [("SIGTERM", 0), ("SIGKILL", 40), (None, 43)]


# A background process without a parent, one of another run, and the program itself.
SESSION = "(sleep 600 &); (MEMTOP_RUN=/other sleep 600 &); echo; exec sleep 600"


def test_the_session_of_a_program_whose_shim_was_killed_is_its_own(tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"]}
    with subprocess.Popen(["sh", "-c", SESSION], env=environment, start_new_session=True, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"
            program, reader = identify(process.pid), identify(os.getpid())
            assert program is not None
            deadline = time.monotonic() + 60
            found: list[ProcessId] = []
            names: list[str] = []
            while names != ["sleep", "sleep"] and time.monotonic() < deadline:  # the shells begin at any time
                found = family(RunFolder(tmp_path), 1, shim=None, program=program, known=())
                names = [named(one).name for one in found]
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert program in found
    assert names == ["sleep", "sleep"], "without that of another run"
    # A process that has ended, or whose pid another process has now, is in nobody's family.
    assert reader is not None
    others = (program, replace(reader, started_ticks=1))
    assert family(RunFolder(tmp_path), 1, shim=None, program=program, known=others) == []


# --- after the end --------------------------------------------------------------------------------


async def test_the_name_of_a_run_that_has_ended_is_free_at_once(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMTOP_SOCKET_DIR", runs.environment["MEMTOP_SOCKET_DIR"])
    again = ("train", "--name", "a", "--fresh", "--", "true")
    await asyncio.to_thread(runs.memtop, *again)
    # A dashboard that shows the end is told it, and does not keep the name.
    viewer = await AsyncRunClient.connect(runs.path / "a")
    await viewer.send(Subscribe(id=1))
    await asyncio.to_thread(runs.memtop, *again)
    states = set()
    while (message := await viewer.receive()) is not None:
        if isinstance(message, StateUpdate):
            states.add(message.run.state)
    assert states == {Phase.FINISHED}
    await viewer.close()
    assert len(list(runs.path.glob("a.*"))) == 1


def test_runs_that_end_within_one_second_are_all_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda _: "20260101-000000")
    spec = RunSpec(name="a", created=1.0, settings=None, command=("x",), cwd="/", memtop_version="0")
    for _ in range(4):
        create_run(tmp_path, spec, fresh=True)
    stamp = "a.20260101-000000"
    assert {path.name for path in tmp_path.iterdir()} == {"a", stamp, f"{stamp}-2", f"{stamp}-3"}


def test_a_run_that_goes_on_keeps_its_name(runs: Runs) -> None:
    runs.memtop("train", "--name", "a", "--detach", "--", "sleep", "600")
    refused = runs.memtop("train", "--name", "a", "--fresh", "--detach", "--", "true", status=1)
    assert "run 'a' is in use: `memtop stop a` first" in refused.stderr
    assert runs.show("a")["alive"]
