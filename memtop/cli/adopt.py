"""`memtop adopt PID`: ends a training that memtop did not start, and starts it again as a run, from
its newest checkpoint."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import click
from msgspec.structs import replace

from memtop import __version__
from memtop.cli.configuration import default_runs_dir
from memtop.cli.options import SECONDS, WHOLE, detach_option, headless_option, refuse_both, runs_dir_option
from memtop.cli.output import print_message
from memtop.presets.program_profiles import load_profiles
from memtop.supervisor import units
from memtop.supervisor.errors import RefusedError, RunFolderError, UsageError
from memtop.supervisor.monitor.processes.proc import ProcessId, is_alive
from memtop.supervisor.monitor.processes.signals import ProcessGone, signal_process
from memtop.supervisor.observed.adoption import Adoption, Hold, about, adoption_of, hold_of
from memtop.supervisor.observed.shown import line_of
from memtop.supervisor.run.processes.environment import different, keep_environment
from memtop.supervisor.run.processes.members import refuse_used_path
from memtop.supervisor.run.record.folder import RunFolder, RunSpec, create_run
from memtop.supervisor.run.record.profile_checkpoints import being_saved, place_of
from memtop.supervisor.run.starting import start_supervisor
from memtop.supervisor.run.stop_ladder import MOST_ASIDE_SECONDS
from memtop.supervisor.wire import Checkpoint

_LOOK_SECONDS = 0.1


@click.command()
@click.argument("pid", type=WHOLE, metavar="PID")
@click.option("--yes", is_flag=True, help="do not ask; needed without a terminal")
@click.option("--from-zero", is_flag=True, help="start it again from its beginning, where it cannot resume")
@click.option("--wait", "seconds", type=SECONDS, default=60.0, metavar="SECONDS", help="how long it may take to end [60]")
@click.option("--name", metavar="NAME", help="the name of the run")
@headless_option
@detach_option
@click.option(
    "--on-oom", type=click.Choice(("auto", "ask", "stop")), default="ask", help="what to do when memory runs out [ask]"
)
@runs_dir_option
def adopt(
    pid: int,
    yes: bool,
    from_zero: bool,
    seconds: float,
    name: str | None,
    headless: bool,
    detach: bool,
    on_oom: str,
    runs_dir: Path | None,
) -> int:
    """Restart a training that memtop did not start, as a run of memtop.

    PID is any process of it. The program continues from its newest complete checkpoint, if it is
    built on Hugging Face's Trainer, or if a profile says how it resumes. memtop first shows the
    command, the folder and the environment that it will use, and asks. It sends SIGINT, or what the
    profile says, and waits until all processes have ended. It never sends SIGKILL.
    """
    from memtop.cli.foreground import stay
    from memtop.cli.train import step_pattern
    from memtop.supervisor.run.starting import free_name

    begun = time.time()
    refuse_both(headless, detach)
    adoption, seen = adoption_of(pid)
    pattern = step_pattern(adoption.environment.get("MEMTOP_STEP") or os.environ.get("MEMTOP_STEP"))
    where = runs_dir or default_runs_dir()
    run = name or free_name(where, Path(seen.name).stem)
    if os.path.lexists(where / run):
        raise UsageError(f"--name {run}: {where / run} exists; give another name")
    refuse_used_path(where / run)
    spec = RunSpec(
        name=run,
        created=begun,
        settings=None,
        command=adoption.command,
        cwd=adoption.folder,
        on_oom=on_oom,
        step_pattern=pattern,
        memtop_version=__version__,
    )
    held = None if from_zero else _hold(adoption, pid, spec, where)
    print_message(line_of(seen))
    for line in _plan(adoption, spec, where, held, seen.updates):
        print_message(line)
    if not _agreed("End it and start it again?", yes=yes):
        print_message("memtop: nothing was changed")
        return 1
    _rehearse(where, spec)
    number = _signal(adoption, held)
    _wait_for_save(adoption.processes[0], held, number)
    _end(adoption, number, seconds, yes=yes)
    # It may have saved once more, so look again.
    if held is not None:
        held = _hold(adoption, pid, spec, where)
        spec = replace(spec, grip=held.grip, profile=held.grip.profile, profile_why=held.profile_why)
    return stay(_start(where, spec, adoption), begun, headless=headless, detach=detach)


def _hold(adoption: Adoption, given: int, spec: RunSpec, where: Path) -> Hold:
    """How it resumes. RefusedError if it cannot. `given`: the process that the user named."""
    found = hold_of(adoption, spec, where / spec.name, load_profiles().values())
    if isinstance(found, str):
        pid = adoption.processes[0].pid
        state = "" if is_alive(adoption.processes[0]) else "; it has ended, and nothing was started"
        refusal = f"PID {pid}: {found}; --from-zero starts it again from its beginning{state}"
        raise RefusedError(about(given, pid, refusal))
    return found


def _plan(adoption: Adoption, spec: RunSpec, where: Path, held: Hold | None, reached: int | None) -> list[str]:
    """What will be done, and what memtop cannot know."""
    name = _signal(adoption, held).name
    lines = [
        f"  ends      pid {', '.join(str(process.pid) for process in adoption.processes)}, with {name}",
        f"  command   {shlex.join(adoption.command)}",
        f"  folder    {adoption.folder}",
        f"  variables {_variables(adoption.environment)}",
        f"  run       {spec.name} in {where}; its output goes to the run's log",
        f"  from      {_origin(None if held is None else held.checkpoint, reached)}",
        "  not known what the program, or a script before it, has changed since its start; its input, which will be empty",
    ]
    return [*lines, *(f"  note      {note}" for note in (*(held.notes if held is not None else ()), *adoption.notes))]


def _signal(adoption: Adoption, held: Hold | None) -> signal.Signals:
    return signal.Signals(adoption.signal_number if held is None else held.signal_of(adoption))


def _origin(checkpoint: Checkpoint | None, reached: int | None) -> str:
    if checkpoint is None:
        return "zero: everything that it has trained is done again" + ("" if reached is None else f" ({reached} updates)")
    text = f"update {units.count(checkpoint.updates)}: {checkpoint.path}"
    if reached is None or checkpoint.updates is None:
        return f"{text}; what it has done since is done again, unless it saves when it ends"
    again = max(0, reached - checkpoint.updates)
    if again == 1:
        return f"{text}; 1 update is done again, unless it saves when it ends"
    return f"{text}; {again} updates are done again, unless it saves when it ends" if again else text


def _variables(environment: dict[str, str]) -> str:
    """What differs from the caller's environment."""
    text, names = f"the {len(environment)} of the process", different(environment, os.environ)
    return f"{text}; different from here: {names}" if names else text


