"""All that is known of the host's memory, in groups."""

from __future__ import annotations

from memtop.supervisor import units, wire
from memtop.supervisor.monitor.bands import EDGE_FROM
from memtop.tui.bands import banded
from memtop.tui.line import MUTED, STRONG, Line, fit, line, width_of
from memtop.tui.machine.facts import Facts, Group, column_width, flow, laid_out, share, size
from memtop.tui.machine.host import ram_bar
from memtop.tui.store import Store
from memtop.tui.words import age


def draw_host_details(store: Store, width: int) -> list[Line]:
    """As many lines as it takes; the screen scrolls."""
    each = column_width(width)
    groups = [_memory(store, each), _limit(store, each), _swap(store, each), _cpu(store, each)]
    if store.run is not None:
        groups.insert(1, _roles(store.run, each))
    tail = line("  ", *banded(store.host.used_fraction, store.host.band))
    head = fit((*ram_bar(store, width - width_of(tail)), *tail), width)
    return [head, (), *laid_out(groups, width)]


def _memory(store: Store, width: int) -> Group:
    host = store.host
    facts = Facts("Memory", width, host.unknown)
    facts.add("in the machine", size(host.total_bytes), "total_bytes")
    facts.add("used", size(host.used_bytes), "used_bytes")
    facts.add("available", size(host.available_bytes), "available_bytes")
    cached = None if host.cached_bytes is None else f"{units.size(host.cached_bytes)}, given back when it is needed"
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
    facts = Facts(f"The run {run.name}", width)
    facts.add("resident, together", size(run.run_rss_bytes))
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
    facts = Facts("Limit of the cgroup", width, host.unknown)
    if host.limit_bytes is None:
        reason = host.unknown.get("limit_bytes")
        facts.add("limit", None if reason else "none below the machine's memory", "limit_bytes")
    else:
        facts.add("limit", size(host.limit_bytes))
        facts.add("set by", host.limit_path, "limit_path")
        facts.add("slowed down above", size(host.limit_throttle_bytes) or "not set")
        facts.add("swap allowed", size(host.limit_swap_bytes) or "not limited")
    kills = None if host.oom_kills is None else units.count(host.oom_kills)
    facts.add("killed for memory", kills, "oom_kills", role="bad" if host.oom_kills else STRONG)
    return facts.group()


def _swap(store: Store, width: int) -> Group:
    host = store.host
    facts = Facts("Swap and pressure", width, host.unknown)
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
    facts = Facts("Processors", width, host.unknown)
    facts.add("busy", share(host.cpu_fraction), "cpu_fraction")
    facts.add("cores for memtop", None if host.cpu_count is None else str(host.cpu_count), "cpu_count")
    load = host.load_average
    facts.add("load 1, 5, 15 min", None if load is None else "  ".join(f"{one:.2f}" for one in load), "load_average")
    facts.add("up", None if host.uptime_seconds is None else age(host.uptime_seconds), "uptime_seconds")
    return facts.group()
