"""What the trainer is asked from outside, by commands or signals, agreed on by all ranks at each update boundary."""

from __future__ import annotations

import signal
from types import FrameType

import msgspec
import torch
from accelerate import Accelerator

from memtop.train.channel import Channel


class Asked(msgspec.Struct, frozen=True):
    """What to do at this boundary; `commands` are the ids that wait for the save."""

    save: bool
    stop: bool
    commands: tuple[int, ...] = ()


class Control:
    """Collects commands and signals; SIGTERM and SIGINT mean: finish the update, save, exit."""

    def __init__(self, channel: Channel, accelerator: Accelerator) -> None:
        self._channel = channel
        self._accelerator = accelerator
        self._stop = False
        channel.offer("checkpoint", "stop")

    def catch_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def at_boundary(self) -> Asked:
        """What any rank was asked since the last boundary."""
        save, waiting = False, []
        for number, name in self._channel.take_commands():
            if name == "stop":
                # Answered at once: the end of the process is the proof.
                self._stop = True
                self._channel.answer(number, True, "stopping after this update")
            else:
                save = True
                waiting.append(number)
        stop = self._stop
        if self._accelerator.num_processes > 1:
            flags = torch.tensor([float(save), float(stop)], device=self._accelerator.device)
            save, stop = (bool(flag > 0) for flag in self._accelerator.reduce(flags, reduction="sum"))
        return Asked(save, stop, tuple(waiting))

    def saved(self, asked: Asked, result: tuple[bool, str]) -> None:
        """Tell those who asked for the save."""
        for number in asked.commands:
            self._channel.answer(number, *result)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop = True
        # A second one means it: no more waiting.
        signal.signal(number, signal.SIG_DFL)
