"""The dashboard's first line: the run, its state and settings, or the machine."""

from __future__ import annotations

from memtop.supervisor import units
from memtop.supervisor.language import Verbatim, tr
from memtop.supervisor.program import Knobs, name_of
from memtop.supervisor.wire import Phase, RunState
from memtop.tui.line import MUTED, NAME, STRONG, Line, fact, fit, foreign, join, line, spread, width_of, with_short_names
from memtop.tui.store import Store

PHASE_MARKS = {
    Phase.CREATED: ("○", MUTED),
    Phase.QUEUED: ("○", "edge"),
    Phase.STARTING: ("◌", "accent"),
    Phase.TRAINING: ("●", "good"),
    Phase.STOPPING: ("◐", "edge"),
    Phase.RESTARTING: ("↻", "accent"),
    Phase.FINISHED: ("✓", "good"),
    Phase.STOPPED: ("■", MUTED),
    Phase.FAILED: ("✗", "bad"),
}


def draw_header(store: Store, width: int, height: int) -> list[Line]:
    """Name, attempt, state, preset, batch arithmetic, sequence length, run time; without a run the
    machine.
    """
    head = line((" memtop ", "accent"))
    if store.run is None:
        what = tr(_followed(store) or ("this machine" if store.machine is not None else "starting"))
        return [spread(join((head, line((what, NAME)), _label(store))), _machine_words(store), width)]
    run = store.run
    name, lasted = line((run.name, NAME)), units.duration(run_seconds(store))
    left = join((head, name, fact("attempt", str(run.attempt)) if run.attempt else (), _phase(run)))
    clock = line((lasted, STRONG), " ")
    # In the first attempt it is the time of the run.
    named = line(*fact("this attempt", lasted), " ") if run.attempt > 1 else clock
    label, short = _label(store), _short_label(store)
    # The longest right side that fits. The note that values are not live is dropped last. The time
    # of an attempt keeps its label, since it is not that of the run.
    settings = [join((label, words, named)) for words in _settings_words(run)]
    choices = [one for one in settings if width_of(left) + 2 + width_of(one) <= width]
    if run.attempt > 1 and not choices:
        # Beside the attempt, its time takes less room than with a label of its own.
        timed = join((head, name, line((f"attempt {run.attempt} for {lasted}", STRONG)), _phase(run)))
        found = [join((label, (*words, *line(" ")))) for words in _settings_words(run)]
        fitting = next((one for one in found if width_of(timed) + 2 + width_of(one) <= width), None)
        if fitting is not None:
            return [spread(timed, fitting, width)]
    # For these the name is shortened.
    choices += [join((label, named)), join((short, named)), join((label, clock)), label, join((short, clock)), short]
    room = width - width_of(with_short_names(left, 0)) - 2
    right = next((choice for choice in choices if width_of(choice) <= room), short)
    return [spread(fit(left, max(0, width - width_of(right) - 2)), right, width)]


def _phase(run: RunState) -> Line:
    """`● training`, or what a run that starts does: `◌ loading the model`."""
    sign, role = PHASE_MARKS[run.state]
    if run.observed and run.state is Phase.STARTING:
        return line((f"{sign} progress not known", MUTED))
    return line((f"{sign} {run.word if run.stage is None else run.stage.value}", role))


def _followed(store: Store) -> str:
    tree = store.followed
    if tree is None:
        return ""
    if not tree.pids:
        return f"pid {tree.pid} has ended"
    return f"pid {tree.pid}: {units.processes(len(tree.pids))}, {units.size(tree.rss_bytes)} resident: {tree.command}"


def _label(store: Store) -> Line:
    words = [store.label] if store.label else []
    if store.read_only:
        words.append("read-only")
    return line((" · ".join(map(tr, words)), "edge")) if words else ()


def _short_label(store: Store) -> Line:
    """`replay 60x` or `read-only`: the shortest note that these values are past, or that nothing
    can be changed.
    """
    words = store.short_label or store.label or ("read-only" if store.read_only else "")
    return line((f"{words} ", "edge")) if words else ()


def _machine_words(store: Store) -> Line:
    version = store.machine.driver_version if store.machine else None
    return line((f"driver {version} ", MUTED)) if version else ()


def _settings_words(run: RunState) -> list[Line]:
    """The settings, and what is left of them with less and less room."""
    settings = run.settings
    if settings is None:
        name = foreign((name_of(run.command), STRONG)) if run.command else ()
        knobs = _knob_words(run)
        return [join([name, *knobs] if name else knobs), *(join(knobs[:count]) for count in range(len(knobs), 0, -1))]
    arithmetic = line((f"{settings.split_text} = {settings.effective_batch}", STRONG))
    parts = [arithmetic, fact("T", str(settings.seq_len))]
    return [join([fact("preset", Verbatim(settings.preset)), *parts]), join(parts), arithmetic]


def _knob_words(run: RunState) -> list[Line]:
    """`2 x 4 x 1 = 8` and `T 512` of a program of the user, as far as they are known."""
    knobs, whole = (run.program.knobs if run.program is not None else Knobs()), run.effective_batch
    batch, accumulation, length = (knob and knob.value for knob in (knobs.batch, knobs.accumulation, knobs.seq_len))
    parts = []
    if whole and batch and accumulation:
        parts.append(line((f"{batch} x {accumulation} x {whole // (batch * accumulation)} = {whole}", STRONG)))
    return [*parts, fact("T", str(length))] if length else parts


def run_seconds(store: Store) -> float | None:
    """For how long the current attempt has run, seconds."""
    run = store.run
    if run is None or run.started is None:
        return None
    until = run.ended if run.ended is not None else store.now
    return None if until is None else max(0.0, until - run.started)
