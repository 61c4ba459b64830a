"""`--headless`: the command stays until the run is over and prints only new events."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from memtop.cli import foreground
from memtop.supervisor.errors import NotRunningError, RefusedError, RunFolderError
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.wire import Event, EventRows, Message, Phase, Request, RunState, StateUpdate, Stop, Subscribe
from tests.conftest import UNTIL_GO, Runs, wait_for_file
from tests.tui.support import SETTINGS

STATE = RunState(name="a", folder="/a", state=Phase.TRAINING, created=1.0, alive=True)
FINISHED = StateUpdate(run=msgspec.structs.replace(STATE, state=Phase.FINISHED, alive=False))


class Connection:
    """A scripted connection to a supervisor: None when it exits, RefusedError when it is silent,
    another error when it refuses a write."""

    def __init__(self, *messages: Message | RefusedError | None, broken: Exception | None = None) -> None:
        self._messages = list(messages)
        self._broken = broken
        self.closed = False

    async def send(self, request: Request) -> None:
        if self._broken is not None:
            raise self._broken

    async def receive(self) -> Message | None:
        message = self._messages.pop(0) if self._messages else None
        if isinstance(message, RefusedError):
            raise message
        return message

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Follow a run whose supervisor answers (a Connection) or not (the state in its folder)."""
    monkeypatch.setattr(foreground, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(foreground.starting, "revive", lambda path: False)

    def run(*looks: Connection | RunState, since: float = 0.0, told: int | None = None) -> int:
        left = list(looks)

        async def connect(path: Path) -> Connection:
            if isinstance(left[0], RunState):
                raise NotRunningError("nobody")
            return left.pop(0)  # type: ignore[return-value]

        monkeypatch.setattr(foreground.client.AsyncRunClient, "connect", connect)
        monkeypatch.setattr(foreground, "read_state", lambda folder: left.pop(0))
        status = foreground.follow(RunFolder(tmp_path), since=since, told=told)
        assert not left, "it left before the end"
        return status

    return run


def test_a_run_that_another_process_revived_is_still_followed(follow: Callable[..., int]) -> None:
    assert follow(Connection(StateUpdate(run=STATE), None), STATE, STATE, Connection(FINISHED)) == 0


def test_only_a_final_phase_ends_the_command(follow: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    failed = msgspec.structs.replace(STATE, state=Phase.FAILED, reason="both are gone", alive=False)
    assert follow(STATE, failed) == 1
    assert "run a: failed (both are gone)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"settings": SETTINGS, "exit_status": 2, "attempt": 1}, 2),
        ({"settings": SETTINGS, "exit_status": 2, "attempt": 1, "updates": 3}, 1),
        ({"settings": SETTINGS, "exit_status": 2, "attempt": 2}, 1),
        ({"settings": SETTINGS, "exit_status": 1}, 1),
        ({"exit_status": 2, "command": ("make",)}, 1),
    ],
)
def test_input_that_the_trainer_refuses_is_wrong_usage(follow: Callable[..., int], fields: dict[str, Any], status: int) -> None:
    assert follow(msgspec.structs.replace(FINISHED.run, state=Phase.FAILED, **fields)) == status


