"""What commands and dashboards do when the supervisor is stopped, hangs or ends, or its socket is
gone."""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest

from memtop.cli import run as memtop
from memtop.supervisor.errors import NotRunningError, RefusedError, RunFolderError
from memtop.supervisor.monitor.processes.proc import identify, is_alive
from memtop.supervisor.run import client, starting
from memtop.supervisor.run.client import AsyncRunClient
from memtop.supervisor.run.processes.members import refuse_used_path
from memtop.supervisor.run.record.folder import RunFolder, RunSpec, create_run
from memtop.supervisor.run.server import ControlServer
from memtop.supervisor.wire import Answer, Outcome, Phase, RunState, StateUpdate, Stop
from memtop.tui.feed import Disconnected
from memtop.tui.run_feed import RunFeed
from tests.conftest import Runs, wait_for_file


async def everything(viewer: AsyncRunClient) -> None:
    while await viewer.receive() is not None:
        pass


async def test_a_stopped_supervisor_is_named_with_what_to_do(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMTOP_SOCKET_DIR", runs.environment["MEMTOP_SOCKET_DIR"])
    follower = runs.start("train", "--name", "a", "--", "sleep", "600", stderr=subprocess.PIPE)
    assert follower.stderr is not None
    while "attempt 1" not in follower.stderr.readline():
        assert follower.poll() is None
    supervisor = runs.show("a")["supervisor_pid"]
    viewer = await AsyncRunClient.connect(runs.path / "a")
    advice = f"its supervisor is stopped (SIGSTOP or Ctrl-Z) and cannot answer: `kill -CONT {supervisor}` lets it continue"
    os.kill(supervisor, signal.SIGSTOP)
    try:
        assert advice in runs.memtop("checkpoint", "a", status=1).stderr
        with pytest.raises(RefusedError, match=f"kill -CONT {supervisor}"):
            await asyncio.wait_for(everything(viewer), 60)
        feed = RunFeed(runs.path / "a", sampler_factory=Mock)
        async for message in feed.messages():
            if isinstance(message, Disconnected):
                assert advice in message.reason
                break
        assert advice in follower.stderr.readline()
    finally:
        os.kill(supervisor, signal.SIGCONT)
    runs.memtop("stop", "a")
    _, said = follower.communicate(timeout=120)
    assert "run a: stopped" in said
    assert advice not in said, "it is said once"
    await viewer.close()


def test_a_supervisor_that_does_not_even_accept_a_request_is_given_up(
    tmp_path: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMTOP_SOCKET_DIR", runs.environment["MEMTOP_SOCKET_DIR"])
    monkeypatch.setattr(client, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(client, "ANSWER_SECONDS", 0.05)
    spec = RunSpec(name="a", created=1.0, settings=None, command=("x",), cwd="/", memtop_version="0")
    folder = create_run(tmp_path, spec, fresh=False)
    with socket.socket(socket.AF_UNIX) as silent:
        path = client.socket_path(folder.path)
        silent.bind(str(path))
        silent.listen()
        with pytest.raises(
            RefusedError, match=rf"its supervisor has not answered for \d+ s: see /.*`kill -KILL {os.getpid()}`"
        ):
            client.ask(folder, lambda number: Stop(id=number))


@pytest.mark.parametrize("state", ["stopped", "hung"])
def test_stop_and_restart_name_a_supervisor_that_cannot_answer_and_what_runs_on(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: str
) -> None:
    for name in ("MEMTOP_RUNS_DIR", "MEMTOP_SOCKET_DIR"):
        monkeypatch.setenv(name, runs.environment[name])
    runs.memtop("train", "--name", "a", "--detach", "--", "sleep", "600")
    before = runs.wait("a", lambda d: d["trainer_pid"] is not None)
    supervisor, program = before["supervisor_pid"], before["trainer_pid"]
    words = f"is stopped (SIGSTOP or Ctrl-Z) and cannot answer: `kill -CONT {supervisor}` lets it continue; "
    if state == "hung":
        # As a process that waits for a disk: it answers nothing, and is not stopped.
        monkeypatch.setattr(client, "is_stopped", lambda _: False)
        monkeypatch.setattr(client, "LOOK_SECONDS", 0.01)
        monkeypatch.setattr(client, "ANSWER_SECONDS", 0.05)
        words = f"has not answered for N s: see {runs.path}/a/supervisor.log; it may still do what you asked for; "
    os.kill(supervisor, signal.SIGSTOP)
    for command in (["stop"], ["restart", "--detach"], ["restart", "--live", "--batch", "2"]):
        assert memtop([*command, "a"]) == 1
        out, err = capsys.readouterr()
        # The environment of this process is not that of the run.
        assert (out, err.count("\n")) == ("", 2 if command == ["restart", "--detach"] else 1)
        said = re.sub(r"for \d+ s:", "for N s:", err)
        assert f"memtop: run 'a': its supervisor {words}its program (pid {program}) runs on" in said
    if state == "hung":
        assert f"`kill -KILL {supervisor}`: the next command starts a new supervisor" in err
        monkeypatch.undo()
        # The advice can be followed.
        runs.kill(supervisor)
        runs.memtop("stop", "a")
    else:
        os.kill(supervisor, signal.SIGCONT)
        after = runs.wait("a", lambda d: d["supervisor_pid"] == supervisor)
        assert (after["trainer_pid"], after["state"]) == (program, before["state"]), "a refused command changes nothing"


def test_a_run_that_was_renamed_while_it_ran_is_named_with_what_to_do(runs: Runs) -> None:
    runs.memtop("train", "--name", "a", "--detach", "--", "sleep", "600")
    before = runs.wait("a", lambda d: d["trainer_pid"] is not None)
    there, here = runs.path / "a", runs.path / "b"
    there.rename(here)
    for command in ("stop", "restart"):
        said = runs.memtop(command, "b", status=1).stderr
        assert f"its supervisor (pid {before['supervisor_pid']}) listens only for its old place: `mv -T {here} {there}`" in said
        assert f"its program (pid {before['trainer_pid']}) runs on" in said
    here.rename(there)
    runs.memtop("stop", "a")


def test_the_name_of_a_renamed_run_is_taken_while_its_program_lives(runs: Runs) -> None:
    """Its ranks write their journals, and the built-in trainer its states, by path."""
    assert runs.memtop("train", "--detach", "--", "sleep", "600").stdout == "sleep\n"
    program = runs.wait("sleep", lambda d: d["trainer_pid"] is not None)["trainer_pid"]
    there, here = runs.path / "sleep", runs.path / "b"
    there.rename(here)
    for fresh in ((), ("--fresh",)):
        refused = runs.memtop("train", "--name", "sleep", *fresh, "--", "true", status=1).stderr
        assert f"pid {program} still saves to this path; it belongs to run 'b', which was renamed: " in refused
        assert f"`mv -T {here} {there}` moves it back, or `kill {program}` ends it; --name chooses another name" in refused
        assert not there.exists()
    assert runs.memtop("train", "--detach", "--", "sleep", "0").stdout == "sleep-2\n", "a name that is free"
    runs.kill(program)
    wait_for_file(here / "attempts/0001/exit.json")
    runs.memtop("train", "--name", "sleep", "--", "true")


@pytest.mark.parametrize("place", ["nowhere", "a", "b"])
def test_who_uses_the_path_of_a_new_run_is_named(tmp_path: Path, place: str) -> None:
    spec = RunSpec(name="a", created=1.0, settings=None, command=("x",), cwd="/", memtop_version="0")
    path, folder = tmp_path / "a", create_run(tmp_path, spec, fresh=False)
    environment = {"MEMTOP_RUN": str(path), "MEMTOP_RUN_ID": folder.id if place != "nowhere" else "gone"}
    program = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(program, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # before, /proc may not show its environment yet
        if place == "b":
            path.rename(tmp_path / "b")
            create_run(tmp_path, spec, fresh=False)
        words = {
            "nowhere": f"pid {process.pid} still saves to this path; it belongs to a run that was renamed or deleted: `kill",
            "a": f"run 'a' is in use by its program (pid {process.pid}): `memtop stop a` first",
            "b": f"it belongs to run 'b', which was renamed: `kill {process.pid}` ends it; --name chooses another name",
        }
        try:
            with pytest.raises(RefusedError, match=re.escape(words[place])):
                refuse_used_path(path)
        finally:
            process.communicate(b"\n")
    refuse_used_path(path)


def test_another_run_in_the_place_of_a_renamed_one_leaves_it_alone(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """`memtop train` makes none there, but a person may move one there."""
    monkeypatch.setenv("MEMTOP_SOCKET_DIR", runs.environment["MEMTOP_SOCKET_DIR"])
    spec = RunSpec(name="a", created=1.0, settings=None, command=("sleep", "600"), cwd="/", memtop_version="0")
    another = create_run(runs.root / "elsewhere", spec, fresh=False)
    runs.memtop("train", "--name", "a", "--detach", "--", "sleep", "600")
    before = runs.wait("a", lambda d: d["trainer_pid"] is not None)
    there, here = runs.path / "a", runs.path / "b"
    program, supervisor = identify(before["trainer_pid"]), identify(before["supervisor_pid"])
    assert program is not None
    assert supervisor is not None
    shutil.copytree(there, copied := runs.path / "c")
    said = runs.memtop("stop", "c", status=1).stderr
    assert said == f"memtop: run 'c': it is a copy of {there}, which runs; use that one\n"
    shown = runs.show("c")
    assert (shown["alive"], shown["supervisor_pid"], shown["trainer_pid"]) == (False, None, None)
    assert shown["reason"] == f"it is a copy of {there}, which runs; use that one"
    assert f"reason      it is a copy of {there}, which runs" in runs.memtop("show", "c").stdout
    listed = {line.split()[0]: line.split()[1] for line in runs.memtop("runs").stdout.splitlines()}
    assert (listed["a"], listed["c"]) == (runs.show("a")["state"], "copy")
    said = runs.memtop("train", "--fresh", "--name", "c", "--detach", "--", "true", status=1).stderr
    assert said == f"memtop: run 'c': it is a copy of {there}, which runs; use that one\n"
    shutil.rmtree(copied)
    there.rename(here)
    there.symlink_to(here)
    assert "copy" not in runs.memtop("show", "b").stdout
    there.unlink()
    another.path.rename(there)
    starting.start_supervisor(RunFolder(there))
    runs.wait("a", lambda d: d["trainer_pid"] is not None)
    runs.memtop("stop", "a")
    assert is_alive(program), "it belongs to the renamed run"
    assert runs.events("a", "leftovers") == []
    assert runs.show("a")["state"] == "stopped"
    words, deadline = f"another run is now in {there}: no record until it is back there", time.monotonic() + 60
    while words not in (here / "supervisor.log").read_text():  # with its next look
        assert time.monotonic() < deadline
        time.sleep(0.02)
    said = runs.memtop("stop", "b", status=1).stderr
    assert f"another run is there now: end that one and move it away; then `mv -T {here} {there}`" in said
    # Its end is recorded at its new place, and its supervisor leaves.
    runs.kill(program.pid)
    wait_for_file(here / "attempts/0001/exit.json")
    deadline = time.monotonic() + 60
    while is_alive(supervisor):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not (there / "attempts/0002").exists()
    assert runs.show("a")["state"] == "stopped"


@pytest.mark.parametrize("whole", [False, True], ids=["the socket", "its folder"])
def test_a_socket_that_was_removed_is_made_again(runs: Runs, whole: bool) -> None:
    """Programs that clean /tmp do that to a run of some weeks."""
    runs.memtop("train", "--name", "a", "--detach", "--", "sleep", "600")
    path = Path(json.loads((runs.path / "a/state.json").read_text())["socket"])
    place = path.parent if whole else path
    place.rename(runs.root / "removed")  # in one step: the supervisor looks at any time
    wait_for_file(path)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    runs.memtop("stop", "a")
    assert runs.show("a")["state"] == "stopped"


async def test_a_dashboard_names_a_supervisor_that_hangs(tmp_path: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMTOP_SOCKET_DIR", runs.environment["MEMTOP_SOCKET_DIR"])
    monkeypatch.setattr(client, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(client, "ANSWER_SECONDS", 0.05)
    spec = RunSpec(name="a", created=1.0, settings=None, command=("x",), cwd="/", memtop_version="0")
    folder = create_run(tmp_path, spec, fresh=False)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(client.socket_path(folder.path)))
        silent.listen()
        viewer = await AsyncRunClient.connect(folder.path)
        with pytest.raises(RefusedError, match=r"its supervisor has not answered for \d+ s"):
            await asyncio.wait_for(everything(viewer), 60)
        await viewer.close()


@pytest.fixture
def listening(tmp_path: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RunFolder, socket.socket]]:
    """A run and the socket of its supervisor, which the test plays."""
    monkeypatch.setenv("MEMTOP_SOCKET_DIR", runs.environment["MEMTOP_SOCKET_DIR"])
    monkeypatch.setattr(client, "LOOK_SECONDS", 0.02)
    spec = RunSpec(name="a", created=1.0, settings=None, command=("x",), cwd="/", memtop_version="0")
    folder = create_run(tmp_path, spec, fresh=False)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(client.socket_path(folder.path)))
        server.listen()
        yield folder, server


STATE = msgspec.json.encode(StateUpdate(run=RunState(name="a", folder="a", state=Phase.STOPPING, created=1.0))) + b"\n"
DONE = msgspec.json.encode(Answer(id=1, outcome=Outcome.DONE, message="stopped")) + b"\n"


def test_a_request_that_takes_long_is_waited_for_while_the_supervisor_answers(
    listening: tuple[RunFolder, socket.socket],
) -> None:
    """It accepts the request, answers ten questions whether it is there, then the request."""
    folder, server = listening

    def serve() -> None:
        connection = server.accept()[0]
        with connection, connection.makefile("rwb", buffering=0) as lines:
            assert b"stop" in lines.readline()
            lines.write(msgspec.json.encode(Answer(id=1, outcome=Outcome.ACCEPTED, message="asked")) + b"\n")
            for _ in range(10):
                assert b"status" in lines.readline()
                lines.write(STATE)
            lines.write(DONE)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert client.ask(folder, lambda number: Stop(id=number)).message == "stopped"
    thread.join(60)


def test_only_questions_without_an_answer_count_as_silence(tmp_path: Path) -> None:
    silence = client.Silence(RunFolder(tmp_path), 0)
    most = int(client.ANSWER_SECONDS / client.LOOK_SECONDS)
    for _ in range(3):
        silence.heard()
        for _ in range(most):
            silence.check()
    with pytest.raises(RefusedError, match="has not answered for 30 s"):
        silence.check()


@pytest.mark.parametrize("user", ["a command", "a dashboard"])
async def test_one_that_was_paused_blames_no_supervisor(
    listening: tuple[RunFolder, socket.socket], monkeypatch: pytest.MonkeyPatch, user: str
) -> None:
    """Ctrl-Z, and fg after a while: its clock goes on, and it has asked nothing meanwhile."""
    folder, server = listening
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=time.sleep)
    monkeypatch.setattr(client, "time", clock)

    def serve() -> None:
        connection = server.accept()[0]
        with connection, connection.makefile("rwb", buffering=0) as lines:
            if user == "a command":
                assert b"stop" in lines.readline()
            lines.readline()
            clock.monotonic = lambda: time.monotonic() + 1000.0
            lines.readline()
            lines.write(DONE)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    if user == "a command":
        answer: object = await asyncio.to_thread(client.ask, folder, lambda number: Stop(id=number))
    else:
        viewer = await AsyncRunClient.connect(folder.path)
        answer = await viewer.receive()
        await viewer.close()
    assert isinstance(answer, Answer)
    assert answer.message == "stopped"
    thread.join(60)


@pytest.mark.parametrize("when", ["before the request", "before a question is read"])
def test_a_supervisor_that_is_killed_is_gone(listening: tuple[RunFolder, socket.socket], when: str) -> None:
    """The kernel reports that as a reset or broken connection if something was left unread."""
    folder, server = listening

    def serve() -> None:
        connection = server.accept()[0]
        with connection:
            if when != "before the request":
                assert connection.recv(1 << 16)
                select.select([connection], [], [], 60)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()

    def make(number: int) -> Stop:
        if when == "before the request":
            thread.join(60)
        return Stop(id=number)

    with pytest.raises(NotRunningError, match="the supervisor of run 'a' ended"):
        client.ask(folder, make)
    thread.join(60)


@pytest.mark.parametrize("name", ["file/socket", "n" * 300], ids=["a file in place of its folder", "no name for a file"])
async def test_a_socket_that_cannot_be_looked_at_is_one_that_cannot_be_made(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    server = ControlServer(tmp_path / name, on_request=AsyncMock(), on_agent=Mock(), on_gone=Mock())
    with pytest.raises(RunFolderError, match=r"cannot create a socket: .*; set MEMTOP_SOCKET_DIR"):
        await server.start()
    assert not server.is_there()
    await server.close()
