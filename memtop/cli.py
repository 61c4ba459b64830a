"""The command line. Data goes to stdout, talk to stderr; textual and torch are loaded by nothing but a dashboard or a trainer.

Exit status: 0 done; 1 the run or the command failed; 2 wrong usage or bad input; 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from memtop import __version__, requesting
from memtop.options import (
    CSV_HELP,
    PATH,
    RUN_HELP,
    SECONDS,
    WHOLE,
    detach_option,
    edit_options,
    headless_option,
    json_option,
    run_argument,
    runs_dir_option,
)
from memtop.supervisor.errors import MemtopError, UsageError
from memtop.supervisor.recovery.policy import ON_OOM
from memtop.supervisor.run.record.folder import RunFolder, RunSpec, create_run, default_runs_dir
from memtop.supervisor.wire import Change, CheckpointNow, Edit, FreeCache, Stop, Try


@click.group(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train on GPUs and machines that are too small: see the memory, survive the shortage, resume without losing a sample.",
)
@click.option("--version", is_flag=True, help="print the version")
@click.pass_context
def app(context: click.Context, version: bool) -> None:
    if version:
        print(f"memtop {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


def run(arguments: list[str]) -> int:
    """Run one command; the exit status. Every error that a person can cause is one line on stderr."""
    try:
        result = app.main(_with_program(arguments), prog_name="memtop", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.UsageError as error:
        where = f"memtop {error.ctx.info_name}" if error.ctx and error.ctx.parent else "memtop"
        return _complain(f"{' '.join(error.format_message().split())} (see `{where} --help`)", 2)
    except MemtopError as error:
        return _complain(str(error), error.exit_status)
    except (KeyboardInterrupt, click.Abort):
        return 130
    except (BrokenPipeError, SystemExit):
        # The reader of our output (`| head`) has gone; nobody is left to tell. Inside a command click makes an exit of it, and
        # of nothing else where it does not stand alone.
        _drop_output()
        return 0
    except OSError as error:
        # Whatever was not foreseen: a file that this user may not read, a full disk, a folder that went away.
        try:
            sys.stdout.flush()
        except OSError:
            _drop_output()
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        return _complain(f"{where}{error.strerror or error or type(error).__name__}", 1)


def _drop_output() -> None:
    """What is still held for stdout goes nowhere, so that Python does not complain about it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str, status: int) -> int:
    print(f"memtop: {message}", file=sys.stderr)
    return status


_program: tuple[str, ...] = ()


def _with_program(arguments: list[str]) -> list[str]:
    """Cut off `-- COMMAND ARG ...`: the words after it are the user's own program, never ours to interpret."""
    global _program
    _program = ()
    if "--" in arguments and arguments[0] == "train":
        at = arguments.index("--")
        _program = tuple(arguments[at + 1 :])
        if not _program:
            raise UsageError("-- COMMAND: nothing follows the two dashes; give the program to run")
        return arguments[:at]
    return arguments


@app.command()
@click.argument("recipe", required=False, metavar="[RECIPE]")
@edit_options
@click.option("--gpus", metavar="0,1|free:N", help="which GPUs, or N free ones; one process each")
@click.option("--name", metavar="NAME", help="the run's name")
@click.option("--save-every", type=WHOLE, metavar="N", help="updates between saves")
@headless_option
@detach_option
@click.option("--on-oom", default="auto", metavar="auto|ask|stop", help="what to do when the run dies of memory [auto]")
@click.option("--fresh", is_flag=True, help="move a run of that name aside and start anew")
@runs_dir_option
def train(
    recipe: str | None,
    preset: str | None,
    batch: int | None,
    accum: int | None,
    seq_len: int | None,
    assignments: tuple[str, ...],
    max_updates: int | None,
    gpus: str | None,
    name: str | None,
    save_every: int | None,
    headless: bool,
    detach: bool,
    on_oom: str,
    fresh: bool,
    runs_dir: Path | None,
) -> int:
    """Train a recipe (or your own program: `memtop train -- COMMAND ARG ...`) and open the dashboard.

    Without a terminal it runs headless. Quitting the dashboard never stops the run.
    """
    from memtop import asking
    from memtop import gpus as gpu_choice
    from memtop.supervisor.run.clients.client import start_supervisor

    begun = time.time()
    _exclude(headless, detach)
    if on_oom not in ON_OOM:
        raise UsageError(f"--on-oom {on_oom}: give auto (go on smaller), ask (propose it) or stop (report it)")
    gpu_list = gpu_choice.wanted(gpus)
    own = _program
    edits = Change(max_updates=max_updates, assignments=_assigned(assignments, batch, accum, seq_len, save_every))
    if own:
        asking.refuse_for_own_program(recipe, preset, edits)
    settings = None if own else asking.settings_for(recipe or "first-run", preset, edits, gpu_list, fresh=fresh)
    where = runs_dir or default_runs_dir()
    spec = RunSpec(
        name=name or asking.free_name(where, Path(own[0]).stem if own else recipe or "first-run"),
        created=begun,
        settings=settings,
        command=own,
        cwd=str(Path.cwd()),
        gpus=None if gpu_list is None else ",".join(gpu_list),
        on_oom=on_oom,
        memtop_version=__version__,
    )
    folder = create_run(where, spec, fresh=fresh)
    start_supervisor(folder)
    return requesting.follow(folder, begun, headless=headless, detach=detach)


