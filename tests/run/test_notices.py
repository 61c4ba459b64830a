"""Notifications: what is told, to whom, and that it is told once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memtop.cli import dashboard, notify, run
from memtop.supervisor.monitor.processes.proc import command_words
from memtop.supervisor.monitor.processes.table import all_pids
from memtop.supervisor.monitor.values import MachineSnapshot
from memtop.supervisor.run import starting
from memtop.supervisor.run.effects import AddEvent
from memtop.supervisor.run.events import Sampled
from memtop.supervisor.run.notices import FILE, TOPICS, Notifier, Target, claims, is_configured, keep_targets, notices
from memtop.supervisor.run.record.folder import RunFolder, RunLock, RunSpec, StateFile, create_run, write_json
from memtop.supervisor.run.record.ledger import Ledger
from memtop.supervisor.run.starting import AFTER_KILL
from memtop.supervisor.run.state import run_state
from memtop.supervisor.wire import Event
from tests.conftest import UNTIL_GO, Runs, wait_for_file
from tests.run.brain import training
from tests.run.receiver import Receiver

NOW = 1_790_000_000.0
SPEC = RunSpec(id="1", name="qwen", created=NOW, cwd="/", settings=None, command=("python", "t.py"), memtop_version="0")


def event(kind: str, seconds: float = 0.0, message: str = "m", **fields: Any) -> Event:
    return Event(time=NOW + seconds, attempt=1, kind=kind, message=message, **fields)


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
    made = create_run(tmp_path / "runs", SPEC, fresh=False)
    ledger = Ledger(made.ledger_path)
    for kind, message in (("attempt", "attempt 1"), ("failed", "host_oom: the kernel killed it"), ("remedy", "waits for you")):
        ledger.add_event(Event(time=time.time(), attempt=1, kind=kind, message=message))
    ledger.close()
    return made


@pytest.mark.parametrize(
    ("text", "variables", "is_set"),
    [
        ('# notify-ntfy = "https://ntfy.sh/topic"\nnotify-on = "end"\nnotify-desktop = "bell"\n', {}, False),
        ("", {"MEMTOP_NOTIFY_ON": "end", "MEMTOP_NOTIFY_WEBHOOK": ""}, False),
        ("notify-ntfy = ", {}, False),
        ('notify-command = "true"\n', {}, True),
        ("", {"MEMTOP_NOTIFY_NTFY": "https://ntfy.sh/topic"}, True),
    ],
)
def test_notifications_need_an_address_or_a_command(
    environment: pytest.MonkeyPatch, tmp_path: Path, text: str, variables: dict[str, str], is_set: bool
) -> None:
    (tmp_path / "config" / "memtop").mkdir(parents=True)
    (tmp_path / "config" / "memtop" / "config.toml").write_text(text)
    assert is_configured(variables) is is_set


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


def test_an_end_is_told_with_the_state_that_is_not_written_yet(
    folder: RunFolder, receiver: Receiver, environment: pytest.MonkeyPatch
) -> None:
    """The ledger has it first, and the sender may come in between."""
    environment.setenv("MEMTOP_NOTIFY_WEBHOOK", f"{receiver.address}/hook")
    write_json(folder.state_path, StateFile(run=run_state(training().model), socket=""))
    with contextlib.closing(Ledger(folder.ledger_path)) as ledger:
        ledger.add_event(Event(time=time.time(), attempt=1, kind="finished", message="60 of 60 updates"))
    assert run(["notify", str(folder.path)]) == 0
    assert [(sent["event"], sent["run"]["state"]) for _, sent in receiver.received] == [
        ("failed", "failed"),
        ("finished", "finished"),
    ]


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
        ({"COMMAND": "true", "ON": "ende"}, "notify-on 'ende': unknown; did you mean end?"),
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


def test_a_run_without_a_target_says_so(
    environment: pytest.MonkeyPatch, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["notify", str(folder.path)]) == 0
    assert capsys.readouterr().err.startswith("memtop: nothing to notify: set notify-ntfy, ")


def test_a_test_message_says_how_it_went(
    environment: pytest.MonkeyPatch, receiver: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    environment.setenv("MEMTOP_NOTIFY_WEBHOOK", receiver.address)
    environment.setenv("MEMTOP_NOTIFY_COMMAND", "exit 3")
    assert run(["notify", "--test"]) == 1
    assert capsys.readouterr().out == "webhook: sent\ncommand: it ended with status 3\n"


@pytest.mark.parametrize("host", ["hooks.slack.com", "discord.com"])
def test_chat_services_get_their_own_form_and_call_nobody(
    tmp_path: Path, receiver: Receiver, environment: pytest.MonkeyPatch, host: str
) -> None:
    made = create_run(tmp_path / "runs", SPEC, fresh=False)
    ledger = Ledger(made.ledger_path)
    ledger.add_event(Event(time=time.time(), attempt=1, kind="failed", message="<!channel> & @everyone <@U1>"))
    ledger.close()
    for name, value in receiver.as_proxy.items():
        environment.setenv(name, value)
    environment.setattr(urllib.request, "_opener", None)  # it has kept the variables of before
    environment.setenv("MEMTOP_NOTIFY_WEBHOOK", f"http://{host}/services/secret")
    assert run(["notify", str(made.path)]) == 0
    ((path, sent),) = receiver.received
    assert path == f"http://{host}/services/secret"
    if host == "discord.com":
        assert set(sent) == {"content", "allowed_mentions"}
        assert sent["content"].startswith("**qwen has failed**\n<!channel> & @everyone <@U1>\n")
        assert sent["allowed_mentions"] == {"parse": []}
    else:
        assert set(sent) == {"text"}
        assert sent["text"].startswith("*qwen has failed*\n&lt;!channel&gt; &amp; @everyone &lt;@U1&gt;\n")


# --- the targets of one run -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("desktop", "desktop", ""),
        ("https://hooks.slack.com/services/T/B/x", "webhook", "https://hooks.slack.com/services/T/B/x"),
        ("http://127.0.0.1:8080/x?a=b:c", "webhook", "http://127.0.0.1:8080/x?a=b:c"),
        ("ntfy:my-topic", "ntfy", "https://ntfy.sh/my-topic"),
        ("https://ntfy.sh/my-topic", "ntfy", "https://ntfy.sh/my-topic"),
        ("ntfy:https://push.example.org/my-topic", "ntfy", "https://push.example.org/my-topic"),
        ("command:echo a: b", "command", "echo a: b"),
    ],
)
def test_what_a_target_means(environment: pytest.MonkeyPatch, text: str, kind: str, value: str) -> None:
    found = notify.targets([text, text])
    assert [(one.kind, one.value) for one in found] == [(kind, value)], "each once"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "dekstop",
            "give desktop, ntfy:TOPIC, command:COMMAND or an address that begins with https:// or http://; did you mean",
        ),
        ("", "give desktop, "),
        ("hooks.slack.com/secret", "give desktop, "),
        ("ftp://example.org/secret", "give desktop, "),
        ("https://[secret", "give desktop, "),
        ("https://secret:port/", "give desktop, "),
        ("https://example.org/a secret", "give desktop, "),
        ("https://example.org/secret/\N{LATIN SMALL LETTER E WITH ACUTE}", "give desktop, "),
        ("https://ntfy.sh/", "give desktop, "),
        ("command: ", "give desktop, "),
        ("ntfy:", "give ntfy:TOPIC (letters, digits, - and _), or "),
        ("ntfy:my/secret", "give ntfy:TOPIC (letters, digits, - and _), or "),
        ("ntfy:https://push.example.org/?secret", "give ntfy:TOPIC (letters, digits, - and _), or "),
    ],
)
def test_a_wrong_target_is_one_line_and_starts_nothing(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, words: str
) -> None:
    arguments = [
        "train",
        "--detach",
        "--runs-dir",
        str(tmp_path / "runs"),
        "--notify",
        "desktop",
        "--notify",
        text,
        "--",
        "true",
    ]
    assert run(arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"memtop: --notify, target 2: {words}")
    assert message.count("\n") == 1
    assert "secret" not in message
    assert not (tmp_path / "runs").exists()


def test_a_target_is_told_in_addition_to_those_of_the_configuration_and_once(
    folder: RunFolder, receiver: Receiver, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("MEMTOP_NOTIFY_WEBHOOK", f"{receiver.address}/mine")
    environment.setenv("MEMTOP_NOTIFY_NTFY", f"{receiver.address}/topic")
    keep_targets(folder, notify.targets([f"{receiver.address}/other", f"ntfy:{receiver.address}/topic"]))
    for _ in range(2):
        assert run(["notify", str(folder.path)]) == 0
    assert sorted(path for path, _ in receiver.received) == ["/", "/mine", "/other"]


def test_targets_that_others_may_have_written_are_not_used(
    folder: RunFolder, receiver: Receiver, environment: pytest.MonkeyPatch
) -> None:
    """The run has a warning, and the configuration's address gets the message."""
    environment.setenv("MEMTOP_NOTIFY_WEBHOOK", receiver.address)
    told = folder.path / "told"
    keep_targets(folder, [Target(kind="command", value=f"touch {told}")])
    (folder.path / "notify.json").chmod(0o620)
    assert run(["notify", str(folder.path)]) == 1
    assert len(receiver.received) == 1
    notifier, deadline = Notifier(folder), time.monotonic() + 120
    while notifier.busy:
        assert time.monotonic() < deadline
        notifier.tick()
        time.sleep(0.02)
    assert notifier.problem is not None
    assert notifier.problem.startswith(f"notifications cannot be sent: {folder.path}/notify.json: is not yours alone")
    assert not told.exists()


