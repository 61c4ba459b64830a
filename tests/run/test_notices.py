"""Notifications: what is told, to whom, and that it is told once."""

from __future__ import annotations

import http.server
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memtop.cli import notify, run
from memtop.supervisor.monitor.values import MachineSnapshot
from memtop.supervisor.run.effects import AddEvent
from memtop.supervisor.run.events import Sampled
from memtop.supervisor.run.notices import FILE, TOPICS, claims, notices
from memtop.supervisor.run.record.folder import RunFolder, RunSpec, create_run
from memtop.supervisor.run.record.ledger import Ledger
from memtop.supervisor.wire import Event
from tests.conftest import UNTIL_GO, Runs
from tests.run.brain import training

NOW = 1_790_000_000.0


def event(kind: str, seconds: float = 0.0, message: str = "m", **fields: Any) -> Event:
    return Event(time=NOW + seconds, attempt=1, kind=kind, message=message, **fields)


class Receiver:
    """A server that keeps what is sent to it, and answers with `status`."""

    def __init__(self) -> None:
        self.received: list[tuple[str, dict[str, Any]]] = []
        self.status = 200
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.received.append((self.path, json.loads(body)))
                self.send_response(receiver.status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    yield found
    found.close()


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    for name in list(os.environ):
        if name.startswith("MEMTOP_NOTIFY_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(notify, "_WAITS", (0.0, 0.0, 0.0))
    return monkeypatch


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run that has just failed."""
    made = create_run(
        tmp_path / "runs",
        RunSpec(id="1", name="qwen", created=NOW, cwd="/", settings=None, command=("python", "t.py"), memtop_version="0"),
        fresh=False,
    )
    ledger = Ledger(made.ledger_path)
    for kind, message in (("attempt", "attempt 1"), ("failed", "host_oom: the kernel killed it"), ("remedy", "waits for you")):
        ledger.add_event(Event(time=time.time(), attempt=1, kind=kind, message=message))
    ledger.close()
    return made


def test_the_events_that_are_told_and_their_words() -> None:
    happened = [
        event("attempt"),
        event("failed", 1, "no memory"),
        event("remedy", 2, "restarts with batch 4"),
        event("finished", 3),
    ]
    found = notices("qwen", happened, TOPICS, NOW + 10)
    assert [(one.topic, one.title, one.text) for one in found] == [
        ("failure", "qwen has failed", "no memory\nrestarts with batch 4"),
        ("end", "qwen has finished", "m"),
    ]
    assert [one.topic for one in notices("qwen", happened, {"end"}, NOW + 10)] == ["end"]


def test_a_gauge_that_stays_in_danger_is_a_topic() -> None:
    brain = training()
    line = "GPU 0 has been above 90 % for 30 s"
    brain.tell(Sampled(machine=MachineSnapshot(time=NOW), dangers=(line,)))
    (added,) = [effect.event for effect in brain.asked(AddEvent)]
    (told,) = notices("qwen", [added], TOPICS, added.time)
    assert (told.topic, told.title, told.text) == ("danger", "qwen is close to the end of its memory", line)
    assert notices("qwen", [added], {"end"}, added.time) == []


def test_an_event_of_long_ago_is_no_news() -> None:
    assert not notices("qwen", [event("finished")], TOPICS, NOW + 3601)


def test_what_repeats_is_told_every_ten_minutes() -> None:
    happened = [event("survived", seconds) for seconds in (0, 30, 599, 601, 1000)]
    assert [one.time - NOW for one in notices("qwen", happened, TOPICS, NOW + 1000)] == [0, 601]
    # Also where the first ones are no news any more.
    assert [one.time - NOW for one in notices("qwen", happened, TOPICS, NOW + 4000)] == [601]


def test_a_notice_is_sent_once_to_each_address(
    folder: RunFolder, receiver: Receiver, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.setenv("MEMTOP_NOTIFY_WEBHOOK", f"{receiver.address}/hook/secret")
    environment.setenv("MEMTOP_NOTIFY_NTFY", f"{receiver.address}/base/my-topic")
    out = tmp_path / "out"
    environment.setenv("MEMTOP_NOTIFY_COMMAND", f'echo "$MEMTOP_NOTICE_TITLE: $MEMTOP_NOTICE_TEXT" >> {out}')
    for _ in range(3):
        assert run(["notify", str(folder.path)]) == 0
    assert sorted(path for path, _ in receiver.received) == ["/base/", "/hook/secret"]
    sent = dict(receiver.received)
    assert sent["/base/"]["topic"] == "my-topic"
    assert sent["/base/"]["title"] == sent["/hook/secret"]["title"] == f"{folder.name} has failed"
    assert sent["/hook/secret"]["text"] == "host_oom: the kernel killed it\nwaits for you"
    assert sent["/hook/secret"]["topic"] == "failure"
    assert out.read_text().count("has failed: host_oom") == 1
    assert "secret" not in (folder.path / FILE).read_text()


@pytest.mark.parametrize(
    ("status", "tries", "words"), [(404, 1, "the address answered 404"), (503, 3, "the address answered 503")]
)
def test_an_address_that_refuses_is_given_up_and_not_named(
    folder: RunFolder,
    receiver: Receiver,
    environment: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    status: int,
    tries: int,
    words: str,
) -> None:
    environment.setenv("MEMTOP_NOTIFY_WEBHOOK", f"{receiver.address}/secret")
    receiver.status = status
    assert run(["notify", str(folder.path)]) == 1
    assert len(receiver.received) == tries
    receiver.status = 200
    assert run(["notify", str(folder.path)]) == 0
    assert len(receiver.received) == tries, "given up"
    outcomes = [claim.outcome for claim in claims((folder.path / FILE).read_bytes())]
    assert outcomes == [None, words]
    assert "secret" not in "".join(capfd.readouterr())


def test_a_claim_whose_sender_was_killed_is_not_sent_again(
    folder: RunFolder, receiver: Receiver, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("MEMTOP_NOTIFY_WEBHOOK", receiver.address)
    with Ledgered(folder) as events:
        failed = next(one for one in events if one.kind == "failed")
    line = json.dumps({"key": f"{failed.time:.6f} failed", "channel": "webhook", "time": NOW})
    (folder.path / FILE).write_text(line + '\n{"key": "cut')
    assert run(["notify", str(folder.path)]) == 0
    assert not receiver.received


class Ledgered:
    """The events of a run's ledger."""

    def __init__(self, folder: RunFolder) -> None:
        self._ledger = Ledger(folder.ledger_path, read_only=True)

    def __enter__(self) -> list[Event]:
        return self._ledger.events()

    def __exit__(self, *_: object) -> None:
        self._ledger.close()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "nothing to notify"),
        ({"WEBHOOK": "hooks.slack.com/secret"}, "notify-webhook: give an address that begins with https://"),
        ({"NTFY": "file:///secret"}, "notify-ntfy: give an address that begins with https://"),
        ({"COMMAND": "true", "ON": "ende"}, "notify-on 'ende': unknown (did you mean end?)"),
    ],
)
def test_a_wrong_configuration_is_one_line(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variables: dict[str, str], words: str
) -> None:
    for name, value in variables.items():
        environment.setenv(f"MEMTOP_NOTIFY_{name}", value)
    assert run(["notify", "--test"]) == 2
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1
    assert "secret" not in message


