"""The run's panels: its numbers and its loss curve."""

from __future__ import annotations

from collections.abc import Sequence

from memtop.supervisor import units
from memtop.supervisor.monitor.vram import RankMemory
from memtop.supervisor.wire import Phase, RunState, Stage
from memtop.tui.bars import progress_bar
from memtop.tui.charts import Point, curve, curve_spark
from memtop.tui.dashboard.header import PHASE_MARKS
from memtop.tui.line import (
    MUTED,
    STRONG,
    Line,
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
from memtop.tui.store import Store
from memtop.tui.words import BOTTLENECKS, age

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
    first = (*_progress(run, width - width_of(eta)), *eta)
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


_STAGES = (Stage.STARTING, Stage.IMPORTING, Stage.LOADING_MODEL, Stage.READING_DATA, Stage.FIRST_UPDATE)
_STAGES_OF_PROGRAMS = (Stage.STARTING, Stage.LOADING, Stage.FIRST_UPDATE)


def _stages(run: RunState, stage: Stage, width: int) -> Line:
    """`✓ starting  ◌ importing torch  · loading the model`, or `importing torch, 2 of 5`."""
    stages = _STAGES if run.settings is not None else _STAGES_OF_PROGRAMS
    at = stages.index(stage) if stage in stages else 0
    sign, role = PHASE_MARKS[Phase.STARTING]
    parts = []
    for number, one in enumerate(stages):
        mark = ("✓", "good") if number < at else (sign, role) if number == at else ("·", MUTED)
        parts.append(line(mark, (f" {one.value}", STRONG if number == at else MUTED)))
    row = join(parts)
    if width_of(row) <= width:
        return row
    return fit(line((f"{sign} ", role), (stage.value, STRONG), (f", {at + 1} of {len(stages)}", MUTED)), width)


def _progress(run: RunState, width: int) -> Line:
    if run.stage is not None and not run.updates:
        return _stages(run, run.stage, width)
    done, total = run.updates, run.total_updates
    fraction = None if not total or done is None else done / total
    left = line(("update ", MUTED), (units.count(done), STRONG), (f" / {units.count(total)}  ", MUTED))
    right = line((f"  {units.percent(fraction, 0):>5}", STRONG))
    room = width - width_of((*left, *right))
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
    return line((word, MUTED), (" ", MUTED), (least, "edge"), (" to ", "edge"), (most, "edge"))


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