def test_the_dashboard_of_a_run_that_tells_the_desktop(folder: RunFolder, environment: pytest.MonkeyPatch) -> None:
    assert dashboard._terminal_notices(folder) is None
    keep_targets(folder, [Target(kind="desktop")])
    assert dashboard._terminal_notices(None) is None
    assert dashboard._terminal_notices(folder) is not None
    assert run(["notify", str(folder.path)]) == 0
    assert not (folder.path / FILE).exists(), "the sender has nothing to do"


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_end_is_told_once_to_the_targets_of_the_run(runs: Runs, receiver: Receiver, is_killed: bool) -> None:
    """Nothing is configured. What may be secret is in one file, and on no screen."""
    command = "echo $MEMTOP_NOTICE_TITLE >> told # private"
    targets = ("--notify", f"command:{command}", "--notify", f"{receiver.address}/secret")
    started = runs.memtop("train", "--detach", "--name", "a", *targets, "--", sys.executable, "-c", UNTIL_GO)
    first = runs.wait("a", lambda run: run["supervisor_pid"] is not None and run["alive"])["supervisor_pid"]
    if is_killed:
        runs.kill(first)
        runs.wait("a", lambda run: run["supervisor_pid"] is None)
    (runs.root / "go").touch()
    wait_until_all_have_left(runs.path / "a")
    assert (runs.root / "told").read_text() == "a has finished\n"
    assert [(path, sent["title"]) for path, sent in receiver.received] == [("/secret", "a has finished")]
    written = claims((runs.path / "a" / FILE).read_bytes())
    assert [(claim.channel, claim.outcome) for claim in written] == [
        *(("--notify command 1", None), ("--notify command 1", "sent")),
        *(("--notify webhook 2", None), ("--notify webhook 2", "sent")),
    ]
    holding = [
        path for path in find_files(runs.path / "a") if any(word in path.read_bytes() for word in (b"secret", b"private"))
    ]
    assert holding == [runs.path / "a" / "notify.json"]
    assert holding[0].stat().st_mode & 0o777 == 0o600
    shown = runs.memtop("show", "a", "--json")
    for text in (started.stdout, started.stderr, shown.stdout, shown.stderr):
        assert "secret" not in text
        assert "private" not in text


