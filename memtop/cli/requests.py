"""Requests to a run's supervisor: `memtop free`, `checkpoint`, `stop`, `restart`, `rollback`; and
the order of the runs that wait: `memtop next`."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import click

from memtop.cli import completion
from memtop.cli.common import find_run, readable_ledger
from memtop.cli.foreground import stay
from memtop.cli.interpreters import python_for
from memtop.cli.options import (
    RUN_HELP,
    WHOLE,
    assignments_of,
    detach_option,
    edit_options,
    gpus_option,
    headless_option,
    refuse_both,
    run_argument,
    runs_dir_option,
)
from memtop.cli.output import print_lines, print_message
from memtop.presets.comparison import risk
from memtop.presets.measured import Learned
from memtop.presets.schema import Settings
from memtop.supervisor.errors import MemtopError, NotRunningError, UsageError
from memtop.supervisor.interpreters import learned_on
from memtop.supervisor.monitor.values import EDGE_FROM
from memtop.supervisor.plan import gpu_kind
from memtop.supervisor.recovery.configuration import edited, failed_settings, kept_length
from memtop.supervisor.recovery.forecast import Forecaster, forecaster_of, foreseen_text, gpu_of, split_text
from memtop.supervisor.recovery.values import Forecast
from memtop.supervisor.run import client, explain, starting
from memtop.supervisor.run.grip import consequences, knobs_of
from memtop.supervisor.run.processes.environment import different, kept_environment, missing_here, moved_environment
from memtop.supervisor.run.queue import begin_next
from memtop.supervisor.run.record import checkpoints, grip_checkpoints
from memtop.supervisor.run.record.configurations import before_the_present, same_configuration
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.run.record.ledger import reading_ledger
from memtop.supervisor.run.rules.spikes import change_for
from memtop.supervisor.run.view import needs_supervisor, read_configurations, read_state, refuse_living
from memtop.supervisor.wire import (
    AcceptSpike,
    Answer,
    Change,
    Checkpoint,
    CheckpointNow,
    Configuration,
    Edit,
    FreeCache,
    Outcome,
    Request,
    Restart,
    RunState,
    Stop,
)


@click.command(epilog=RUN_HELP)
@run_argument
@runs_dir_option
def free(run_name: str, runs_dir: Path | None) -> int:
    """Free the cached memory of the training processes.

    Each of them runs gc, torch's empty_cache and malloc_trim, and reports how much it freed.
    """
    return ask(find_run(run_name, runs_dir), lambda number: FreeCache(id=number))


@click.command(epilog=RUN_HELP)
@run_argument
@runs_dir_option
def checkpoint(run_name: str, runs_dir: Path | None) -> int:
    """Save the training state after the current update.

    The state is written to the run's folder train_latest_state.
    """
    return ask(find_run(run_name, runs_dir), lambda number: CheckpointNow(id=number))


@click.command(epilog=RUN_HELP)
@run_argument
@runs_dir_option
def stop(run_name: str, runs_dir: Path | None) -> int:
    """Stop a run after the current update and save its state.

    Your own program, and one that does not react, gets SIGINT, SIGTERM and finally SIGKILL.
    """
    return ask(find_run(run_name, runs_dir), lambda number: Stop(id=number))


@click.command("next", epilog=RUN_HELP)
@run_argument
@runs_dir_option
def next_(run_name: str, runs_dir: Path | None) -> int:
    """Put a run that waits with --queue before the others.

    `memtop runs` shows their order. A run that waits with --after begins when the run that it names
    has ended. `memtop restart RUN` begins a waiting run at once, whatever else runs.
    """
    print_lines(begin_next(find_run(run_name, runs_dir)))
    return 0


def ask(folder: RunFolder, make: Callable[[int], Request]) -> int:
    """Send a request and print the final answer. If the supervisor died, start a new one first."""
    if needs_supervisor(folder):
        starting.revive(folder.path)
    print_lines(final_answer(folder, make).message)
    return 0


def final_answer(folder: RunFolder, make: Callable[[int], Request]) -> Answer:
    """Send a request to the run's supervisor and wait until it is done; progress goes to stderr."""
    try:
        return client.ask(folder, make, on_accepted=_report, until=Outcome.DONE)
    except (NotRunningError, ConnectionError) as error:
        state, kind = read_state(folder), type(make(0))
        if state.state.final and kind is not Restart:
            raise NotRunningError(explain.over(state.name, state.word, state.ended, kind)) from None
        if isinstance(error, NotRunningError):
            raise
        # The supervisor exited while we wrote to it. Without this, it would look like a broken
        # stdout.
        raise NotRunningError(
            f"the supervisor of run {folder.name!r} ended: memtop watch {folder.name} starts a new one"
        ) from None


