"""Requests to the supervisor of a run: `memtop free`, `memtop checkpoint` and `memtop stop`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import click

from memtop.cli.lookup import find_run
from memtop.cli.options import RUN_HELP, run_argument, runs_dir_option
from memtop.supervisor.errors import NotRunningError
from memtop.supervisor.run.clients import client
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.run.view import needs_supervisor
from memtop.supervisor.wire import Answer, CheckpointNow, FreeCache, Outcome, Request, Stop


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

    If the program does not react, it gets SIGINT, SIGTERM and finally SIGKILL.
    """
    return ask(find_run(run_name, runs_dir), lambda number: Stop(id=number))


def ask(folder: RunFolder, make: Callable[[int], Request]) -> int:
    """Send a request and print the final answer. If the supervisor died, start a new one first."""
    if needs_supervisor(folder):
        client.revive(folder.path)
    print(final_answer(folder, make).message)
    return 0


def final_answer(folder: RunFolder, make: Callable[[int], Request]) -> Answer:
    """Send a request to the run's supervisor and wait until it is done; progress goes to stderr."""
    try:
        return client.ask(folder, make, on_accepted=_report, until=Outcome.DONE)
    except ConnectionError:
        # The supervisor exited while we wrote to it. Without this, it would look like a broken
        # stdout.
        raise NotRunningError(
            f"the supervisor of run {folder.name!r} ended: memtop watch {folder.name} starts a new one"
        ) from None


def _report(answer: object) -> None:
    print(getattr(answer, "message", answer), file=sys.stderr)
