"""The line below the header: what is wrong with the picture itself, or with the run."""

from __future__ import annotations

import re

from rich.cells import cell_len

from memtop.supervisor.wire import RunState
from memtop.tui.line import Line, cropped, fit, line
from memtop.tui.machine.gpu import driver_silence
from memtop.tui.store import Link, Store
from memtop.tui.trends import before_the_end, first_full, sentence


def draw_notice(store: Store, width: int, height: int) -> list[Line]:
    """What is wrong with the picture itself: nobody at the other end, old values, warnings of the run."""
    words = notice(store, width - 1)
    return [fit(line((f" {words}", "edge")), width)] if words else []


def notice(store: Store, width: int = 160) -> str:
    """The sentence for the line below the header, in fewer words where `width` cells hold no more; or nothing."""
    run = store.run
    if store.proposal is not None and store.link in (Link.CONNECTED, Link.ENDED):
        what, key = store.proposal.diagnosis.summary.rstrip("."), " (w: what can be done)"
        # What to do about it outlives the end of what happened.
        room = max(0, width - len(key) - 2)
        return f"! {what if cell_len(what) <= room else cropped(what, room)}{key}"
    if store.link in (Link.GONE, Link.ENDED):
        return f"! {store.link_reason}" if store.link is Link.GONE else store.link_reason
    if store.link is Link.WAITING:
        return f"… {store.link_reason}"
    if store.quiet_seconds > 0:
        return f"! stale: nothing heard for {store.quiet_seconds:.0f} s, these are the last known values"
    if store.machine is not None and store.machine.gpu_age_seconds is not None:
        return f"! {driver_silence(store)}: GPU numbers are old, the rest is live"
    return "" if run is None else _notice_of_run(store, run, width)


def _notice_of_run(store: Store, run: RunState, width: int) -> str:
    if run.unsaved is not None:
        whole = f"! {run.unsaved}"
        # Where there is no room for it, what is wrong goes before where.
        return whole if cell_len(whole) <= width else cropped(re.sub(r" in /[^;]*", "", whole), width)
    urgent = first_full([trend for trend in run.trends if before_the_end(trend, run)])
    if urgent is not None:
        return f"^ {sentence(urgent, run, width - 2)}"
    if run.trial is not None and run.trial.state.startswith("measuring"):
        return f"… trial of {run.trial.title}: {run.trial.state}"
    if run.warnings:
        more = len(run.warnings) - 1
        return f"! {run.warnings[-1]}" + (f"  (and {more} more)" if more else "")
    return ""
