"""The run's panels: notice line, training numbers, loss curve, events."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from rich.cells import cell_len

from memtop.supervisor import units
from memtop.supervisor.monitor.values import Band, mark
from memtop.supervisor.monitor.vram import RankMemory
from memtop.supervisor.names import shortened
from memtop.supervisor.wire import Event, Phase, RunState
from memtop.tui.bars import progress_bar
from memtop.tui.charts import Point, curve, curve_spark
from memtop.tui.dashboard.header import PHASE_MARKS
from memtop.tui.line import (
    MUTED,
    SHORTEST_NAME,
    STRONG,
    Line,
    cropped,
    fact,
    fit,
    grid,
    join,
    join_fitting,
    line,
    spread,
    width_of,
    wrap,
)
from memtop.tui.machine.gpu import driver_silence
from memtop.tui.store import ConnectionState, Store
from memtop.tui.trends import before_the_end, first_full, sentence
from memtop.tui.words import BOTTLENECKS, age, in_words

_LINES = 6
"""Lines of the training panel without the reason and the ranks."""


def draw_training(store: Store, width: int, height: int) -> list[Line]:
    """Progress, losses, speed and the newest checkpoint."""
    run = store.run
    if run is None:
        return [line(("no run", MUTED))]
    lines = [_progress(run, width)]
    if run.reason:
        reason = wrap(run.reason, width, "edge" if run.state is not Phase.FAILED else "bad")
        # Ranks of an ended run have no lines; the reason may use them.
        room = max(1, height - _LINES) if run.state.final else 1
        lines += [*reason[: room - 1], fit(join(reason[room - 1 :], " "), width)] if len(reason) > room else reason
    lines += [
        grid(
            (
                fact("ETA", units.duration(run.eta_seconds)),
                fact("epoch", _number(run.epoch, ".2f")),
                fact("samples", units.count(run.samples_seen)),
            ),
            width,
        ),
        grid(
            (
                line(*fact("loss", _number(run.loss, ".3f")), (f" best {_number(run.best_loss, '.3f')}", MUTED)),
                fact("lr", _number(run.learning_rate, ".1e")),
                fact("grad", _number(run.gradient_norm, ".2f")),
            ),
            width,
        ),
        grid(
            (
                fact("", f"{units.rate(run.samples_per_second)} samples/s"),
                _tokens(run, width * 3 // 10),
                fact("step", _step(run.step_seconds)),
            ),
            width,
        ),
        _checkpoint_line(store, run, width),
        *_source_lines(run, width),
    ]
    return (lines + _rank_lines(store, run, width, height - len(lines)))[:height]


def _source_lines(run: RunState, width: int) -> list[Line]:
    """The parts of an update, and where the numbers of a user's program come from: on two lines if
    it says nothing of the parts."""
    why = run.program.why if run.program is not None else None
    if why is None:
        return [_split_line(run, width)]
    first, *more = wrap(why, width, MUTED)
    if any(getattr(run.split, name) is not None for name in run.split.__struct_fields__):
        return [_split_line(run, width), fit(join((first, *more), " "), width)]
    return [first, *([fit(join(more, " "), width)] if more else [])]


_SPARK_HIGHEST = 40
"""Cells of the loss on a small terminal."""


def draw_compact_training(store: Store, width: int, height: int) -> list[Line]:
    """The same on three lines, for a small terminal."""
    run = store.run
    if run is None:
        return []
    eta = line("  ", *fact("ETA", units.duration(run.eta_seconds)))
    first = (*_progress(run, width - sum(len(t) for t, _ in eta)), *eta)
    best = line((f" best {_number(run.best_loss, '.3f')}", MUTED))
    second = join(
        (
            line(*fact("loss", _number(run.loss, ".3f")), *best),
            fact("lr", _number(run.learning_rate, ".1e")),
            fact("grad", _number(run.gradient_norm, ".2f")),
            fact("epoch", _number(run.epoch, ".2f")),
        )
    )
    if recent := curve_spark(_losses(store), min(_SPARK_HIGHEST, width - width_of(second) - 2)):
        second = join((second, line((recent, "curve"))))
    third = join(
        (
            fact("", f"{units.rate(run.samples_per_second)} samples/s"),
            fact("", f"{_thousands(run.tokens_per_second)} tok/s"),
            fact("step", _step(run.step_seconds)),
            fact("saved", _ago(store, run), "bad" if run.unsaved else STRONG),
            _bound(run),
        )
    )
    if run.reason:
        second, *more = wrap(run.reason, width, "bad" if run.state is Phase.FAILED else "edge")
        if more and run.state.final:
            # After the end, the reason is more important than the speed.
            third = join(more, " ")
        elif more:
            second = join((second, *more), " ")
    return [fit(part, width) for part in (first, second, third)][:height]


def _progress(run: RunState, width: int) -> Line:
    done, total = run.updates, run.total_updates
    fraction = None if not total or done is None else done / total
    left = line(("update ", MUTED), (units.count(done), STRONG), (f" / {units.count(total)}  ", MUTED))
    right = line((f"  {units.percent(fraction, 0):>5}", STRONG))
    room = width - sum(len(t) for t, _ in (*left, *right))
    return fit((*left, *progress_bar(room, fraction), *right), width)


def _tokens(run: RunState, width: int) -> Line:
    """`12.3 k tok/s 5 % padding`; without the padding if there is none, or no room."""
    speed = fact("", f"{_thousands(run.tokens_per_second)} tok/s")
    if not run.padding_fraction or run.padding_fraction < _WORTH_A_WORD:
        return speed
    whole = line(*speed, (f" {units.percent(run.padding_fraction, 0)} padding", MUTED))
    return whole if width_of(whole) < width else speed


def _split_line(run: RunState, width: int) -> Line:
    parts: tuple[tuple[str, float | None], ...] = (
        ("data", run.split.data_wait_seconds),
        ("forward", run.split.forward_seconds),
        ("backward", run.split.backward_seconds),
        ("optimizer", run.split.optimizer_seconds),
    )
    known = sum(seconds or 0.0 for _, seconds in parts)
    # The rest of an update (waiting for ranks, logging, other work) is shown as `other`.
    whole = max(known, run.step_seconds or 0.0)
    if known and (whole - known) / whole >= _WORTH_A_WORD:
        parts = (*parts, ("other", whole - known))
    shares = [(word, None if s is None or whole <= 0 else s / whole) for word, s in parts]
    bound = _bound(run)
    # The bottleneck is more important than full words.
    short = [(_SHORT.get(word, word), share) for word, share in shares]
    forms = [join(fact(word, units.percent(share, 0)) for word, share in form) for form in (shares, short, short[:4])]
    split = next((form for form in forms if width_of(form) + 2 + width_of(bound) <= width), forms[-1])
    return spread(split, bound, width) if bound else fit(split, width)


_WORTH_A_WORD = 0.01
_SHORT = {"forward": "fwd", "backward": "bwd", "optimizer": "opt"}


def _bound(run: RunState) -> Line:
    """`data-bound`: the run's bottleneck; empty if it is not known."""
    word = BOTTLENECKS.get(run.advice.bottleneck, "") if run.advice is not None else ""
    return line((word, "accent" if word == "compute-bound" else "edge")) if word else ()


