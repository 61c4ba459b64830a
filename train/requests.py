"""What the trainer is asked from outside, by commands or signals, agreed on by all ranks at each update boundary.

Edits of a training that is running: which there are, and what the settings become by them."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import msgspec
import torch
from accelerate import Accelerator

from memtop.presets import Settings, SettingsError
from memtop.presets.assigning import assign
from memtop.presets.checking import check
from memtop.presets.fields import LIVE, differing, not_live
from memtop.train.engine import Ranks
from memtop.train.reporting import Channel

Edits = tuple[tuple[int, dict[str, Any]], ...]
"""Commands to change settings: the command's id, and the new values by name."""


class Asked(msgspec.Struct, frozen=True):
    """What to do at this boundary; `commands` are the ids that wait for the save, `changes` the same on every rank."""

    save: bool
    stop: bool
    commands: tuple[int, ...] = ()
    changes: Edits = ()


class Control:
    """Collects commands and signals; SIGTERM and SIGINT mean: finish the update, save, exit."""

    def __init__(self, channel: Channel, accelerator: Accelerator) -> None:
        self._channel = channel
        self._accelerator = accelerator
        self._ranks = Ranks(accelerator)
        self._stop = False
        # One rank is asked to change a setting, and tells the others.
        channel.offer("checkpoint", "stop", *(("change",) if accelerator.is_main_process else ()))

    def catch_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def at_boundary(self) -> Asked:
        """What any rank was asked since the last boundary."""
        save, waiting, changes = False, [], []
        for number, name, values in self._channel.take_commands():
            if name == "stop":
                # Answered at once: the end of the process is the proof.
                self._stop = True
                self._channel.answer(number, True, "stopping after this update")
            elif name == "change":
                changes.append((number, values))
            else:
                save = True
                waiting.append(number)
        saving, stopping, changing = self._ranks.sums(save, self._stop, len(changes))
        return Asked(saving > 0, stopping > 0, tuple(waiting), self._from_first(tuple(changes)) if changing else ())

    def _from_first(self, changes: Edits) -> Edits:
        """What the first rank was asked to change."""
        told = [changes]
        if self._accelerator.num_processes > 1:
            torch.distributed.broadcast_object_list(told, src=0)
        return told[0]

    def answer(self, number: int, ok: bool, message: str, result: dict[str, Any]) -> None:
        """Tell whoever asked the first rank for a change what came of it."""
        if self._accelerator.is_main_process:
            self._channel.answer(number, ok, message, result)

    def saved(self, asked: Asked, result: tuple[bool, str]) -> None:
        """Tell those who asked for the save."""
        for number in asked.commands:
            self._channel.answer(number, *result)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop = True
        # A second one means it: no more waiting.
        signal.signal(number, signal.SIG_DFL)


def edit_live(settings: Settings, values: dict[str, Any]) -> Settings:
    """The settings after the edit, checked; None among `values` leaves a setting as it is. A SettingsError says what cannot be.

    As with a restart, batch or accumulation alone leaves the other one as it is.
    """
    given = {name: _text(value) for name, value in values.items() if value is not None}
    if not given:
        raise SettingsError("change", "{}", f"names nothing; there are {', '.join(LIVE)}")
    for name, text in given.items():
        if name not in LIVE:
            raise SettingsError(name, text, f"cannot change in a running program, only {', '.join(LIVE)} can; restart with it")
    after = assign(settings, given)
    for name in not_live(settings, differing(settings, after)):
        raise SettingsError(name, _text(getattr(after, name)), f"is fixed while {settings.zero} runs; restart with it")
    return check(after)


def _text(value: Any) -> str:
    """The value as it is written after --set."""
    return str(value).lower() if isinstance(value, bool) else str(value)
