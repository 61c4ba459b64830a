"""The environment of one process. What looks like a secret stays hidden until it is asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import Button, Static

from memtop.supervisor.errors import RefusedError
from memtop.supervisor.monitor.values import GpuProcess
from memtop.tui.dialog import Dialog

if TYPE_CHECKING:
    from memtop.tui.app import DashboardApp

_SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "PWD", "DSN", "CREDENTIAL", "AUTH")
_FOLDERS = ("PWD", "OLDPWD")
_PASS = re.compile(r"(^|_)PASS(_|$)")
# scheme://user:password@host, and a token in the user's place.
_WITH_PASSWORD = re.compile(r"[a-z][a-z0-9+.-]*://[^\s@]+@", re.IGNORECASE)


def is_secret(name: str, value: str = "") -> bool:
    """Whether a variable's name, or the form of its value, says that the value is nobody else's business."""
    name = name.upper()
    if _WITH_PASSWORD.search(value):
        return True
    return name not in _FOLDERS and (any(word in name for word in _SECRET_WORDS) or _PASS.search(name) is not None)


async def show_environment(app: DashboardApp, process: GpuProcess, say: Callable[[str, str], None]) -> None:
    """Read it and show it; where that is refused, say why."""
    try:
        variables = await app.hands.environment_of(process)
    except RefusedError as refusal:
        say(str(refusal), "bad")
        return
    await app.push_screen_wait(EnvironmentDialog(process, variables))


class EnvironmentDialog(Dialog[None]):
    """Read and close."""

    AUTO_FOCUS = "VerticalScroll"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("v", "reveal", "Reveal", show=False),
        Binding("q,e,enter", "cancel", "Close", show=False),
    ]

    def __init__(self, process: GpuProcess, variables: Mapping[str, str]) -> None:
        super().__init__()
        self._process = process
        self._variables = variables
        self._revealed = False

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog help") as box:
            box.border_title = f"Environment of process {self._process.pid}"
            yield Static(self._text(), id="variables")
            with Horizontal(classes="buttons"):
                if any(is_secret(name, value) for name, value in self._variables.items()):
                    yield Button("Show hidden (v)", id="reveal", compact=True)
                yield Button("Close", id="cancel", compact=True)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        if event.button.id == "reveal":
            self.action_reveal()

    def action_reveal(self) -> None:
        self._revealed = not self._revealed
        self.query_one("#variables", Static).update(self._text())

    def _text(self) -> Text:
        text = Text(overflow="fold")
        for name, value in sorted(self._variables.items()):
            hidden = is_secret(name, value) and not self._revealed
            text.append(f"{name}=", "bold")
            text.append("hidden\n" if hidden else f"{value}\n", "italic" if hidden else "")
        return text if self._variables else Text("it has none")