def _checkpoint_line(store: Store, run: RunState, width: int) -> Line:
    checkpoint = run.checkpoint
    if checkpoint is None:
        return line(*fact("checkpoint", run.checkpoint_words, MUTED))
    if not checkpoint.complete:
        return fit(line(("checkpoint ", MUTED), (f"! not complete: {checkpoint.problem or 'unknown'}", "bad")), width)
    return fit(
        join(
            (
                fact("checkpoint update", units.count(checkpoint.updates)),
                fact("", _ago(store, run)),
                fact("", units.size(checkpoint.size_bytes)),
            )
        ),
        width,
    )


def _ago(store: Store, run: RunState) -> str:
    saved = run.checkpoint.saved_at if run.checkpoint and run.checkpoint.complete else None
    if saved is None or store.now is None:
        return "not yet" if run.checkpoint is None else units.UNKNOWN
    return f"{age(store.now - saved)} ago"


def _rank_lines(store: Store, run: RunState, width: int, room: int) -> list[Line]:
    if room <= 0 or not run.ranks or not run.alive:
        # Ranks of an ended run have no values.
        return []
    by_uuid = {gpu.uuid: gpu.index for gpu in store.gpus if gpu.uuid}
    lines, unlike = [_rank(rank, by_uuid, width) for rank in run.ranks], _unlike_ranks(run.ranks)
    first = [join_fitting([line(("ranks differ", MUTED)), *unlike], width)] if unlike and room > 1 else []
    room -= len(first)
    if len(lines) > room:
        lines = [*lines[: room - 1], line((f"{len(lines) - room + 1} more ranks", MUTED))]
    return [*first, *lines]


