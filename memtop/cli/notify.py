"""`memtop notify`: sends what a run has to tell to a webhook, to ntfy or to a command.

The supervisor starts it for each event that may be told. Addresses may be secret: no message and
no ledger contains one. Of the files of the run, only the one with the targets of `--notify` does,
and only its owner can read it.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import click
import msgspec

from memtop.cli import completion
from memtop.cli.common import find_run
from memtop.cli.configuration import notify_topics, read_layers, value_of
from memtop.cli.options import RUN_HELP, runs_dir_option
from memtop.cli.output import print_lines, print_message
from memtop.presets.checks import did_you_mean
from memtop.supervisor import units
from memtop.supervisor.errors import RunFolderError, UsageError
from memtop.supervisor.language import Verbatim, tr
from memtop.supervisor.run import view
from memtop.supervisor.run.notices import CHANNELS, FILE, Claim, Notice, Target, claims, notices, targets_of
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.run.record.ledger import reading_ledger
from memtop.supervisor.run.record.ownership import require_own
from memtop.supervisor.wire import RunState

_SECONDS = 5.0
"""How long an address may take to answer."""
_COMMAND_SECONDS = 60.0
_WAITS = (0.0, 1.0, 3.0)
"""Before each try, seconds."""
_NO_TARGET = "nothing to notify: set notify-ntfy, notify-webhook or notify-command; `memtop config` shows them"
_SENT = "sent"
_DISCORD_LONGEST = 2000
_NTFY = "https://ntfy.sh/"
_TOPIC = re.compile(r"[A-Za-z0-9_-]{1,64}")

Send = Callable[[Notice, "RunState | None"], None]


class _Refused(Exception):
    """The notice cannot be sent; another try is of no use."""


@click.command(epilog=RUN_HELP)
@click.argument("run_name", metavar="[RUN]", required=False, shell_complete=completion.runs)
@click.option("--test", "is_test", is_flag=True, help="send a test message to each of your addresses")
@runs_dir_option
def notify(run_name: str | None, is_test: bool, runs_dir: Path | None) -> int:
    """Send the notifications of a run, or a test message.

    The run's supervisor calls this by itself. Nothing is sent twice. Set notify-ntfy,
    notify-webhook or notify-command in your configuration (see memtop config).
    """
    if is_test == (run_name is not None):
        raise UsageError("give a run, or --test")
    topics, configured = notify_topics(), _configured()
    if run_name is None:
        if not configured:
            raise UsageError(_NO_TARGET)
        return _test({target.kind: _sender(target) for target in configured})
    folder = find_run(run_name, runs_dir)
    require_own(folder.path)
    own, failed = list[Target](), False
    try:
        own = targets_of(folder)
    except RunFolderError as error:
        # The configuration's addresses still get the message.
        print_message(f"memtop: {error}")
        failed = True
    channels = _channels(folder, own, configured)
    if not channels:
        if not own and not failed:
            print_message(f"memtop: {_NO_TARGET}")
        return int(failed)
    with _claimed(folder) as (known, claim):
        with reading_ledger(folder) as ledger:
            events = [] if ledger is None else ledger.events()
        state = view.read_state(folder)
        for notice in notices(folder.name, events, topics, time.time()):
            for channel, send in channels.items():
                if (notice.key, channel) in known:
                    continue
                claim(Claim(key=notice.key, channel=channel, time=time.time()))
                outcome = _outcome(send, notice, state)
                claim(Claim(key=notice.key, channel=channel, time=time.time(), outcome=outcome))
                failed = failed or outcome != _SENT
    return int(failed)


def _test(channels: Mapping[str, Send]) -> int:
    now = time.time()
    title, text = "memtop: a test message", f"Runs on {socket.gethostname()} will notify you here."
    notice = Notice(key="test", topic="test", event="test", time=now, title=title, text=text)
    outcomes = {channel: _outcome(send, notice, None) for channel, send in channels.items()}
    print_lines(*(f"{channel}: {outcome}" for channel, outcome in outcomes.items()))
    return int(any(outcome != _SENT for outcome in outcomes.values()))


@contextlib.contextmanager
def _claimed(folder: RunFolder) -> Iterator[tuple[set[tuple[str, str]], Callable[[Claim], None]]]:
    """What has been claimed, and a function that adds a line. Only one sender works at a time."""
    path = folder.path / FILE
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be written: {error.strerror}") from None
    with os.fdopen(descriptor, "r+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.write(b"\n")  # the last sender was killed within a line
        known = {(one.key, one.channel) for one in claims(content)}
        yield known, lambda claim: _append(file.fileno(), claim)


def _append(descriptor: int, claim: Claim) -> None:
    line = msgspec.json.encode(claim) + b"\n"
    if os.write(descriptor, line) != len(line):
        raise RunFolderError(f"{FILE}: the disk is full")


def _outcome(send: Send, notice: Notice, state: RunState | None) -> str:
    """Try to send; "sent", or why that failed, without the address."""
    problem = ""
    for wait in _WAITS:
        time.sleep(wait)
        try:
            send(notice, state)
            return _SENT
        except _Refused as refused:
            return str(refused)
        except urllib.error.HTTPError as error:
            problem = f"the address answered {error.code}"
            if error.code < 500 and error.code != 429:
                return problem
        except urllib.error.URLError as error:
            problem = str(getattr(error.reason, "strerror", None) or error.reason)
        except (OSError, http.client.HTTPException) as error:
            problem = getattr(error, "strerror", None) or type(error).__name__
    return problem


# --- the channels ---------------------------------------------------------------------------------


def _configured() -> list[Target]:
    """Those of the configuration. UsageError for an address that cannot be used; it is not
    repeated."""
    layers, found = read_layers(), []
    for kind in CHANNELS:
        value = value_of(f"notify-{kind}", layers, os.environ)
        if value.value is None:
            continue
        if kind != "command" and not _is_address(value.value):
            raise UsageError(f"{value.where}: notify-{kind}: give an address that begins with https:// or http://")
        found.append(msgspec.convert({"kind": kind, "value": value.value}, Target))
    return found


def targets(texts: Sequence[str]) -> list[Target]:
    """Those that `--notify` names, each once. UsageError for one that cannot be used, and for a
    configuration that would keep the sender from its work. It does not repeat the text."""
    if texts:
        notify_topics()
        _configured()
    return list(dict.fromkeys(_target(text, f"--notify, target {number}") for number, text in enumerate(texts, 1)))


def _target(text: str, where: str) -> Target:
    kind, colon, value = text.partition(":")
    if text == "desktop":
        return Target(kind="desktop")
    if kind == "command" and value.strip():
        return Target(kind="command", value=value)
    if kind == "ntfy":
        if _TOPIC.fullmatch(value):
            return Target(kind="ntfy", value=f"{_NTFY}{value}")
        if _is_address(value) and urlsplit(value).path.strip("/"):
            return Target(kind="ntfy", value=value)
        raise UsageError(f"{where}: give ntfy:TOPIC (letters, digits, - and _), or ntfy: and the address of a topic")
    if _is_address(text):
        if not text.startswith(_NTFY):
            return Target(kind="webhook", value=text)
        if urlsplit(text).path.strip("/"):
            return Target(kind="ntfy", value=text)
    hint = did_you_mean(kind + colon, ("desktop", "ntfy:", "command:"))
    raise UsageError(
        f"{where}: give desktop, ntfy:TOPIC, command:COMMAND or an address that begins with https:// or http://{hint}"
    )


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        # Others cannot be sent, and the error would repeat the address.
        return is_whole and text.isprintable() and " " not in text and f"{parts.path}{parts.query}".isascii()
    except ValueError:  # brackets without an IPv6 address, or a port that is no number
        return False


def _channels(folder: RunFolder, own: Sequence[Target], configured: Sequence[Target]) -> dict[str, Send]:
    """The targets of this run. A target that is also configured gets each message once."""
    found: dict[str, Send] = {target.kind: _sender(target) for target in configured if target not in own}
    cwd = folder.spec(own=True).cwd if own else None
    for number, target in enumerate(own, 1):
        if target.kind != "desktop":  # the dashboards of the run tell it
            found[f"--notify {target.kind} {number}"] = _sender(target, cwd)
    return found


def _sender(target: Target, cwd: str | None = None) -> Send:
    """`cwd`: of a command; None: the folder of this process."""
    if target.kind == "command":
        return _command(target.value, cwd)
    return _ntfy(target.value) if target.kind == "ntfy" else _webhook(target.value)


def _ntfy(address: str) -> Send:
    """ntfy takes JSON at the server's own address, with the topic inside."""
    parts = urlsplit(address)
    base, _, topic = parts.path.rpartition("/")
    server = urlunsplit(parts._replace(path=base + "/"))

    def send(notice: Notice, state: RunState | None) -> None:
        urgent = notice.topic in ("failure", "stall", "danger")
        message = {"topic": topic, "title": tr(notice.title), "message": _text(notice, state), "priority": 4 if urgent else 3}
        _post(server, message)

    return send


