"""The speed screen: what limits the run's speed, proposals with predicted peaks, and the result of
the last trial.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from memtop.supervisor import units
from memtop.supervisor.language import Verbatim, separator, tr
from memtop.supervisor.recovery.values import Advice, Remedy, trial_word
from memtop.supervisor.wire import Phase, RunState, Trial
from memtop.tui.keymap import no_changes
from memtop.tui.line import MUTED, STRONG, Line, cell, line, wrap
from memtop.tui.line_list import Entry, LineList, ListContent, indented, indented_width, text_entry
from memtop.tui.remedies import is_applicable, remedy_lines, why_words
from memtop.tui.screen import Dashboard, FullScreen, KeyLine, named
from memtop.tui.store import Store
from memtop.tui.words import BOTTLENECKS


class SpeedScreen(FullScreen):
    """What limits the run's speed, and proposals.

    Enter tries the marked one: measured before and after, kept if it helps.
    """

    AUTO_FOCUS = "LineList"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,b", "leave", "Back", show=False),
        Binding("t", "try", "Try", key_display="Enter", tooltip="Measure, change, measure again; undone unless it is faster"),
        Binding("pagedown", "page(1)", "Scroll", key_display="PgUp PgDn", tooltip="A page forward or back"),
        Binding("pageup", "page(-1)", "Back", show=False),
    ]

    def __init__(self, dashboard: Dashboard) -> None:
        super().__init__(dashboard, id="speed-screen")
        self.chosen: Remedy | None = None
        """The proposal to try after the screen has closed."""

    def compose(self) -> ComposeResult:
        yield self.title_panel()
        yield LineList(self._draw_page, id="speed-list")
        yield self.message_panel()
        yield KeyLine(self)

    def on_mount(self) -> None:
        self.follow(self.dashboard, self._take)

    def _take(self, store: Store) -> None:
        self.query_one(LineList).redraw()
        # A key that has nothing to do is not shown.
        self.query_one(KeyLine).refresh()
        self.show_panels(store)

    def headline(self, store: Store) -> Line:
        return named("What would make {name} faster", store.run.name if store.run is not None else "")

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return action != "try" or bool(self._proposals)

    @property
    def _proposals(self) -> tuple[Remedy, ...]:
        run = self.dashboard.store.run
        return run.advice.proposals if run is not None and run.advice is not None else ()

    def hint(self, store: Store, width: int) -> Line:
        return () if not self._proposals else line(("a change is kept only if samples/s rises by more than its spread", MUTED))

    def _draw_page(self, width: int) -> ListContent:
        run = self.dashboard.store.run
        if run is None:
            return ListContent(())
        entries = [text_entry([*advice_lines(run, width), ()])]
        advice = run.advice
        if advice is not None and advice.proposals:
            words = line(("Proposals", "heading"), ("   dashed bars are predicted, not measured", MUTED))
            entries.append(text_entry([words]))
            entries += _proposals(advice, alive=run.alive, width=indented_width(width))
            entries.append(text_entry([()]))
        elif advice is not None:
            entries.append(text_entry([line(("There is no proposal.", MUTED)), ()]))
        if advice is not None and advice.refused:
            entries.append(text_entry([*refused_lines(advice, width), ()]))
        if run.trial is not None:
            entries.append(text_entry(trial_lines(run.trial, width)))
        return ListContent(entries)

    @on(LineList.Moved)
    def _moved(self) -> None:
        self.clear_message()

    @on(LineList.Chosen)
    def _entered(self) -> None:
        self.action_try()

    def action_try(self) -> None:
        store = self.dashboard.store
        key = self.query_one(LineList).cursor
        remedy = next((one for one in self._proposals if (one.id, one.title) == key), None)
        if remedy is None or store.run is None:
            return
        if (problem := no_changes(store)) is not None:
            self.say(problem)
        elif store.run.state is not Phase.TRAINING:
            self.say(f"a trial measures a run that trains: this one is {store.run.word}")
        elif not is_applicable(remedy):
            self.say(f"memtop does not do this itself; type: {remedy.command}" if remedy.command else "only you can do this")
        else:
            self.chosen = remedy
            self.dismiss(None)

    def action_page(self, direction: int) -> None:
        self.query_one(LineList).action_page(direction)


def _proposals(advice: Advice, *, alive: bool, width: int) -> list[Entry]:
    entries = []
    for number, remedy in enumerate(advice.proposals, 1):
        why = [line("   ", *part) for part in wrap(Verbatim(why_words(remedy)), width - 3, MUTED)]
        entries.append(indented((remedy.id, remedy.title), [*remedy_lines(number, remedy, width, alive=alive), *why]))
    return entries


# --- drawing --------------------------------------------------------------------------------------

_STATES = {"kept": ("✓", "good"), "undone": ("■", "edge"), "refused": ("✗", "bad"), "failed": ("✗", "bad")}


class Comparison(NamedTuple):
    """One line of the table that compares before and after."""

    title: str
    name: str
    words: Callable[[float], str]


_ROWS = (
    Comparison("samples/s", "samples_per_second", units.rate),
    Comparison("tokens/s", "tokens_per_second", lambda value: units.count(value) if value >= 10 else units.rate(value)),
    Comparison("peak", "peak_bytes", units.size),
    Comparison("host RAM", "host_bytes", units.size),
    Comparison("swap", "swap_bytes", units.size),
)
_LABEL, _VALUE, _CHANGE = 11, 20, 10


def advice_lines(run: RunState, width: int) -> list[Line]:
    """The bottleneck and its evidence."""
    advice = run.advice
    if run.state.final and (advice is None or advice.bottleneck == "unknown"):
        return [line(("? what limited the speed is not known: the run ended before it was computed", "unknown"))]
    if advice is None:
        return [line(("? what limits the speed is not known yet: it is computed from measured updates", "unknown"))]
    word = BOTTLENECKS.get(advice.bottleneck, "")
    lines = [line(("The run is ", MUTED), (word, "accent"))] if word else []
    # The summary may begin with the same word.
    rest = tr(advice.summary).removeprefix(tr(word) + separator(": ")).lstrip()
    lines += wrap(Verbatim(rest[:1].upper() + rest[1:]), width, STRONG)
    for text in advice.evidence:
        lines += [(*line(("· " if n == 0 else "  ", MUTED)), *part) for n, part in enumerate(wrap(text, width - 2))]
    return lines


def refused_lines(advice: Advice, width: int) -> list[Line]:
    """Changes that seem to help but are not advised, with reasons."""
    if not advice.refused:
        return []
    lines = [line(("Not advised now", "heading"))]
    for text in advice.refused:
        lines += [(*line(("✗ " if n == 0 else "  ", "bad")), *part) for n, part in enumerate(wrap(text, width - 2))]
    return lines


def trial_lines(trial: Trial, width: int) -> list[Line]:
    """Values before and after the trial, with their spread."""
    sign, role = _STATES.get(trial.state, ("◌", "accent"))
    head = line(("Last trial  ", "heading"), (f"{sign} {trial_word(trial.state)}", role))
    lines = [head, *wrap(trial.title, width, STRONG)]
    if trial.reason:
        lines += wrap(trial.reason, width)
    known = [row for row in _ROWS if row.name in trial.before or row.name in trial.after]
    if known:
        heads = (cell("before", _VALUE, right=True), cell("after", _VALUE, right=True), cell("change", _CHANGE, right=True))
        lines.append(line((f"{'':<{_LABEL}}{''.join(heads)}", MUTED)))
        lines += [_row(row, trial) for row in known]
    return lines


def _row(row: Comparison, trial: Trial) -> Line:
    before, after = trial.before.get(row.name), trial.after.get(row.name)
    change = "" if not before or after is None else units.change((after - before) / before)
    values = "".join(f"{_value(row, part):>{_VALUE}}" for part in (trial.before, trial.after))
    return line((cell(row.title, _LABEL), MUTED), (values, STRONG), (f"{change:>{_CHANGE}}", "text"))


def _value(row: Comparison, measured: dict[str, float]) -> str:
    value, spread = measured.get(row.name), measured.get(f"{row.name}_spread")
    if value is None:
        return units.UNKNOWN
    return row.words(value) if spread is None else f"{row.words(value)} ± {row.words(spread)}"
