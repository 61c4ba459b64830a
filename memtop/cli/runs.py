"""`memtop runs` and `memtop show`: the list of runs, and one run in detail."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from memtop.cli.common import find_run, proposal_lines, readable_ledger, run_line
from memtop.cli.configuration import default_runs_dir
from memtop.cli.options import RUN_HELP, json_option, run_argument, runs_dir_option
from memtop.cli.output import print_json, print_lines, print_message
from memtop.cli.wrapping import for_terminal
from memtop.supervisor import units
from memtop.supervisor.diagnosis.values import in_words, layers_command, outcome_of
from memtop.supervisor.errors import UsageError
from memtop.supervisor.killed import recorded_signal, state_word, status_suffix
from memtop.supervisor.language import tr
from memtop.supervisor.program import known
from memtop.supervisor.recovery.values import Peak
from memtop.supervisor.run import speed, view
from memtop.supervisor.run.explain import phase_peaks, phases_scale, why_no_phases
from memtop.supervisor.run.queue import revive_queued
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.run.record.ledger import SAMPLINGS_STORED, reading_ledger
from memtop.supervisor.run.report.facts import newest_evaluation
from memtop.supervisor.run.runs import RunRow, row_of, run_folders, table, with_turns
from memtop.supervisor.wire import Configuration, Phase, RunState


@click.command()
@json_option
@runs_dir_option
def runs(as_json: bool, runs_dir: Path | None) -> int:
    """List the runs, the newest first.

    With --json the newest is the last.

    `queued 1` is the next of the runs that wait with --queue. A run that waits gets a new
    supervisor if its own is gone.
    """
    where = runs_dir or default_runs_dir()
    for name in revive_queued(where):
        print_message(f"memtop: {name} had lost its supervisor; a new one has started, and the run waits again")
    rows = with_turns(row_of(folder) for folder in run_folders(where))
    if as_json:
        print_json([_document_of(row) for row in rows])
    elif not rows:
        print_message(f"no runs in {where}")
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print_lines(*table(rows[::-1], time.time(), width), own=False)
    return 0


def _document_of(row: RunRow) -> dict[str, Any]:
    if row.run is None:
        return {"name": row.name, "folder": str(row.folder.path), "error": row.error}
    more = {"program": row.program, "created": row.run.created, "ended": row.run.ended}
    peaks = {"peak_bytes": row.peak_bytes, "host_peak_bytes": row.host_peak.size, "host_measure": row.host_peak.measure}
    return {**view.summary(row.run), **more, **peaks, "energy_joules": row.energy_joules, "turn": row.turn}


@click.command(epilog=RUN_HELP)
@run_argument
@json_option
@click.option("--metrics", is_flag=True, help="with --json: one row per update of the final history")
@click.option("--samples", is_flag=True, help="what the model has written for the prompts, instead; with --json, also")
@runs_dir_option
def show(run_name: str, as_json: bool, metrics: bool, samples: bool, runs_dir: Path | None) -> int:
    """Show one run: attempts, settings, progress, saved state."""
    if metrics and not as_json:
        raise UsageError("--metrics: goes with --json")
    folder = find_run(run_name, runs_dir)
    with readable_ledger(folder), reading_ledger(folder) as ledger:
        events = ledger.events(SAMPLINGS_STORED, kind="sample") if ledger is not None and samples else []
        if as_json:
            # Row by row: a long run has very many.
            rows = map(msgspec.to_builtins, ledger.final_history() if ledger is not None else ())
            written = ({"attempt": event.attempt, **event.data} for event in events)
            print_json(document(folder), **({"metrics": rows} if metrics else {}), **({"samples": written} if samples else {}))
            return 0
    if samples:
        if not events:
            print_message(
                f"{folder.name}: no samples are written yet; they need --set sample.prompts=FILE --set sample.every=N"
            )
        for event in events:
            print_lines(*_sample_lines(event.data), own=False)
        return 0
    state = view.read_state(folder)  # before the ledger, which gets the end of an attempt first
    with readable_ledger(folder):
        record = view.show(folder)
    print_lines(*for_terminal(_lines(state, record)))
    return 0


def document(folder: RunFolder) -> dict[str, Any]:
    """What `memtop show --json` prints, as builtin types, without the metric rows.

    MemtopError if the run's folder or ledger cannot be read.
    """
    with readable_ledger(folder):
        record = view.show(folder)
    for row in record["configurations"]:
        row["phases_unknown"] = why_no_phases(msgspec.convert(row, Configuration))
    return record | _measured(view.read_state(folder)) | {"then": folder.spec().then}


def _lines(state: RunState, record: dict[str, Any]) -> Iterator[str]:
    yield run_line(state)
    if state.reason:
        yield f"  reason      {state.reason}"
    yield f"  folder      {state.folder}"
    if state.state is Phase.QUEUED:
        yield from _waiting_lines(state)
    if (then := RunFolder(Path(state.folder)).spec().then) is not None:
        yield f"  then        {then}"
    if state.settings is not None:
        s = state.settings
        split = f"{s.split_text} = {s.effective_batch}"
        yield f"  settings    {s.recipe}, preset {s.preset}, {split}, T {s.seq_len}, lr {s.learning_rate:g}"
        if state.choice is not None:
            yield f"  chosen      {state.choice}"
        if state.batch_search is not None:
            yield f"  search      {state.batch_search}"
    else:
        yield f"  program     {' '.join(state.command)}"
        yield from _program_lines(state)
    if words := speed.words(state.samples_per_second, state.tokens_per_second):
        yield f"  speed       {words}"
    yield from _result_lines(state)
    yield f"  checkpoint  {_checkpoint(state)}"
    for warning in state.warnings:
        yield f"  warning     {warning}"
    for line in _memory_lines(state):
        yield f"  {line}"
    if len(record["configurations"]) > 1 or any(row["foreseen"] for row in record["configurations"]):
        for number, row in enumerate(record["configurations"]):
            yield f"  {_configuration_line(row, record['configurations'][:number])}"
            if (phases := _phases_words(msgspec.convert(row, Configuration))) is not None:
                yield f"    allocated     {phases}"
    for attempt in record["attempts"]:
        yield from _attempt_lines(attempt, state)
    if state.proposal is not None:
        yield "  what can be done"
        for line in proposal_lines(state.proposal, resumes=state.resumes, said=state.reason):
            yield f"    {line}"


def _result_lines(state: RunState) -> Iterator[str]:
    """What `memtop compare` shows, too: losses, the highest memory, the time."""
    folder = RunFolder(Path(state.folder))
    with readable_ledger(folder), reading_ledger(folder) as ledger:
        if ledger is None:
            return
        best, evaluation = ledger.best_loss(), newest_evaluation(ledger)
        seconds = speed.ran_seconds(ledger.attempts(), until=time.time() if state.alive else None)
    row = row_of(folder)
    losses = {"best": best, "evaluation": evaluation}
    if found := [f"{name} {loss:.4f}" for name, loss in losses.items() if loss is not None]:
        yield f"  loss        {', '.join(found)}"
    gpu = None if row.peak_bytes is None else f"GPU memory {units.size(row.peak_bytes)}"
    host = None if row.host_peak.size is None else row.host_peak.words
    if peaks := [peak for peak in (gpu, host) if peak is not None]:
        yield f"  peak        {', '.join(peaks)}"
    if seconds is not None:
        yield f"  time        {units.duration(seconds)} of all attempts"


def _waiting_lines(state: RunState) -> Iterator[str]:
    """The runs that wait with --queue in the same folder, in their order."""
    rows = with_turns(map(row_of, run_folders(Path(state.folder).parent)))
    waiting = sorted((row for row in rows if row.turn is not None), key=lambda row: row.turn or 0)
    if any(row.name == state.name for row in waiting):
        yield f"  order       {', '.join(row.name for row in waiting)}"


def _sample_lines(sampled: dict[str, Any]) -> Iterator[str]:
    """One sampling: each prompt, and what was written for it."""
    yield f"update {sampled['update']}"
    for prompt, text in zip(sampled["prompts"], sampled["texts"], strict=False):
        yield f"  {prompt}"
        yield from (f"    {part}" for part in (text.splitlines() if text.strip() else ("(empty answer)",)))
    if sampled["problem"] is not None:
        yield f"  {sampled['problem']}"


def _program_lines(state: RunState) -> Iterator[str]:
    """What is known of the user's own program, and how."""
    if state.program is None:
        return
    settings = known(state.program.knobs)
    if settings:
        effective = "" if state.effective_batch is None else f"; effective batch {state.effective_batch}"
        yield f"  settings    {', '.join(f'{name} {value}' for name, value in settings.items())}{effective}"
    if state.program.why is not None:
        yield f"  known       {state.program.why}"


