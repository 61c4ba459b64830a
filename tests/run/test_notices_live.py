"""Notifications of a run that goes on: what a real supervisor tells, once for each address, also if
it is killed."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import UNTIL_GO, Runs
from tests.nvml_double.double import Script, nvml_library  # noqa: F401 (a fixture)
from tests.recovery.injected import inject
from tests.run.receiver import Receiver
from tests.run.test_notices import wait_until_all_have_left
from tests.terminal import Terminal

MIB, GIB = 1 << 20, 1 << 30

PROGRAM = """
import json, os, pathlib, sys, time

journal = pathlib.Path(os.environ["MEMTOP_ATTEMPT_DIR"], "rank-0.jsonl")

def report(**values):
    with journal.open("a") as file:
        file.write(json.dumps({"time": time.time(), **values}) + "\\n")

def step(update, **values):
    report(type="step", update=update, samples_seen=4 * update, loss=1.0, step_seconds=0.05, **values)
    time.sleep(0.05)

topic = sys.argv[1]
report(type="hello", rank=0, pid=os.getpid(), offers=[])
report(type="plan", updates=0, total_updates=100000, device_uuid="GPU-0")
step(1)
while not os.path.exists("begin"):
    time.sleep(0.02)
if topic == "survived":
    report(type="oom", survived=True, update=2, message="CUDA out of memory. Tried to allocate 1 GiB", error="OutOfMemoryError")
    step(2)
if topic == "stall":
    step(2)
    print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", flush=True)
update = 2
while not os.path.exists("go"):
    if topic == "leak":
        update += 1
        step(update, allocated_bytes=update << 20, reserved_bytes=(update << 20) + 4096)
    else:
        time.sleep(0.02)
"""
"""A program that reports what its argument names, after a test has said `begin`, until it says
`go`."""

HASTY = """
    import memtop.supervisor.run.post_mortem.examine as stall
    stall.SECONDS = stall.ASIDE_SECONDS = 1.5
"""
DIES = (
    HASTY
    + """
    import os, signal
    from memtop.supervisor.run.notices import Notifier
    hear, start, heard = Notifier.heard, Notifier._start, []
    def hear_too(self, event):
        heard.append(event.kind)
        hear(self, event)
    def start_or_die(self):
        if KIND in heard:
            os.kill(os.getpid(), signal.SIGKILL)
        start(self)
    Notifier.heard, Notifier._start = hear_too, start_or_die
