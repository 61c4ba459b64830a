"""Starts one attempt: builds its command and environment, writes both down, and hands them to the shim."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from memtop.presets.schema import Settings
from memtop.supervisor.errors import RunFolderError
from memtop.supervisor.monitor.processes.table import all_pids
from memtop.supervisor.run.post_mortem.error_files import error_file_environment
from memtop.supervisor.run.processes.process import members
from memtop.supervisor.run.record.folder import RunFolder, RunSpec, write_json

_PACKAGE = Path(__file__).resolve().parents[3]
# On PYTHONPATH, its sitecustomize brings the agent into the training process. A path, not an import: the supervisor
# does not know the trainer.
_AGENT_SITE = _PACKAGE / "train" / "agent" / "site"
_COMMAND = "command.json"
_SHIM = Path(__file__).with_name("shim.py")


class LaunchCommand(msgspec.Struct, frozen=True, kw_only=True):
    """`attempts/NNNN/command.json`: exactly what was started."""

    argv: tuple[str, ...]
    cwd: str
    environment: dict[str, str]
    """Additions to the supervisor's own environment."""


def launch(
    folder: RunFolder, number: int, spec: RunSpec, settings: Settings | None, socket: Path, *, allocator: str = ""
) -> int:
    """Start attempt `number` under a shim of its own; returns the shim's pid. The shim is a child of this process.

    `allocator`: options for a program of the user's own; the built-in trainer's are in its settings.
    """
    attempt = folder.attempt(number)
    try:
        attempt.mkdir(parents=True)
    except OSError as error:
        raise RunFolderError(f"{attempt}: cannot be created: {error.strerror}") from None
    if settings is not None:
        write_json(attempt / "settings.json", settings)
    write_json(
        attempt / _COMMAND,
        LaunchCommand(
            argv=_argv(folder, attempt, spec, settings),
            cwd=spec.cwd,
            environment=_environment(folder, number, spec, settings.allocator if settings else allocator, socket),
        ),
    )
    try:
        with folder.supervisor_log.open("ab") as log:
            shim = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_SHIM), str(attempt)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
    except OSError as error:
        raise RunFolderError(f"attempt {number} cannot be started: {error}") from None
    # The supervisor waits for it through a pidfd and os.waitpid; Popen must not reap it in its finaliser.
    shim.returncode = 0
    return shim.pid


def has_program(folder: RunFolder, number: int) -> bool:
    """Whether the program of this attempt was started, or is about to be: its shim has written so, or is alive.

    A supervisor may be killed between writing `command.json` and starting the shim.
    """
    attempt = folder.attempt(number)
    written = (attempt / "process.json", attempt / "exit.json")
    if any(path.exists() for path in written) or _shim_lives(attempt) or members(folder.path, number):
        return True
    # The shim may have written it and ended since the first look.
    return any(path.exists() for path in written)


def _shim_lives(attempt: Path) -> bool:
    wanted = [os.fsencode(_SHIM), os.fsencode(attempt)]
    for pid in all_pids():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[-3:-1] == wanted:
                return True
    return False


def _argv(folder: RunFolder, attempt: Path, spec: RunSpec, settings: Settings | None) -> tuple[str, ...]:
    if settings is None:
        return spec.command
    trainer = (
        "-m",
        "memtop.train",
        "--settings",
        str(attempt / "settings.json"),
        "--state-dir",
        str(folder.latest_state),
    )
    return (sys.executable, *launcher(settings), *trainer)


def launcher(settings: Settings) -> tuple[str, ...]:
    """What stands between the interpreter and the trainer's module for this strategy and number of processes."""
    if settings.zero.stage:
        # The DeepSpeed configuration is written by the trainer, who knows the model's width: attempts/NNNN/deepspeed.json.
        processes = ("--num_processes", str(settings.world_size), "--num_machines", "1")
        # Port 0: any free one, so that several runs fit on one machine.
        rest = ("--dynamo_backend", "no", "--mixed_precision", "no", "--main_process_port", "0")
        return ("-m", "accelerate.commands.launch", "--use_deepspeed", *processes, *rest)
    if settings.world_size == 1:
        return ()
    # torchrun, which is also what `accelerate launch` starts for several GPUs; that one knows no plain CPU ranks.
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(settings.world_size))


def _environment(folder: RunFolder, number: int, spec: RunSpec, allocator: str, socket: Path) -> dict[str, str]:
    inherited = os.environ.get("PYTHONPATH")
    additions = {
        "MEMTOP_RUN": str(folder.path),
        "MEMTOP_ATTEMPT": str(number),
        "MEMTOP_ATTEMPT_DIR": str(folder.attempt(number)),
        "MEMTOP_SOCKET": str(socket),
        "PYTHONPATH": os.pathsep.join([str(_AGENT_SITE), *([inherited] if inherited else [])]),
        "PYTHONUNBUFFERED": "1",
    }
    if not spec.command:
        # A folder called `tokenizers` where memtop was called must not shadow the library (Python 3.11 and newer).
        additions["PYTHONSAFEPATH"] = "1"
        # Whether a finished training whose state does not fit on the disk waits for room.
        additions["MEMTOP_ON_OOM"] = spec.on_oom
    additions |= allocator_environment(allocator, os.environ)
    additions |= error_file_environment(folder.attempt(number))
    if spec.gpus is not None:
        # UUIDs and PCI order agree with what the driver library shows; the default order of CUDA is by speed.
        additions |= {"CUDA_VISIBLE_DEVICES": spec.gpus, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return additions


# torch read the first name alone up to 2.9; newer ones prefer the second.
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def inherited_allocator(inherited: Mapping[str, str]) -> str:
    """The allocator options that the user's own environment holds; empty for none."""
    return next((inherited[name] for name in reversed(_ALLOCATOR) if inherited.get(name)), "")


def allocator_environment(wanted: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment for these allocator options. What the user has set already wins, option by option."""
    options = [option for option in inherited_allocator(inherited).split(",") if option]
    names = {option.partition(":")[0] for option in options}
    added = [option for option in wanted.split(",") if option and option.partition(":")[0] not in names]
    return dict.fromkeys(_ALLOCATOR, ",".join([*options, *added])) if added else {}
