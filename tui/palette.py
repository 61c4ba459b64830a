"""The command palette: everything that can be done on the screen below it, found by typing.

Imported when it first opens, not at start-up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from textual import on
from textual.binding import Binding
from textual.command import Command, CommandList, CommandPalette, DiscoveryHit, Hit, Hits, Provider, SearchIcon
from textual.content import Content
from textual.screen import ModalScreen, Screen
from textual.style import Style
from textual.widgets import Input
from textual.widgets.option_list import Option

from memtop.supervisor.language import tr
from memtop.tui.dashboard.screen import DashboardScreen
from memtop.tui.help import HelpDialog
from memtop.tui.keymap import ACTIONS, label_of, offered
from memtop.tui.screen import Dialog, FullScreen, KeysDialog, WholeRows, keys_of
from memtop.tui.themes import NAMES


class Entry(NamedTuple):
    """A row of the palette."""

    title: str
    help: str
    run: Callable[[], object]


class Commands(Provider):
    """The actions of the screen, those of the dashboard, and the themes."""

    async def discover(self) -> Hits:
        for hit in self.found(""):
            yield hit

    async def search(self, query: str) -> Hits:
        for hit in self.found(query):
            yield hit

    def found(self, query: str) -> Iterator[Hit | DiscoveryHit]:
        """The entries whose titles match, then those whose descriptions do; all for an empty
        query."""
        matcher, described = self.matcher(query), list[Hit]()
        for title, words, run in self._entries():
            if not query:
                yield DiscoveryHit(title, run, help=words)
            elif (score := matcher.match(title)) > 0:
                yield Hit(score, matcher.highlight(title), run, text=title, help=words)
            elif query.casefold() in words.casefold():
                described.append(Hit(0, title, run, text=title, help=words))
        yield from described

    def _entries(self) -> Iterator[Entry]:
        screen = self._read_of
        yield from self._of_screen(screen)
        # A question must be answered first: it would hide what an action shows.
        if not isinstance(screen, ModalScreen):
            yield from self._of_dashboard()
        yield from self._themes()

    @property
    def _read_of(self) -> Screen[Any]:
        """The screen whose actions are listed: that below a list of keys."""
        stack = self.app.screen_stack
        place = stack.index(self.screen)
        while isinstance(stack[place], HelpDialog | KeysDialog):
            place -= 1
        return stack[place]

    def _of_screen(self, screen: Screen[Any]) -> Iterator[Entry]:
        """The keys that another screen than the dashboard shows."""
        if isinstance(screen, DashboardScreen):
            return
        bindings = {one.key: one for one in type(screen).BINDINGS if isinstance(one, Binding)}
        for key, shown, words in keys_of(screen):
            yield Entry(words.rstrip("…"), _help(shown, bindings[key].tooltip), self._on(screen, bindings[key].action))
        if isinstance(screen, FullScreen):
            yield Entry(tr("Keys of this screen"), "?", self._on(screen, "keys"))
            yield Entry(tr("Back"), "Esc", self._on(screen, "leave"))

    def _on(self, screen: Screen[Any], action: str) -> Callable[[], object]:
        """Do an action of the screen, once a list of keys above it has closed."""

        async def do() -> None:
            if self.screen is not screen and isinstance(self.screen, Dialog):
                await self.screen.dismiss()
            await self.app.run_action(action, screen)

        return do

    def _of_dashboard(self) -> Iterator[Entry]:
        dashboard = self.app.screen_stack[0]
        assert isinstance(dashboard, DashboardScreen)
        for action in ACTIONS:
            if action.id != "palette" and offered(action, dashboard.store):
                # As the button does: the presets are compared, and none is chosen yet.
                key = "" if action.id == "preset" else action.keys[0]
                title = tr(label_of(action, dashboard.store, narrow=False)).rstrip("…")
                run = partial(dashboard.do_above_all, action.id, key)
                yield Entry(title, _help(action.shown_key, action.description), run)

    def _themes(self) -> Iterator[Entry]:
        for name in NAMES:
            words = "the present theme" if name == self.app.theme else "use these colours, now and in later dashboards"
            yield Entry(tr(f"Theme: {name}"), tr(words), partial(self.app.run_action, f"app.choose_theme('{name}')"))


def _help(key: str, description: str) -> str:
    return f"{key}  {tr(description)}"


class Palette(CommandPalette, WholeRows[None]):
    """Textual's palette, but a key always finds the result of the keys before it.

    Textual searches in the background: Enter right behind the last letter would take the command
    that the letters before it had found.
    """

    def on_mount(self) -> None:
        # The magnifying glass is not equally wide on all terminals.
        self.query_one(SearchIcon).icon = ">"

    def _gather_commands(self, search_value: str) -> None:  # type: ignore[override]
        hits = [hit for one in self._providers if isinstance(one, Commands) for hit in one.found(search_value)]
        faint = Style.from_styles(self.get_component_styles("command-palette--help-text"))
        rows = [
            Command(_content(hit.prompt) + Content("\n" + (hit.help or "")).stylize(faint), hit, id=str(number))
            for number, hit in enumerate(hits)
        ]
        commands = self.query_one(CommandList)
        self._refresh_command_list(commands, rows, clear_current=True)
        if not rows:
            commands.add_option(Option(tr("nothing found"), id=self._NO_MATCHES, disabled=True))
            self._list_visible = True
        self.add_class("-ready")

    @on(Input.Submitted)
    def _run_highlighted(self, event: Input.Submitted) -> None:
        event.stop()
        event.prevent_default()
        commands = self.query_one(CommandList)
        chosen = commands.highlighted_option
        if isinstance(chosen, Command):
            self.dismiss()
            self.app.call_later(chosen.hit.command)


def _content(prompt: object) -> Content:
    return prompt if isinstance(prompt, Content) else Content(str(prompt))
