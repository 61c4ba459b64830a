"""The recovery card of a run that has run out of memory: what happened, where the memory went,
remedies.

Enter applies the marked remedy (at first the first one), Esc closes, s cancels an announced
restart. The card follows the store: it shows the countdown of an automatic restart and closes when
the run continues.
"""

from __future__ import annotations

import time
from typing import ClassVar

from rich.cells import cell_len
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.events import Resize
from textual.widgets import Button

from memtop.supervisor import units
from memtop.supervisor.diagnosis.values import PROVEN, Diagnosis, Kind, layers_command
from memtop.supervisor.language import Verbatim, separator, tr
from memtop.supervisor.recovery.values import Remedy
from memtop.supervisor.wire import Proposal
from memtop.tui.bars import Share, memory_bar
from memtop.tui.keymap import no_changes
from memtop.tui.line import MUTED, STRONG, Line, fact, fit, foreign, join, join_fitting, line, width_of, wrap
from memtop.tui.line_list import LineList, ListContent, indented, indented_width, text_entry
from memtop.tui.machine.vram import Part
from memtop.tui.panel import LinePanel
from memtop.tui.remedies import is_applicable, remedy_lines, unknown_lines, why_words
from memtop.tui.screen import Dashboard, Dialog
from memtop.tui.store import Store

DELIBERATE_SECONDS = 0.6
"""A card that has opened by itself ignores Enter for this long: the key was meant for another
screen."""
# The frame, the two panels below the page, and the buttons.
_AROUND = 2 + 3 + 1 + 1
_SIDES = 4
_WIDEST = 124
_AIRY_FROM = 90


def _key(remedy: Remedy) -> tuple[str, str]:
    """There may be several remedies of one kind."""
    return remedy.id, remedy.title


