"""Requests to a running trainer, by commands and signals: save, stop, or change a setting."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import msgspec
import torch
from accelerate import Accelerator

from memtop.presets import Settings, SettingsError
from memtop.presets.edits import assign
from memtop.presets.fields import LIVE, differing, not_live
from memtop.presets.validation import check
from memtop.train.engine import Ranks
from memtop.train.reporting import Channel

Changes = tuple[tuple[int, dict[str, Any]], ...]
"""Commands to change settings: the command's id, and the new values by name."""


class Requests(msgspec.Struct, frozen=True):
    """What to do at an update boundary; alike on all ranks, except `commands`."""

    save: bool
    stop: bool
    commands: tuple[int, ...] = ()
    """Ids of this rank's commands that wait for the save."""
    changes: Changes = ()


class Control:
    """Collects commands and signals. SIGTERM and SIGINT: finish the update, save and exit."""

    def __init__(self, channel: Channel, accelerator: Accelerator) -> None:
        self._channel = channel
        self._accelerator = accelerator
        self._ranks = Ranks(accelerator)
        self._stop = False
        # The first rank receives changes of settings and broadcasts them.
        channel.offer("checkpoint", "stop", *(("change",) if accelerator.is_main_process else ()))

    def catch_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def at_boundary(self) -> Requests:
        """What was requested of any rank since the last call. All ranks call this together."""
        save, waiting, changes = False, [], []
        for number, name, values in self._channel.take_commands():
            if name == "stop":
                # Answered at once: the process may end before a later answer could be sent.
                self._stop = True
                self._channel.answer(number, True, "stopping after this update")
            elif name == "change":
                changes.append((number, values))
            else:
                save = True
                waiting.append(number)
        saving, stopping, changing = self._ranks.sums(save, self._stop, len(changes))
        return Requests(saving > 0, stopping > 0, tuple(waiting), self._from_first(tuple(changes)) if changing else ())

    def _from_first(self, changes: Changes) -> Changes:
        """The changes that were requested of the first rank."""
        shared = [changes]
        if self._accelerator.num_processes > 1:
            torch.distributed.broadcast_object_list(shared, src=0)
        return shared[0]

    def answer(self, number: int, ok: bool, message: str, result: dict[str, Any]) -> None:
        """Answer a change, on the rank that received it."""
        if self._accelerator.is_main_process:
            self._channel.answer(number, ok, message, result)

    def saved(self, requests: Requests, result: tuple[bool, str]) -> None:
        """Answer the commands that waited for the save."""
        for number in requests.commands:
            self._channel.answer(number, *result)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop = True
        # A second signal ends the process at once.
        signal.signal(number, signal.SIG_DFL)


def edit_live(settings: Settings, values: dict[str, Any]) -> Settings:
    """The settings after an edit, checked.

    None among `values` leaves a setting alone. SettingsError if it is not possible.

    As at a restart, changing batch or accumulation leaves the other one unchanged.
    """
    given = {name: _text(value) for name, value in values.items() if value is not None}
    if not given:
        raise SettingsError("change", "{}", f"names no setting; choose from {', '.join(LIVE)}")
    for name, text in given.items():
        if name not in LIVE:
            raise SettingsError(name, text, f"cannot change during a run, only {', '.join(LIVE)} can; restart with it")
    after = assign(settings, given)
    for name in not_live(settings, differing(settings, after)):
        raise SettingsError(name, _text(getattr(after, name)), f"cannot change while {settings.zero} runs; restart with it")
    return check(after)


def _text(value: Any) -> str:
    """The value as it is written after --set."""
    return str(value).lower() if isinstance(value, bool) else str(value)