_UNLIKE, _UNLIKE_BYTES, _UNLIKE_SHARE = 1.2, 256 << 20, 0.1


def _unlike_ranks(ranks: Sequence[RankMemory]) -> list[Line]:
    """By how much the ranks differ in memory, and in the share of an update that they wait for
    data; empty if they do not."""
    found = []
    for word, name in (("peak", "peak_bytes"), ("RSS", "rss_bytes")):
        sizes = [(value, one.rank) for one in ranks if (value := getattr(one, name)) is not None]
        if sizes and max(sizes)[0] > max(_UNLIKE * min(sizes)[0], min(sizes)[0] + _UNLIKE_BYTES):
            found.append(_from_to(word, *(f"{units.size(size)} (rank {n})" for size, n in (min(sizes), max(sizes)))))
            break  # on a GPU, host memory says less
    waits = [
        (one.data_wait_seconds / one.step_seconds, one.rank)
        for one in ranks
        if one.data_wait_seconds is not None and one.step_seconds
    ]
    if waits and max(waits)[0] - min(waits)[0] >= _UNLIKE_SHARE:
        found.append(_from_to("data", *(f"{units.percent(share, 0)} (rank {n})" for share, n in (min(waits), max(waits)))))
    return found


def _from_to(word: str, least: str, most: str) -> Line:
    return line((f"{word} ", MUTED), (f"{least} to {most}", "edge"))


def _rank(rank: RankMemory, by_uuid: dict[str, int], width: int) -> Line:
    where = "CPU" if rank.device_uuid is None else f"GPU {by_uuid.get(rank.device_uuid, '?')}"
    parts = [line((f"rank {rank.rank} ", MUTED), (where, STRONG))]
    if not rank.connected:
        parts.append(line(("! its agent does not answer", "edge")))
    elif rank.device_uuid is None:
        parts += [fact("RSS", units.size(rank.rss_bytes)), fact("pid", str(rank.pid))]
    else:
        parts += [
            fact("alloc", units.gib(rank.allocated_bytes)),
            fact("reserved", units.gib(rank.reserved_bytes)),
            fact("peak", f"{units.gib(rank.peak_bytes)} GiB"),
            fact("RSS", units.size(rank.rss_bytes)),
        ]
    return join_fitting(parts, width)


def draw_loss(store: Store, width: int, height: int) -> list[Line]:
    """The loss of every update of the final history, with a mark where an attempt began."""
    return curve(width, height, _losses(store))


def _losses(store: Store) -> list[Point]:
    return [Point(m.update, m.loss, m.attempt) for m in store.metrics if m.loss is not None]


def draw_events(store: Store, width: int, height: int) -> list[Line]:
    """Newest first; long messages are wrapped.

    Of several routine events in a row only the newest is shown.
    """
    if not store.events:
        return [line(("nothing yet", MUTED))]
    lines: list[Line] = []
    above: str | None = None
    for event in reversed(store.events):
        if len(lines) >= height:
            break
        if event.kind in _ROUTINE and event.kind == above:
            continue
        above = event.kind
        lines += _event(event, width)
    return lines[:height]


# Frequent saves would push all other events off the screen; the ledger has them all.
_ROUTINE = ("checkpoint", "memory")


def _event(event: Event, width: int) -> list[Line]:
    clock = time.strftime("%H:%M:%S", time.localtime(event.time))
    sign, role = _event_look(event)
    head = line((f"{clock} ", MUTED), (f"{sign:<2} ", role))
    indent = line(" " * width_of(head))
    parts = wrap(in_words(event.message), max(1, width - width_of(head)), role)
    return [(*(indent if number else head), *part) for number, part in enumerate(parts)]


_EVENT_LOOKS = {
    "oom": ("✗", "bad"),
    "spike": ("✗", "bad"),
    "failed": ("✗", "bad"),
    "error": ("✗", "bad"),
    "survived": ("✓", "good"),
    "remedy": ("↻", "accent"),
    "workers": ("↻", "edge"),
    "settings": ("▸", "accent"),
    "batch_search": ("▸", "accent"),
    "trial": ("◌", "accent"),
    "trend": ("^", "edge"),
    "pressure": ("^", "edge"),
    "warning": ("!", "edge"),
}


