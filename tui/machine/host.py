"""Host memory: the panel on the dashboard, and every value in groups for the details screen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from memtop.supervisor import units, wire
from memtop.supervisor.language import verbatim
from memtop.supervisor.monitor.values import EDGE_FROM, HostSample
from memtop.supervisor.recovery.values import Trend
from memtop.supervisor.run_memory import RoleMemory, together
from memtop.tui import trends
from memtop.tui.bars import ROLES, Share, banded, memory_bar, padded_tag
from memtop.tui.charts import history
from memtop.tui.line import MUTED, STRONG, Line, cell, fact, fit, join, join_fitting, line, spread, width_of, wrap
from memtop.tui.machine.facts import FactGroup, Group, column_width, flow, laid_out, share, size
from memtop.tui.machine.gpu import LABEL
from memtop.tui.store import Store
from memtop.tui.words import age

_CHART_LOWEST = 3


class Row(NamedTuple):
    """One line of the panel; without room the lines with the highest numbers are dropped first."""

    rank: int
    draw: Callable[[], Line]


def draw_host(store: Store, width: int, height: int) -> list[Line]:
    """Host memory, shared memory and swap, with history in the remaining lines."""
    rows = _rows(store, width)
    if len(rows) > height:
        kept = sorted(rows, key=lambda row: row.rank)[:height]
        rows = [row for row in rows if row in kept]
    lines = [row.draw() for row in rows]
    spare = height - len(lines)
    if spare >= _CHART_LOWEST:
        lines += history(width, spare, [(m.fraction, m.band) for m in store.host_history])
    return lines[:height]


def host_rows(store: Store) -> int:
    """The number of the panel's lines without the chart."""
    return len(_rows(store, 60))


def _rows(store: Store, width: int) -> list[Row]:
    host = store.host
    rows = [
        Row(0, lambda: ((cell("RAM", LABEL), MUTED), *ram_bar(store, width - LABEL))),
        Row(1, partial(_numbers, host, width)),
        Row(4, partial(_holders, store, width)),
    ]
    if store.run is not None and store.run.run_memory:
        rows.append(Row(5, partial(roles_line, store.run.run_memory, width)))
    if host.shm_total_bytes:
        full = (host.shm_fraction or 0.0) > EDGE_FROM
        rows.append(Row(2 if full else 7, partial(shm_row, host, width)))
    rows += [Row(3, partial(swap_row, host, width)), Row(6, partial(_traffic, host, width))]
    if store.run is not None:
        rows += [row for trend in trends.of_host(store.run) for row in _trend(trend, store.run, width)]
    alarms = _alarms(host)
    if alarms:
        rows.append(Row(2, partial(join_fitting, alarms, width)))
    extras = _extras(host)
    if extras:
        rows.append(Row(9, partial(join_fitting, extras, width)))
    if store.run is None and (host.load_average is not None or host.uptime_seconds is not None):
        rows.append(Row(8, lambda: join_fitting(_load(host), width)))
    return rows


def _trend(trend: Trend, run: wire.RunState, width: int) -> list[Row]:
    """The first line has a high priority; continuation lines are dropped first."""
    urgent = trend.full_in_seconds is None or trends.before_the_end(trend, run)
    parts = wrap(f"^ {trends.sentence(trend, run, width - 2)}", width, "edge" if urgent else MUTED)
    return [Row(8 if number else 1, partial(tuple, part)) for number, part in enumerate(parts)]


def ram_bar(store: Store, width: int) -> Line:
    """Host memory: this run's processes, other processes, and memory that the kernel would free."""
    host = store.host
    used = host.used_fraction or 0.0
    whole = host.limit_bytes or host.total_bytes
    cached = Share(min(1 - used, (host.cached_bytes or 0) / whole), "·", "pagecache") if whole and used < 1 else None
    if store.run is None:
        return memory_bar(width, [Share(used, "█", "alloc")], peak=store.host_peak_fraction, after=cached)
    held = store.run.host_memory.size
    own = min(used, held / whole) if held and whole else 0.0
    shares = [Share(own, "█", "alloc"), Share(used - own, "░", "other")]
    return memory_bar(width, shares, peak=store.host_peak_fraction, after=cached)