@app.command(epilog=RUN_HELP)
@click.argument("run_name", required=False, metavar="[RUN]")
@click.option("--pid", type=WHOLE, metavar="PID", help="follow this process and its children")
@click.option("--gpus", metavar="0,2|visible", help="only these GPUs, or those of CUDA_VISIBLE_DEVICES")
@click.option("--once", is_flag=True, help="print one snapshot and leave")
@click.option("--json", "as_json", is_flag=True, help="with --once or --follow: JSON documents and nothing else")
@click.option("--csv", "as_csv", is_flag=True, help=CSV_HELP)
@click.option("--follow", is_flag=True, help="with --json or --csv: go on, one document or sample every --interval")
@click.option("--count", type=WHOLE, metavar="N", help="with --follow: end after N samples")
@click.option("--prometheus", metavar="[HOST:]PORT", help="serve metrics there over HTTP [host 127.0.0.1]")
@click.option("--replay", is_flag=True, help="play RUN from its ledger: space pauses, < > speed, left right one minute")
@click.option("--interval", type=SECONDS, default=1.0, metavar="SECONDS", help="between two samples, 0.2 to 10 [1]")
@click.option("--read-only", is_flag=True, help="no actions, only looking")
@click.option("--demo", is_flag=True, help="invented numbers, to see the dashboard")
@runs_dir_option
def watch(
    run_name: str | None,
    pid: int | None,
    gpus: str | None,
    once: bool,
    as_json: bool,
    as_csv: bool,
    follow: bool,
    count: int | None,
    prometheus: str | None,
    replay: bool,
    interval: float,
    read_only: bool,
    demo: bool,
    runs_dir: Path | None,
) -> int:
    """Attach the dashboard to a run (the newest living one by default), or watch the machine."""
    from memtop import opening, watching

    asked = watching.Asked(
        runs_dir=runs_dir or default_runs_dir(),
        run_name=run_name,
        pid=pid,
        gpus=gpus,
        once=once,
        form="json" if as_json else "csv" if as_csv else None,
        follow=follow,
        count=count,
        prometheus=prometheus,
        interval=interval,
        read_only=read_only,
    )
    if as_json and as_csv:
        raise UsageError("--json and --csv: give one of them")
    asked.check(demo=demo, replay=replay)
    if replay:
        return opening.open_replay(asked.runs_dir, str(run_name), interval)
    return opening.open_demo(interval) if demo else watching.command(asked)


@app.command(epilog=RUN_HELP)
@run_argument
@runs_dir_option
def free(run_name: str, runs_dir: Path | None) -> int:
    """Free the training process's cache (gc, torch's empty_cache, malloc_trim inside it) and say what came back."""
    return requesting.ask(_find(run_name, runs_dir), lambda number: FreeCache(id=number))


@app.command(epilog=RUN_HELP)
@run_argument
@runs_dir_option
def checkpoint(run_name: str, runs_dir: Path | None) -> int:
    """Write train_latest_state after the present update."""
    return requesting.ask(_find(run_name, runs_dir), lambda number: CheckpointNow(id=number))


@app.command(epilog=RUN_HELP)
@run_argument
@runs_dir_option
def stop(run_name: str, runs_dir: Path | None) -> int:
    """Stop a run gracefully: finish the update, save, exit; signals follow only if that does not help."""
    return requesting.ask(_find(run_name, runs_dir), lambda number: Stop(id=number))


@app.command(epilog=RUN_HELP)
@run_argument
@edit_options
@click.option("--live", is_flag=True, help="change it while it runs, at the next update; refused where that cannot be")
@headless_option
@detach_option
@runs_dir_option
def restart(
    run_name: str,
    preset: str | None,
    batch: int | None,
    accum: int | None,
    seq_len: int | None,
    assignments: tuple[str, ...],
    max_updates: int | None,
    live: bool,
    headless: bool,
    detach: bool,
    runs_dir: Path | None,
) -> int:
    """Restart from train_latest_state, with edits; a live run is stopped gracefully first."""
    _exclude(headless, detach)
    folder = _find(run_name, runs_dir)
    change = Change(preset=preset, assignments=_assigned(assignments, batch, accum, seq_len), max_updates=max_updates)
    if not live:
        return requesting.restart(folder, change, headless=headless, detach=detach)
    if headless or detach:
        raise UsageError("--live: the run goes on as it is followed now; leave --headless and --detach out")
    return requesting.ask(folder, lambda number: Edit(id=number, change=change))