# --- a supervisor that is killed ------------------------------------------------------------------

KILLED = """
import os, signal, sys
from memtop.supervisor.__main__ import main
from memtop.supervisor.run.notices import Notifier

ended, heard, start = [], Notifier.heard, Notifier._start

def hear(self, event):
    ended.extend([event] if event.kind == "finished" else [])
    heard(self, event)

def start_or_die(self):
    if ended:
        os.kill(os.getpid(), signal.SIGKILL)
    start(self)

Notifier.heard, Notifier._start = hear, start_or_die
main()
"""
"""A supervisor that is killed after the end is in the ledger, where it would start the sender."""


@pytest.fixture
def told(runs: Runs, receiver: Receiver) -> Runs:
    """Runs of a person who is notified."""
    runs.environment["MEMTOP_NOTIFY_WEBHOOK"] = f"{receiver.address}/secret"
    return runs


def processes_of(folder: Path) -> list[list[str]]:
    """The commands of all processes that have a run's folder in them: supervisors, those that stand
    by, and senders."""
    commands = [command_words(pid) or () for pid in all_pids()]
    return [list(words) for words in commands if any(str(folder) in word for word in words)]


def wait_until_all_have_left(folder: Path, word: str = "") -> None:
    """`word`: only those with this word in their command.

    Looks several times: a process that is just replacing its program has no command for a moment.
    """
    deadline, looks = time.monotonic() + 180, 0
    while looks < 5:
        living = [words for words in processes_of(folder) if not word or word in words]
        looks = 0 if living else looks + 1
        assert time.monotonic() < deadline, living
        time.sleep(0.1)


