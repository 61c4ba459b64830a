"""The samples screen: what the model has written for the prompts, the newest first, or for each
prompt over the updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from memtop.supervisor import units
from memtop.supervisor.language import Verbatim, separator, tr
from memtop.supervisor.wire import Event
from memtop.tui.line import MUTED, STRONG, Line, line, wrap
from memtop.tui.line_list import LineList, ListContent, text_entry
from memtop.tui.screen import Dashboard, FullScreen, KeyLine, named
from memtop.tui.store import Store


class SamplesScreen(FullScreen):
    """What the model writes while it trains."""

    AUTO_FOCUS = "LineList"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,t", "leave", "Back", show=False),
        Binding("p", "order", "By prompt or by update", tooltip="For each prompt over the updates, or the newest update first"),
        Binding("pagedown", "page(1)", "Scroll", key_display="PgUp PgDn", tooltip="A page forward or back"),
        Binding("pageup", "page(-1)", "Back", show=False),
    ]

    def __init__(self, dashboard: Dashboard) -> None:
        super().__init__(dashboard, id="samples-screen")
        self._by_prompt = False
        self._drawn: tuple[object, ...] = ()

    def compose(self) -> ComposeResult:
        yield self.title_panel()
        yield LineList(self._draw_page, id="samples-list")
        yield self.message_panel()
        yield KeyLine(self)

    def on_mount(self) -> None:
        self.follow(self.dashboard, self._take)

    def _take(self, store: Store) -> None:
        shown = tuple(event.id for event in samplings(store.events))
        if shown != self._drawn:
            self._drawn = shown
            self.query_one(LineList).redraw()
        self.show_panels(store)

    def headline(self, store: Store) -> Line:
        return named("What {name} writes", store.run.name if store.run is not None else "")

    def hint(self, store: Store, width: int) -> Line:
        order = "each prompt, its newest text first" if self._by_prompt else "the newest update first"
        return line((f"{order}; all: memtop show RUN --samples", MUTED))

    def _draw_page(self, width: int) -> ListContent:
        found = samplings(self.dashboard.store.events)
        draw = lines_by_prompt if self._by_prompt else lines_by_update
        return ListContent([text_entry([one]) for one in draw(found, width)])

    def action_order(self) -> None:
        self._by_prompt = not self._by_prompt
        self.query_one(LineList).redraw()
        self.show_message()

    def action_page(self, direction: int) -> None:
        self.query_one(LineList).action_page(direction)


def samplings(events: Iterable[Event]) -> list[Event]:
    """The samplings among the events, the newest first."""
    return [event for event in events if event.kind == "sample"][::-1]


# --- drawing --------------------------------------------------------------------------------------


def lines_by_update(found: Sequence[Event], width: int) -> list[Line]:
    """Each sampling: what it cost, and a text for each prompt."""
    lines: list[Line] = []
    for event in found:
        data = event.data
        lines.append(line((f"update {data['update']}", "heading"), (f"   {_cost(data)}", MUTED)))
        for prompt, text in zip(data["prompts"], data["texts"], strict=False):
            lines += wrap(Verbatim(prompt), width, STRONG)
            lines += _text(text, width)
        if data["problem"] is not None:
            lines += wrap(data["problem"], width, "edge")
        lines.append(())
    return lines


def lines_by_prompt(found: Sequence[Event], width: int) -> list[Line]:
    """Each prompt, with its texts."""
    texts: dict[str, list[tuple[int, str]]] = {}
    for event in found:
        for prompt, text in zip(event.data["prompts"], event.data["texts"], strict=False):
            texts.setdefault(prompt, []).append((event.data["update"], text))
    lines: list[Line] = []
    for prompt, written in texts.items():
        lines += wrap(Verbatim(prompt), width, "heading")
        for update, text in written:
            lines.append(line((f"update {update}", MUTED)))
            lines += _text(text, width)
        lines.append(())
    return lines


_MARGIN = 2


def _text(text: str, width: int) -> list[Line]:
    """A text with its own lines and indentation."""
    lines: list[Line] = []
    for own in text.expandtabs(4).splitlines():
        indent = min(len(own) - len(own.lstrip(" ")), width // 2)
        lines += [(*line(" " * (_MARGIN + indent)), *part) for part in wrap(Verbatim(own), width - _MARGIN - indent)] or [()]
    return lines if text.strip() else [line(("  (empty answer)", MUTED))]


def _cost(data: dict[str, Any]) -> str:
    """What a sampling took, apart from the training: `128 tokens, 1.2 s, peak 3.1 GiB`."""
    parts = [f"{data['tokens']} tokens"]
    if data["seconds"] is not None:
        parts.append(f"{data['seconds']:.1f} s")
    if data["peak_bytes"] is not None:
        parts.append(f"peak {units.size(data['peak_bytes'])}, apart from that of the updates")
    return separator(", ").join(map(tr, parts))
