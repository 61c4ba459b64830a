"""What a report of a run contains, read from its folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import msgspec

from memtop.presets.comparison import changes
from memtop.supervisor import units
from memtop.supervisor.diagnosis.values import outcome_of
from memtop.supervisor.killed import status_suffix
from memtop.supervisor.language import Verbatim
from memtop.supervisor.monitor.history import HOST, Bucket, label_of
from memtop.supervisor.monitor.values import MachineSnapshot
from memtop.supervisor.run import speed, view
from memtop.supervisor.run.processes.attempt import COMMAND, LaunchCommand
from memtop.supervisor.run.processes.environment import outside_any_run
from memtop.supervisor.run.record.folder import RunFolder, open_to_read, read_derived
from memtop.supervisor.run.record.ledger import Attempt, Ledger, reading_ledger
from memtop.supervisor.run.reports import Hello, decode
from memtop.supervisor.run_memory import HostMemory
from memtop.supervisor.wire import Configuration, Event, Metric, RunState

POINTS = 800
"""Of a curve. More updates are averaged."""
_EVENTS = 300
_SAMPLES = 20
_LONGEST_REPORT = 1 << 20


class Curve(NamedTuple):
    """Points from left to right. Without a value there is a gap."""

    title: str
    points: tuple[tuple[float, float | None], ...]


class Source(NamedTuple):
    """A GPU or the host over time."""

    label: str
    used: Curve
    """Fractions of its memory."""
    peak: float | None
    """The highest fraction."""
    joules: float | None
    """From the power that the driver reports; None for the host."""


class Price(NamedTuple):
    """What the user pays for energy."""

    per_kilowatt_hour: float
    currency: str


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything in a report."""

    written: float
    state: RunState
    attempts: tuple[Attempt, ...]
    configurations: tuple[Configuration, ...]
    events: tuple[Event, ...]
    sources: tuple[Source, ...]
    curves: tuple[Curve, ...]
    """Over updates: loss, ..."""
    version: str
    gpus: tuple[str, ...] = ()
    driver: str | None = None
    """Its version, if the machine has a GPU."""
    price: Price | None = None
    host_peak: HostMemory = HostMemory()
    """The highest host memory of the run's processes together."""
    environment: Hello | None = None
    """Of the newest attempt, as its first process has reported it."""
    started_with: LaunchCommand | None = None
    """The same attempt's command."""
    evaluation_loss: float | None = None
    """The newest."""
    samples: tuple[Event, ...] = ()
    """What the model has written, the newest last; see `Written` in reports.py."""

    @property
    def rows(self) -> list[tuple[str, str]]:
        """The most important values, with their names."""
        return [(name, value) for name, value in _rows(self) if value]


def read_facts(folder: RunFolder, price: Price | None = None) -> Facts:
    """Read a run. Without a price no cost is named. MemtopError if its files cannot be read."""
    state, spec, now = view.read_state(folder), folder.spec(), time.time()
    with reading_ledger(folder) as ledger:
        machine = None if ledger is None else ledger.snapshot(now, 0.0)
        return Facts(
            written=now,
            state=state,
            attempts=() if ledger is None else tuple(ledger.attempts()),
            configurations=() if ledger is None else tuple(record.configuration for record in ledger.configurations()),
            events=() if ledger is None else tuple(ledger.events(_EVENTS)),
            sources=() if ledger is None else tuple(_sources(ledger)),
            curves=() if ledger is None else (*_curves(list(ledger.final_history())), *_evaluations(ledger)),
            version=spec.memtop_version,
            gpus=() if machine is None else _gpu_names(machine),
            driver=None if machine is None or not machine.gpus else machine.driver_version,
            price=price,
            host_peak=HostMemory() if ledger is None else ledger.host_peak(),
            environment=_environment(folder, state.attempt),
            started_with=read_derived(folder.attempt(state.attempt) / COMMAND, LaunchCommand),
            evaluation_loss=None if ledger is None else newest_evaluation(ledger),
            samples=() if ledger is None else tuple(ledger.events(_SAMPLES, kind="sample")),
        )


def newest_evaluation(ledger: Ledger) -> float | None:
    """The loss of the newest evaluation; None if there was none."""
    found = [event.data.get("loss") for event in ledger.events(1, kind="evaluation")]
    return found[0] if found else None