def roles_line(roles: Sequence[RoleMemory], width: int) -> Line:
    """`run 21.4: main 9.8  6 workers 11.2  shm 0.4`; shared memory is listed separately, so that
    the parts add up.
    """
    names = {"rank": ("main", "ranks"), "loader worker": ("worker", "workers"), "launcher": ("launcher", "launchers")}
    order = ("rank", "loader worker", "launcher")
    parts = []
    for role in sorted(roles, key=lambda r: order.index(r.role) if r.role in order else len(order)):
        one, many = names.get(role.role, (role.role, role.role))
        word = one if role.processes == 1 else f"{role.processes} {many}"
        private = None if role.pss_bytes is None else max(0, role.pss_bytes - (role.shm_bytes or 0))
        parts.append(fact(word, units.gib(private)))
    shared = [role.shm_bytes for role in roles if role.shm_bytes is not None]
    if shared:
        parts.insert(2, fact("shm", units.gib(sum(shared))))
    swapped = sum(role.swap_bytes or 0 for role in roles)
    if swapped:
        parts.append(line(("! swapped ", "edge"), (units.gib(swapped), "edge")))
    total = units.gib(together(roles))
    return join_fitting([line(("run ", MUTED), (f"{total}:", STRONG)), *parts], width)


def _numbers(host: HostSample, width: int) -> Line:
    whole = host.limit_bytes or host.total_bytes
    left = join(
        (
            line((units.used_of(host.used_bytes, whole), STRONG)),
            banded(host.used_fraction, host.band),
        ),
        "   ",
    )
    if host.limit_bytes is None:
        return spread(left, fact("available", f"{units.gib(host.available_bytes)} GiB"), width)
    words = units.size if host.limit_bytes < units.GIB else units.gib
    return spread(left, fact("limit", f"{words(host.limit_bytes)} of {words(host.total_bytes)}"), width)


def _holders(store: Store, width: int) -> Line:
    host = store.host
    cpu = fact("cpu", units.percent(host.cpu_fraction, 0))
    cached = (
        () if host.cached_bytes is None else line(("·", "pagecache"), " ", *fact("page cache", units.gib(host.cached_bytes)))
    )
    if store.run is None:
        return spread(cached, cpu, width) if cached else fit(cpu, width)
    own, measure = store.run.host_memory
    others = None if own is None or host.used_bytes is None else max(0, host.used_bytes - own)
    parts = [
        line(("█", "alloc"), " ", *fact("this run, RSS" if measure == "RSS" else "this run", units.gib(own))),
        line(("░", "other"), " ", *fact("others", units.gib(others))),
        cached,
    ]
    return spread(join_fitting(parts, width - width_of(cpu) - 2), cpu, width)


def shm_row(host: HostSample, width: int) -> Line:
    """/dev/shm on one line, with a warning before data-loader workers fail."""
    fraction = host.shm_fraction
    tail = line((f" {units.used_of(host.shm_used_bytes, host.shm_total_bytes)}", STRONG))
    role = "danger" if (fraction or 0.0) > EDGE_FROM else MUTED
    tail = (*tail, *line((f"  {units.percent(fraction):>7}", role)))
    if role == "danger":
        tail = (*tail, ("  !! nearly full", "danger"))
    room = max(4, width - LABEL - width_of(tail))
    bar = memory_bar(room, [Share(fraction or 0.0, "█", "alloc")], limits=False)
    return fit(((cell("shm", LABEL), MUTED), *bar, *tail), width)