def the_end_is_told_once(runs: Runs, receiver: Receiver) -> None:
    assert [(path, sent["title"], sent["run"]["state"]) for path, sent in receiver.received] == [
        ("/secret", "a has finished", "finished")
    ]
    assert len(runs.events("a", "finished")) == 1
    assert [claim.outcome for claim in claims((runs.path / "a" / FILE).read_bytes())] == [None, "sent"]


def test_a_supervisor_that_is_killed_before_it_starts_the_sender(told: Runs, receiver: Receiver) -> None:
    command = (sys.executable, "-c", UNTIL_GO)
    spec = RunSpec(
        id="1", name="a", created=time.time(), cwd=str(told.root), settings=None, command=command, memtop_version="0"
    )
    folder = create_run(told.path, spec, fresh=False)
    killed = subprocess.Popen([sys.executable, "-c", KILLED, str(folder.path)], env=told.environment, cwd="/")
    # The sender of the start has left, so it cannot see the end.
    wait_for_file(folder.path / FILE)
    wait_until_all_have_left(folder.path, "notify")
    (told.root / "go").touch()
    assert killed.wait(timeout=180) == -signal.SIGKILL
    wait_until_all_have_left(folder.path)
    the_end_is_told_once(told, receiver)


def test_a_supervisor_that_is_killed_before_the_end(told: Runs, receiver: Receiver) -> None:
    """No person opens the run. The command of `--then` starts, too."""
    train = ("train", "--detach", "--name", "a", "--then", "echo $MEMTOP_STATE")
    told.memtop(*train, "--", sys.executable, "-c", UNTIL_GO)
    told.kill(told.wait("a", lambda run: run["supervisor_pid"] is not None and run["alive"])["supervisor_pid"])
    told.wait("a", lambda run: run["supervisor_pid"] is None)
    (told.root / "go").touch()
    wait_until_all_have_left(told.path / "a")
    the_end_is_told_once(told, receiver)
    assert (told.path / "a" / "then.log").read_text() == "finished\n"
    assert told.show("a")["state"] == "finished"


FAILS = """
from memtop.supervisor.__main__ import main
from memtop.supervisor.run.server import ControlServer

async def close(self):
    raise OSError("no space")

ControlServer.close = close
main()
"""


