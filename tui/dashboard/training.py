"""The run's panels: its numbers and its loss curve."""

from __future__ import annotations

from collections.abc import Sequence

from memtop.supervisor import units
from memtop.supervisor.monitor.vram import RankMemory
from memtop.supervisor.run_memory import host_memory
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
    wrap_within,
)
from memtop.tui.store import READING, Store
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
        # Ranks of an ended run have no lines; the reason may use them.
        room = max(1, height - _LINES) if run.state.final else 1
        lines += wrap_within(run.reason, width, room, "edge" if run.state is not Phase.FAILED else "bad")
    lines += [
        *_numbers(run, width),
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
    if any(getattr(run.split, name) is not None for name in run.split.__struct_fields__):
        return [_split_line(run, width), *wrap_within(why, width, 1, MUTED)]
    return wrap_within(why, width, 2, MUTED)


_ROWS = (("ETA", "epoch", "samples"), ("loss", "lr", "grad"), ("speed", "tokens", "step"))
_LESS_IMPORTANT = ("why", "padding", "best", "grad", "samples", "step", "epoch", "tokens", "lr")
"""What is left out where there is no room, the first one first."""


def _numbers(run: RunState, width: int) -> list[Line]:
    """Three lines with the numbers for which there is room."""
    rows: list[list[Line]] = []
    for count in range(len(_LESS_IMPORTANT) + 1):
        items = _items(run, _LESS_IMPORTANT[:count])
        rows = [[items[name] for name in row if name in items] for row in _ROWS]
        lines = grid(rows, width)
        if lines is not None:
            return lines
    return [join_fitting(row, width) for row in rows]


def _items(run: RunState, left_out: Sequence[str]) -> dict[str, Line]:
    """The numbers by their names, without some."""
    loss, tokens = fact("loss", _number(run.loss, ".3f")), fact("", f"{units.thousands(run.tokens_per_second)} tok/s")
    if "best" not in left_out:
        loss = line(*loss, (f" best {_number(run.best_loss, '.3f')}", MUTED))
    if "padding" not in left_out and run.padding_fraction and run.padding_fraction >= _WORTH_A_WORD:
        tokens = line(*tokens, (f" {units.percent(run.padding_fraction, 0)} padding", MUTED))
    speed = fact("", f"{units.rate(run.samples_per_second)} samples/s")
    if "why" not in left_out and run.samples_per_second is None and run.program is not None and run.updates:
        speed = line(*speed, (" batch not known" if run.effective_batch is None else " not measured yet", MUTED))
    found = {
        "ETA": fact("ETA", units.duration(run.eta_seconds)),
        "epoch": fact("epoch", _number(run.epoch, ".2f")),
        "samples": fact("samples", units.count(run.samples_seen)),
        "loss": loss,
        "lr": fact("lr", _number(run.learning_rate, ".1e")),
        "grad": fact("grad", _number(run.gradient_norm, ".2f")),
        "speed": speed,
        "tokens": tokens,
        "step": _pace(run),
    }
    return {name: item for name, item in found.items() if name not in left_out}


_SPARK_HIGHEST = 40
"""Cells of the loss on a small terminal."""


def draw_compact_training(store: Store, width: int, height: int) -> list[Line]:
    """The same on three lines, for a small terminal."""
    run = store.run
    if run is None:
        return []
    eta = line("  ", *fact("ETA", units.duration(run.eta_seconds)))
    first = (*_progress(run, width - width_of(eta)), *eta)
    saved = fact("saved", _ago(store, run), "bad" if run.unsaved else STRONG)
    if run.checkpoint is None and not run.saves_are_seen:
        saved = line(("no checkpoint seen", MUTED))
    more = {"saved": saved, "bound": _bound(run)}
    second = _fitting(run, ("loss", "lr", "grad", "epoch"), {}, width)
    if recent := curve_spark(_losses(store), min(_SPARK_HIGHEST, width - width_of(second) - 2)):
        second = join((second, line((recent, "curve"))))
    third = _fitting(run, ("speed", "tokens", "step", "saved", "bound"), more, width)
    if run.reason:
        # After the end, the reason is more important than the speed.
        second, *rest = wrap_within(run.reason, width, 1 + run.state.final, "bad" if run.state is Phase.FAILED else "edge")
        third = rest[0] if rest else third
    return [fit(part, width) for part in (first, second, third)][:height]


def _fitting(run: RunState, names: Sequence[str], more: dict[str, Line], width: int) -> Line:
    """The items with these names on one line; the less important ones only if there is room."""
    parts: list[Line] = []
    for count in range(1, len(_LESS_IMPORTANT) + 1):
        items = _items(run, _LESS_IMPORTANT[:count]) | more
        parts = [items[name] for name in names if name in items]
        if width_of(join(parts)) <= width:
            break
    return join_fitting(parts, width)


_STAGES = (Stage.STARTING, Stage.IMPORTING, Stage.LOADING_MODEL, Stage.READING_DATA, Stage.FIRST_UPDATE)
_STAGES_OF_PROGRAMS = (Stage.STARTING, Stage.LOADING, Stage.FIRST_UPDATE)
_COMPILES = "(first use only; a minute or more)"


def _stages(run: RunState, stage: Stage, width: int) -> Line:
    """`✓ starting  ◌ importing torch  · loading the model`, or `importing torch, stage 2 of 5`."""
    sign, role = PHASE_MARKS[Phase.STARTING]
    if stage is Stage.COMPILING:
        # It is seldom, but takes longer than all the others.
        return fit(line((f"{sign} ", role), (stage.value, STRONG), (f" {_COMPILES}", MUTED)), width)
    stages = _STAGES if run.settings is not None else _STAGES_OF_PROGRAMS
    at = stages.index(stage) if stage in stages else 0
    parts = []
    for number, one in enumerate(stages):
        mark = ("✓", "good") if number < at else (sign, role) if number == at else ("·", MUTED)
        parts.append(line(mark, (f" {one.value}", STRONG if number == at else MUTED)))
    row = join(parts)
    if width_of(row) <= width:
        return row
    return fit(line((f"{sign} ", role), (stage.value, STRONG), (f", stage {at + 1} of {len(stages)}", MUTED)), width)


def _progress(run: RunState, width: int) -> Line:
    if run.stage is not None and not run.updates:
        return _stages(run, run.stage, width)
    done, total = run.updates, run.total_updates
    fraction = None if not total or done is None else done / total
    left = line(("update ", MUTED), (units.count(done), STRONG), (f" / {units.count(total)}  ", MUTED))
    right = line((f"  {units.percent(fraction, 0):>5}", STRONG))
    room = width - width_of((*left, *right))
    if room < 0:
        return fit(join_fitting((fact("update", units.count(done)), fact("", units.percent(fraction, 0))), width), width)
    return fit((*left, *progress_bar(room, fraction), *right), width)


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
    percents = units.shares({word: s for word, s in parts if s is not None}) if known else {}
    shares = [(word, f"{percents[word]} %" if word in percents else units.UNKNOWN) for word, _ in parts]
    bound = _bound(run)
    # The bottleneck is more important than full words.
    short = [(_SHORT.get(word, word), share) for word, share in shares]
    forms = [[fact(word, share) for word, share in form] for form in (shares, short, short[:4])]
    room = width - (width_of(bound) + 2 if bound else 0)
    split = next((form for form in forms if width_of(join(form)) <= room), forms[-1])
    return spread(join_fitting(split, room), bound, width)


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
        head = line(("checkpoint ", MUTED))
        why = wrap_within(f"! not complete: {checkpoint.problem or 'unknown'}", width - width_of(head), 1, "bad")
        return (*head, *why[0])
    parts = (
        fact("checkpoint", f"update {units.count(checkpoint.updates)}"),
        fact("", _ago(store, run)),
        fact("", units.size(checkpoint.size_bytes)),
    )
    return fit(join_fitting(parts, width), width)


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
    for word, name in (("peak", "peak_bytes"), ("RAM", "pss_bytes"), ("RSS", "rss_bytes")):
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
        parts += [_host_memory(rank), fact("pid", str(rank.pid))]
    else:
        parts += [
            fact("alloc", units.gib(rank.allocated_bytes)),
            fact("reserved", units.gib(rank.reserved_bytes)),
            fact("peak", f"{units.gib(rank.peak_bytes)} GiB"),
            _host_memory(rank),
        ]
    return join_fitting(parts, width)


def _host_memory(rank: RankMemory) -> Line:
    """The rank's part of the run's memory; else what it has reported itself."""
    size, measure = host_memory(rank.pss_bytes, rank.rss_bytes)
    return fact("RSS" if measure == "RSS" else "RAM", units.size(size))


def draw_loss(store: Store, width: int, height: int) -> list[Line]:
    """The loss of every update of the final history, with a mark where an attempt began."""
    losses = _losses(store)
    return curve(width, height, losses, READING) if store.is_being_read else curve(width, height, losses)


def _losses(store: Store) -> list[Point]:
    return [Point(m.update, m.loss, m.attempt) for m in store.metrics if m.loss is not None]


def _pace(run: RunState) -> Line:
    """Of the same updates as samples/s and tok/s; of the newest one where only that is known."""
    if run.pace_seconds is None:
        return fact("step", _step(run.step_seconds))
    return fact("mean step", _step(run.pace_seconds))


def _step(seconds: float | None) -> str:
    """`1.15 s`, `0.0042 s`, and `123 s` without hundredths."""
    return f"{units.UNKNOWN if seconds is None else f'{seconds:.2f}' if 0.1 <= seconds < 100 else f'{seconds:.3g}'} s"


def _number(value: float | None, form: str) -> str:
    return units.UNKNOWN if value is None else format(value, form)
