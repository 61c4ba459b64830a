"""What the supervisor asks of a framework's trainer: save now, or save and stop.

Every rank must save after the same update; see `Agreement`. `Orders` does not depend on the
reports: if those fail on one rank, this rank still saves with the others.
"""

from __future__ import annotations

import json
import os
from typing import Any, Protocol

COMMANDS = ("checkpoint", "stop")
_AHEAD = 2
"""In how many updates several ranks save together."""


class Commander(Protocol):
    """What orders need of the agent."""

    def take_commands(self) -> list[tuple[int, str, dict[str, Any]]]: ...

    def answer(self, number: int, ok: bool, message: str, result: dict[str, Any] | None = None) -> None: ...


class Orders:
    """What is asked of one training. Call `after` at the end of each update."""

    def __init__(self, agent: Commander, agreement: Agreement | None = None) -> None:
        self.saves = False
        """The training is to save as soon as it can."""
        self.stops = False
        """The training is to stop as soon as it has saved."""
        self._agent = agent
        self._agreement = agreement
        self._asked: list[int] = []

    def after(self, update: int) -> None:
        """Take the commands that have come."""
        if self._agreement is not None:
            self.agreed(update)
            if self._agreement.is_open(update):
                return
        known = len(self._asked)
        stops = self._take()
        if len(self._asked) == known:
            return
        if self._agreement is None:
            self._do("stop" if stops else "checkpoint")
        else:
            self._agreement.propose(update, stops)

    def agreed(self, update: int) -> None:
        """Do what the ranks have agreed upon; take no commands."""
        if self._agreement is not None:
            self._do(self._agreement.at(update))

    def saved(self, message: str) -> None:
        """The training has saved: answer what was asked."""
        self.saves = False
        asked, self._asked = self._asked, []
        for number in asked:
            self._agent.answer(number, True, message)

    def refuse(self, why: str) -> None:
        """Answer what is asked and cannot be done any more."""
        self._take()
        self.saves = self.stops = False
        asked, self._asked = self._asked, []
        for number in asked:
            self._agent.answer(number, False, why)

    def _take(self) -> bool:
        """Whether one of the commands is a stop."""
        taken = self._agent.take_commands()
        self._asked += [number for number, _, _ in taken]
        return any(name == "stop" for _, name, _ in taken)

    def _do(self, what: str | None) -> None:
        self.saves = self.saves or what is not None
        self.stops = self.stops or what == "stop"


class Agreement:
    """The update after which all ranks save, in a file of the attempt's folder.

    Only the first rank is asked. If it saved alone, the other ranks would wait for it in their next
    exchange. It writes the update after the next one. No rank can end that update without the
    first rank's part of the next one, and the first rank begins that only after it has written the
    file. So all ranks read it in time, and no rank waits. The file is not replaced before all ranks
    have begun the update after that.
    """

    def __init__(self, folder: str | None, training: int) -> None:
        self._path = os.path.join(folder or "", "agreed.json")
        self._training = training
        self._proposed: int | None = None
        self._stamp: tuple[int, int] | None = None
        self._update: int | None = None
        self._what = ""

    def is_open(self, update: int) -> bool:
        """Whether some rank may still have to read what the first rank has written."""
        return self._proposed is not None and update <= self._proposed

    def propose(self, update: int, stop: bool) -> None:
        """After this update of the first rank."""
        proposed = update + _AHEAD
        content = {"training": self._training, "update": proposed, "what": "stop" if stop else "checkpoint"}
        with open(self._path + ".new", "w") as file:
            json.dump(content, file)
        os.replace(self._path + ".new", self._path)
        self._proposed = proposed

    def at(self, update: int) -> str | None:
        """What all ranks do after this update: "checkpoint", "stop" or None."""
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return None
        stamp = (found.st_ino, found.st_mtime_ns)
        if stamp != self._stamp:
            with open(self._path) as file:
                content = json.load(file)
            self._stamp = stamp
            self._update = content["update"] if content["training"] == self._training else None
            self._what = content["what"]
        return self._what if update == self._update else None