@app.command(epilog=RUN_HELP)
@run_argument
@click.argument("number", required=False, type=WHOLE, metavar="[N]")
@click.option("--state", is_flag=True, help="to its newest kept state, too; later ones are moved aside, not deleted")
@headless_option
@detach_option
@runs_dir_option
def rollback(run_name: str, number: int | None, state: bool, headless: bool, detach: bool, runs_dir: Path | None) -> int:
    """Return to the settings of an earlier configuration N of RUN (`memtop show RUN` lists them), by default the one before."""
    from memtop.rolling_back import change_to

    _exclude(headless, detach)
    folder = _find(run_name, runs_dir)
    return requesting.restart(folder, change_to(folder, number, with_state=state), headless=headless, detach=detach)


@app.command(epilog=RUN_HELP)
@run_argument
@json_option
@click.option("--try", "try_it", is_flag=True, help="try the first proposal: measure, change, measure, keep or undo")
@runs_dir_option
def advise(run_name: str, as_json: bool, try_it: bool, runs_dir: Path | None) -> int:
    """Say what a run spends its time on, what would make it faster, what must not be done now, and what memory grows."""
    from memtop import advising

    folder = _find(run_name, runs_dir)
    if not try_it:
        return advising.print_advice(folder, as_json=as_json)
    return advising.print_trial(requesting.asked(folder, lambda number: Try(id=number)).data, as_json=as_json)


@app.command()
@json_option
@runs_dir_option
def runs(as_json: bool, runs_dir: Path | None) -> int:
    """List the runs, newest last."""
    from memtop import looking

    return looking.print_runs(runs_dir or default_runs_dir(), as_json=as_json)


@app.command(epilog=RUN_HELP)
@run_argument
@json_option
@click.option("--metrics", is_flag=True, help="with --json: one row per update of the final history")
@runs_dir_option
def show(run_name: str, as_json: bool, metrics: bool, runs_dir: Path | None) -> int:
    """Tell all about one run: attempts, settings, position, checkpoint."""
    from memtop import looking

    if metrics and not as_json:
        raise UsageError("--metrics: goes with --json")
    return looking.print_run(_find(run_name, runs_dir), as_json=as_json, metrics=metrics)


@app.command(epilog=RUN_HELP)
@run_argument
@click.argument("out", type=PATH, metavar="DIR")
@click.option("--adapter", is_flag=True, help="LoRA: the adapter alone, not merged into its base")
@click.option("--merge", is_flag=True, help="QLoRA: merged into its base, out of its 4 bits")
@runs_dir_option
def export(run_name: str, out: Path, adapter: bool, merge: bool, runs_dir: Path | None) -> int:
    """Write the trained model in Hugging Face's format, from the run's newest whole state, and print the folder."""
    from memtop.exporting import command

    if adapter and merge:
        raise UsageError("--adapter and --merge: give one of them")
    return command(_find(run_name, runs_dir), out, adapter=adapter, merge=merge)


@app.command()
@json_option
@click.option("--kill", type=WHOLE, multiple=True, metavar="PID", help="end this process; repeatable")
@runs_dir_option
def strays(as_json: bool, kill: tuple[int, ...], runs_dir: Path | None) -> int:
    """List the processes that hold GPU memory, and end those you choose (your own only)."""
    from memtop import straying

    return straying.command(runs_dir or default_runs_dir(), as_json=as_json, kill=list(kill))


@app.command()
@click.argument("log", required=False, metavar="[LOG | -]")
@click.option("--exit-code", type=WHOLE, metavar="N", help="the program's exit status; negative or 128 + N for signal N")
@json_option
def diagnose(log: str | None, exit_code: int | None, as_json: bool) -> int:
    """Say what ended a training program, from its log: any program's, of any length."""
    from memtop.diagnosing import command

    return command(log, exit_code, as_json=as_json)


@app.command()
@click.argument("name", required=False, metavar="[NAME]")
@json_option
def presets(name: str | None, as_json: bool) -> int:
    """List the presets: what each makes of the newest living run, or of the recipe it is meant for."""
    from memtop.preset_list import print_presets

    return print_presets(default_runs_dir(), name, as_json=as_json)


@app.command()
@json_option
@runs_dir_option
def doctor(as_json: bool, runs_dir: Path | None) -> int:
    """Check what memtop finds on this machine, and say what to do about what is missing."""
    from memtop.doctor import command

    return command(runs_dir or default_runs_dir(), as_json=as_json)


def _find(reference: str, runs_dir: Path | None) -> RunFolder:
    from memtop.finding import find_run

    return find_run(reference, runs_dir or default_runs_dir())


def _exclude(headless: bool, detach: bool) -> None:
    if headless and detach:
        raise UsageError("--headless and --detach: give one of them")


def _assigned(
    texts: Sequence[str], batch: int | None, accum: int | None, seq_len: int | None, save_every: int | None = None
) -> dict[str, str]:
    """The settings that the options name, as text. An option of its own wins over the same name after `--set`."""
    numbers = {"batch": batch, "accumulation": accum, "seq_len": seq_len, "save_every": save_every}
    options = {name: str(number) for name, number in numbers.items() if number is not None}
    pairs = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not sign or not key:
            raise UsageError(f"--set {text!r}: give KEY=VALUE")
        pairs[key] = value
    return {**options, **pairs, **options}
