"""The supervisor with real processes, signals and sockets. It runs `program.py` of this folder."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from memtop.supervisor.errors import NotRunningError, RefusedError, RunFolderError
from memtop.supervisor.monitor.processes.proc import identify, is_alive
from memtop.supervisor.monitor.processes.table import run_processes
from memtop.supervisor.run.client import AsyncRunClient, ask
from memtop.supervisor.run.processes.environment import moved_environment
from memtop.supervisor.run.record.folder import RunFolder, RunSpec, create_run, find_run, move_aside
from memtop.supervisor.run.starting import let_leave
from memtop.supervisor.run.view import read_state
from memtop.supervisor.wire import (
    Answer,
    Change,
    EventRows,
    FreeCache,
    MetricRows,
    Outcome,
    Restart,
    StateUpdate,
    Stop,
    Subscribe,
)
from tests.conftest import Runs, wait_for_file
from tests.forking import Program

PROGRAM = str(Path(__file__).with_name("program.py"))


# A supervisor whose stop ladder is climbed in seconds.
HASTY = """
import asyncio, pathlib, signal, sys
from memtop.supervisor.run.stop_ladder import Waits
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.run.supervisor import Supervisor
waits = Waits(graceful=0.3, interrupt=float(sys.argv[2]), terminate=float(sys.argv[3]), kill=60)
asyncio.run(Supervisor(RunFolder(pathlib.Path(sys.argv[1])), waits=waits).run(None))
"""


@contextlib.contextmanager
def hasty(runs: Runs, name: str, *command: str, interrupt: float = 0.3, terminate: float = 0.3) -> Iterator[None]:
    """A run of that program under a supervisor with short waits, until it is over."""
    spec = RunSpec(name=name, created=1.0, settings=None, command=command, cwd=str(runs.root), memtop_version="0")
    folder = create_run(runs.path, spec, fresh=False)
    arguments = [str(folder.path), str(interrupt), str(terminate)]
    supervisor = Program([sys.executable, "-c", HASTY, *arguments], env=runs.environment, stdin=subprocess.DEVNULL)
    yield
    assert supervisor.wait(timeout=120) == 0


def start(runs: Runs, updates: int | None = None, *extra: str, name: str = "a") -> None:
    """A run of `program.py`: so many updates, or until `finish`."""
    command = [sys.executable, PROGRAM, str(updates or "go"), "0.02" if updates else "0.05", *extra]
    assert runs.memtop("train", "--detach", "--name", name, "--", *command).stdout == f"{name}\n"


def finish(runs: Runs) -> None:
    """Let the program train no further."""
    (runs.root / "go").touch()


def test_a_program_runs_to_its_end_and_all_is_remembered(runs: Runs) -> None:
    start(runs, 12)
    runs.wait("a", lambda d: d["state"] == "finished")
    document = runs.show("a", metrics=True)
    assert [row["update"] for row in document["metrics"]] == list(range(1, 13))
    (attempt,) = document["attempts"]
    assert (attempt["outcome"], attempt["exit_status"], attempt["updates"]) == ("finished", 0, 12)
    assert (runs.path / "a/attempts/0001/output.log").read_text().splitlines()[-1] == "update 12"
    command = json.loads((runs.path / "a/attempts/0001/command.json").read_text())
    assert command["argv"][1] == PROGRAM
    assert command["environment"]["MEMTOP_RUN"] == str(runs.path / "a")
    assert command["environment"]["MEMTOP_RUN_ID"] == json.loads((runs.path / "a/run.json").read_text())["id"] != ""
    # The program has reported that it supports no commands, which differs from having reported
    # nothing.
    assert read_state(find_run("a", runs.path)).offers == ()


def test_a_failing_program_fails_the_command_with_its_last_words(runs: Runs) -> None:
    done = runs.memtop("train", "--name", "a", "--", sys.executable, "-c", "raise SystemExit('out of luck')", status=1)
    assert "failed (exit status 1: out of luck)" in done.stderr
    assert done.stdout == ""
    document = runs.show("a")
    assert document["exit_status"] == 1
    assert document["attempts"][0]["diagnosis"]["evidence"] == ["out of luck"]


def test_a_killed_supervisor_is_replaced_and_nothing_is_lost(runs: Runs) -> None:
    start(runs)
    before = runs.wait("a", lambda d: (d["updates"] or 0) >= 3)
    runs.kill(before["supervisor_pid"])
    orphaned = runs.wait("a", lambda d: d["supervisor_pid"] is None)
    assert (orphaned["alive"], orphaned["state"]) == (True, "training")
    (row,) = json.loads(runs.memtop("watch", "--once", "--json").stdout)["runs"]
    assert (row["alive"], row["adopted"], row["trainer_pid"]) == (True, True, before["trainer_pid"])
    runs.wait("a", lambda d: d["updates"] > orphaned["updates"])
    finish(runs)
    runs.wait("a", lambda d: d["state"] == "finished")
    document = runs.show("a", metrics=True)
    last = (runs.path / "a/attempts/0001/output.log").read_text().splitlines()[-1]
    assert last == f"update {document['updates']}"
    assert [row["update"] for row in document["metrics"]] == list(range(1, document["updates"] + 1))
    assert document["attempts"][0]["exit_status"] == 0


def test_a_read_only_dashboard_starts_nothing(runs: Runs) -> None:
    start(runs)
    before = runs.wait("a", lambda d: (d["updates"] or 0) >= 1)
    runs.kill(before["supervisor_pid"])
    runs.wait("a", lambda d: d["supervisor_pid"] is None)
    (row,) = json.loads(runs.memtop("watch", "--once", "--json", "--read-only").stdout)["runs"]
    assert (row["alive"], row["supervisor_pid"]) == (True, None)


def test_the_end_is_known_although_no_supervisor_saw_it(runs: Runs) -> None:
    start(runs)
    before = runs.wait("a", lambda d: (d["updates"] or 0) >= 1)
    runs.kill(before["supervisor_pid"])
    finish(runs)
    runs.wait("a", lambda d: not d["alive"] and d["ended"] is not None)
    assert runs.show("a")["state"] == "finished"
    runs.memtop("restart", "a", "--detach")
    document = runs.wait("a", lambda d: d["state"] == "finished" and len(d["attempts"]) == 2)
    assert [attempt["exit_status"] for attempt in document["attempts"]] == [0, 0]


def test_a_killed_program_fails_the_run_and_can_be_restarted(runs: Runs) -> None:
    start(runs)
    before = runs.wait("a", lambda d: (d["updates"] or 0) >= 2)
    runs.kill(before["trainer_pid"])
    after = runs.wait("a", lambda d: d["state"] == "failed")
    assert after["reason"] == "ended by signal 9 (SIGKILL)"
    assert after["attempts"][0]["exit_status"] == -9
    runs.memtop("restart", "a", "--detach")
    runs.wait("a", lambda d: d["state"] == "training" and len(d["attempts"]) == 2)


def test_a_killed_shim_hides_nothing_while_the_supervisor_lives(runs: Runs) -> None:
    start(runs)
    runs.wait("a", lambda d: (d["updates"] or 0) >= 2)
    runs.kill(json.loads((runs.path / "a/attempts/0001/process.json").read_text())["shim_pid"])
    finish(runs)
    document = runs.wait("a", lambda d: not d["alive"] and d["state"] != "training")
    assert (document["state"], document["exit_status"]) == ("finished", 0)


def test_stop_climbs_to_the_signal_that_helps(runs: Runs) -> None:
    start(runs)
    runs.wait("a", lambda d: (d["updates"] or 0) >= 1)
    done = runs.memtop("stop", "a")
    assert done.stdout.startswith("stopped as requested; SIGINT sent to pid ")
    assert "start from update 0: stopped\n" in runs.memtop("show", "a").stdout
    refused = runs.memtop("stop", "a", status=1)
    assert re.fullmatch(r"memtop: run 'a' was stopped at [0-9-]{10} [0-9:]{8}; nothing to stop\n", refused.stderr)


@pytest.mark.parametrize("command", ["stop", "restart"])
def test_a_stopped_program_that_answers_no_request_is_continued_and_ended(runs: Runs, command: str) -> None:
    with hasty(runs, "a", sys.executable, PROGRAM, "go", "0.05", "silent-agent"):
        runs.wait("a", lambda d: (d["updates"] or 0) >= 1)
        trainer = runs.show("a")["trainer_pid"]
        os.kill(trainer, signal.SIGSTOP)
        if command == "restart":
            runs.memtop("restart", "a", "--detach")
            runs.wait("a", lambda d: d["state"] == "training" and len(d["attempts"]) == 2)
            assert runs.show("a")["attempts"][0]["exit_status"] == -signal.SIGTERM
            runs.kill(runs.show("a")["trainer_pid"])
        else:
            assert f"; SIGTERM sent to pid {trainer} (python" in runs.memtop("stop", "a").stdout


SAVES_SLOWLY = """
import os, pathlib, signal, sys, time
def save(*_):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pathlib.Path("asked").touch()
    while not pathlib.Path("go").exists():
        time.sleep(0.02)
    pathlib.Path("saved").touch()
    sys.exit(0)