def swap_row(host: HostSample, width: int) -> Line:
    """Swap on one line: bar, numbers, band."""
    if host.swap_total_bytes == 0:
        return line((cell("Swap", LABEL), MUTED), ("none", MUTED))
    tail = join(
        (
            line((f" {units.used_of(host.swap_used_bytes, host.swap_total_bytes)}", STRONG)),
            line((f"{units.percent(host.swap_fraction):>7}", ROLES[host.swap_band])),
            padded_tag(host.swap_band),
        )
    )
    room = max(4, width - LABEL - width_of(tail))
    bar = memory_bar(room, [Share(host.swap_fraction or 0.0, "█", "alloc")])
    return fit(((cell("Swap", LABEL), MUTED), *bar, *tail), width)


def rate(value: float | None) -> str:
    return units.UNKNOWN if value is None else f"{units.size(value)}/s"


def _traffic(host: HostSample, width: int) -> Line:
    traffic = (fact("swap in", rate(host.swap_in_bytes_per_second)), fact("out", rate(host.swap_out_bytes_per_second)))
    some = units.percent(host.pressure_fraction)
    # The kernel's terms: `some` = at least one task waits for memory, `full` = all tasks wait.
    full = "" if host.pressure_full_fraction is None else units.percent(host.pressure_full_fraction)
    both = fact("memory pressure", f"some {some}, full {full}" if full else some)
    wide = join((*traffic, both), "   ")
    return wide if width_of(wide) <= width else join_fitting((*traffic, fact("memory pressure", some)), width)


def _alarms(host: HostSample) -> list[Line]:
    """Warnings other than the bands."""
    found = []
    if host.oom_kills:
        times = "once" if host.oom_kills == 1 else f"{host.oom_kills} times"
        found.append(line((f"!! the kernel has killed {times} for memory in this cgroup", "bad")))
    throttle = host.limit_throttle_bytes
    if throttle is not None and host.used_bytes is not None and host.used_bytes > throttle:
        found.append(line((f"! above memory.high ({units.size(throttle)}): the kernel slows the group down", "edge")))
    return found


def _extras(host: HostSample) -> list[Line]:
    found = []
    if host.huge_pages_total_bytes:
        free = units.gib(host.huge_pages_free_bytes)
        found.append(fact("huge pages", f"{units.gib(host.huge_pages_total_bytes)} ({free} free)"))
    if host.locked_bytes and host.locked_bytes > units.GIB // 20:
        found.append(fact("locked", units.gib(host.locked_bytes)))
    if host.dirty_bytes and host.dirty_bytes > units.GIB // 2:
        found.append(fact("not yet written", units.gib(host.dirty_bytes)))
    return found


def _load(host: HostSample) -> list[Line]:
    load = host.load_average
    words = units.UNKNOWN if load is None else " ".join(f"{value:.1f}" for value in load)
    cores = [] if host.cpu_count is None else [fact("cores", str(host.cpu_count))]
    up = [] if host.uptime_seconds is None else [fact("up", age(host.uptime_seconds))]
    return [fact("load", words), *cores, *up]


def draw_host_details(store: Store, width: int) -> list[Line]:
    """All lines; the screen scrolls."""
    each = column_width(width)
    groups = [_memory(store, each), _limit(store, each), _swap(store, each), _cpu(store, each)]
    if store.run is not None:
        groups.insert(1, _roles(store.run, each))
    tail = line("  ", *banded(store.host.used_fraction, store.host.band))
    head = fit((*ram_bar(store, width - width_of(tail)), *tail), width)
    return [head, (), *laid_out(groups, width)]


