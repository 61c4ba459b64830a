"""How screens end: each once, whoever closes it and whatever lies over it; and how they follow the run until then."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from textual.await_complete import AwaitComplete
from textual.screen import Screen

from memtop.tui.store import Store

if TYPE_CHECKING:
    from memtop.tui.dashboard.screen import DashboardScreen

T = TypeVar("T")


class Closing(Screen[T]):
    """A screen that may be closed by a key, a click and the run itself, all in one go.

    Textual's `dismiss` takes the topmost screen off, whichever that is: called twice it takes the dashboard with it.
    """

    _due: tuple[T | None] | None = None
    """What it is to be dismissed with as soon as nothing lies over it any more."""

    @property
    def is_open(self) -> bool:
        """Whether there is anything to draw on: a screen that was left has no widgets any more."""
        return self.is_mounted and self in self.app.screen_stack

    def dismiss(self, result: T | None = None) -> AwaitComplete:
        """Close with a result; nothing if it is closed already. Under another screen it closes when that one has gone."""
        stack = self.app.screen_stack
        if self not in stack:
            return AwaitComplete()
        if stack[-1] is not self:
            self._due = self._due or (result,)
            return AwaitComplete()
        return super().dismiss(result)

    def on_screen_resume(self) -> None:
        if self._due is not None:
            self.dismiss(*self._due)

    def follow(self, dashboard: DashboardScreen, take: Callable[[Store], None]) -> None:
        """Hand `take` what the dashboard knows, now and whenever that changes, for as long as the screen is open."""

        def hand(store: Store) -> None:
            if self.is_open:
                take(store)

        # While it is being mounted it does not count as open yet, but all that it draws on is there.
        take(dashboard.store)
        self.watch(dashboard, "store", hand, init=False)