def _environment(folder: RunFolder, attempt: int) -> Hello | None:
    try:
        with open_to_read(folder.attempt(attempt) / "rank-0.jsonl") as file:
            found = decode(file.readline(_LONGEST_REPORT))
    except OSError:
        return None  # the program has not reported yet, or never does
    return found if isinstance(found, Hello) else None


def environment_rows(facts: Facts) -> list[tuple[str, str]]:
    """What the program of the newest attempt ran with, as far as it or memtop has recorded it."""
    found, started = facts.environment or Hello(), facts.started_with
    named = {**found.packages, "CUDA": found.cuda}
    versions = ", ".join(f"{name} {version}" for name, version in named.items() if version)
    by_memtop = {} if started is None else outside_any_run(started.environment)
    rows = [
        ("Python", f"{found.python or units.UNKNOWN} ({found.executable or units.UNKNOWN})" if facts.environment else None),
        ("packages", versions),
        ("system", ", ".join(part for part in (None if started is None else started.system, found.system) if part)),
        ("driver", facts.driver),
        ("processors", None if found.cpus is None else str(found.cpus)),
        ("RAM", None if found.memory_bytes is None else units.size(found.memory_bytes)),
        ("variables", _assignments(found.variables)),
        ("variables set by memtop", _assignments({name: value for name, value in by_memtop.items() if value})),
    ]
    return [(name, Verbatim(value)) for name, value in rows if value]


def _assignments(variables: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in variables.items())


def outcome_words(attempt: Attempt) -> str:
    """How an attempt ended."""
    if attempt.outcome is None:
        return "running" if attempt.ended is None else "ended"
    found = attempt.diagnosis or {}
    by_words = found.get("source") == "words"
    words = outcome_of(found.get("kind"), by_words=by_words) if attempt.outcome == "failed" else None
    words = words or attempt.word or attempt.outcome
    return f"{words}{status_suffix(attempt.outcome, attempt.exit_status)}"


def configuration_words(rows: Sequence[Configuration]) -> list[tuple[Configuration, str]]:
    """Each configuration with what it changed."""
    found = []
    for before, row in zip([None, *rows], rows, strict=False):
        if row.settings is None:
            words = ", ".join(f"{name} {value}" for name, value in {**row.uses, **row.knobs}.items())
        elif before is None or before.settings is None:
            words = f"{row.settings.split_text}, T {row.settings.seq_len}, preset {row.settings.preset}"
        else:
            words = ", ".join(changes(before.settings, row.settings))
        found.append((row, words))
    return found


def _rows(facts: Facts) -> Iterable[tuple[str, str]]:
    state = facts.state
    yield "state", state.word + (f": {state.reason}" if state.reason else "")
    total = "" if state.total_updates is None else f" of {units.count(state.total_updates)}"
    yield "updates", "" if state.updates is None else units.count(state.updates) + total
    yield "samples", "" if state.samples_seen is None else units.count(state.samples_seen)
    best = "" if state.best_loss is None else f" (best {state.best_loss:.4g})"
    yield "loss", "" if state.loss is None else f"{state.loss:.4g}{best}"
    yield "evaluation loss", "" if facts.evaluation_loss is None else f"{facts.evaluation_loss:.4g}"
    yield "learning rate", "" if state.settings is None else f"{state.settings.learning_rate:g}"
    yield "speed", speed.words(state.samples_per_second, state.tokens_per_second)
    yield "attempts", str(len(facts.attempts)) if facts.attempts else ""
    ran = speed.ran_seconds(facts.attempts, until=facts.written if state.alive else None)
    yield "time of all attempts", "" if ran is None else units.duration(ran)
    ends = [attempt.ended for attempt in facts.attempts if attempt.ended is not None]
    whole = units.duration(max(ends) - state.created) if len(facts.attempts) > 1 and ends and state.state.final else ""
    yield "time from the first start to the end", whole
    for source in facts.sources:
        yield f"highest memory of {source.label}, all programs", "" if source.peak is None else units.percent(source.peak)
    yield "highest host memory of this run", "" if facts.host_peak.size is None else facts.host_peak.words
    yield "energy of the GPUs", _energy(facts)
    if state.settings is not None:
        s = state.settings
        yield "recipe", f"{s.recipe}, preset {s.preset}, {s.split_text} = {s.effective_batch}, T {s.seq_len}"
    yield "command", Verbatim(" ".join(state.command))
    yield "folder", Verbatim(state.folder)
    yield "GPUs", Verbatim(", ".join(facts.gpus))
    yield "memtop", Verbatim(facts.version)


