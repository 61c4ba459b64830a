"""One GPU, or the host, in full: everything the driver and the kernel tell, and why something is not known."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import MouseScrollDown, MouseScrollUp

from memtop.supervisor.monitor.history import gpu_key
from memtop.tui.full import FullScreen
from memtop.tui.key_line import KeyLine
from memtop.tui.line import MUTED, STRONG, Line, join, line, spread
from memtop.tui.machine.gpu import draw_gpu_note, gpu_title
from memtop.tui.machine.gpu_details import draw_gpu_details
from memtop.tui.machine.host_details import draw_host_details
from memtop.tui.panel import LinePanel
from memtop.tui.processes.actions import Eyes
from memtop.tui.store import Store

if TYPE_CHECKING:
    from memtop.tui.dashboard.screen import DashboardScreen

_WHEEL_LINES = 3


class MachineScreen(FullScreen):
    """Up and down go from GPU to GPU and on to the host. It stays on its card when others come and go."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "leave", "Back", show=False),
        Binding("g", "other(False)", "GPU or back", show=False),
        Binding("m", "other(True)", "Host", tooltip="From a GPU to the host; g from the host to the GPU; again: back"),
        Binding("up", "subject(-1)", "Other GPU", key_display="↑↓", tooltip="The GPU above or below; the host comes last"),
        Binding("down", "subject(1)", "Next", show=False),
        Binding("pagedown", "scroll(1)", "Scroll", key_display="PgUp PgDn", tooltip="A page forward or back"),
        Binding("pageup", "scroll(-1)", "Back", show=False),
        Binding("o", "processes", "Its processes", tooltip="The process list, filtered to this GPU"),
    ]

    def __init__(self, dashboard: DashboardScreen, position: int) -> None:
        super().__init__(id="machine-screen")
        self.dashboard = dashboard
        gpus = dashboard.store.gpus
        self._key = gpu_key(gpus[position]) if position < len(gpus) else None
        """Of the GPU that is shown; None for the host."""
        self._offset = 0
        self._length = 0

    def compose(self) -> ComposeResult:
        yield LinePanel(self._draw_title, id="machine-title")
        yield LinePanel(self._draw_body, id="machine-body")
        yield KeyLine(self)

    def on_mount(self) -> None:
        self.follow(self.dashboard, self._take)

    def _take(self, store: Store) -> None:
        feed = self.dashboard.feed
        if self._key is not None and isinstance(feed, Eyes):
            feed.look_closely()
        for panel in self.query(LinePanel):
            panel.show(store)

    def _position(self, store: Store) -> int | None:
        """Where the shown GPU stands now; None for the host, or for a card that is not there at present."""
        return next((n for n, gpu in enumerate(store.gpus) if gpu_key(gpu) == self._key), None)

    def _draw_title(self, store: Store, width: int, height: int) -> list[Line]:
        position = self._position(store)
        title = "Host" if self._key is None else "GPU" if position is None else gpu_title(store.gpus[position])
        count = len(store.gpus)
        where = "" if position is None else f"{position + 1} of {count}"
        left = join((line((" memtop ", "accent")), line((title, STRONG)), line((where, MUTED))))
        return [spread(left, line((f"{store.label or ''} ", "edge")), width)]

    def _draw_body(self, store: Store, width: int, height: int) -> list[Line]:
        position = self._position(store)
        if self._key is None:
            lines = draw_host_details(store, width)
        elif position is not None:
            lines = draw_gpu_details(store, store.gpus[position], width)
        elif store.gpus:
            lines = [line((f"! {self._key} is not there at present; it is shown again when it returns", "edge"))]
        else:
            lines = draw_gpu_note(store, width, height)
        self._length = len(lines)
        self._offset = max(0, min(self._offset, self._length - height))
        below = self._length - self._offset - height
        shown = lines[self._offset : self._offset + height]
        if below > 0:
            shown[-1] = line((f"  {below + 1} more lines: PgDn", MUTED))
        return shown

    def action_subject(self, step: int) -> None:
        gpus = self.dashboard.store.gpus
        position = self._position(self.dashboard.store)
        at = len(gpus) if position is None else position
        at = min(len(gpus), max(0, at + step))
        self._key = gpu_key(gpus[at]) if at < len(gpus) else None
        self._offset = 0
        self._take(self.dashboard.store)

    def action_other(self, host: bool) -> None:
        """The key of what is shown leads back, the other one there."""
        gpus = self.dashboard.store.gpus
        if host == (self._key is None) or not gpus:
            self.action_leave()
            return
        self._key = None if host else gpu_key(gpus[min(self.dashboard.store.selected_gpu, len(gpus) - 1)])
        self._offset = 0
        self._take(self.dashboard.store)

    def action_scroll(self, direction: int) -> None:
        self._scroll(direction * max(1, self.query_one("#machine-body").size.height - 2))

    def _scroll(self, lines: int) -> None:
        self._offset = max(0, self._offset + lines)
        self._take(self.dashboard.store)

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        self._scroll(_WHEEL_LINES)

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        self._scroll(-_WHEEL_LINES)

    def action_processes(self) -> None:
        from memtop.tui.processes.screen import ProcessesScreen

        position = self._position(self.dashboard.store)
        only = "" if position is None else f"gpu:{self.dashboard.store.gpus[position].index}"
        self.app.push_screen(ProcessesScreen(self.dashboard, filter_text=only))

    def action_leave(self) -> None:
        self.dismiss(None)
