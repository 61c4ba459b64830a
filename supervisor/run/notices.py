"""Notifications: which events of a run a person is told, in which words, and the process that sends
them (`memtop notify`).

The sender is a process of its own: it outlives a supervisor that is killed, and a slow address
delays nothing. Before it sends a notice, it writes a claim into `notices.jsonl`, under a lock, so
that no notice is sent twice. A notice whose sender is killed in between is not sent again. If the
supervisor is killed before it has started the sender, the next one does it (`starting.Standby`).
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Literal, NamedTuple

import msgspec

from memtop.presets.decoding import decoder_of
from memtop.presets.files import PresetFileError, parse, user_config
from memtop.supervisor.errors import RunFolderError
from memtop.supervisor.run.record.folder import RunFolder, read_json, write_json
from memtop.supervisor.wire import Event

FILE = "notices.jsonl"
_TARGETS = "notify.json"
"""Of a run: the targets that its command line names (`--notify`), readable for its owner alone."""
TOPICS = ("end", "failure", "stall", "survived", "danger", "leak")
_FRESH_SECONDS = 3600.0
"""Older events are no news, for example when notifications are configured later."""
_REPEATED_SECONDS = 600.0
"""A run may survive many allocation failures: one notice in so many seconds."""
CHANNELS = ("ntfy", "webhook", "command")
"""notify-NAME in the configuration, or MEMTOP_NOTIFY_NAME, sets the address or the command."""


class _Told(NamedTuple):
    topic: str
    words: str
    repeats: bool = False


_KINDS = {
    "finished": _Told("end", "has finished"),
    "stopped": _Told("end", "has stopped"),
    "failed": _Told("failure", "has failed"),
    "stalled": _Told("stall", "makes no progress"),
    "survived": _Told("survived", "ran out of memory and goes on", repeats=True),
    "danger": _Told("danger", "is close to the end of its memory", repeats=True),
    "leak": _Told("leak", "leaks memory", repeats=True),
}


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """One message to a person."""

    key: str
    """Identifies the event, also in a ledger that was built again."""
    topic: str
    event: str
    """The event's kind."""
    time: float
    title: str
    text: str


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Whom one run tells, in addition to those of the configuration."""

    kind: Literal["desktop", "ntfy", "webhook", "command"]
    value: str = ""
    """The address or the command: it may be secret. Empty for the desktop."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `notices.jsonl`: one before a notice is sent, and one with the outcome."""

    key: str
    channel: str
    time: float
    outcome: str | None = None
    """None before it is sent; "sent"; or why it could not be sent."""


def notices(run: str, events: Sequence[Event], topics: Collection[str], now: float) -> list[Notice]:
    """What a person who has asked for these topics is told, the oldest first."""
    found = []
    newest: dict[str, float] = {}
    for event, following in zip_longest(events, events[1:]):
        told = _KINDS.get(event.kind)
        if told is None or told.topic not in topics:
            continue
        if told.repeats and event.time - newest.get(told.topic, 0.0) < _REPEATED_SECONDS:
            continue
        newest[told.topic] = event.time
        if now - event.time > _FRESH_SECONDS:
            continue
        # What memtop does about a failure.
        decided = following is not None and following.kind == "remedy" and event.kind == "failed"
        text = f"{event.message}\n{following.message}" if following is not None and decided else event.message
        found.append(
            Notice(
                key=f"{event.time:.6f} {event.kind}",
                topic=told.topic,
                event=event.kind,
                time=event.time,
                title=f"{run} {'was killed' if event.word == 'killed' else told.words}",
                text=text,
            )
        )
    return found


def claims(content: bytes) -> Iterator[Claim]:
    """The lines of `notices.jsonl`. A line that was cut is left out."""
    for line in content.splitlines():
        try:
            yield decoder_of(Claim).decode(line)
        except msgspec.DecodeError:
            continue


def keep_targets(folder: RunFolder, targets: Sequence[Target]) -> None:
    """Store the targets of a new run. RunFolderError if that is not possible."""
    write_json(folder.path / _TARGETS, targets, mode=0o600)


def targets_of(folder: RunFolder) -> list[Target]:
    """The targets of the run's command line. RunFolderError if its file cannot be used, or is not
    the caller's alone: it may contain a command."""
    path = folder.path / _TARGETS
    return read_json(path, list[Target], own=True) if os.path.lexists(path) else []


def is_wanted(folder: RunFolder, environment: Mapping[str, str]) -> bool:
    """Whether this run has an address or a command; the sender finds out whether it is valid."""
    return os.path.lexists(folder.path / _TARGETS) or is_configured(environment)


def is_configured(environment: Mapping[str, str]) -> bool:
    """Whether an address or a command is set; the sender finds out whether it is valid."""
    if any(environment.get(f"MEMTOP_NOTIFY_{name.upper()}") for name in CHANNELS):
        return True
    folder = user_config()
    if folder is None or not (folder / "config.toml").is_file():
        return False
    try:
        table = parse(folder / "config.toml")
    except PresetFileError:
        return False  # all commands of the user say so
    return any(table.get(f"notify-{name}") for name in CHANNELS)


class Notifier:
    """Starts the sender of one run when there is something to tell."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._due = True  # What the supervisor before may not have told.
        self._process: int | None = None
        """A pidfd, while a sender works."""
        self.problem: str | None = None
        """Why the newest notice could not be sent."""

    @property
    def busy(self) -> bool:
        """Whether a sender works or is about to."""
        return self._due or self._process is not None

    def heard(self, event: Event) -> None:
        """An event has been added to the run."""
        self._due = self._due or event.kind in _KINDS

    def tick(self) -> None:
        """Start a sender if one is due; look how one has ended. The ledger has all events."""
        if self._process is not None:
            if not select.select([self._process], [], [], 0)[0]:
                return
            os.close(self._process)
            self._process = None
            self.problem = self._outcome()
        if self._due:
            self._due = False
            if is_wanted(self._folder, os.environ):
                self._start()

    def _start(self) -> None:
        command = [sys.executable, "-m", "memtop", "notify", str(self._folder.path)]
        try:
            with self._folder.open_supervisor_log() as log:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/"
                )
            self._process = os.pidfd_open(process.pid)
        except OSError as error:
            self.problem = f"notifications cannot be sent: {error.strerror}"
            return
        # The supervisor reaps all its children, so Popen must not do it in its finaliser.
        process.returncode = 0

    def _outcome(self) -> str | None:
        try:
            targets_of(self._folder)
        except RunFolderError as error:
            return f"notifications cannot be sent: {error}"
        try:
            content = (self._folder.path / FILE).read_bytes()
        except OSError:
            return None
        newest = {claim.channel: claim.outcome for claim in claims(content)}
        failed = [f"{channel}: {outcome}" for channel, outcome in newest.items() if outcome not in (None, "sent")]
        return f"a notification could not be sent: {'; '.join(failed)}" if failed else None