def test_a_test_message_says_how_it_went(
    environment: pytest.MonkeyPatch, receiver: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    environment.setenv("MEMTOP_NOTIFY_WEBHOOK", receiver.address)
    environment.setenv("MEMTOP_NOTIFY_COMMAND", "exit 3")
    assert run(["notify", "--test"]) == 1
    assert capsys.readouterr().out == "webhook: sent\ncommand: it ended with status 3\n"


def test_chat_services_get_their_own_form(environment: pytest.MonkeyPatch) -> None:
    posted: list[tuple[str, dict[str, Any]]] = []
    environment.setattr(notify, "_post", lambda address, document: posted.append((address, document)))
    environment.setenv("MEMTOP_NOTIFY_WEBHOOK", "https://hooks.slack.com/services/T/B/x")
    assert run(["notify", "--test"]) == 0
    environment.setenv("MEMTOP_NOTIFY_WEBHOOK", "https://discord.com/api/webhooks/1/x")
    assert run(["notify", "--test"]) == 0
    assert [set(document) for _, document in posted] == [{"text"}, {"content", "allowed_mentions"}]


def test_the_end_is_told_once_though_the_supervisor_is_killed(runs: Runs, receiver: Receiver) -> None:
    runs.environment["MEMTOP_NOTIFY_WEBHOOK"] = f"{receiver.address}/secret"
    runs.memtop("train", "--detach", "--name", "a", "--", sys.executable, "-c", UNTIL_GO)
    first = runs.wait("a", lambda run: run["supervisor_pid"] is not None and run["alive"])["supervisor_pid"]
    runs.kill(first)
    runs.wait("a", lambda run: run["supervisor_pid"] is None)
    runs.memtop("watch", "a", "--once")
    (runs.root / "go").touch()
    runs.wait("a", lambda run: run["state"] == "finished" and run["supervisor_pid"] is None)
    assert [(path, sent["title"]) for path, sent in receiver.received] == [("/secret", "a has finished")]
    kept = b"".join(path.read_bytes() for path in find_files(runs.path / "a"))
    assert b"/secret" not in kept


def find_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_dead_address_costs_the_run_nothing_and_is_one_event(runs: Runs, receiver: Receiver) -> None:
    receiver.close()
    runs.environment["MEMTOP_NOTIFY_WEBHOOK"] = f"{receiver.address}/secret"
    (runs.root / "go").touch()
    runs.memtop("train", "--detach", "--name", "a", "--", sys.executable, "-c", UNTIL_GO)
    runs.wait("a", lambda run: run["state"] == "finished" and run["supervisor_pid"] is None)
    (warning,) = [one for one in runs.events("a", "warning") if "notification" in one.message]
    assert warning.message == "a notification could not be sent: webhook: Connection refused"