def _report(answer: object) -> None:
    print_message(str(getattr(answer, "message", answer)))


@click.command(epilog=RUN_HELP)
@run_argument
@edit_options
@gpus_option
@click.option("--this-environment", "move", is_flag=True, help="give the program the environment of this shell from now on")
@click.option("--live", is_flag=True, help="change the running program at its next update, without a restart")
@headless_option
@detach_option
@runs_dir_option
def restart(
    run_name: str,
    preset: str | None,
    batch: int | str | None,
    accum: int | None,
    seq_len: int | None,
    assignments: tuple[str, ...],
    max_updates: int | None,
    gpus: str | None,
    move: bool,
    live: bool,
    headless: bool,
    detach: bool,
    runs_dir: Path | None,
) -> int:
    """Restart a run from its saved state, with other settings.

    A run in progress finishes its update and saves its state first. Your own program, if it is
    built on Hugging Face's Trainer or has a profile, gets --batch, --accum and --seq-len and
    resumes from its newest checkpoint. Any other gets SIGINT, and the same command starts again.
    --live refuses settings that need a restart. The program keeps the environment of the run's
    first start, except for what may be secret.
    """
    refuse_both(headless, detach)
    folder = find_run(run_name, runs_dir)
    if live and (move or headless or detach):
        raise UsageError("--live: does not restart the run; leave out --headless, --detach and --this-environment")
    values = assignments_of(assignments, batch=batch, accumulation=accum, seq_len=seq_len)
    if "python" in values:
        values["python"] = python_for(f"run {folder.name}: the built-in trainer", values["python"], "--set python").path
    chosen = None if gpus is None else _chosen_gpus(folder, gpus, values.get("device"))
    change = Change(preset=preset, assignments=values, gpus=chosen, max_updates=max_updates)
    if not live:
        with _moved_here(folder) if move else contextlib.nullcontext():
            return restart_with(folder, change, headless=headless, detach=detach)
    plan = planned(folder, change)
    answered = ask(folder, lambda number: Edit(id=number, change=change))
    say_peak(plan)
    return answered


@contextlib.contextmanager
def _moved_here(folder: RunFolder) -> Iterator[None]:
    """Let the run keep the environment of this shell instead, unless its restart is refused.
    RefusedError while its program, or a supervisor that would give it the former one, lives."""
    starting.let_leave(folder)
    refuse_living(folder)
    with moved_environment(folder, os.environ):
        yield


def _chosen_gpus(folder: RunFolder, text: str, device: str | None) -> str:
    """What `--gpus` selects for a run, as CUDA_VISIBLE_DEVICES."""
    from memtop.cli.gpus import choose_place, wanted

    settings = read_state(folder).settings
    if settings is None:
        advice = f"a new run may have others: memtop train --gpus {text} -- COMMAND"
        raise UsageError(f"--gpus {text}: this run's program is your own, and keeps its GPUs; {advice}")
    indices = wanted(text, folder.name) or []
    place = choose_place(indices, device or settings.device, folder.name, python=settings.python)
    if place.warning or place.pinned:
        print_message(f"memtop: {place.warning or f'trains {place.note}'}")
    return place.pinned or ",".join(indices)


def restart_with(folder: RunFolder, change: Change, *, headless: bool, detach: bool) -> int:
    """Restart the run and stay with it. A run that is over gets a new supervisor."""
    begun = time.time()
    if needs_supervisor(folder):
        starting.revive(folder.path)
    plan = planned(folder, change)
    if names := different(kept_environment(folder, os.environ), os.environ):
        print_message(f"memtop: the run keeps its environment; different from here: {names}")
    try:
        answer = final_answer(folder, lambda number: Restart(id=number, change=change))
        print_message(answer.message)
    except NotRunningError:
        again = _repeated_updates(folder, change) if detach else None
        # Without --detach the run's events say how its end moves.
        lines = list(meant(planned(folder, change), change, length=detach))
        foreseen = _of_own_program(folder, change)
        if missing := missing_here(folder, os.environ):
            print_message(f"memtop: not set here, and not kept, since they may be secret: {', '.join(missing)}")
        starting.start_supervisor(folder, change)
        if foreseen:
            print_message(f"memtop: {foreseen}")
        for line in (*([again] if again else []), *(f"memtop: {line}" for line in lines)):
            print_message(line)
    return stay(folder, begun, headless=headless, detach=detach, told=say_peak(plan))


