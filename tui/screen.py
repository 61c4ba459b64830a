"""What all screens share: the dashboard as they see it, how they close, dialogs, full screens and
the line of keys.

A screen knows the dashboard only as the abstract `Dashboard`, so that no screen imports the
dashboard's own module.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.await_complete import AwaitComplete
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.events import Click
from textual.geometry import Region
from textual.reactive import var
from textual.screen import ModalScreen, Screen
from textual.timer import Timer
from textual.widget import Widget
from textual.widgets import Button, Static

from memtop.supervisor import wire
from memtop.supervisor.clean import clean
from memtop.supervisor.language import has_wide, tr, wrapped_anywhere
from memtop.supervisor.monitor.history import History
from memtop.tui.choices import Choices
from memtop.tui.line import NAME, STRONG, TEXT, Line, foreign, join, line, spread, wrap
from memtop.tui.line_list import LineList, ListContent, text_entry
from memtop.tui.pace import Pace
from memtop.tui.panel import LinePanel
from memtop.tui.processes.actions import ProcessActions
from memtop.tui.processes.trails import Trails
from memtop.tui.store import Store
from memtop.tui.words import LASTING, message_seconds, report_lines

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

SAVE_SECONDS = 1.0
"""So long after the last choice it is saved."""
TITLE_NAME = 30
"""The widest name in the title of a dialog, in cells."""


class Dashboard(Screen[None]):
    """The dashboard, as the screens over it see it."""

    store: var[Store] = var(Store)
    """The newest state of everything shown. Screens watch it."""
    trails: Trails
    """What each GPU process did since the dashboard started."""
    history: History
    """The samples of the last hour, for the history screen."""
    process_actions: ProcessActions
    pace: Pace
    """How fast the terminal takes what is drawn."""
    ending_processes = False
    """Whether chosen processes are being ended at the moment."""

    runs_dir: Path | None = None
    """The folder of the runs; None in a replay."""
    choices: Choices
    """What the user has chosen on the screens."""
    _say_saved: Mapping[str, Callable[[str, str], object]] = MappingProxyType({})
    """What says that a choice was saved, by its key."""
    _until_saved: Timer | None = None
    told_of_saving = False
    """A message has said that choices are saved."""

    @property
    def only_shown(self) -> bool:
        """Shown in a browser that may not act: it also gets no secrets, and writes no files."""
        return self.store.read_only and self.app.is_web

    def choose(self, key: str, value: str, say: Callable[[str, str], object]) -> None:
        """Use a choice from now on, also in later dashboards.

        It is saved a little after the last key. Then `say` gets a message and its kind; see
        `Saved`.
        """
        self.choices.choose(key, value, saved=not self.only_shown)
        self._say_saved = {**self._say_saved, key: say}
        if self._until_saved is not None:
            self._until_saved.stop()
        self._until_saved = self.set_timer(SAVE_SECONDS, self._save_choices)

    @work(group="choices")
    async def _save_choices(self) -> None:
        for saved in await asyncio.to_thread(self.choices.save):
            self._say_saved[saved.key](saved.text, saved.kind)

    @abstractmethod
    def leave(self) -> None:
        """Close the dashboard; a run goes on."""

    @abstractmethod
    def open_run(self, folder: Path) -> None:
        """Show another run in place of this one."""

    @abstractmethod
    def say(self, text: str, kind: str = "note") -> None:
        """Show a message above the buttons. `kind`: note | busy | good | bad | failed."""

    @abstractmethod
    async def ask_supervisor(self, make: Callable[[int], wire.Request]) -> None:
        """Send the request that `make` builds from an id, and show every answer to it."""

    @abstractmethod
    def call_off(self) -> object:
        """Cancel a restart that memtop has announced; the run stays failed."""

    @abstractmethod
    def look_closely(self) -> None:
        """Also read the values that cost the driver much time, for the next few seconds."""

    @abstractmethod
    def dialog_closed(self) -> None:
        """The user has answered: the next dialog may open while the answer is carried out."""


class ClosingScreen(Screen[T]):
    """A screen that a key, a click and the run itself may all close at the same moment.

    Textual's `dismiss` removes whichever screen is on top: called twice it would remove the
    dashboard, too.
    """

    _pending_result: tuple[T | None] | None = None
    """The result to close with as soon as this screen is on top again."""

    @property
    def is_open(self) -> bool:
        """Whether the screen has widgets to draw on.

        A closed screen has none, nor has one whose widgets are being removed because the program
        ends: work that goes on in a thread may finish then.
        """
        return self.is_mounted and self in self.app.screen_stack and self.display

    def dismiss(self, result: T | None = None) -> AwaitComplete:
        """Close with a result.

        A closed screen ignores it; one below another screen closes once it is on top.
        """
        stack = self.app.screen_stack
        if self not in stack:
            return AwaitComplete()
        if stack[-1] is not self:
            self._pending_result = self._pending_result or (result,)
            return AwaitComplete()
        return super().dismiss(result)

    def on_screen_resume(self) -> None:
        if self._pending_result is not None:
            self.dismiss(*self._pending_result)

    def follow(self, dashboard: Dashboard, take: Callable[[Store], None]) -> None:
        """Call `take` with the dashboard's store now and after every change, as long as the screen
        is open.
        """

        def hand(store: Store) -> None:
            if self.is_open:
                take(store)

        # While it is being mounted the screen does not count as open, but its widgets exist
        # already.
        take(dashboard.store)
        self.watch(dashboard, "store", hand, init=False)


class Prose:
    """Text that is wrapped between Chinese characters."""

    def __init__(self, text: str) -> None:
        self._lines = text.split("\n")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text("\n".join(row for one in self._lines for row in self._wrapped(one, options.max_width)))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        widest = max(map(cell_len, self._lines))
        return Measurement(min(widest, 2), widest)

    def _wrapped(self, text: str, width: int) -> list[str]:
        indent = " " * (len(text) - len(text.lstrip(" ")))
        return [f"{indent}{row}" for row in wrapped_anywhere(text, max(2, width - len(indent)))] or [""]


def prose(text: str) -> str | Prose:
    """The text as a widget shows it: only Chinese needs its own wrapping."""
    return Prose(text) if has_wide(text) else text


class Words(Static):
    """A text in the reader's language."""

    def __init__(self, text: str = "", *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(prose(text), markup=False, id=id, classes=classes)

    def say(self, text: str) -> None:
        """Show another text."""
        self.update(prose(text))


# --- dialogs --------------------------------------------------------------------------------------


class WholeRows(Screen[T]):
    """A screen over another one, which is painted in whole rows when the one below changes.

    Textual would paint it up to the right edge of what has changed below. A wide character at this
    edge would be cut, and a space would stay in its place.
    """

    def refresh(self, *regions: Region, repaint: bool = True, layout: bool = False, recompose: bool = False) -> Self:
        rows = (Region(0, region.y, self.size.width, region.height) for region in regions)
        return super().refresh(*rows, repaint=repaint, layout=layout, recompose=recompose)


class Dialog(ClosingScreen[T | None], ModalScreen[T | None], WholeRows[T | None]):
    """A titled box in the middle; the result is None if the user cancels."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "cancel", "Cancel", show=False),
        Binding("left", "app.focus_previous", "Previous", show=False),
        Binding("right", "app.focus_next", "Next", show=False),
    ]

    def action_cancel(self) -> None:
        self.dismiss(None)

    @on(Button.Pressed, "#cancel")
    def _cancelled(self) -> None:
        self.action_cancel()


class ConfirmDialog(Dialog[bool]):
    """Explains a dangerous action and asks.

    Cancel has the focus: Enter alone never does anything dangerous.
    """

    AUTO_FOCUS = "#cancel"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "confirm", "Yes", show=False),
        Binding("n", "cancel", "No", show=False),
    ]

    def __init__(self, title: str, lines: Sequence[str], *, confirm: str, cancel: str = "Cancel") -> None:
        super().__init__()
        self._title = title
        self._lines = lines
        self._confirm = confirm
        self._cancel = cancel

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog -dangerous") as box:
            box.border_title = tr(self._title)
            yield Words("\n".join(clean(tr(one)) for one in self._lines), id="what")
            with Horizontal(classes="buttons"):
                yield Button(f"{tr(self._cancel)} (n)", id="cancel", compact=True)
                yield Button(f"{tr(self._confirm)} (y)", id="confirm", variant="error", compact=True)

    @on(Button.Pressed, "#confirm")
    def action_confirm(self) -> None:
        self.dismiss(True)


class KeysPage(Dialog[None]):
    """Keys and what they do, to read and close."""

    # The page itself has the focus: it opens at its top, and the arrow keys scroll it.
    AUTO_FOCUS = "LineList"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark,q", "cancel", "Close", show=False),
        # The page would take it.
        Binding("enter", "cancel", "Close", show=False, priority=True),
    ]
    TITLE: ClassVar[str]

    @abstractmethod
    def draw(self, width: int) -> list[Line]:
        """The lines of the page."""

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog help") as box:
            box.border_title = tr(self.TITLE)
            yield LineList(lambda width: ListContent([text_entry(self.draw(width))]))
            with Horizontal(classes="buttons"):
                yield Button(tr("Close"), id="cancel", compact=True)

    def on_resize(self) -> None:
        width = min(_PAGE_WIDTH, self.size.width * 96 // 100) - _PAGE_SIDES
        page = self.query_one(LineList)
        page.styles.height = min(page.lines_wanted(width), self.size.height * 96 // 100 - _PAGE_AROUND)


_PAGE_WIDTH, _PAGE_SIDES, _PAGE_AROUND = 112, 6, 6
"""Cells of such a page with its border, at its sides, and above and below it with the button."""
_KEY_WIDTH = 5


def key_rows(rows: Sequence[tuple[str, str, str]], width: int) -> list[list[Line]]:
    """The lines of each (key, name, what it does); key and name are in the reader's language."""
    keys = max(_KEY_WIDTH, max((cell_len(key) for key, _, _ in rows), default=0))
    names = max((cell_len(name) for _, name, _ in rows), default=0)
    beside = 2 + keys + 2 + names + 2
    found = []
    for key, name, words in rows:
        first, *more = wrap(words, width - beside) or [()]
        start = foreign(("  ", TEXT), (set_cell_size(key, keys), STRONG), ("  ", TEXT), (set_cell_size(name, names + 2), TEXT))
        found.append([(*start, *first), *((*foreign((" " * beside, TEXT)), *one) for one in more)])
    return found


class KeysDialog(KeysPage):
    """The keys of a full screen."""

    TITLE = "Keys of this screen"

    def __init__(self, of: Screen[Any]) -> None:
        super().__init__()
        self._of = of

    def draw(self, width: int) -> list[Line]:
        tips = {b.key: b.tooltip for b in type(self._of).BINDINGS if isinstance(b, Binding)}
        rows = [(shown, words.rstrip("…"), tips.get(key, "")) for key, shown, words in keys_of(self._of)]
        back = "One step back: clear the input, the search, the ticks, the filter, then leave this screen"
        palette = "Find an action, a screen or a theme by typing; Enter does it"
        rows += [("Esc", tr("Back"), back), ("Ctrl+P", tr("Commands"), palette)]
        return [line for row in key_rows(rows, width) for line in row]


# --- full screens ---------------------------------------------------------------------------------


class FullScreen(ClosingScreen[None]):
    """A screen that covers the dashboard: a title line, its own widgets, a message line and its
    keys.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark", "keys", "Help", show=False),
        Binding("escape", "leave", "Back", show=False),
    ]

    def __init__(self, dashboard: Dashboard, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.dashboard = dashboard
        self._message: tuple[str, str] | None = None
        """The text and its kind."""
        self._going: Timer | None = None
        """What clears the message."""

    def title_panel(self) -> LinePanel:
        return LinePanel(self._draw_title, classes="title")

    def message_panel(self) -> LinePanel:
        return LinePanel(self.draw_message, id="message", classes="message")

    def headline(self, store: Store) -> Line:
        """The words after the program's name in the title line."""
        raise NotImplementedError

    def headline_right(self, store: Store) -> Line:
        """The words at the right edge of the title line."""
        return line((store.label or "", "edge"))

    def hint(self, store: Store, width: int) -> Line:
        """What the message line shows while there is no message."""
        return ()

    def _draw_title(self, store: Store, width: int, height: int) -> list[Line]:
        left = join((line((" memtop ", "accent")), self.headline(store)))
        return [spread(left, (*self.headline_right(store), (" ", "text")), width)]

    def draw_message(self, store: Store, width: int, height: int) -> list[Line]:
        return report_lines(*self._message, width) if self._message else [self.hint(store, width)]

    def say(self, text: str, kind: str = "note") -> None:
        """Show a message on the lines above the keys."""
        self._message = (text, kind)
        if self._going is not None:
            self._going.stop()
        self._going = None if kind in LASTING else self.set_timer(message_seconds(kind), self.clear_message)
        self.show_message()

    def choose(self, key: str, value: str) -> None:
        """Use a choice from now on. A message says once that choices are saved, and each time that
        one is not."""
        self.dashboard.choose(key, value, self._say_saved)

    def _say_saved(self, text: str, kind: str) -> None:
        # One message is enough for all that are saved.
        if kind != "good" or not self.dashboard.told_of_saving:
            self.dashboard.told_of_saving = self.dashboard.told_of_saving or kind == "good"
            words = f"{text}; later choices are saved, too" if kind == "good" else text
            (self if self.is_open else self.dashboard).say(words, kind)

    def clear_message(self) -> None:
        """Show the hint again."""
        self._message = None
        self.show_message()

    def show_message(self) -> None:
        """Draw the message on as many lines as it needs."""
        if self.is_open:
            panel = self.query_one("#message", LinePanel)
            panel.styles.height = max(1, len(self.draw_message(self.dashboard.store, self.size.width - 2, 1)))
            panel.show(self.dashboard.store)

    def show_panels(self, store: Store) -> None:
        """Draw every panel from this store."""
        for panel in self.query(LinePanel):
            panel.show(store)

    def action_keys(self) -> None:
        self.app.push_screen(KeysDialog(self))

    def action_leave(self) -> None:
        self.dismiss(None)


def named(text: str, name: str = "") -> Line:
    """A title line, in bold; `{name}` in the text stands for the name of a run or a device."""
    before, _, after = tr(text).partition("{name}")
    return foreign((before, STRONG), (name, NAME), (after, STRONG))


def keys_of(screen: Screen[Any]) -> list[tuple[str, str, str]]:
    """(key, how it is written, description) of each binding that the screen itself shows and that
    works now.
    """
    found = []
    for binding in type(screen).BINDINGS:
        if isinstance(binding, Binding) and binding.show and screen.check_action(binding.action.partition("(")[0], ()):
            found.append((binding.key, tr(binding.key_display or binding.key), tr(binding.description)))
    return found


_ALWAYS = (("question_mark", "?", "Help"), ("escape", "Esc", "Back"))


class KeyLine(Widget):
    """`k End…  t View  f Filter … ? Help  Esc Back`.

    A click does what the key does; the help lists keys that do not fit.
    """

    COMPONENT_CLASSES: ClassVar[set[str]] = {"action--key", "action--label"}

    def __init__(self, of: Screen[None]) -> None:
        super().__init__()
        self._of = of
        self._places: list[tuple[int, int, str]] = []

    def render(self) -> Text:
        key_style = self.get_component_rich_style("action--key", partial=True)
        shown_line = Text(no_wrap=True)
        self._places = []
        always = [(key, shown, tr(words)) for key, shown, words in _ALWAYS]
        room = self.size.width - sum(cell_len(_key_words(shown, words)) for _, shown, words in always)
        for key, shown, words in (*keys_of(self._of), *always):
            text = _key_words(shown, words)
            if (key, shown, words) not in always and shown_line.cell_len + cell_len(text) > room:
                continue
            self._places.append((shown_line.cell_len, shown_line.cell_len + cell_len(text), key))
            shown_line.append_text(Text.assemble(" ", (shown, key_style), f" {words} "))
        return shown_line

    def on_click(self, event: Click) -> None:
        event.stop()
        for start, end, key in self._places:
            if start <= event.x < end:
                self.app.simulate_key(key)
                return


def _key_words(shown: str, words: str) -> str:
    return f" {shown} {words} "
