"""The line below the header: how the run has ended, and what is wrong."""

from __future__ import annotations

import re

from rich.cells import cell_len

from memtop.supervisor import units
from memtop.supervisor.language import separator, tr
from memtop.supervisor.names import shortened
from memtop.supervisor.recovery.values import trial_word
from memtop.supervisor.wire import Phase, RunState
from memtop.tui.dashboard.header import PHASE_MARKS
from memtop.tui.line import SHORTEST_NAME, Line, beginning, fit, line
from memtop.tui.machine.gpu import driver_silence
from memtop.tui.store import ConnectionState, Store
from memtop.tui.trends import before_the_end, first_full, sentence
from memtop.tui.words import lack_of_memory

_AGAIN = "r starts it again"
_FROM_ZERO = "r starts it again from the beginning"
_FROM_ZERO_OWN = "r starts it again from the beginning, unless it resumes by itself"


def draw_notice(store: Store, width: int, height: int) -> list[Line]:
    """The end of the run, problems of the connection, old values, and warnings of the run."""
    words = notice(store, width - 1)
    role = "good" if words.startswith(PHASE_MARKS[Phase.FINISHED][0]) else "edge"
    return [fit(line((f" {words}", role)), width)] if words else []


def notice(store: Store, width: int = 160) -> str:
    """The sentence below the header in the reader's language, shortened to `width` cells if needed;
    empty if there is none.
    """
    run = store.run
    if store.proposal is not None and store.link in (ConnectionState.CONNECTED, ConnectionState.ENDED):
        what = tr(store.proposal.diagnosis.summary).rstrip(".。")
        return with_key(f"! {what}", tr(" (w: what can be done)"), width)
    answers = store.link in (ConnectionState.CONNECTED, ConnectionState.ENDED)
    if run is not None and run.state.final and run.unsaved is None and answers and not store.replaying:
        return _end(run, width)
    if store.link in (ConnectionState.GONE, ConnectionState.ENDED):
        return tr(f"! {store.link_reason}" if store.link is ConnectionState.GONE else store.link_reason)
    if store.link is ConnectionState.WAITING:
        return tr(f"… {store.link_reason}")
    if store.quiet_seconds > 0:
        return tr(f"! no data for {store.quiet_seconds:.0f} s, these are the last known values")
    if store.machine is not None and store.machine.gpu_age_seconds is not None:
        return tr(f"! {driver_silence(store)}: GPU numbers are old, the rest is live")
    if run is None:
        return f"{tr(store.others[0])}{_and_more(len(store.others) - 1)}" if store.others else ""
    return _notice_of_run(store, run, width)


def _and_more(count: int) -> str:
    return f"  {tr(f'(and {count} more)')}" if count > 0 else ""


def with_key(what: str, key: str, width: int) -> str:
    """The sentence and the key; the key is more important than the end of the sentence."""
    return f"{beginning(what, max(0, width - cell_len(key)))}{key}"


def _end(run: RunState, width: int) -> str:
    """How the run has ended, after how long, and what goes on from there: `■ stopped at update 40
    after 00:03:10; r resumes at update 40`."""
    state = f"{PHASE_MARKS[run.state][0]} {run.word}"
    lasted = ""
    if run.ended is not None:
        began = run.created if run.started is None else run.started
        time = units.duration(run.earlier_seconds + max(0.0, run.ended - began))
        # The time at the top is that of the newest attempt.
        lasted = f" after {time} in all" if run.attempt > 1 else f" after {time}"
    between = separator("; ")
    why = f"{separator(': ')}{tr(run.reason)}" if run.reason and run.state is Phase.FAILED else ""
    brief = tr(state if run.updates is None else f"{state} at update {units.count(run.updates)}")
    step = _next_step(run, run.name)
    brief_step = tr(_AGAIN) if step in (tr(_FROM_ZERO), tr(_FROM_ZERO_OWN)) else step
    steps = [*([f"{step}{between}{_export(run)}"] if _can_export(run) else []), step, brief_step]
    whole = (f"{what}{between}{then}" for what in (f"{brief}{tr(lasted)}{why}", f"{brief}{why}") for then in steps)
    if (fitting := next((words for words in whole if cell_len(words) <= width), None)) is not None:
        return fitting
    # Without room the name is shortened first, then how long it took and the reason are left out.
    for end in (f"{brief}{tr(lasted)}", brief):
        excess = max(0, cell_len(f"{end}{between}{step}") - width)
        key = f"{between}{_next_step(run, shortened(run.name, max(SHORTEST_NAME, cell_len(run.name) - excess)))}"
        key = key.replace(tr(_FROM_ZERO_OWN), tr(_AGAIN))
        room = max(0, width - cell_len(key))
        if cell_len(end) <= room:
            break
    return f"{beginning(f'{end}{why}', room)}{key}"


def _next_step(run: RunState, name: str) -> str:
    if run.state is Phase.FINISHED:
        own = run.settings is None
        return tr(f"memtop report {name} writes a page about it" if own else f"memtop export {name} DIR writes the model")
    saved = run.checkpoint if run.resumes else None
    if saved is not None and saved.complete and saved.updates is not None:
        return tr(f"r resumes at update {units.count(saved.updates)}")
    return tr(_FROM_ZERO if run.settings is not None else _FROM_ZERO_OWN)


def _export(run: RunState) -> str:
    return tr(f"memtop export {run.name} DIR writes the model")


def _can_export(run: RunState) -> bool:
    """Whether a run that has not finished has a model to write."""
    saved = run.checkpoint
    return run.settings is not None and run.state is not Phase.FINISHED and saved is not None and saved.complete


def _notice_of_run(store: Store, run: RunState, width: int) -> str:
    if run.unsaved is not None:
        whole = tr(f"! {run.unsaved}")
        # Without room, the folder is dropped before the problem.
        return whole if cell_len(whole) <= width else beginning(tr(re.sub(r" in /[^;]*", "", f"! {run.unsaved}")), width)
    urgent = first_full([trend for trend in run.trends if before_the_end(trend, run)])
    if urgent is not None:
        return f"^ {sentence(urgent, run, width - 2)}"
    if run.trial is not None and run.trial.state.startswith("measuring"):
        return tr(f"… trial of {run.trial.title}: {trial_word(run.trial.state)}")
    if run.spike is not None:
        return with_key(f"! {tr(run.spike.message)}", tr(" (w: go back, go on or stop)"), width)
    survived = _survived(store, run)
    if run.warnings:
        return f"! {tr(run.warnings[-1])}{_and_more(len(run.warnings) - 1 + bool(survived))}"
    mark = "…" if run.state is Phase.STARTING else PHASE_MARKS[Phase.FINISHED][0]
    return with_key(f"{mark} {tr(survived)}", tr(" (u: more)"), width) if survived else ""


def _survived(store: Store, run: RunState) -> str:
    """How this attempt has gone on after a lack of memory, or tries to; empty if there was none."""
    lack = lack_of_memory(store.configurations, starting=run.state is Phase.STARTING)
    if lack is None or lack[1] is None or lack[1].attempt != run.attempt:
        return ""
    return lack[0]