def _repeated_updates(folder: RunFolder, change: Change) -> str | None:
    """Which updates the next attempt repeats. Without --detach the run's events report it."""
    state = read_state(folder)
    if state.settings is None or change.state_before is not None:
        return None
    return explain.done_again(state.updates, state.checkpoint)


def _of_own_program(folder: RunFolder, change: Change) -> str | None:
    """What the change means for the user's own program, which is not running now. A supervisor says
    it of one that runs."""
    state, file = read_state(folder), folder.state()
    if file is None or state.settings is not None:
        return None
    if file.grip is None:
        return explain.FROM_ZERO
    found = grip_checkpoints.newest_for(folder.path, file.grip, file.grip.since)
    grip = file.grip if state.program is None else file.grip.with_seen(state.program.knobs)
    meant = consequences(grip, knobs_of(change), found, state.updates, state.total_updates, ended=True)
    if found is None or not found.complete:
        return f"begins with the first update: {found.problem if found is not None else 'it has no checkpoint'}{meant}"
    where = "from the program's newest checkpoint" if found.updates is None else f"at update {found.updates}"
    return f"resumes {where}{meant}"


class Planned(NamedTuple):
    """A change before it is asked for."""

    state: RunState
    rows: tuple[Configuration, ...]
    at: Checkpoint | None
    """Where it resumes if the run is over."""
    after: Settings
    """The changed settings."""


def planned(folder: RunFolder, change: Change) -> Planned | None:
    """The run and the changed settings; None if they are not memtop's, or cannot be known here."""
    try:
        state = read_state(folder)
        with readable_ledger(folder):
            rows = tuple(read_configurations(folder.path))
        at = state.checkpoint
        if change.state_before is not None:
            at = checkpoints.newest_until(checkpoints.kept_states(folder.latest_state), change.state_before)
        after = edited(state.settings, change, at, rows)
    except (MemtopError, OSError):
        return None  # The supervisor refuses it and reports the reason, or rebuilds the ledger.
    return None if after is None else Planned(state, rows, at, after)


def meant(plan: Planned | None, change: Change, *, length: bool = True) -> Iterator[str]:
    """What the change means for a run that is over: for its end (`length`), and a warning if its
    settings ran out of memory. A supervisor says it of one that runs."""
    if plan is None:
        return
    state = plan.state
    moved = explain.length_change(state.settings, plan.after, plan.at, state.total_updates)
    moved = moved or kept_length(change, plan.after, plan.rows)
    yield from [moved] if moved and length else []
    found = risk(plan.after, failed_settings(plan.rows))
    yield from [found] if found else []


def say_peak(plan: Planned | None) -> int | None:
    """Print the foreseen peak of the changed settings, as at a launch, or why there is none; the
    number of their configuration if there is one. It reads the GPUs, which takes time if their
    driver is slow."""
    if plan is None or plan.after == plan.state.settings:
        return None
    from memtop.cli.gpus import sample

    machine, run = sample(), plan.state
    gpu, python = gpu_of(run, machine.gpus), "" if run.settings is None else run.settings.python
    learned = Learned() if gpu is None else learned_on(gpu_kind(gpu), python, without=run.folder)
    forecaster = forecaster_of(run, plan.rows, machine.gpus, machine.host, learned)
    found = forecaster.measured(plan.after) or forecaster.predicted(plan.after)
    for line in peak_words(forecaster, plan.after, found):
        print_message(f"memtop: {line}")
    if isinstance(found, str):
        return None  # The supervisor may still foresee it.
    return plan.rows[-1].number + 1 if plan.rows else 1


def peak_words(forecaster: Forecaster, after: Settings, found: Forecast | str) -> Iterator[str]:
    """The foreseen peak of these settings, or why there is none; if it is not safe, also the
    largest split with the same effective batch that is."""
    yield foreseen_text(found, on_gpu=forecaster.on_gpu)
    if isinstance(found, str) or found.fraction is None or found.fraction < EDGE_FROM:
        return
    best = forecaster.safe_split(after)
    if best is not None:
        yield split_text(best[0], best[1].peak_bytes)


