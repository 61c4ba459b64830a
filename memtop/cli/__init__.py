"""The command line. Data goes to stdout, messages go to stderr.

Exit status: 0 done; 1 the run or the command failed; 2 wrong usage or bad input; 130 interrupted.

Each command is defined in a module of this package, which is imported only when the command is
called: `memtop --help` loads none of them.
"""

from __future__ import annotations

import difflib
import gc
import importlib
import os
import sys

import click

from memtop import __version__
from memtop.cli.language import HelpContext, chosen_language, without_language
from memtop.cli.output import discard, print_lines, print_message
from memtop.supervisor import import_asyncio_without_tls, language
from memtop.supervisor.errors import MemtopError, UsageError
from memtop.supervisor.language import tr

COMMAND_GROUPS = {
    "Train": {
        "train": "Train a recipe or your own program and open the dashboard.",
        "checkpoint": "Save the training state after the current update.",
        "free": "Free the cached memory of the training processes.",
        "next": "Put a run that waits with --queue before the others.",
        "stop": "Stop a run after the current update and save its state.",
        "export": "Write the trained model in Hugging Face's format.",
        "sample": "Print what the model of a run writes after a prompt.",
        "notify": "Send the notifications of a run, or a test message.",
    },
    "Watch": {
        "watch": "Open the dashboard on a run or on the machine.",
        "runs": "List the runs, the newest first.",
        "show": "Show one run: attempts, settings, progress, saved state.",
        "compare": "Compare runs: results, speed, memory, settings that differ.",
        "report": "Write a run as one HTML page, to keep or to share.",
    },
    "Recover": {
        "restart": "Restart a run from its saved state, with other settings.",
        "rollback": "Return a run to earlier settings, or to before a loss spike.",
        "adopt": "Restart a training that memtop did not start, as a run of memtop.",
        "diagnose": "Find out from its log what ended a training program.",
        "strays": "List the processes that hold GPU memory, and end your own.",
    },
    "Inspect": {
        "advise": "Show what limits a run's speed and what would make it faster.",
        "config": "Show each value of the configuration and where it comes from.",
        "doctor": "Check what memtop finds on this machine.",
        "plan": "Foresee the GPU and the host memory of a run before it starts.",
        "presets": "List the presets, what each would change, and its peak of memory.",
    },
}
"""Each command and the first sentence of its help, in the groups that `memtop --help` shows."""
COMMANDS = {name: summary for group in COMMAND_GROUPS.values() for name, summary in group.items()}
EXAMPLES = {
    "memtop train first-run": "train a small recipe that needs no GPU",
    "memtop train -- python train.py": "train your own program",
    "memtop restart my-run": "restart the run my-run from its saved state",
}
"""Command lines that `memtop --help` shows."""
_MODULES = {
    "show": "runs",
    "sample": "export",
    **dict.fromkeys(("checkpoint", "free", "next", "restart", "rollback", "stop"), "requests"),
}
"""The module of a command, if it does not have the command's name."""
_FUNCTIONS = {"next": "next_"}
"""The function of a command, if it does not have the command's name."""


class LazyGroup(click.Group):
    """Commands that are imported when they are called."""

    context_class = HelpContext

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        if cmd_name == "watch":
            import_asyncio_without_tls()
        module = importlib.import_module(f"memtop.cli.{_MODULES.get(cmd_name, cmd_name)}")
        gc.enable()  # see `__main__`
        command: click.Command = getattr(module, _FUNCTIONS.get(cmd_name, cmd_name))
        command.context_class = HelpContext
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        near = difflib.get_close_matches(args[0], COMMANDS, n=1)
        if near and args[0] not in COMMANDS and not ctx.resilient_parsing:
            ctx.fail(f"No such command {args[0]!r}; did you mean {near[0]}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands in their groups, without importing them, and then the examples."""
        for title, commands in COMMAND_GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(list(commands.items()))
        with formatter.section("Examples"):
            formatter.write_dl(list(EXAMPLES.items()), col_max=40)


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train language models on GPUs and machines that are too small: watch the memory, survive "
    "running out of it, and resume without losing a sample.",
)
@click.option("--version", is_flag=True, help="print the version")
@click.option("--lang", metavar="en|zh", help="the language of screen and command line [that of the locale]")
@click.pass_context
def app(context: click.Context, version: bool, lang: str | None) -> int | None:
    if version:
        print_lines(f"memtop {__version__}")
    elif context.invoked_subcommand is None:
        if sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
            import_asyncio_without_tls()
            from memtop.cli.dashboard import open_runs

            return open_runs()
        print_lines(*context.get_help().splitlines())
    return None


def run(arguments: list[str]) -> int:
    """Run one command and return the exit status. An error of the user prints one line to
    stderr."""
    try:
        if wanted := os.environ.get("_MEMTOP_COMPLETE"):
            from memtop.cli.completion import answer

            print_lines(*answer(app, wanted), own=False)
            return 0
        arguments, program = _without_program(arguments)
        arguments, given = without_language(arguments)
        language.use(given or chosen_language())
        result = app.main(arguments, prog_name="memtop", standalone_mode=False, obj=program)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.UsageError as error:
        where = f"memtop {error.ctx.info_name}" if error.ctx and error.ctx.parent else "memtop"
        return _complain(f"{tr(error.format_message())} (see `{where} --help`)", 2)
    except MemtopError as error:
        return _complain(str(error), error.exit_status)
    except UnicodeEncodeError as error:
        # Python keeps such bytes of arguments and paths as surrogates.
        return _complain(f"{error.object!r}: has bytes that are not UTF-8; rename it, or use another folder", 2)
    except (KeyboardInterrupt, click.Abort):
        return 130
    except (BrokenPipeError, SystemExit):
        # The reader of our output has gone, as in `| head`. Inside a command click turns a broken
        # pipe into SystemExit, and raises SystemExit for nothing else without standalone mode.
        discard(sys.stdout)
        return 0
    except OSError as error:
        # A file that this user cannot read, a full disk, a folder that was removed.
        try:
            sys.stdout.flush()
        except OSError:
            discard(sys.stdout)
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        return _complain(f"{where}{error.strerror or error or type(error).__name__}", 1)


def _complain(message: str, status: int) -> int:
    print_message(f"memtop: {message}")
    return status


def _without_program(arguments: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Split `train ... -- COMMAND ARG ...`: the words after `--` are the user's program."""
    if "--" not in arguments or arguments[0] not in ("train", "plan"):
        return arguments, ()
    at = arguments.index("--")
    program = tuple(arguments[at + 1 :])
    if not program:
        raise UsageError("-- COMMAND: nothing follows the two dashes; give the program to run")
    return arguments[:at], program