signal.signal(signal.SIGINT, save)
signal.signal(signal.SIGTERM, save if "term" in sys.argv else signal.SIG_DFL)
pathlib.Path("ready").touch()
time.sleep(600)
"""


@pytest.mark.parametrize(
    "script",
    [
        # A shell that waits for its program.
        f'"{sys.executable}" saves.py; true',
        # One that dies of the signal at once, while its program saves.
        f'"{sys.executable}" saves.py & trap "exit 3" INT; wait',
    ],
)
def test_a_wrapped_program_is_interrupted_too_and_may_save(runs: Runs, script: str) -> None:
    (runs.root / "saves.py").write_text(SAVES_SLOWLY)
    with hasty(runs, "a", "bash", "-c", script, interrupt=60):
        wait_for_file(runs.root / "ready")
        asked = runs.start("stop", "a")
        wait_for_file(runs.root / "asked")
        (runs.root / "go").touch()
        assert asked.wait(timeout=120) == 0
    assert (runs.root / "saved").exists()
    assert runs.show("a")["state"] == "stopped"


def test_a_program_whose_wrapper_was_terminated_is_given_its_time(runs: Runs) -> None:
    (runs.root / "saves.py").write_text(SAVES_SLOWLY)
    # It has a session of its own, as torchrun's ranks have, so that SIGINT does not reach it.
    inner = f"setsid --wait '{sys.executable}' saves.py term"
    with hasty(runs, "a", "bash", "-c", f"trap '' INT; {inner}; true", interrupt=0.5, terminate=60):
        wait_for_file(runs.root / "ready")
        asked = runs.start("stop", "a")
        wait_for_file(runs.root / "asked")
        runs.wait("a", lambda d: d["trainer_pid"] is None)
        (runs.root / "go").touch()
        assert asked.wait(timeout=120) == 0
    assert (runs.root / "saved").exists()


def test_workers_left_behind_are_ended(runs: Runs) -> None:
    start(runs, 3, "leave-worker")
    runs.wait("a", lambda d: d["state"] == "finished")
    assert run_processes(str(runs.path / "a")) == []


def test_a_run_cannot_be_started_twice_nor_under_a_taken_name(runs: Runs) -> None:
    start(runs)
    again = runs.memtop("train", "--name", "a", "--detach", "--", "true", status=1)
    assert "`memtop watch a` shows it" in again.stderr
    spec = RunSpec(name="b", created=1.0, settings=None, command=("true",), cwd="/", memtop_version="0")
    create_run(runs.path, spec, fresh=False)
    again = runs.memtop("train", "--name", "b", "--detach", "--", "true", status=1)
    assert "its program was never started: if another command starts it just now, `memtop watch b` shows it; " in again.stderr
    with pytest.raises(RunFolderError, match="another command has just created it"):
        create_run(runs.path, spec, fresh=False)
    second = runs.start(str(runs.path / "a"), module="memtop.supervisor", stderr=subprocess.PIPE)
    assert "in use by another supervisor" in second.communicate(timeout=120)[1]
    assert second.returncode == 1


ALONE = """
import fcntl, pathlib, time
lock = open("lock", "w")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    pathlib.Path("two-at-once").touch()
with open("started", "a") as file:
    file.write("x")
