"""Notifications by the terminal of a dashboard: a bell, or a message on the desktop."""

from __future__ import annotations

import time
from collections.abc import Collection

from memtop.supervisor.clean import clean
from memtop.supervisor.language import tr
from memtop.supervisor.run.notices import notices
from memtop.tui.store import Store

WAYS = {
    "bell": "\x07",
    "osc9": "\x1b]9;{title}: {text}\x1b\\",
    "osc777": "\x1b]777;notify;{title};{text}\x1b\\",
}
"""What a terminal understands: `osc9` for example iTerm2, kitty, WezTerm and Windows Terminal;
`osc777` foot, Ghostty, urxvt and terminals with VTE."""


class TerminalNotices:
    """Finds what is new since the dashboard was opened."""

    def __init__(self, way: str, topics: Collection[str]) -> None:
        self._form = WAYS[way]
        self._topics = topics
        self._since = time.time()
        self._newest: object = None
        self._told: set[str] = set()

    def of(self, store: Store) -> str:
        """What the terminal must get; empty if nothing has happened."""
        newest = store.events[-1:]
        if store.run is None or store.replaying or newest == self._newest:
            return ""
        self._newest = newest
        found = notices(store.run.name, store.events, self._topics, time.time())
        fresh = [one for one in found if one.time >= self._since and one.key not in self._told]
        self._told |= {one.key for one in fresh}
        # A semicolon would end the title.
        return "".join(self._form.format(title=_plain(tr(one.title)), text=_plain(tr(one.text))) for one in fresh)


def _plain(text: str) -> str:
    return clean(text.replace("\n", "; ")).replace(";", ",")