def _sources(ledger: Ledger) -> Iterable[Source]:
    extent = ledger.extent()
    if extent is None:
        return
    for key, index in ledger.sources().items():
        series = ledger.history(key, extent[0] - 1, extent[1])
        used = series["used_fraction"]
        points = tuple(_with_gaps(_thinned(used)))
        joules = None if key == HOST else _joules(series["power_watts"])
        peak = max((bucket.high for bucket in used), default=None)
        yield Source(label_of(index), Curve(f"{label_of(index)}: memory in use", points), peak, joules)


def _energy(facts: Facts) -> str:
    """By the drivers' counters, else by the power that they report."""
    counted = [attempt.energy_joules for attempt in facts.attempts if attempt.energy_joules is not None]
    by_power = [source.joules for source in facts.sources if source.joules is not None]
    joules = sum(counted) if counted else sum(by_power)
    if not joules:
        return ""
    words = units.energy(joules) if counted else f"about {units.energy(joules)}, by the power that the driver reports"
    if facts.price is None:
        return words
    each, currency = facts.price
    return f"{words}; {joules / 3.6e6 * each:.2f} {currency} at {each:g} {currency} per kWh"


def _joules(power: Sequence[Bucket]) -> float | None:
    return sum(bucket.mean * bucket.seconds for bucket in power) if power else None


def _thinned(buckets: Sequence[Bucket]) -> list[Bucket]:
    """At most about POINTS: the highest value of neighbours counts."""
    size = max(1, -(-len(buckets) // POINTS))
    groups = (buckets[at : at + size] for at in range(0, len(buckets), size))
    return [
        Bucket(group[0].time, group[-1].time + group[-1].seconds - group[0].time, 0.0, 0.0, max(one.high for one in group))
        for group in groups
    ]


def _with_gaps(buckets: Sequence[Bucket]) -> Iterable[tuple[float, float | None]]:
    end = None
    for bucket in buckets:
        if end is not None and bucket.time > end + 2 * bucket.seconds:
            yield end, None
        yield bucket.time, bucket.high
        end = bucket.time + bucket.seconds


def _tokens_per_second(row: Metric) -> float | None:
    return row.tokens / row.step_seconds if row.tokens and row.step_seconds else None


def _peak_gib(row: Metric) -> float | None:
    return None if row.peak_bytes is None else row.peak_bytes / units.GIB


_CURVES: tuple[tuple[str, Callable[[Metric], float | None], Callable[[Sequence[float]], float]], ...] = (
    ("loss", lambda row: row.loss, fmean),
    ("learning rate", lambda row: row.learning_rate, fmean),
    ("gradient norm", lambda row: row.gradient_norm, fmean),
    ("seconds of an update", lambda row: row.step_seconds, fmean),
    ("tokens per second of an update", _tokens_per_second, fmean),
    ("peak memory of an update, GiB", _peak_gib, max),
)
"""By title: the value of an update, and that of several as one point."""


def _curves(rows: Sequence[Metric]) -> tuple[Curve, ...]:
    size = max(1, -(-len(rows) // POINTS))
    groups = [rows[at : at + size] for at in range(0, len(rows), size)]
    found = []
    for title, value_of, together in _CURVES:
        points = []
        for group in groups:
            known = [value for row in group if (value := value_of(row)) is not None]
            if known:
                points.append((float(group[0].update), together(known)))
        if len(points) > 1:
            found.append(Curve(title, tuple(points)))
    return tuple(found)


def _evaluations(ledger: Ledger) -> Iterable[Curve]:
    """Without those that a restart, or the program itself, has taken back."""
    attempts, kept = ledger.attempts(), list[tuple[int, float]]()
    for event in ledger.events(POINTS, kind="evaluation"):
        update, loss = event.data.get("update"), event.data.get("loss")
        begins = [one.start_updates for one in attempts if one.number > event.attempt and one.start_updates is not None]
        if update is None or loss is None or update > min(begins, default=update):
            continue
        while kept and kept[-1][0] >= update:
            kept.pop()
        kept.append((update, loss))
    if len(kept) > 1:
        yield Curve("evaluation loss", tuple((float(update), loss) for update, loss in kept))


def _gpu_names(machine: MachineSnapshot) -> tuple[str, ...]:
    return tuple(f"{gpu.index}: {gpu.name or 'unknown'}, {units.size(gpu.total_bytes)}" for gpu in machine.gpus)