def test_each_silence_of_the_supervisor_is_printed_once(follow: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    silent = RefusedError("it is stopped")
    assert follow(Connection(silent, silent, StateUpdate(run=STATE), silent, silent, FINISHED)) == 0
    assert capsys.readouterr().err.count("memtop: it is stopped\n") == 2


def test_the_foreseen_peak_of_each_new_configuration_is_printed_once(
    follow: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    def event(number: int) -> Event:
        text = f"GPU memory is foreseen to peak at {number}.0 GiB: estimate"
        return Event(id=number, time=float(number), attempt=1, kind="foreseen", message=text, data={"configuration": number})

    def printed(told: int | None) -> list[str]:
        assert follow(Connection(EventRows(rows=(event(1), event(2))), FINISHED), told=told) == 0
        return re.findall(r"foreseen to peak at (\d)", capsys.readouterr().err)

    assert printed(None) == ["1", "2"]
    assert printed(1) == ["2"], "the command has said the first at the launch"


@pytest.mark.parametrize("error", [ConnectionResetError("Connection lost"), BrokenPipeError()])
def test_an_exiting_supervisor_does_not_end_the_command(follow: Callable[..., int], error: Exception) -> None:
    leaving = Connection(broken=error)
    assert follow(leaving, FINISHED.run) == 0
    assert leaving.closed


def test_a_supervisor_that_repeatedly_fails_to_start_is_an_error(
    follow: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def revive(path: Path) -> bool:
        raise RunFolderError("in use")

    monkeypatch.setattr(foreground.starting, "revive", revive)
    with pytest.raises(RunFolderError, match="in use"):
        follow(*[STATE] * 9)


def _twice() -> None:
    """Ctrl+C and a signal at once: two equal ones may become one."""
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGTERM)


def test_two_interrupts_at_once_stop_the_run_too(follow: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    sent: list[Request] = []

    class Interrupted(Connection):
        async def send(self, request: Request) -> None:
            sent.append(request)

        async def receive(self) -> Message | None:
            _twice()
            await asyncio.Event().wait()
            return None

    assert follow(Interrupted()) == 130
    assert [type(request) for request in sent] == [Subscribe, Stop]
    assert "it is still being stopped; memtop show" in capsys.readouterr().err


def test_a_run_whose_supervisor_was_not_reached_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def nobody(path: Path) -> Connection:
        _twice()
        raise NotRunningError("nobody")

    monkeypatch.setattr(foreground, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(foreground.starting, "revive", lambda path: False)
    monkeypatch.setattr(foreground.client.AsyncRunClient, "connect", nobody)
    monkeypatch.setattr(foreground, "read_state", lambda folder: STATE)
    assert foreground.follow(RunFolder(tmp_path / "a"), since=0.0) == 130
    words = "run a goes on: its supervisor does not answer, so nothing was stopped; memtop stop a stops it\n"
    assert capsys.readouterr().err.endswith(words)


def test_earlier_events_are_not_printed(follow: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    events = (
        Event(time=5.0, attempt=1, kind="warning", message="of the first attempt"),
        Event(time=20.0, attempt=2, kind="attempt", message="attempt 2 started"),
    )
    assert follow(Connection(EventRows(rows=events), FINISHED), since=10.0) == 0
    printed = capsys.readouterr().err
    assert "attempt 2 started" in printed
    assert "first attempt" not in printed


def test_a_flood_of_events_is_counted_and_hides_no_other_kind(
    follow: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flood = [Event(time=1.0 + number, attempt=1, kind="warning", message=f"warning {number}") for number in range(1000)]
    blocks = [EventRows(rows=tuple(flood[first : first + 100])) for first in range(0, 1000, 100)]
    last = EventRows(rows=(Event(time=2000.0, attempt=2, kind="attempt", message="attempt 2 started"),))
    assert follow(Connection(*blocks, last, FINISHED)) == 0
    printed = capsys.readouterr().err.splitlines()
    assert [line for line in printed if "warning" in line] == [
        *(f"memtop: warning {number}" for number in range(foreground.MOST_OF_A_KIND)),
        f"memtop: {1000 - foreground.MOST_OF_A_KIND} more events like these (warning): memtop watch {tmp_path.name} lists them",
    ]
    assert "memtop: attempt 2 started" in printed


def test_the_death_of_the_supervisor_does_not_end_the_command(runs: Runs) -> None:
    arguments = ("train", "--headless", "--name", "a", "--", sys.executable, "-c", UNTIL_GO)
    with runs.start(*arguments, stderr=subprocess.PIPE) as follower:
        wait_for_file(runs.path / "a/attempts/0001/process.json")
        runs.kill(runs.wait("a", lambda d: d["supervisor_pid"] is not None)["supervisor_pid"])
        runs.memtop("watch", "--once")
        (runs.root / "go").touch()
        _, printed = follower.communicate(timeout=120)
    assert follower.returncode == 0, printed
    assert "run a: finished" in printed
    assert runs.show("a")["state"] == "finished"


def test_a_signal_stops_the_run_although_nobody_reads_the_output_any_more(runs: Runs) -> None:
    arguments = ("train", "--headless", "--name", "a", "--", sys.executable, "-c", UNTIL_GO)
    with runs.start(*arguments, stderr=subprocess.PIPE) as follower:
        assert follower.stderr is not None
        follower.stderr.readline()
        follower.stderr.close()
        wait_for_file(runs.path / "a/attempts/0001/process.json")
        runs.wait("a", lambda d: d["state"] in ("starting", "training"))
        follower.send_signal(signal.SIGTERM)
        follower.wait(timeout=120)
    assert follower.returncode == 130
    assert runs.show("a")["state"] == "stopped"