"""
)
"""A supervisor that is killed when the event is in its ledger, where it would start the sender."""

KINDS = {"stall": "stalled", "survived": "survived", "danger": "danger", "leak": "leak"}
WORDS = {
    "stall": "makes no progress",
    "survived": "ran out of memory and goes on",
    "danger": "is close to the end of its memory",
    "leak": "leaks memory",
}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    yield found
    found.close()


@pytest.mark.parametrize(
    ("topic", "killed_before_it_sends"),
    [
        ("stall", True),
        ("survived", False),
        pytest.param("danger", True, marks=pytest.mark.long),
        pytest.param("leak", False, marks=pytest.mark.long),
        *(pytest.param(topic, topic in ("survived", "leak"), marks=pytest.mark.long) for topic in KINDS),
    ],
)
def test_each_event_is_told_once_to_each_address_across_a_supervisors_death(
    runs: Runs,
    receiver: Receiver,
    tmp_path: Path,
    nvml_library: Path,  # noqa: F811
    topic: str,
    killed_before_it_sends: bool,
) -> None:
    card = Script(tmp_path / "nvml").gpu(0, total=20 * GIB, used=10 * GIB, uuid="GPU-0").write()
    addresses = ("http://hooks.slack.com/services/1", "http://discord.com/api/webhooks/1", "http://example.org/hook")
    runs.environment |= {
        **card.env(nvml_library),
        **receiver.as_proxy,
        "MEMTOP_NOTIFY_WEBHOOK": addresses[0],
        "MEMTOP_NOTIFY_ON": topic,
    }
    inject(runs, "    pass", supervisor=DIES.replace("KIND", repr(KINDS[topic])) if killed_before_it_sends else HASTY)
    targets = [word for address in addresses[1:] for word in ("--notify", address)]
    runs.memtop("train", "--detach", "--name", "a", *targets, "--", sys.executable, "-c", PROGRAM, topic)
    started = runs.wait("a", lambda run: run["updates"] == 1 and run["trainer_pid"] is not None)
    if topic in ("danger", "leak"):
        used = 19 * GIB + 200 * MIB if topic == "danger" else 20 * GIB - 100 * MIB
        card.clear().gpu(0, total=20 * GIB, used=used, uuid="GPU-0").process(0, pid=started["trainer_pid"], used=used).write()
    (runs.root / "begin").touch()
    first = started["supervisor_pid"]
    if not killed_before_it_sends:
        runs.wait("a", lambda run: len(receiver.received) == len(addresses) and run["supervisor_pid"] is not None)
        runs.kill(first)
    runs.wait("a", lambda run: run["supervisor_pid"] != first)
    runs.memtop("watch", "a", "--once")
    runs.wait("a", lambda run: len(receiver.received) == len(addresses))
    (runs.root / "go").touch()
    wait_until_all_have_left(runs.path / "a")
    (event,) = runs.events("a", KINDS[topic])
    assert sorted(path for path, _ in receiver.received) == sorted(addresses), "each once"
    sent = dict(receiver.received)
    title = f"a {WORDS[topic]}"
    assert sent[addresses[0]]["text"].startswith(f"*{title}*\n{event.message[:20]}")
    assert sent[addresses[1]]["content"].startswith(f"**{title}**\n{event.message}\n")
    assert sent[addresses[1]]["allowed_mentions"] == {"parse": []}
    assert (sent[addresses[2]]["title"], sent[addresses[2]]["text"]) == (title, event.message)
    assert (sent[addresses[2]]["topic"], sent[addresses[2]]["event"]) == (topic, KINDS[topic])


@pytest.mark.parametrize(
    ("way", "sequence", "fails"),
    [
        pytest.param("bell", "\x07", True, marks=pytest.mark.long),
        pytest.param("osc9", "\x1b]9;a {}: {}\x1b\\", False, marks=pytest.mark.long),
        ("osc777", "\x1b]777;notify;a {};{}\x1b\\", True),
    ],
)
def test_the_terminal_of_a_dashboard_gets_the_end_once(runs: Runs, way: str, sequence: str, fails: bool) -> None:
    runs.environment["MEMTOP_NOTIFY_DESKTOP"] = way
    program = f"{UNTIL_GO}\nraise SystemExit({3 * fails})"
    runs.memtop("train", "--detach", "--name", "a", "--", sys.executable, "-c", program)
    command = [sys.executable, "-m", "memtop", "watch", "a"]
    screen = Terminal(command, columns=100, rows=30, cwd=str(runs.root), environment=runs.environment)
    try:
        screen.wait_for("Detach")
        assert not told(screen)
        (runs.root / "go").touch()
        state = "failed" if fails else "finished"
        screen.wait_for(state)
        (event,) = runs.events("a", state)
        wanted = sequence.format(f"has {state}", event.message.replace(";", ",")).encode()
        deadline = time.monotonic() + 120
        while wanted not in told(screen):
            assert time.monotonic() < deadline, told(screen)
            screen.text()
        screen.keys("d")
        screen.wait()
        assert told(screen) == [wanted]
    finally:
        screen.close()


def told(screen: Terminal) -> list[bytes]:
    """The bells, and the messages to the desktop; other commands to the terminal may end with a
    bell."""
    commands = re.findall(rb"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x07", screen.sequences)
    return [one for one in commands if one.startswith((b"\x07", b"\x1b]9;", b"\x1b]777;"))]