def _memory(store: Store, width: int) -> Group:
    host = store.host
    facts = FactGroup("Memory", width, host.unknown)
    facts.add("in the machine", size(host.total_bytes), "total_bytes")
    facts.add("used", size(host.used_bytes), "used_bytes")
    facts.add("available", size(host.available_bytes), "available_bytes")
    cached = None if host.cached_bytes is None else f"{units.size(host.cached_bytes)}, freed when needed"
    facts.add("page cache", cached, "cached_bytes")
    facts.add("not yet written", size(host.dirty_bytes), "dirty_bytes")
    facts.add("shared, tmpfs", size(host.shared_bytes), "shared_bytes")
    shm = None
    if host.shm_total_bytes is not None:
        shm = f"{units.size(host.shm_used_bytes)} of {units.size(host.shm_total_bytes)}, {units.percent(host.shm_fraction)}"
    full = (host.shm_fraction or 0.0) > EDGE_FROM
    facts.add("/dev/shm", f"{shm}, nearly full" if shm and full else shm, "shm_total_bytes", role="danger" if full else STRONG)
    facts.add("locked", size(host.locked_bytes), "locked_bytes")
    huge = None
    if host.huge_pages_total_bytes is not None:
        free = "" if not host.huge_pages_total_bytes else f", {units.size(host.huge_pages_free_bytes)} free"
        huge = f"{units.size(host.huge_pages_total_bytes)}{free}"
    facts.add("huge pages", huge, "huge_pages_total_bytes")
    return facts.group()


def _roles(run: wire.RunState, width: int) -> Group:
    facts = FactGroup(f"The run {run.name}", width)
    whole, measure = run.host_memory
    facts.add("together, RSS" if measure == "RSS" else "together", size(whole))
    if not run.run_memory:
        facts.add_text("its memory by role has not been read yet", MUTED)
    for role in run.run_memory:
        parts = [f"{units.size(role.pss_bytes)}"]
        if role.uss_bytes is not None:
            parts.append(f"{units.size(role.uss_bytes)} of it private")
        if role.shm_bytes:
            parts.append(f"{units.size(role.shm_bytes)} shared memory")
        if role.swap_bytes:
            parts.append(f"{units.size(role.swap_bytes)} swapped out")
        facts.add(f"{role.processes} x {role.role}", ", ".join(parts) if role.pss_bytes is not None else None)
    return facts.group()


def _limit(store: Store, width: int) -> Group:
    host = store.host
    facts = FactGroup("Limit of the cgroup", width, host.unknown)
    if host.limit_bytes is None:
        reason = host.unknown.get("limit_bytes")
        facts.add("limit", None if reason else "none below the machine's memory", "limit_bytes")
    else:
        facts.add("limit", size(host.limit_bytes))
        facts.add("set by", verbatim(host.limit_path), "limit_path")
        facts.add("slowed down above", size(host.limit_throttle_bytes) or "not set")
        facts.add("swap allowed", size(host.limit_swap_bytes) or "not limited")
    kills = None if host.oom_kills is None else units.count(host.oom_kills)
    facts.add("killed for memory", kills, "oom_kills", role="bad" if host.oom_kills else STRONG)
    return facts.group()


def _swap(store: Store, width: int) -> Group:
    host = store.host
    facts = FactGroup("Swap and pressure", width, host.unknown)
    used = None
    if host.swap_total_bytes is not None:
        used = f"{units.size(host.swap_used_bytes)} of {units.size(host.swap_total_bytes)}" if host.swap_total_bytes else "none"
    facts.add("swap", used, "swap_total_bytes")
    facts.add("swapped in", flow(host.swap_in_bytes_per_second), "swap_in_bytes_per_second")
    facts.add("swapped out", flow(host.swap_out_bytes_per_second), "swap_out_bytes_per_second")
    facts.add("some task waits", share(host.pressure_fraction, 1), "pressure_fraction")
    facts.add("all tasks wait", share(host.pressure_full_fraction, 1), "pressure_full_fraction")
    return facts.group()


def _cpu(store: Store, width: int) -> Group:
    host = store.host
    facts = FactGroup("Processors", width, host.unknown)
    facts.add("busy", share(host.cpu_fraction), "cpu_fraction")
    facts.add("cores for memtop", None if host.cpu_count is None else str(host.cpu_count), "cpu_count")
    load = host.load_average
    facts.add("load 1, 5, 15 min", None if load is None else "  ".join(f"{one:.2f}" for one in load), "load_average")
    facts.add("up", None if host.uptime_seconds is None else age(host.uptime_seconds), "uptime_seconds")
    return facts.group()
