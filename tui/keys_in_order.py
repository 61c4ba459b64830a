"""Keys take effect in the order in which they were typed, however busy the machine is.

Textual hands a key to the focused widget at once. A character is inserted there, but a key with a
binding (Backspace, Tab, Enter) goes on to the app, so the next character can overtake it; and a
key that opens a form is still at work when the next key arrives. Here a key waits until the one
before it, and what that one has caused, has passed through all the queues on its way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from textual.app import App
from textual.events import Event, Key, Paste
from textual.message_pump import MessagePump

_ROUNDS = 2
"""The first follows the key, the second what the key has caused: a message such as
`Input.Submitted`, a new focus, a screen that opens."""


class KeysInOrder:
    """Hands on one key or pasted text after the other."""

    def __init__(self, app: App[Any], hand_on: Callable[[Event], Awaitable[None]]) -> None:
        self._app = app
        self._hand_on = hand_on
        self._waiting: deque[Event] = deque()
        self._at_work = False

    async def take(self, event: Key | Paste) -> None:
        """Hand this event on, now or after those before it."""
        self._waiting.append(event)
        if not self._at_work:
            await self._next()

    async def _next(self) -> None:
        self._at_work = bool(self._waiting)
        if self._at_work:
            path = self._path()
            await self._hand_on(self._waiting.popleft())
            await self._follow(path, path, _ROUNDS)

    def _path(self) -> Sequence[MessagePump]:
        """The widgets that a key passes, up to the app."""
        return (self._app.focused or self._app.screen).ancestors_with_self

    async def _follow(self, whole: Sequence[MessagePump], rest: Sequence[MessagePump], rounds: int) -> None:
        """Pass through the queues of `rest`, then begin the next round or the next key."""
        for at, pump in enumerate(rest, 1):
            # A widget that has been removed takes nothing more.
            if pump.call_later(self._follow, whole, rest[at:], rounds):
                return
        if not self._app.is_running:
            return
        if rounds > 1:
            # A screen that has just opened takes this once it has its widgets and a focus.
            await self._follow(whole, (*whole, self._app.screen, self._app), rounds - 1)
        else:
            await self._next()
