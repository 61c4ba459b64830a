"""`memtop export` and `memtop sample`: the trained model as files, and what it writes. A child
process does the work, because it loads torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from memtop.cli.common import find_run
from memtop.cli.options import PATH, RUN_HELP, run_argument, runs_dir_option
from memtop.cli.output import print_lines, print_message
from memtop.presets.schema import Settings
from memtop.supervisor.errors import MemtopError, UsageError
from memtop.supervisor.interpreters import environment_of
from memtop.supervisor.run.processes.attempt import require_python
from memtop.supervisor.run.record.folder import RunFolder, read_json


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
    form = [*(["--adapter"] if adapter else []), *(["--merge"] if merge else [])]
    return _from_state(find_run(run_name, runs_dir), "export", "memtop.train.export", ["--out", str(out), *form])


@click.command(epilog=RUN_HELP)
@run_argument
@click.argument("prompt", metavar="[PROMPT]", required=False)
@click.option(
    "--max-new-tokens", type=click.IntRange(1, 1 << 16), default=64, metavar="N", help="the longest text, in tokens [64]"
)
@click.option(
    "--gpu",
    metavar="N|cpu",
    help="where it computes [the first GPU of the run if it has room and is not in use, otherwise the CPU]",
)
@click.option("--temperature", type=click.FloatRange(0, 100), default=0.0, metavar="T", help="0: the most probable tokens [0]")
@click.option("--seed", type=click.IntRange(0, (1 << 31) - 1), default=0, metavar="S", help="of the random choices [0]")
@runs_dir_option
def sample(
    run_name: str,
    prompt: str | None,
    max_new_tokens: int,
    gpu: str | None,
    temperature: float,
    seed: int,
    runs_dir: Path | None,
) -> int:
    """Print what the model of a run writes after a prompt.

    It reads the run's newest complete state, while the run goes on or after it. Without PROMPT, it
    prints each prompt of the run's settings (sample.prompts) and the text for it. A GPU on which
    another program computes is used only if you name it.
    """
    from memtop.cli.gpus import place_to_read

    folder = find_run(run_name, runs_dir)
    settings = _settings_of(folder, "sample")[1]
    if prompt is None and not settings.sample.prompts:
        change = f"memtop restart {folder.name} --set sample.prompts=FILE --set sample.every=N"
        raise UsageError(f"PROMPT: not given, and run {folder.name} has no prompts in its settings: give one, or `{change}`")
    place = place_to_read(settings, gpu)
    print_message(f"memtop: {place.words}")
    numbers = [f"--max-new-tokens={max_new_tokens}", f"--temperature={temperature}", f"--seed={seed}"]
    given = f"--prompts={settings.sample.prompts}" if prompt is None else f"--prompt={prompt}"
    words = [given, *numbers, f"--device={'cpu' if place.visible is None else 'cuda'}"]
    environment = {} if place.visible is None else {"CUDA_VISIBLE_DEVICES": place.visible}
    return _from_state(folder, "sample", "memtop.train.write", words, environment)


def _settings_of(folder: RunFolder, what: str) -> tuple[Path, Settings]:
    """The file with the newest settings of the run, and these; UsageError if it has none."""
    if folder.spec().settings is None:
        raise UsageError(f"RUN {folder.name}: is your own program: memtop does not know how it saves its model")
    written = sorted(folder.path.glob("attempts/*/settings.json"))
    if not written:
        raise UsageError(f"RUN {folder.name}: was never started: there is nothing to {what}")
    return written[-1], read_json(written[-1], Settings)


def _from_state(
    folder: RunFolder, what: str, module: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> int:
    """Run a module of the trainer that reads a run's saved state; return its exit status."""
    written, settings = _settings_of(folder, what)
    require_python(folder, settings)
    where = ("--settings", str(written), "--state-dir", str(folder.latest_state))
    command = [settings.python or sys.executable, "-m", module, *where, *arguments]
    status = _printed(command, {**environment_of(settings.python), **(environment or {})})
    if status < 0:
        raise MemtopError(
            f"{what} of {folder.name}: killed by signal {-status}; 9 means that host memory ran out: the model needs "
            "4 bytes per parameter"
        )
    return status


def _printed(command: Sequence[str], environment: dict[str, str]) -> int:
    """Run the command and print what it prints, cleaned: messages as they come, then the result."""
    with subprocess.Popen(
        command,
        env=environment,
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
        print_lines(*child.stdout.read().splitlines(), own=False)
    return child.returncode