def _agreed(question: str, *, yes: bool) -> bool:
    if yes:
        return True
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError("adopt: there is no terminal to ask on: give --yes to do what is shown")
    return click.confirm(question, default=False, err=True)


def _rehearse(where: Path, spec: RunSpec) -> None:
    """Create such a run in a folder of its own, and delete that: what prevents it is known before
    the program is ended."""
    is_new = not where.exists()
    try:
        where.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".adopt-", dir=where) as folder:
            create_run(Path(folder), spec, fresh=False)
        if is_new:
            with contextlib.suppress(OSError):  # another run has begun there
                where.rmdir()
    except OSError as error:
        raise RunFolderError(f"{where}: cannot be written to: {error.strerror}; choose another --runs-dir") from None


def _wait_for_save(leader: ProcessId, held: Hold | None, number: signal.Signals) -> None:
    """A signal in the middle of a save would leave it broken, as of a run: see `StopLadder`."""
    place = None if held is None else place_of(held.grip)
    told, until = False, time.monotonic() + MOST_ASIDE_SECONDS
    while place is not None and is_alive(leader) and time.monotonic() < until:
        if (saving := being_saved(place)) is None:
            return
        if not told:
            print_message(f"the program is saving {saving}: {number.name} follows when it has saved")
        told = True
        time.sleep(_LOOK_SECONDS)


def _end(adoption: Adoption, number: signal.Signals, seconds: float, *, yes: bool) -> None:
    """End the program gently; RefusedError if it does not end."""
    leader = adoption.processes[0]
    _ask_to_end(leader, number)
    left = _wait(adoption.processes, seconds)
    can_ask = not yes and number != signal.SIGTERM
    if left and can_ask and _agreed(f"It has not ended in {seconds:g} s. Send SIGTERM?", yes=False):
        for process in left:
            _ask_to_end(process, signal.SIGTERM)
        left = _wait(left, seconds)
    if left:
        pids = ", ".join(str(process.pid) for process in left)
        raise RefusedError(
            f"pid {pids}: has not ended in {seconds:g} s; nothing was started. End it yourself, or give more --wait"
        )


def _ask_to_end(process: ProcessId, number: signal.Signals) -> None:
    try:
        signal_process(process, number)
    except ProcessGone:
        return


def _wait(processes: Sequence[ProcessId], seconds: float) -> list[ProcessId]:
    """Those that have not ended in time."""
    deadline = time.monotonic() + seconds
    while left := [process for process in processes if is_alive(process)]:
        if time.monotonic() >= deadline:
            break
        time.sleep(_LOOK_SECONDS)
    return left


def _start(where: Path, spec: RunSpec, adoption: Adoption) -> RunFolder:
    folder = create_run(where, spec, fresh=False)
    own = {name: value for name, value in os.environ.items() if name.startswith("MEMTOP_")}
    keep_environment(folder, adoption.environment)
    start_supervisor(folder, environment={**adoption.environment, **own})
    return folder