time.sleep(600)
"""


def test_commands_at_the_same_moment_never_start_two_programs(runs: Runs) -> None:
    def at_once(*commands: str) -> list[int]:
        program = ("--", sys.executable, "-c", ALONE)
        words = [(*command.split(), *(program if command.startswith("train") else ())) for command in commands]
        running = [runs.start(*each, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for each in words]
        said = [command.communicate(timeout=120)[1] for command in running]
        assert not [text for text in said if "Traceback" in text]
        return sorted(command.returncode for command in running)

    assert at_once(*["train --name a --detach"] * 4) == [0, 1, 1, 1]
    wait_for_file(runs.root / "started")
    at_once(*["restart a --detach"] * 3, "stop a", "train --name a --fresh --detach")
    at_once("stop a", "stop a")
    at_once(*["restart a --detach"] * 3, "train --name a --fresh --detach")
    assert runs.wait("a", lambda d: d["trainer_pid"] is not None)["alive"]
    assert not (runs.root / "two-at-once").exists()


def test_a_socket_whose_owner_died_is_one_clear_line(runs: Runs) -> None:
    start(runs)
    state = runs.wait("a", lambda d: (d["updates"] or 0) >= 1)
    runs.kill(state["trainer_pid"])
    runs.kill(state["supervisor_pid"])
    done = runs.memtop("free", "a", status=1)
    assert re.fullmatch(r"memtop: run 'a' was killed at [0-9-]{10} [0-9:]{8}; nothing to free\n", done.stderr)
    with pytest.raises(NotRunningError) as raised:
        ask(find_run("a", runs.path), lambda number: Stop(id=number))
    assert str(raised.value) == (
        "run 'a': it has no supervisor; `memtop show a` shows how it ended, `memtop restart a` starts it again, "
        "from what it has saved if it can"
    )


def test_another_shell_with_another_socket_folder_finds_the_supervisor(
    runs: Runs, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(runs)
    runs.wait("a", lambda d: (d["updates"] or 0) >= 1)
    elsewhere = tmp_path_factory.mktemp("s")
    elsewhere.chmod(0o700)
    monkeypatch.setenv("MEMTOP_SOCKET_DIR", str(elsewhere))
    assert ask(find_run("a", runs.path), lambda number: Stop(id=number)).outcome is Outcome.DONE


def test_a_run_moved_aside_does_not_reach_its_successor(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMTOP_SOCKET_DIR", runs.environment["MEMTOP_SOCKET_DIR"])
    start(runs, 3)
    runs.wait("a", lambda d: d["state"] == "finished" and d["supervisor_pid"] is None)
    aside = RunFolder(move_aside(find_run("a", runs.path)))
    start(runs)
    with pytest.raises(NotRunningError):
        ask(aside, lambda number: Stop(id=number))
    state = read_state(aside)
    assert (state.name, state.folder, state.log_path) == (
        aside.name,
        str(aside.path),
        str(aside.path / "attempts/0001/output.log"),
    )
    # Its program has not been stopped. It begins a moment after its supervisor.
    runs.wait("a", lambda d: d["alive"])


def test_settings_of_an_own_program_are_not_memtops_to_change(runs: Runs) -> None:
    refused = runs.memtop("train", "--batch", "4", "--", "true", status=2)
    assert "--batch 4: memtop does not set the options of your own program" in refused.stderr
    start(runs)
    runs.wait("a", lambda d: (d["updates"] or 0) >= 1)
    refused = runs.memtop("restart", "a", "--batch", "4", "--detach", status=2)
    assert "it can change only the allocator settings (PYTORCH_CUDA_ALLOC_CONF), with `--set allocator=...`; " in refused.stderr
    assert runs.show("a")["alive"]


def test_a_refused_restart_leaves_an_ended_run_as_it_was(runs: Runs) -> None:
    start(runs, 5)
    before = runs.wait("a", lambda d: d["state"] == "finished" and d["supervisor_pid"] is None)
    assert (
        "it can change only the allocator settings (PYTORCH_CUDA_ALLOC_CONF), with `--set allocator=...`; "
        in runs.memtop("restart", "a", "--batch", "4", "--detach", status=2).stderr
    )
    assert runs.show("a") == before


def test_a_run_keeps_the_environment_of_its_first_start(runs: Runs) -> None:
    def attempt(number: int, *words: str, over: bool = False, **variables: str) -> str:
        """What the command says."""
        said = runs.memtop(*words, "--detach", env={**runs.environment, **variables}).stderr
        runs.wait("a", lambda d: d["state"] == "finished" and len(d["attempts"]) == number)
        if over:
            let_leave(folder)
        return said

    folder = RunFolder(runs.path / "a")
    program = ("--", "sh", "-c", 'echo "$COLOUR $MY_TOKEN $TERM" >> seen')
    attempt(1, "train", "--name", "a", *program, COLOUR="blue", MY_TOKEN="t1", TERM="one")
    said = attempt(2, "restart", "a", COLOUR="red", MY_TOKEN="t1", TERM="two", over=True)
    assert "memtop: the run keeps its environment; different from here: COLOUR\n" in said
    said = attempt(3, "restart", "a", SHAPE="round", TERM="three", over=True)
    assert "memtop: the run keeps its environment; different from here: COLOUR, SHAPE\n" in said
    assert "memtop: not set here, and not kept, since they may be secret: MY_TOKEN\n" in said
    said = attempt(4, "restart", "a", COLOUR="blue", MY_TOKEN="t4", TERM="four", over=True)
    assert "environment" not in said
    said = attempt(5, "restart", "a", "--this-environment", COLOUR="green", TERM="five", over=True)
    assert "environment" not in said
    attempt(6, "restart", "a", COLOUR="red", MY_TOKEN="t6", TERM="six")
    seen = (runs.root / "seen").read_text().splitlines()
    # The supervisor of the first attempt may have started the second one: its terminal counts then.
    assert (seen[0], seen[1].split()[:2]) == ("blue t1 one", ["blue", "t1"])
    assert seen[2:] == ["blue  three", "blue t4 four", "green  five", "green t6 six"]
    kept = folder.path / "environment.json"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert '"t1"' not in kept.read_text()
    before = kept.read_bytes()
    with contextlib.suppress(RefusedError), moved_environment(folder, {"COLOUR": "black"}):
        assert b"black" in kept.read_bytes()
        raise RefusedError("the restart is refused")
    assert kept.read_bytes() == before


def test_a_program_that_runs_keeps_its_environment(runs: Runs) -> None:
    start(runs)
    runs.wait("a", lambda d: (d["updates"] or 0) >= 1)
    refused = runs.memtop("restart", "a", "--this-environment", "--detach", status=1).stderr
    assert "run 'a' is in use: `memtop stop a` first" in refused
    refused = runs.memtop("restart", "a", "--this-environment", "--live", status=2).stderr
    assert "leave out --headless, --detach and --this-environment" in refused


@pytest.mark.parametrize("kind", ["pipe", "file", "empty pipe", "read file", "nothing"])
def test_input_that_the_program_does_not_get_is_named(runs: Runs, kind: str) -> None:
    (runs.root / "words").write_text("hello\n")
    with (runs.root / "words").open() as file:
        reads, writes = os.pipe()
        if kind == "pipe":
            os.write(writes, b"hello\n")
        if kind == "read file":
            os.lseek(file.fileno(), 0, os.SEEK_END)
        given = {"nothing": subprocess.DEVNULL, "file": file, "read file": file}.get(kind, reads)
        said = runs.memtop("train", "--name", "a", "--headless", "--", "sh", "-c", "cat > got", stdin=given).stderr
        os.close(reads)
        os.close(writes)
    line = "memtop: the standard input of this command is not passed on: that of the program is empty\n"
    assert (line in said) is (kind in ("pipe", "file"))
    assert (runs.root / "got").read_text() == ""


def test_a_program_that_asks_for_input_fails_with_the_reason(runs: Runs) -> None:
    runs.memtop("train", "--name", "a", "--headless", "--", sys.executable, "-c", "input('how many? ')", status=1)
    document = runs.show("a")
    why = "exit status 1: EOFError: EOF when reading a line; under memtop the input of a program is empty"
    found = document["attempts"][0]["diagnosis"]
    assert (document["reason"], found["reason"], found["summary"]) == (why, "no_input", why)


def test_ctrl_c_in_a_headless_run_stops_it(runs: Runs) -> None:
    command = [sys.executable, PROGRAM, "go", "0.05"]
    process = runs.start("train", "--name", "a", "--", *command, stderr=subprocess.PIPE)
    assert process.stderr is not None
    while "attempt 1" not in (line := process.stderr.readline()):
        assert line, "the run did not start"
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=120)
    assert process.returncode == 130, rest
    assert "stopping: what it saves is up to the program; Ctrl+C again does not wait for that\n" in rest
    assert rest.splitlines()[-1].startswith("memtop: run a: stopped (stopped as requested")
    assert rest.endswith("; memtop show a; memtop restart a starts it again\n")
    assert runs.show("a")["state"] == "stopped"


async def test_two_viewers_see_the_same_and_commands_are_answered(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMTOP_SOCKET_DIR", runs.environment["MEMTOP_SOCKET_DIR"])
    await asyncio.to_thread(start, runs)
    await asyncio.to_thread(runs.wait, "a", lambda d: (d["updates"] or 0) >= 3)
    viewers = [await AsyncRunClient.connect(runs.path / "a") for _ in range(2)]
    for viewer in viewers:
        await viewer.send(Subscribe(id=1))

    async def until_update(viewer: AsyncRunClient, update: int) -> tuple[str, int]:
        while True:
            message = await viewer.receive()
            if isinstance(message, StateUpdate) and (message.run.updates or 0) >= update:
                assert message.machine is not None
                assert message.machine.host.total_bytes
                return message.run.state.value, message.run.attempt

    assert await asyncio.gather(*(until_update(viewer, 10) for viewer in viewers)) == [("training", 1)] * 2

    async def answer(viewer: AsyncRunClient, number: int, wanted: Outcome) -> str:
        while True:
            message = await viewer.receive()
            if isinstance(message, Answer) and message.id == number and message.outcome is wanted:
                return message.message

    await viewers[0].send(FreeCache(id=7))
    assert "no training process is connected" in await answer(viewers[0], 7, Outcome.REFUSED)
    await viewers[1].send(Restart(id=8, change=Change()))
    assert await answer(viewers[1], 8, Outcome.DONE) == "attempt 2 started"
    # The other viewer learns that earlier rows no longer count, and what happened.
    rows_reset, explained = False, False
    while not (rows_reset and explained):
        message = await viewers[0].receive()
        rows_reset |= isinstance(message, MetricRows) and message.reset_from == 1
        explained |= isinstance(message, EventRows) and any(event.message == "attempt 2: restart" for event in message.rows)
    for viewer in viewers:
        await viewer.close()


async def test_invalid_messages_on_the_socket_are_refused_and_harm_no_client(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMTOP_SOCKET_DIR", runs.environment["MEMTOP_SOCKET_DIR"])
    await asyncio.to_thread(start, runs)
    path = json.loads((runs.path / "a/state.json").read_text())["socket"]
    assert Path(path).stat().st_mode & 0o777 == 0o600
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(b'not json\n{"type": "stop"}\n[1]\n{"type": "fly", "id": 5}\n')
    answers = [json.loads(await reader.readline()) for _ in range(4)]
    assert [(a["outcome"], a["id"]) for a in answers] == [("refused", 0), ("refused", 0), ("refused", 0), ("refused", 5)]
    writer.write(b"x" * (2 << 20) + b"\n")
    # Cut off, perhaps with our bytes still unread.
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()
    supervisor = (await asyncio.to_thread(runs.show, "a"))["supervisor_pid"]
    found = identify(supervisor)
    assert found is not None
    assert is_alive(found)
