"""Who may make memtop act through a socket: other users, and peers that claim a rank."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from memtop.supervisor.errors import RefusedError, RunFolderError
from memtop.supervisor.monitor.processes.proc import identify
from memtop.supervisor.run.client import AsyncRunClient, ask, socket_path
from memtop.supervisor.run.record.folder import StateFile, write_json
from memtop.supervisor.run.server import Agents, ControlServer
from memtop.supervisor.run.starting import start_supervisor
from memtop.supervisor.wire import Phase, RunState, Stop
from tests.conftest import Runs
from tests.run.planted import OTHER, killed_at_the_end, needs_root, planted


@contextmanager
def listening(path: Path, serve: Callable[[socket.socket], None]) -> Iterator[None]:
    """A thread that serves one client of a Unix socket."""

    clients: list[socket.socket] = []

    def run() -> None:
        with suppress(OSError):
            clients.append(server.accept()[0])
            serve(clients[0])

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            # Nobody may have connected, or the client may not have left.
            for one in (server, *clients):
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            thread.join(60)
            for one in clients:
                one.close()
    assert not thread.is_alive()


def endless(client: socket.socket) -> None:
    while True:
        client.sendall(b"x" * (1 << 20))


def test_a_stopped_supervisor_with_a_full_queue_is_named(here: Runs) -> None:
    folder = planted(here, here.path)
    with socket.socket(socket.AF_UNIX) as server, killed_at_the_end(subprocess.Popen(["sleep", "120"], text=True)) as process:
        server.bind(str(socket_path(folder.path)))
        server.listen(0)
        supervisor = identify(process.pid)
        assert supervisor is not None
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        run = RunState(
            name="a", folder=str(folder.path), state=Phase.TRAINING, created=1.0, attempt=1, supervisor_pid=process.pid
        )
        write_json(folder.state_path, StateFile(run=run, socket="", supervisor_started_ticks=supervisor.started_ticks))
        with socket.socket(socket.AF_UNIX) as first:
            first.connect(server.getsockname())
            with pytest.raises(RefusedError, match=rf"its supervisor is stopped .* `kill -CONT {process.pid}`"):
                ask(folder, lambda number: Stop(id=number))


@pytest.mark.parametrize(
    ("logged", "free", "words"),
    [
        ('{"error": "the real reason"}', 0, "the real reason"),
        ("", 0, "the disk is full: 0 KiB free"),
        ("", 1 << 30, "ended with status 1 while starting"),
    ],
)
def test_the_logged_reason_goes_before_the_disk(
    here: Runs, monkeypatch: pytest.MonkeyPatch, logged: str, free: int, words: str
) -> None:
    """Some file systems report 0 free bytes always."""
    folder = planted(here, here.path)
    folder.supervisor_log.write_text('{"error": "of an earlier start"}\n')
    folder.supervisor_log.chmod(0o600)
    program = here.root / "supervisor"
    program.write_text(f"#!/bin/sh\necho '{logged}'\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    with pytest.raises(RunFolderError, match=words):
        start_supervisor(folder)


def garbled(client: socket.socket) -> None:
    client.sendall(b'{"type": "answer", "id": "\xff"}\n')
    client.recv(1 << 16)


@pytest.mark.parametrize(("serve", "words"), [(endless, "a line of more than (1|64) MiB"), (garbled, "")])
def test_what_a_supervisor_sends_is_bounded_and_checked(here: Runs, serve: Callable[[socket.socket], None], words: str) -> None:
    folder = planted(here, here.path)
    path = socket_path(folder.path)
    expected = f"run 'a': what its supervisor sent cannot be read: {words}"
    with listening(path, serve), pytest.raises(RunFolderError, match=expected):
        ask(folder, lambda number: Stop(id=number))
    path.unlink()

    async def follow() -> None:
        client = await AsyncRunClient.connect(folder.path)
        try:
            await client.receive()
        finally:
            await client.close()

    with listening(path, serve), pytest.raises(RunFolderError, match=expected):
        asyncio.run(follow())


LISTENS = """
import os, socket, sys
socket.setdefaulttimeout(60)
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o777)
os.setuid(int(sys.argv[2]))
server.listen()
print("listens", flush=True)
print(server.accept()[0].recv(1), flush=True)
"""


@needs_root
def test_a_server_of_another_user_gets_no_request(here: Runs) -> None:
    folder = planted(here, here.path)
    command = [sys.executable, "-I", "-S", "-c", LISTENS, str(socket_path(folder.path)), str(OTHER)]
    with killed_at_the_end(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "listens\n"
        with pytest.raises(RunFolderError, match="nobody listens there, not your supervisor of run 'a'"):
            ask(folder, lambda number: Stop(id=number))
        assert server.stdout.readline() == "b''\n", "it was sent a request"


AGENT = """
import sys
from memtop.train.agent.journal import Link
Link(sys.argv[1], sys.argv[2], {"type": "agent"}, print).start()
sys.stdin.read()
"""


@needs_root
@pytest.mark.parametrize(("owner", "received"), [(OTHER, "b''\n"), (os.getuid(), "b'{'\n")])
def test_an_agent_speaks_only_with_the_owner_of_the_runs_folder(here: Runs, owner: int, received: str) -> None:
    folder = planted(here, here.path)
    path = str(socket_path(folder.path))
    listens = [sys.executable, "-I", "-S", "-c", LISTENS, path, str(owner)]
    agent = [sys.executable, "-c", AGENT, path, str(folder.attempt(1))]
    with killed_at_the_end(subprocess.Popen(listens, stdout=subprocess.PIPE, text=True)) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "listens\n"
        with killed_at_the_end(subprocess.Popen(agent, stdin=subprocess.PIPE, text=True)):
            assert server.stdout.readline() == received


@needs_root
def test_the_advice_about_a_squatted_socket_folder_can_be_followed(
    here: Runs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    squatted = Path(here.environment["MEMTOP_SOCKET_DIR"])
    os.chown(squatted, OTHER, OTHER)
    with pytest.raises(RunFolderError, match="belongs to nobody") as refused:
        socket_path(here.path)
    found = re.search(r"`export MEMTOP_SOCKET_DIR=\$HOME/([^`]+)`", str(refused.value))
    assert found is not None
    monkeypatch.setenv("MEMTOP_SOCKET_DIR", f"/tmp/memtop-{os.getpid()}-{found[1]}")
    path = socket_path(here.path)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.parent.rmdir()


async def test_a_second_peer_with_a_rank_does_not_take_it_from_the_first(tmp_path: Path, here: Runs) -> None:
    agents, greeted, gone = Agents(), asyncio.Queue[int | None](), asyncio.Queue[list[int]]()
    path = socket_path(tmp_path)

    async def on_request(*_: object) -> None:
        raise AssertionError("no request is sent")

    server = ControlServer(
        path,
        on_request=on_request,
        on_agent=lambda peer, message: greeted.put_nowait(agents.receive(peer, message, 1)),
        on_gone=lambda peer: gone.put_nowait(agents.gone(peer)),
    )
    await server.start()

    async def greet() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b'{"type": "agent", "attempt": 1, "rank": 0}\n')
        return reader, writer

    first, to_first = await greet()
    assert await greeted.get() == 0
    _, to_second = await greet()
    assert await greeted.get() is None
    to_second.close()
    assert (await gone.get(), agents.ranks) == ([], {0})
    # A process that has connected again speaks once its old connection is gone.
    third, to_third = await greet()
    assert await greeted.get() is None
    asked = asyncio.ensure_future(agents.call("free_cache", {0}))
    assert json.loads(await first.readline())["name"] == "free_cache"
    to_first.close()
    assert (await gone.get(), agents.ranks) == ([], {0})
    assert [answer.ok for answer in await asked] == [False]
    asked = asyncio.ensure_future(agents.call("checkpoint", {0}))
    assert json.loads(await third.readline())["name"] == "checkpoint"
    to_third.close()
    assert (await gone.get(), agents.ranks, len(await asked)) == ([0], set(), 1)
    await server.close()


GREETS_TWICE = """
import json, os, socket, time
place = os.environ["MEMTOP_ATTEMPT_DIR"] + "/ranks.json"

def recorded():
    return os.path.exists(place) and os.getpid() in [one["pid"] for one in json.load(open(place))["processes"]]

def greet():
    link = socket.socket(socket.AF_UNIX)
    link.connect(os.environ["MEMTOP_SOCKET"])
    link.sendall(b'{"type": "agent", "attempt": 1, "rank": 0}\\n')
    end = time.monotonic() + 60
    while not recorded() and time.monotonic() < end:
        time.sleep(0.02)
    return link

link = greet()
child = os.fork()
if not child:
    greet()
    os._exit(0 if recorded() else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_second_peer_of_a_rank_is_recorded_as_well(runs: Runs) -> None:
    """It speaks for the rank once the first has left, and must be known as a process of the run."""
    runs.memtop("train", "--name", "a", "--headless", "--", sys.executable, "-c", GREETS_TWICE)
    assert runs.show("a")["exit_status"] == 0
