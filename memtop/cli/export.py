"""`memtop export`: writes the trained model. A child process does the work, because it loads
torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from memtop.cli.common import find_run
from memtop.cli.options import PATH, RUN_HELP, run_argument, runs_dir_option
from memtop.cli.output import print_lines, print_message
from memtop.presets.schema import Settings
from memtop.supervisor.errors import MemtopError, UsageError
from memtop.supervisor.interpreters import TRAINER_PATH, is_own
from memtop.supervisor.run.processes.attempt import require_python
from memtop.supervisor.run.record.folder import read_json


@click.command(epilog=RUN_HELP)
@run_argument
@click.argument("out", type=PATH, metavar="DIR")
@click.option("--adapter", is_flag=True, help="LoRA: write only the adapter, not merged into its base model")
@click.option("--merge", is_flag=True, help="QLoRA: merge the adapter into its base model, no longer in 4 bits")
@runs_dir_option
def export(run_name: str, out: Path, adapter: bool, merge: bool, runs_dir: Path | None) -> int:
    """Write the trained model in Hugging Face's format.

    It reads the run's newest complete state and prints the folder that it wrote. For QLoRA runs it
    writes the adapter only.
    """
    if adapter and merge:
        raise UsageError("--adapter and --merge: give one of them")
    folder = find_run(run_name, runs_dir)
    if folder.spec().settings is None:
        raise UsageError(f"RUN {folder.name}: is your own program: memtop does not know how it saves its model")
    written = sorted(folder.path.glob("attempts/*/settings.json"))
    if not written:
        raise UsageError(f"RUN {folder.name}: was never started: there is nothing to export")
    settings = read_json(written[-1], Settings)
    require_python(folder, settings)
    where = ("--settings", str(written[-1]), "--state-dir", str(folder.latest_state), "--out", str(out))
    form = [*(["--adapter"] if adapter else []), *(["--merge"] if merge else [])]
    command = [settings.python or sys.executable, "-m", "memtop.train.export", *where, *form]
    status = _printed(command, [] if is_own(settings.python) else [str(TRAINER_PATH)])
    if status < 0:
        raise MemtopError(
            f"export of {folder.name}: killed by signal {-status}; 9 means that host memory ran out: the model needs "
            "4 bytes per parameter"
        )
    return status


def _printed(command: Sequence[str], python_path: Sequence[str]) -> int:
    """Run the command and print what it prints, cleaned: messages as they come, then the result.

    `python_path` comes before the PYTHONPATH of the environment.
    """
    inherited = os.environ.get("PYTHONPATH")
    paths = os.pathsep.join([*python_path, *([inherited] if inherited else [])])
    with subprocess.Popen(
        command,
        # A folder named `tokenizers` in the current directory must not shadow the library.
        env={**os.environ, "PYTHONSAFEPATH": "1", **({"PYTHONPATH": paths} if paths else {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        for line in child.stderr:
            print_message(line.rstrip("\n"))
        print_lines(*child.stdout.read().splitlines())
    return child.returncode