def _checkpoint(state: RunState) -> str:
    saved = state.checkpoint
    if saved is None:
        return state.checkpoint_words
    if not saved.complete:
        return f"incomplete: {saved.problem}"
    where = "" if saved.updates is None else f"update {saved.updates}, "
    return f"{where}{units.size(saved.size_bytes)}, {saved.path}"


def _attempt_lines(attempt: dict[str, Any], state: RunState) -> Iterator[str]:
    known = attempt["outcome"] and state_word(attempt["outcome"], recorded_signal(attempt["diagnosis"]))
    outcome = known or _without_end(attempt["number"], state)
    status = status_suffix(attempt["outcome"], attempt["exit_status"])
    where = "" if attempt["start_updates"] is None else f" from update {attempt['start_updates']}"
    energy = "" if attempt["energy_joules"] is None else f", {units.energy(attempt['energy_joules'])}"
    # A reason may have several clauses: it is translated before it becomes a part of the line.
    yield f"  attempt {attempt['number']}   {tr(in_words(attempt['reason']))}{where}: {outcome}{status}{energy}"
    if attempt["diagnosis"]:
        if (summary := attempt["diagnosis"]["summary"]) != state.reason:
            yield f"              {summary}"
        if (command := layers_command(attempt["diagnosis"].get("snapshot_file"))) is not None:
            yield f"              {command}"


