"""The lines above the dashboard's buttons: what the user was told last."""

from __future__ import annotations

from textual.timer import Timer

from memtop.tui.line import MUTED, Line, fit
from memtop.tui.panel import LinePanel
from memtop.tui.report import report_lines
from memtop.tui.store import Store

_LINES, _LINES_LOW = 3, 2
"""What is told may take so many lines for a while, fewer on low terminals; the log gives them."""
_TALL = 20
_SECONDS = 20.0


class FlashPanel(LinePanel):
    """As many lines as the newest message takes; after a while one."""

    def __init__(self) -> None:
        super().__init__(self._message, id="flash")
        self._told: tuple[str, str] | None = None
        """The text, and of which kind it is."""
        self._folding: Timer | None = None

    @property
    def has_told(self) -> bool:
        return self._told is not None

    def tell(self, text: str, kind: str, terminal_lines: int) -> None:
        self._told = (text, kind)
        self._unfold(_LINES if terminal_lines >= _TALL else _LINES_LOW)

    def fold(self) -> None:
        """Onto one line."""
        self._unfold(1)

    def _unfold(self, most: int) -> None:
        if self._folding is not None:
            self._folding.stop()
            self._folding = None
        wanted = 1 if self._told is None else len(report_lines(*self._told, self.app.size.width - 2))
        self.styles.height = min(most, max(1, wanted))
        self.show(self._store)
        if min(most, wanted) > 1:
            self._folding = self.set_timer(_SECONDS, self.fold)

    def _message(self, store: Store, width: int, height: int) -> list[Line]:
        if self._told is None:
            return []
        lines = report_lines(*self._told, width)
        if len(lines) <= height:
            return lines
        return [*lines[: height - 1], fit((*lines[height - 1], (" …", MUTED)), width)]