@click.command(epilog=f"{RUN_HELP} N is the number of a configuration.")
@run_argument
@click.argument("number", required=False, type=WHOLE, metavar="[N]", shell_complete=completion.configurations)
@click.option("--state", is_flag=True, help="return to its newest saved state too; later states are moved aside, not deleted")
@click.option("--before-spike", is_flag=True, help="return to before the newest spike of the loss, without its samples")
@click.option("--accept-spike", is_flag=True, help="instead, go on after the spike, and delete the state before it")
@headless_option
@detach_option
@runs_dir_option
def rollback(
    run_name: str,
    number: int | None,
    state: bool,
    before_spike: bool,
    accept_spike: bool,
    headless: bool,
    detach: bool,
    runs_dir: Path | None,
) -> int:
    """Return a run to earlier settings, or to before a loss spike.

    `memtop show RUN` lists the configurations. Without N, it is the one before the present one.
    """
    refuse_both(headless, detach)
    if before_spike and (state or number is not None):
        raise UsageError("--before-spike: keeps the present settings; leave out N and --state")
    if accept_spike and (before_spike or state or number is not None):
        raise UsageError("--accept-spike: keeps the run as it is; leave out N, --state and --before-spike")
    folder = find_run(run_name, runs_dir)
    if accept_spike:
        return ask(folder, lambda request: AcceptSpike(id=request))
    change = before_spike_of(folder) if before_spike else change_to(folder, number, with_state=state)
    return restart_with(folder, change, headless=headless, detach=detach)


def before_spike_of(folder: RunFolder) -> Change:
    """The change that returns to before the newest spike of the loss; UsageError without one."""
    settings = read_state(folder).settings
    with readable_ledger(folder), reading_ledger(folder) as ledger:
        events = ledger.events(1, kind="spike") if ledger is not None else []
    spike = events[0].data if events else None
    if spike is None or settings is None:
        raise UsageError(f"--before-spike: the loss of run {folder.name!r} had no spike")
    if any(first <= spike["begin"] and spike["end"] <= end for first, end in settings.leave_out):
        raise UsageError(f"--before-spike: run {folder.name!r} leaves out the samples of its newest spike already")
    change = change_for(spike, settings.leave_out)
    if change is None:
        raise UsageError(f"--before-spike: no state from before update {spike['first_update']} was saved")
    kept = [state.updates for state in checkpoints.kept_states(folder.latest_state) if state.updates is not None]
    if not any(update <= spike["state_update"] for update in kept):
        there = ", ".join(map(str, kept)) or "none"
        raise UsageError(f"--before-spike: the state of update {spike['state_update']} is not kept any more (kept: {there})")
    return change


_OWN = "this run's program is your own, and memtop has never changed its settings: there are none to return to"


def change_to(folder: RunFolder, number: int | None, *, with_state: bool) -> Change:
    """The change that returns to configuration `number`; None: the newest one with other settings
    than the present.

    UsageError if there is no such configuration, or if nothing would change.
    """
    with readable_ledger(folder):
        rows = read_configurations(folder.path)
    there = _there(rows[-1].number) if rows else "it was never started"
    if number is None:
        if rows and rows[-1].settings is None and not any(row.knobs for row in rows):
            raise UsageError(_OWN)
        chosen = before_the_present(rows)
        if chosen is None:
            raise UsageError(f"run {folder.name!r}: no earlier configuration has other settings: {there}")
    else:
        chosen = next((row for row in rows if row.number == number), None)
        if chosen is None:
            raise UsageError(f"N {number}: run {folder.name!r} has no such configuration: {there}")
    if chosen.settings is None and (with_state or not any(row.knobs for row in rows)):
        raise UsageError(_OWN)
    if not with_state:
        if same_configuration(chosen, rows[-1]):
            raise UsageError(_nothing_to_do(folder.name, chosen.number, rows[-1].number))
        return Change(configuration=chosen.number)
    if chosen.until_update is None:
        raise UsageError(f"--state: configuration {chosen.number} is the present one; its state is the newest")
    return Change(configuration=chosen.number, state_before=chosen.until_update)


def _there(newest: int) -> str:
    return f"it has 1 to {newest}" if newest > 1 else "its first configuration is its only one"


def _nothing_to_do(run: str, number: int, present: int) -> str:
    what = "is the present one" if number == present else f"has the settings of the present one, {present}"
    return f"N {number}: configuration {number} of run {run!r} {what}; `memtop restart {run}` starts it again unchanged"