def _without_end(number: int, state: RunState) -> str:
    """What an attempt does now whose end is not recorded."""
    ended = (RunFolder(Path(state.folder)).attempt(number) / "exit.json").exists()
    if number == state.attempt and (state.alive or (state.state is Phase.STARTING and not ended)):
        return "running"
    if number < state.attempt or state.supervisor_pid is None or state.state.final:
        return "no end recorded"
    return "ending" if number == state.attempt else "starting"


def _words(settings: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _configuration_line(row: dict[str, Any], earlier: list[dict[str, Any]]) -> str:
    """One configuration (a period with the same settings), with the number for `memtop
    rollback`. `earlier`: those before it."""
    settings, peak = row["settings"], row["peak"]
    parts = [_words(row["uses"]) or (f"requested: {_words(row['knobs'])}" if row["knobs"] else "own program")]
    if settings:
        splits = settings["rank_splits"] or [(settings["batch"], settings["accumulation"])]
        parts = [f"{' + '.join(f'{b} x {a}' for b, a in splits)}, T {settings['seq_len']}"]
    if row["since_update"] is not None:
        parts.append(f"from update {row['since_update']}")
    if peak is not None:
        parts.append(f"peak {msgspec.convert(peak, Peak).words}")
    elif (held := _held_before(row, earlier)) is not None:
        parts.append(f"peak ≤ {units.size(held)}")
    if row["foreseen"] is not None:
        parts.append(f"foreseen {units.size(row['foreseen']['peak_bytes'])}")
    if row["samples_per_second"] is not None:
        parts.append(f"mean {units.rate(row['samples_per_second'])} samples/s")
    outcome = row["outcome"]
    ended = outcome_of(outcome, by_words=row["by_words"]) or (outcome and state_word(outcome, row["ended_by"]))
    parts.append(ended or "current")
    return f"configuration {row['number']}  {', '.join(parts)} ({tr(in_words(row['reason']))})"


def _held_before(row: dict[str, Any], earlier: list[dict[str, Any]]) -> int | None:
    """What the program held of host memory, bytes, when these settings began in it: it keeps what
    it has freed, so their own peak is hidden below that. None if it began with them, or trains on a
    GPU."""
    same = (one for one in earlier if one["attempt"] == row["attempt"] and one["peak"] is not None)
    found = [one["peak"]["bytes"] for one in same if str(one["outcome"]).startswith("host_oom")]
    return max(found, default=None)


def _phases_words(row: Configuration) -> str | None:
    """What was foreseen and measured in each phase of an update."""
    peaks = phase_peaks(row)
    if not peaks:
        return None
    of, why = phases_scale(peaks), why_no_phases(row)
    sizes = ", ".join(f"{tr(peak.phase)} {peak.before(of)} / {of.number(peak.measured)}" for peak in peaks)
    if why is not None:
        return f"{sizes} {of.unit}, foreseen / measured: {why}"
    return f"{sizes} {of.unit}, foreseen / measured"


def _measured(state: RunState) -> dict[str, Any]:
    """What was measured: the memory it uses now (null if it does not run), each rank's newest
    update, and what a search for the batch found."""
    held = state.host_memory
    now: dict[str, Any] = {"host_bytes": held.size, "host_measure": held.measure, "run_rss_bytes": state.run_rss_bytes}
    now["run_memory"] = msgspec.to_builtins(state.run_memory)
    if not state.alive:
        now = dict.fromkeys(now)
    names = ("epoch", "best_loss", "gradient_norm", "tokens_per_second", "padding_fraction", "step_seconds", "split", "ranks")
    more = ("pace_seconds", "stage", "doing", "gpu_base_bytes", "started", "ended", "log_path", "warnings", "batch_search")
    rest = {name: msgspec.to_builtins(getattr(state, name)) for name in (*names, *more)}
    return now | rest


def _memory_lines(state: RunState) -> Iterator[str]:
    if state.alive and state.run_memory:
        roles = [f"{role.words} {units.size(role.pss_bytes)}" for role in state.run_memory]
        yield f"memory      {state.host_memory.words}: {', '.join(roles)}"
    for rank in state.ranks:
        if rank.peak_bytes is not None:
            base = state.gpu_base_bytes.get(rank.device_uuid or "")
            outside = "" if not base else f", outside the allocator at least {units.size(base)} on its GPU"
            yield f"GPU memory  rank {rank.rank}: {units.size(rank.peak_bytes)} peak in its newest update{outside}"
