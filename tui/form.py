"""Dialogs with fields: what is typed is judged at once, and the button waits until it is right."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.events import DescendantFocus
from textual.widget import Widget
from textual.widgets import Button, Input, Label, Select

from memtop.supervisor.language import tr
from memtop.tui.screen import Dialog, T, Words


class FormDialog(Dialog[T]):
    """Fields, what is wrong with them, what they mean, and the button `#confirm`."""

    @abstractmethod
    def judge(self) -> None:
        """Read the fields and call `show_judgement`."""

    def show_judgement(self, problem: str | None, consequences: Iterable[str]) -> None:
        """Show what is wrong, if anything is, and what the fields mean, in lines."""
        shown = self.query_one("#problem", Words)
        shown.display = problem is not None
        shown.say(f"✗ {tr(problem)}" if problem is not None else "")
        self.query_one("#consequences", Words).say("\n".join(map(tr, consequences)))
        self.query_one("#confirm", Button).disabled = problem is not None
        self._say_what_enter_does(self.focused)

    @on(Input.Changed)
    def _typed(self) -> None:
        self.judge()

    @on(Input.Submitted)
    def _entered(self) -> None:
        # Enter in a field moves to the button, so that nothing happens by accident.
        button = self.query_one("#confirm", Button)
        wrong = self.query("Input.-wrong")
        if not button.disabled:
            button.focus()
        elif wrong:
            wrong.first().focus()

    @on(DescendantFocus)
    def _focus_moved(self, event: DescendantFocus) -> None:
        self._say_what_enter_does(event.widget)

    def _say_what_enter_does(self, focused: Widget | None) -> None:
        button = self.query_one("#confirm", Button)
        text = ""
        if isinstance(focused, Input):
            text = "Enter goes to the wrong field" if button.disabled else f"Enter goes to {button.label}"
        elif isinstance(focused, Select):
            text = "Enter opens the list"
        elif isinstance(focused, Button):
            text = "Enter closes the form" if focused.id == "cancel" else "Enter does it"
        self.query_one("#enter", Words).say(tr(text))


def field(name: str, text: str, tooltip: str | None = None) -> ComposeResult:
    """An input with its name above it."""
    with Vertical(classes="field"):
        yield Label(tr(name))
        yield Input(text, id=name, compact=True, tooltip=tooltip)


def buttons(word: str, *more: Button) -> ComposeResult:
    """The last line of a form: what Enter does, Cancel, other buttons, and the one that does it."""
    with Horizontal(classes="buttons"):
        yield Words(id="enter", classes="muted")
        yield Button(tr("Cancel"), id="cancel", compact=True)
        yield from more
        yield Button(tr(word), id="confirm", variant="primary", compact=True)