def test_a_supervisor_that_ends_with_an_error_has_no_successor(told: Runs) -> None:
    command = (sys.executable, "-c", "pass")
    spec = RunSpec(
        id="1", name="a", created=time.time(), cwd=str(told.root), settings=None, command=command, memtop_version="0"
    )
    folder = create_run(told.path, spec, fresh=False)
    failed = subprocess.Popen(
        [sys.executable, "-c", FAILS, str(folder.path)], env=told.environment, cwd="/", stderr=subprocess.PIPE, text=True
    )
    assert "OSError: no space" in failed.communicate(timeout=180)[1]
    wait_until_all_have_left(folder.path)
    written = folder.state()
    assert written is not None
    assert written.run.supervisor_pid == failed.pid


def test_a_person_opens_the_run_of_a_killed_supervisor(told: Runs, receiver: Receiver) -> None:
    told.memtop("train", "--detach", "--name", "a", "--", sys.executable, "-c", UNTIL_GO)
    first = told.wait("a", lambda run: run["supervisor_pid"] is not None and run["alive"])["supervisor_pid"]
    told.kill(first)
    told.wait("a", lambda run: run["supervisor_pid"] is None)
    told.memtop("watch", "a", "--once")
    (told.root / "go").touch()
    wait_until_all_have_left(told.path / "a")
    the_end_is_told_once(told, receiver)
    kept = b"".join(path.read_bytes() for path in find_files(told.path / "a"))
    assert b"/secret" not in kept


def test_a_supervisor_that_ends_by_itself_has_no_successor(told: Runs, receiver: Receiver) -> None:
    told.memtop("train", "--detach", "--name", "a", "--", sys.executable, "-c", UNTIL_GO)
    first = told.wait("a", lambda run: run["supervisor_pid"] is not None and run["alive"])["supervisor_pid"]
    assert any(AFTER_KILL in words[2] for words in processes_of(told.path / "a") if words[0] == "/bin/sh")
    (told.root / "go").touch()
    wait_until_all_have_left(told.path / "a")
    the_end_is_told_once(told, receiver)
    written = RunFolder(told.path / "a").state()
    assert written is not None
    assert written.run.supervisor_pid == first


def test_a_successor_that_is_killed_has_none(runs: Runs) -> None:
    """It is killed while the sender works, and the sender goes on."""
    told, leave = runs.root / "told", runs.root / "leave"
    command = f"echo $MEMTOP_NOTICE_TITLE >> {told}; until [ -e {leave} ]; do sleep 0.05; done"
    runs.environment["MEMTOP_NOTIFY_COMMAND"] = command
    runs.memtop("train", "--detach", "--name", "a", "--", sys.executable, "-c", UNTIL_GO)
    first = runs.wait("a", lambda run: run["supervisor_pid"] is not None and run["alive"])["supervisor_pid"]
    runs.kill(first)
    (runs.root / "go").touch()
    second = runs.wait("a", lambda run: run["supervisor_pid"] not in (None, first) and told.exists())["supervisor_pid"]
    runs.kill(second)
    runs.wait("a", lambda run: run["supervisor_pid"] is None)
    assert [words[-2] for words in processes_of(runs.path / "a")] == ["notify"]
    leave.touch()
    wait_until_all_have_left(runs.path / "a")
    assert told.read_text() == "a has finished\n"
    assert [claim.outcome for claim in claims((runs.path / "a" / FILE).read_bytes())] == [None, "sent"]


def test_nobody_takes_over_a_run_that_has_a_supervisor(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "_LOOK_EVERY_SECONDS", 0.0)
    assert starting.wait_for_end(folder)
    lock = RunLock(folder)
    assert lock.acquire()
    assert not starting.wait_for_end(folder)
    lock.release()


def test_a_training_that_was_never_started_is_not_begun_after_a_kill(told: Runs, folder: RunFolder) -> None:
    """The supervisor was killed before its first attempt."""
    folder.ledger_path.unlink()
    command = [sys.executable, "-m", "memtop.supervisor", str(folder.path), AFTER_KILL]
    done = subprocess.run(command, env=told.environment, cwd="/", capture_output=True, text=True, timeout=180, check=False)
    assert json.loads(done.stderr.splitlines()[-1]) == {"error": "its supervisor ended before it could start it"}
    assert (done.returncode, folder.attempt_numbers()) == (1, [])


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