def _event_look(event: Event) -> tuple[str, str]:
    if event.kind == "band":
        # The message names the new band: "GPU 1: safe -> edge, 86.2 %".
        for band, role in ((Band.DANGER, "bad"), (Band.EDGE, "edge"), (Band.SAFE, "safe")):
            if f"-> {band.value}" in event.message:
                return (mark(band), role)
    return _EVENT_LOOKS.get(event.kind, ("", "text"))


def _step(seconds: float | None) -> str:
    """`1.15 s`, `0.0042 s`, and `123 s` without hundredths."""
    return f"{units.UNKNOWN if seconds is None else f'{seconds:.2f}' if 0.1 <= seconds < 100 else f'{seconds:.3g}'} s"


def _number(value: float | None, form: str) -> str:
    return units.UNKNOWN if value is None else format(value, form)


def _thousands(value: float | None) -> str:
    if value is None:
        return units.UNKNOWN
    if value < 10:
        return units.rate(value)
    return f"{value / 1000:.1f} k" if value >= 10_000 else units.count(value)


def draw_notice(store: Store, width: int, height: int) -> list[Line]:
    """The end of the run, problems of the connection, old values, and warnings of the run."""
    words = notice(store, width - 1)
    role = "good" if words.startswith(PHASE_MARKS[Phase.FINISHED][0]) else "edge"
    return [fit(line((f" {words}", role)), width)] if words else []


def notice(store: Store, width: int = 160) -> str:
    """The sentence below the header, shortened to `width` cells if needed; empty if there is
    none.
    """
    run = store.run
    if store.proposal is not None and store.link in (ConnectionState.CONNECTED, ConnectionState.ENDED):
        what, key = store.proposal.diagnosis.summary.rstrip("."), " (w: what can be done)"
        # The key is more important than the end of the summary.
        room = max(0, width - len(key) - 2)
        return f"! {what if cell_len(what) <= room else cropped(what, room)}{key}"
    answers = store.link in (ConnectionState.CONNECTED, ConnectionState.ENDED)
    if run is not None and run.state.final and run.unsaved is None and answers and not store.replaying:
        return _end(run, width)
    if store.link in (ConnectionState.GONE, ConnectionState.ENDED):
        return f"! {store.link_reason}" if store.link is ConnectionState.GONE else store.link_reason
    if store.link is ConnectionState.WAITING:
        return f"… {store.link_reason}"
    if store.quiet_seconds > 0:
        return f"! no data for {store.quiet_seconds:.0f} s, these are the last known values"
    if store.machine is not None and store.machine.gpu_age_seconds is not None:
        return f"! {driver_silence(store)}: GPU numbers are old, the rest is live"
    if run is None:
        more = f"  (and {len(store.others) - 1} more)" if len(store.others) > 1 else ""
        return f"{store.others[0]}{more}" if store.others else ""
    return _notice_of_run(store, run, width)


def _end(run: RunState, width: int) -> str:
    """How the run has ended, after how long, and what goes on from there: `■ stopped at update 40
    after 00:03:10; r resumes at update 40`."""
    at = "" if run.updates is None else f" at update {units.count(run.updates)}"
    lasted = "" if run.ended is None else f" after {units.duration(run.ended - run.created)}"
    why = f": {run.reason}" if run.reason and run.state is Phase.FAILED else ""
    brief = f"{PHASE_MARKS[run.state][0]} {run.state.value}{at}"
    # Without room the name is shortened first, then how long it took and the reason are left out.
    for end in (f"{brief}{lasted}", brief):
        excess = max(0, cell_len(f"{end}; {_next_step(run, run.name)}") - width)
        key = f"; {_next_step(run, shortened(run.name, max(SHORTEST_NAME, cell_len(run.name) - excess)))}"
        room = max(0, width - cell_len(key))
        if cell_len(end) <= room:
            break
    what = f"{end}{why}"
    return f"{what if cell_len(what) <= room else cropped(what, room)}{key}"


def _next_step(run: RunState, name: str) -> str:
    if run.state is Phase.FINISHED:
        own = run.settings is None
        return f"memtop report {name} writes a page about it" if own else f"memtop export {name} DIR writes the model"
    saved = run.checkpoint if run.resumes else None
    if saved is not None and saved.complete and saved.updates is not None:
        return f"r resumes at update {units.count(saved.updates)}"
    return "r starts it again from the beginning"


def _notice_of_run(store: Store, run: RunState, width: int) -> str:
    if run.unsaved is not None:
        whole = f"! {run.unsaved}"
        # Without room, the folder is dropped before the problem.
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