def _webhook(address: str) -> Send:
    host = urlsplit(address).hostname or ""

    def send(notice: Notice, state: RunState | None) -> None:
        text = _text(notice, state)
        if host == "hooks.slack.com":
            _post(address, {"text": _for_slack(f"*{tr(notice.title)}*\n{text}")})
        elif host in ("discord.com", "discordapp.com"):
            content = f"**{tr(notice.title)}**\n{text}"[:_DISCORD_LONGEST]
            _post(address, {"content": content, "allowed_mentions": {"parse": []}})
        else:
            _post(address, _document(notice, state))

    return send


def _for_slack(text: str) -> str:
    """Slack reads commands in angle brackets: `<!channel>` in an error would wake everybody."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _command(command: str, cwd: str | None) -> Send:
    def send(notice: Notice, state: RunState | None) -> None:
        given = {"TITLE": tr(notice.title), "TEXT": _text(notice, state), "TOPIC": notice.topic, "EVENT": notice.event}
        environment = {**os.environ, **{f"MEMTOP_NOTICE_{name}": value for name, value in given.items()}}
        try:
            done = subprocess.run(
                ["/bin/sh", "-c", command],
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_COMMAND_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise _Refused(f"it was ended after {_COMMAND_SECONDS:.0f} s") from None
        if done.returncode:
            # It may have done a part of its work: no other try.
            raise _Refused(f"it ended with status {done.returncode}")

    return send


def _post(address: str, document: dict[str, Any]) -> None:
    request = urllib.request.Request(
        address, data=json.dumps(document).encode(), headers={"Content-Type": "application/json", "User-Agent": "memtop"}
    )
    with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
        answer.read(1 << 16)


def _document(notice: Notice, state: RunState | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "title": tr(notice.title),
        "text": tr(notice.text),
        "topic": notice.topic,
        "event": notice.event,
        "time": notice.time,
        "host": socket.gethostname(),
    }
    if state is not None:
        names = ("name", "updates", "total_updates", "loss", "exit_status")
        # The supervisor writes an end into the ledger before it writes the state.
        now = notice.event if notice.topic == "end" else state.state.value
        found["run"] = {name: getattr(state, name) for name in names} | {"state": now}
    return found


def _text(notice: Notice, state: RunState | None) -> str:
    """What has happened, and how far the run is."""
    words = []
    if state is not None and state.updates is not None:
        total = "" if state.total_updates is None else f" of {units.count(state.total_updates)}"
        words.append(f"update {units.count(state.updates)}{total}")
    if state is not None and state.loss is not None:
        words.append(f"loss {state.loss:.4g}")
    words.append(Verbatim(socket.gethostname()))
    return f"{tr(notice.text)}\n{', '.join(map(tr, words))}"
