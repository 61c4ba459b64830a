"""The built-in trainer's side of the agent: the agent if this process has one, otherwise nobody."""

from __future__ import annotations

import sys
from typing import Any, Protocol


class Channel(Protocol):
    """What the trainer says and hears. See `train/agent/__init__.py` for the reports' fields."""

    def offer(self, *names: str) -> None: ...

    def report(self, kind: str, **values: Any) -> None: ...

    def oom(self, error: BaseException, **values: Any) -> None:
        """Report an allocation failure, once for each error, and keep nothing of it: its frames hold tensors."""

    def flush(self) -> None: ...

    def take_commands(self) -> list[tuple[int, str, dict[str, Any]]]: ...

    def answer(self, number: int, ok: bool, message: str, result: dict[str, Any] | None = None) -> None: ...

    def readings(self) -> dict[str, int | None]: ...

    def dropped(self) -> int: ...


class Unsupervised:
    """No supervisor: nobody to tell, nobody who asks."""

    def offer(self, *names: str) -> None:
        """Nobody to take it up."""

    def report(self, kind: str, **values: Any) -> None:
        """Nobody to read it."""

    def oom(self, error: BaseException, **values: Any) -> None:
        """Nobody to read it."""

    def flush(self) -> None:
        """Nothing is queued."""

    def take_commands(self) -> list[tuple[int, str, dict[str, Any]]]:
        return []

    def answer(self, number: int, ok: bool, message: str, result: dict[str, Any] | None = None) -> None:
        raise AssertionError("nobody asked")

    def readings(self) -> dict[str, int | None]:
        return {}

    def dropped(self) -> int:
        return 0


def open_channel() -> Channel:
    """The agent that `sitecustomize` loaded into this process, if memtop launched it."""
    agent: Any = sys.modules.get("memtop_agent")
    return Unsupervised() if agent is None else agent