class OomCard(Dialog[Remedy]):
    """Closes with the remedy to apply, or None."""

    AUTO_FOCUS = "LineList"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("w,q", "cancel", "Close", show=False),
        Binding("s", "stay", "Stay stopped", show=False),
    ]

    def __init__(self, dashboard: Dashboard, *, by_itself: bool = False) -> None:
        super().__init__()
        self._dashboard = dashboard
        self._not_before = time.monotonic() + (DELIBERATE_SECONDS if by_itself else 0.0)
        self._said: Line = ()
        self._copied = 0
        """How often Enter copied what the marked remedy asks a person to type."""

    @property
    def _proposal(self) -> Proposal | None:
        return self._dashboard.store.proposal

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog -dangerous oom", id="oom-box") as box:
            # Sized before the first paint, because a countdown may be running.
            self._frame(box, LineList(self._draw))
            yield LineList(self._draw, id="oom-page")
            yield LinePanel(self._draw_why, id="oom-why")
            yield LinePanel(self._draw_status, id="oom-status")
            with Horizontal(classes="buttons"):
                yield Button(tr("Close (Esc)"), id="cancel", compact=True)
                yield Button(tr("Stay stopped (s)"), id="stay", compact=True)
                yield Button(tr("Apply (Enter)"), id="confirm", variant="primary", compact=True)

    def on_mount(self) -> None:
        self.follow(self._dashboard, self._take)

    def on_resize(self, event: Resize) -> None:
        self._take(self._dashboard.store)

    def _take(self, store: Store) -> None:
        if self._proposal is None:
            self.dismiss(None)
            return
        page = self.query_one(LineList)
        self._frame(self.query_one("#oom-box", Vertical), page)
        page.redraw()
        self._show_buttons()
        for panel in self.query(LinePanel):
            panel.show(store)

    def _frame(self, box: Vertical, page: LineList) -> None:
        """Set the title and the height for the content."""
        if self._proposal is not None:
            box.border_title = tr(card_title(self._proposal.diagnosis))
        width = min(_WIDEST, self.app.size.width * 96 // 100)
        box.styles.height = min(page.lines_wanted(width - _SIDES) + _AROUND, self.app.size.height - 1)

    def _show_buttons(self) -> None:
        remedy, may = self._remedy(), no_changes(self._dashboard.store) is None
        self.query_one("#confirm", Button).display = may and remedy is not None and is_applicable(remedy)
        self.query_one("#stay", Button).display = may and self._announced

    @property
    def _announced(self) -> bool:
        """Whether a restart begins by itself unless the user acts."""
        return self._proposal is not None and self._proposal.begins is not None

    # --- what it shows ----------------------------------------------------------------------------

    def _draw(self, width: int) -> ListContent:
        proposal, store = self._proposal, self._dashboard.store
        if proposal is None:
            return ListContent(())
        diagnosis = proposal.diagnosis
        entries = [
            text_entry(happened_lines(diagnosis, width)),
            text_entry(memory_lines(diagnosis, store, width)),
            text_entry(evidence_lines(diagnosis, width)),
        ]
        for cause in proposal.causes:
            entries.append(text_entry(wrap(f"! {cause}", width, "edge")))
        alive = store.run is not None and store.run.alive
        resumes = store.run is None or store.run.resumes
        if proposal.remedies:
            head = line(("What can be done", "heading"), ("   dashed bars are predicted, solid ones were measured", MUTED))
            entries.append(text_entry([(), head] if width >= _AIRY_FROM else [head]))
        elif not proposal.last_advice and not proposal.causes:
            entries.append(text_entry([line(("No remedy is known for this.", MUTED))]))
        if proposal.waiting:
            entries.append(text_entry(wrap(f"memtop does nothing by itself: {proposal.waiting}", width, "edge")))
        room = indented_width(width)
        said, unknown = unknown_lines(proposal.remedies, width)
        if unknown:
            entries.append(text_entry(unknown))
        for number, remedy in enumerate(proposal.remedies, 1):
            shown = remedy_lines(number, remedy, room, alive=alive, resumes=resumes, said=said)
            entries.append(indented(_key(remedy), shown))
        if proposal.last_advice:
            title = "memtop has no automatic remedy left" if not proposal.remedies else "Beyond that"
            numbered = (Verbatim(f"{number}. {tr(text)}") for number, text in enumerate(proposal.last_advice, 1))
            advice = [part for text in numbered for part in wrap(text, width)]
            entries.append(text_entry([line((title, "heading")), *advice]))
        return ListContent(entries)

    def _draw_why(self, store: Store, width: int, height: int) -> list[Line]:
        remedy = self._remedy()
        if remedy is None:
            return []
        lines = wrap(Verbatim(why_words(remedy)), width, MUTED)
        if not is_applicable(remedy) and (places := tuple(remedy.to_type)):
            lines = [_to_type(places, self._copied, width), *lines]
        return lines[:height]

    def _draw_status(self, store: Store, width: int, height: int) -> list[Line]:
        proposal = self._proposal
        if self._said or proposal is None:
            return [self._said]
        now = store.now if store.now is not None else time.time()
        return [outlook(proposal, self._remedy(), now, can_act=no_changes(store) is None)]

    def _remedy(self) -> Remedy | None:
        """The remedy under the cursor."""
        proposal, key = self._proposal, self.query_one(LineList).cursor
        return next((remedy for remedy in (proposal.remedies if proposal else ()) if _key(remedy) == key), None)

    def _say(self, text: str, role: str) -> None:
        self._said = line((text, role))
        self.query_one("#oom-status", LinePanel).show(self._dashboard.store)

    # --- keys -------------------------------------------------------------------------------------

    @on(LineList.Moved)
    def _moved(self) -> None:
        self._said, self._copied = (), 0
        self._show_buttons()
        for panel in self.query(LinePanel):
            panel.show(self._dashboard.store)

    @on(Button.Pressed, "#stay")
    def action_stay(self) -> None:
        """Cancel an announced restart. Closing the card alone does not cancel it."""
        problem = no_changes(self._dashboard.store)
        if not self._announced:
            return
        if problem is not None:
            self._say(f"✗ {problem}", "bad")
        else:
            self.dismiss(None)
            self._dashboard.call_off()

    @on(LineList.Chosen)
    @on(Button.Pressed, "#confirm")
    def _apply(self) -> None:
        remedy, problem = self._remedy(), no_changes(self._dashboard.store)
        if remedy is None or time.monotonic() < self._not_before:
            return
        if problem is not None:
            self._say(f"✗ {problem}", "bad")
        elif is_applicable(remedy):
            self.dismiss(remedy)
        elif places := tuple(remedy.to_type):
            self._copy(places)
        else:
            self._say("only you can do this: memtop has nothing to apply", "edge")

    def _copy(self, places: Places) -> None:
        """Copy what goes into the first place; the next Enter copies what goes into the next."""
        number, count = self._copied % len(places), len(places)
        self.app.copy_to_clipboard(places[number][1])
        self._copied += 1
        if count == 1:
            self._say("Copied, if your terminal allows that. memtop does not run this.", "edge")
        else:
            then = self._copied % count + 1
            self._say(f"Copied {number + 1} of {count}, if your terminal allows that. Enter copies {then} of {count}.", "edge")
        self.query_one("#oom-why", LinePanel).show(self._dashboard.store)


Places = tuple[tuple[str | None, str], ...]
"""Where a person types or writes something (None: in a shell), and exactly what."""


def _to_type(places: Places, copied: int, width: int) -> Line:
    """The first line of what Enter copies next, and how many more there are."""
    number, count = copied % len(places), len(places)
    place, text = places[number]
    first, *others = text.splitlines()
    more = tr(f"  and {len(others)} more") if others else ""
    more += tr(f"  ({number + 1} of {count})" if count > 1 else ": Enter copies all" if others else "")
    shown = line(("type: " if place is None else f"in {place}: ", MUTED), (Verbatim(first), "strong"))
    if width_of(shown) > width - cell_len(more):
        shown = fit(shown, width - cell_len(more))
    return (*shown, (more, MUTED))


_TITLES = {
    Kind.GPU_OOM: "Out of GPU memory",
    Kind.GPU_OOM_FRAGMENTED: "Out of GPU memory: enough is free, but it is fragmented",
    Kind.GPU_OOM_OTHER_PROCESS: "Out of GPU memory: other processes hold most of the card",
    Kind.HOST_OOM_ALLOC: "Out of host memory",
    Kind.HOST_OOM_KILLED: "Killed by the kernel: out of host memory",
    Kind.PINNED_HOST_OOM: "Out of page-locked host memory",
    Kind.SHM_EXHAUSTED: "Shared memory (/dev/shm) is full",
    Kind.DISK_FULL: "The disk is full",
    Kind.NOT_MEMORY: "Memory was not the cause",
}
_SOURCES = {
    "record": "the program's own record",
    "error_file": "torchrun's error file",
    "kernel": "the kernel's counters",
    "samples": "memtop's samples",
    "words": "the text of the log",
    "exit_status": "the exit status alone",
}
_EVIDENCE_LINES = 2
_NARROW_BELOW = 80
# Parts below a hundredth of the whole are not named.
_WORTH_A_WORD = 0.01
_SHORTLY = 60.0


def card_title(diagnosis: Diagnosis) -> str:
    """The title of the card: which memory ran out."""
    return _TITLES[diagnosis.kind]


def happened_lines(diagnosis: Diagnosis, width: int) -> list[Line]:
    """One sentence, then the phase of the step, the confidence and its source."""
    source = _SOURCES.get(diagnosis.source, diagnosis.source)
    parts = [
        fact("phase", diagnosis.phase) if diagnosis.phase != "unknown" else (),
        () if diagnosis.rank is None else fact("rank", str(diagnosis.rank)),
        line((diagnosis.certainty, "good" if diagnosis.confidence >= PROVEN else "edge"), (" by ", MUTED), (source, MUTED)),
    ]
    return [*wrap(diagnosis.summary, width, STRONG), join_fitting([part for part in parts if part], width)]


def evidence_lines(diagnosis: Diagnosis, width: int) -> list[Line]:
    """The strongest evidence, quoted."""
    strongest = diagnosis.evidence[0] if diagnosis.evidence else ""
    if diagnosis.source == "kernel":
        # memtop's words for the kernel's counters; all else is a quote.
        strongest = tr(strongest)
    parts = wrap(Verbatim(strongest), max(10, width - 2), MUTED)
    if width < _NARROW_BELOW:
        # The remedies need the room.
        return [fit(foreign(("│ ", "limit"), (strongest, MUTED)), width)] if parts else []
    parts = parts[:_EVIDENCE_LINES]
    return [(*line(("│ ", "limit")), *part) for part in parts]


def memory_lines(diagnosis: Diagnosis, store: Store, width: int) -> list[Line]:
    """Where the memory went: a heading, a bar on a fixed scale, its parts, and the requested
    size.
    """
    if diagnosis.kind.of_gpu:
        lines = _gpu_lines(diagnosis, store, width)
    elif diagnosis.kind in (Kind.HOST_OOM_ALLOC, Kind.HOST_OOM_KILLED, Kind.PINNED_HOST_OOM):
        lines = _host_lines(diagnosis, store, width)
    else:
        lines = _room_lines(diagnosis, store, width)
    if diagnosis.requested_bytes is not None:
        words = units.size(diagnosis.requested_bytes)
        requested = f"asked for {words} more" + (f": {diagnosis.requested_for}" if diagnosis.requested_for else "")
        lines = [*lines, *wrap(requested, width, "edge")]
    command = layers_command(diagnosis.snapshot_file)
    return lines if command is None else [*lines, *wrap(command, width, MUTED)]


def _gpu_lines(diagnosis: Diagnosis, store: Store, width: int) -> list[Line]:
    parts = [
        Part("allocated", diagnosis.allocated_bytes, "█", "alloc"),
        Part("cached", diagnosis.reserved_unallocated_bytes, "▓", "cache"),
        Part("context", diagnosis.context_bytes, "▒", "context"),
        Part("others", diagnosis.other_process_bytes, "░", "other"),
    ]
    if diagnosis.allocated_bytes is None and diagnosis.process_bytes is not None:
        parts[:3] = [Part("this process", diagnosis.process_bytes, "█", "alloc")]
    head = f"{_card(diagnosis, store)} at that moment, measured"
    return _bar_lines(head, parts, diagnosis.total_bytes, diagnosis.free_bytes, width)


def _card(diagnosis: Diagnosis, store: Store) -> str:
    """The driver's name of the card if it is known, else the program's."""
    for gpu in store.gpus:
        if diagnosis.device_uuid is not None and gpu.uuid == diagnosis.device_uuid:
            return f"GPU {gpu.index}"
    return "the GPU" if diagnosis.device_index is None else f"the program's GPU {diagnosis.device_index}"


def _host_lines(diagnosis: Diagnosis, store: Store, width: int) -> list[Line]:
    host = store.host
    whole = diagnosis.allowed_bytes or diagnosis.total_bytes
    own, free = diagnosis.process_bytes, diagnosis.free_bytes
    if whole is not None and (own is not None or free is not None):
        others = None if own is None or free is None else max(0, whole - own - free)
        parts = [Part("this run", own, "█", "alloc"), Part("others", others, "░", "other")]
        limit = "its memory limit" if diagnosis.allowed_bytes else "host memory"
        return _bar_lines(f"{limit} at that moment, measured", parts, whole, free, width)
    whole, peak = whole or host.limit_bytes or host.total_bytes, _fullest_before(store)
    if whole is None or peak is None:
        return [line(("? host memory at that moment is not known: this dashboard has no sample", "unknown"))]
    head = f"host memory, the highest sample in the minute before: {units.percent(peak)} of {units.size(whole)}"
    return [
        *wrap(head, width, MUTED),
        memory_bar(width, [Share(peak, "█", "alloc")]),
        line(("? how much each program held is not known", "unknown")),
    ]


def _fullest_before(store: Store) -> float | None:
    """The highest sample of host memory in the minute before the end; None without a sample."""
    ended = store.run.ended if store.run is not None else None
    if ended is None:
        return None
    near = [moment.fraction for moment in store.host_history if ended - _SHORTLY <= moment.time <= ended]
    return max((fraction for fraction in near if fraction is not None), default=None)


def _room_lines(diagnosis: Diagnosis, store: Store, width: int) -> list[Line]:
    """The parts of shared memory or of the disk."""
    shared = diagnosis.kind is Kind.SHM_EXHAUSTED
    whole = diagnosis.total_bytes or (store.host.shm_total_bytes if shared else None)
    free = diagnosis.free_bytes
    name = "/dev/shm" if shared else "the disk"
    if whole is None or free is None:
        size = "" if whole is None else f" of {units.size(whole)}"
        return [line((f"? how much of {name}{size} was in use at that moment is not known", "unknown"))]
    used = Part("in use", max(0, whole - free), "█", "alloc")
    return _bar_lines(f"{name} at that moment, measured", [used], whole, free, width)


def _bar_lines(head: str, parts: list[Part], whole: int | None, free: int | None, width: int) -> list[Line]:
    """A heading, the bar and the parts; an unknown rest is named and not spread over the other
    parts.
    """
    scale = units.scale(whole)
    legend = [_words(part, scale) for part in parts]
    if not whole:
        return [line((f"{head}; its whole size is not known", MUTED)), join_fitting(legend, width)]
    known = sum(part.size or 0 for part in parts)
    shares = [Share((part.size or 0) / whole, part.glyph, part.role) for part in parts]
    rest = whole - known - (free or 0)
    if rest / whole >= _WORTH_A_WORD:
        missing = Part("unknown" if free is not None else "unknown, or free", rest, "?", "gone")
        legend.append(_words(missing, scale))
        # If the free part is unknown as well, the bar does not claim that the rest was in use.
        shares += [Share(rest / whole, "?", "gone")]
    finer = scale._replace(digits=2) if free is not None and scale.unit == "GiB" and free < units.GIB else scale
    legend.append(fact("free", f"{finer.number(free)} {scale.unit}" if free is not None else units.UNKNOWN))
    return [
        *wrap(Verbatim(f"{tr(head)}{separator(', ')}{units.size(whole)}"), width, MUTED),
        memory_bar(width, shares, limits=False),
        *_rows(legend, width),
    ]


def _words(part: Part, scale: units.Scale) -> Line:
    return line((part.glyph, part.role), " ", *fact(part.word, scale.number(part.size)))


def _rows(parts: list[Line], width: int) -> list[Line]:
    """Parts side by side, continued on a second line."""
    first = join_fitting(parts, width)
    count = next(n for n in range(len(parts), -1, -1) if join(parts[:n]) == first)
    return [first] if count == len(parts) else [first, join_fitting(parts[count:], width)]


def outlook(proposal: Proposal, marked: Remedy | None, now: float, *, can_act: bool) -> Line:
    """What happens next, automatically or by a key; `marked` is the remedy under the cursor."""
    if proposal.begins is not None:
        seconds = max(0, round(proposal.begins - now))
        keys = " (Enter: ▸ now, s: stay stopped, Esc: close)" if can_act else " by itself"
        return line(("… ", "accent"), (f"remedy 1 begins in {seconds} s", "accent"), (keys, "accent"))
    if marked is None or not can_act:
        words = "Esc closes; the run stays failed"
    elif is_applicable(marked):
        words = "Enter applies ▸, Esc leaves the run failed"
    else:
        what = "the text" if marked.writes else "the command" if marked.command else None
        enter = f"Enter copies {what} of ▸" if what else "▸ only you can do"
        words = f"{enter}, Esc leaves the run failed"
    return line(("· ", MUTED), (words, "text"))
