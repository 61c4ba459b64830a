"""A program that memtop did not start, as dashboards and the command line show it."""

from __future__ import annotations

from memtop.supervisor import units
from memtop.supervisor.observed.values import Observed
from memtop.supervisor.program import Program
from memtop.supervisor.run_memory import host_memory
from memtop.supervisor.wire import Phase, RunState

NOTE = "not started by memtop"
_SEVERAL = {"launcher": "launchers", "rank": "ranks", "process": "processes", "loader worker": "loader workers"}


def state_of(seen: Observed, now: float) -> RunState:
    """What the Training panel shows. What memtop cannot know of it stays None."""
    phase = Phase.STOPPED if not seen.alive else Phase.STARTING if seen.updates is None else Phase.TRAINING
    why = f"read from the output, by lines like `{seen.example}`" if seen.example else seen.unknown.get("updates")
    return RunState(
        name=seen.name,
        folder=seen.folder or "",
        state=phase,
        observed=True,
        reason=None if seen.alive else "it has ended; memtop did not start it, so the exit status is not known",
        alive=seen.alive,
        trainer_pid=seen.pid,
        created=seen.started,
        started=seen.started,
        ended=None if seen.alive else now,
        command=seen.command,
        program=Program(grip=None if seen.updates is None else "output", why="; ".join((NOTE, _processes(seen), str(why)))),
        updates=seen.updates,
        total_updates=seen.total_updates,
        epoch=seen.epoch,
        loss=seen.loss,
        best_loss=seen.best_loss,
        learning_rate=seen.learning_rate,
        tokens_per_second=seen.tokens_per_second,
        step_seconds=seen.step_seconds,
        eta_seconds=seen.eta_seconds,
        run_rss_bytes=seen.rss_bytes,
        checkpoint=seen.checkpoint,
        log_path=seen.output[0] if seen.output else None,
    )


def _processes(seen: Observed) -> str:
    """`1 launcher, 2 ranks, 4.0 GiB of GPU memory`."""
    counts: dict[str, int] = {}
    for process in seen.processes:
        role = "rank" if process.role.startswith("rank") else process.role
        counts[role] = counts.get(role, 0) + 1
    parts = [f"{count} {role if count == 1 else _SEVERAL.get(role, role)}" for role, count in counts.items()]
    if seen.gpu_bytes is not None:
        parts.append(f"{units.size(seen.gpu_bytes)} of GPU memory")
    return ", ".join(parts) or "no process"


def line_of(seen: Observed) -> str:
    """`train.py  pid 123  update 100 / 300  loss 2.31  2.0 GiB RAM  not started by memtop`."""
    parts = [seen.name, f"pid {seen.pid}"]
    if seen.updates is None:
        parts.append("progress not known")
    else:
        parts.append(f"update {units.count(seen.updates)} / {units.count(seen.total_updates)}")
        parts.append(f"loss {units.UNKNOWN if seen.loss is None else f'{seen.loss:.4g}'}")
    memory = host_memory(None, seen.rss_bytes).words
    parts.append(memory if seen.gpu_bytes is None else f"{units.size(seen.gpu_bytes)} GPU, {memory}")
    return "  ".join([*parts, NOTE])


def lines_of(seen: Observed) -> list[str]:
    """The same with more about it."""
    lines = [line_of(seen)]
    lines += [
        f"  {process.pid:>8}  {process.role:<14} {units.size(process.rss_bytes):>9}  {process.command}"
        for process in seen.processes
    ]
    for path in seen.output:
        lines.append(f"  output      {path}")
    if "output" in seen.unknown:
        lines.append(f"  output      {units.UNKNOWN}: {seen.unknown['output']}")
    elif "updates" in seen.unknown:
        lines.append(f"  step        {units.UNKNOWN}: {seen.unknown['updates']}")
    found = seen.checkpoint
    saved = f"{units.UNKNOWN}: {seen.unknown['checkpoint']}" if found is None else found.path
    lines.append(f"  checkpoint  {saved}")
    if seen.example:
        lines.append(f"  step        read from the output, by lines like `{seen.example}`")
    return lines
