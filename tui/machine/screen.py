"""The screen of one GPU or of the host: every value of the driver and the kernel, and why a value
is not known.
"""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from memtop.supervisor.language import tr
from memtop.supervisor.monitor.history import gpu_key
from memtop.tui.line import MUTED, Line, join, line
from memtop.tui.line_list import LineList, ListContent, text_entry
from memtop.tui.machine.gpu import draw_gpu_note, gpu_title
from memtop.tui.machine.gpu_details import draw_gpu_details
from memtop.tui.machine.host import draw_host_details
from memtop.tui.processes.screen import ProcessesScreen
from memtop.tui.screen import Dashboard, FullScreen, KeyLine, named
from memtop.tui.store import Store


class MachineScreen(FullScreen):
    """Up and down go from GPU to GPU and on to the host.

    The screen stays on its card when other cards come and go.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "leave", "Back", show=False),
        Binding("g", "other(False)", "GPU or back", show=False),
        Binding("m", "other(True)", "Host", tooltip="From a GPU to the host; g from the host to the GPU; again: back"),
        Binding("up", "subject(-1)", "Other GPU", key_display="↑↓", tooltip="The GPU above or below; the host comes last"),
        Binding("down", "subject(1)", "Next", show=False),
        Binding("pagedown", "scroll(1)", "Scroll", key_display="PgUp PgDn", tooltip="A page forward or back"),
        Binding("pageup", "scroll(-1)", "Back", show=False),
        Binding("o", "processes", "Its processes", tooltip="The process list, filtered to this GPU"),
    ]

    def __init__(self, dashboard: Dashboard, position: int) -> None:
        super().__init__(dashboard, id="machine-screen")
        gpus = dashboard.store.gpus
        self._key = gpu_key(gpus[position]) if position < len(gpus) else None
        """The GPU that is shown; None for the host."""

    def compose(self) -> ComposeResult:
        yield self.title_panel()
        body = LineList(self._draw_page, id="machine-body")
        # Up and down belong to the screen: they show another GPU.
        body.can_focus = False
        yield body
        yield KeyLine(self)

    def on_mount(self) -> None:
        self.follow(self.dashboard, self._take)

    def _take(self, store: Store) -> None:
        if self._key is not None:
            self.dashboard.look_closely()
        self.show_panels(store)
        self._body.redraw()

    @property
    def _body(self) -> LineList:
        return self.query_one("#machine-body", LineList)

    def _position(self, store: Store) -> int | None:
        """The position of the shown GPU; None for the host, or for a card that is missing at the
        moment.
        """
        return next((n for n, gpu in enumerate(store.gpus) if gpu_key(gpu) == self._key), None)

    def headline(self, store: Store) -> Line:
        position = self._position(store)
        name = tr("Host") if self._key is None else "GPU" if position is None else gpu_title(store.gpus[position])
        where = "" if position is None else f"{position + 1} of {len(store.gpus)}"
        return join((named("{name}", name), line((where, MUTED))))

    def _draw_page(self, width: int) -> ListContent:
        store = self.dashboard.store
        position = self._position(store)
        if self._key is None:
            lines = draw_host_details(store, width)
        elif position is not None:
            lines = draw_gpu_details(store, store.gpus[position], width)
        elif store.gpus:
            lines = [line((f"! {self._key} is missing at the moment; it is shown again when it returns", "edge"))]
        else:
            lines = draw_gpu_note(store, width, self.size.height)
        return ListContent([text_entry(lines)])

    def action_subject(self, step: int) -> None:
        gpus = self.dashboard.store.gpus
        position = self._position(self.dashboard.store)
        at = len(gpus) if position is None else position
        at = min(len(gpus), max(0, at + step))
        self._key = gpu_key(gpus[at]) if at < len(gpus) else None
        self._body.to_top()
        self._take(self.dashboard.store)

    def action_other(self, host: bool) -> None:
        """`g` and `m`: the key of what is shown goes back, the other key switches."""
        gpus = self.dashboard.store.gpus
        if host == (self._key is None) or not gpus:
            self.action_leave()
            return
        self._key = None if host else gpu_key(gpus[min(self.dashboard.store.selected_gpu, len(gpus) - 1)])
        self._body.to_top()
        self._take(self.dashboard.store)

    def action_scroll(self, direction: int) -> None:
        self._body.action_page(direction)

    def action_processes(self) -> None:
        position = self._position(self.dashboard.store)
        only = "" if position is None else f"gpu:{self.dashboard.store.gpus[position].index}"
        self.app.push_screen(ProcessesScreen(self.dashboard, filter_text=only))
