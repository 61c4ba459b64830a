"""Starts one attempt: builds its command and environment, writes both to a file, and starts the
shim."""

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
from memtop.supervisor.run.post_mortem.log_end import error_file_environment
from memtop.supervisor.run.processes.attempt import members
from memtop.supervisor.run.record.folder import RunFolder, RunSpec, write_json

_PACKAGE = Path(__file__).resolve().parents[3]
# On PYTHONPATH, its sitecustomize loads the agent into the training process. This is a path and no
# import, because the supervisor does not import the trainer.
_AGENT_SITE = _PACKAGE / "train" / "agent" / "site"
_COMMAND = "command.json"
_SHIM = Path(__file__).with_name("shim.py")


class LaunchCommand(msgspec.Struct, frozen=True, kw_only=True):
    """`attempts/NNNN/command.json`: the command that was started."""

    argv: tuple[str, ...]
    cwd: str
    environment: dict[str, str]
    """Additions to the supervisor's own environment."""


def launch(
    folder: RunFolder, number: int, spec: RunSpec, settings: Settings | None, socket: Path, *, allocator: str = ""
) -> int:
    """Start attempt `number` with its own shim, a child of this process. Returns the shim's pid.

    `allocator`: allocator options for an external command. Those of the built-in trainer are in its
    settings.
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
    # The supervisor waits for the shim with a pidfd and os.waitpid, so Popen must not reap it in
    # its finaliser.
    shim.returncode = 0
    return shim.pid


def has_program(folder: RunFolder, number: int) -> bool:
    """Whether the program of this attempt was started, or is about to be: its shim has written so,
    or is alive.

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
    """The launcher module and its arguments, for this strategy and number of processes."""
    if settings.zero.stage:
        # The trainer writes the DeepSpeed configuration, because it knows the model's width:
        # attempts/NNNN/deepspeed.json.
        processes = ("--num_processes", str(settings.world_size), "--num_machines", "1")
        # Port 0 means any free port, so that several runs can share a machine.
        rest = ("--dynamo_backend", "no", "--mixed_precision", "no", "--main_process_port", "0")
        return ("-m", "accelerate.commands.launch", "--use_deepspeed", *processes, *rest)
    if settings.world_size == 1:
        return ()
    # Use torchrun, which `accelerate launch` also starts for several GPUs. accelerate has no plain
    # CPU ranks.
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
        # A folder `tokenizers` in the working directory must not shadow the library (Python 3.11
        # and newer).
        additions["PYTHONSAFEPATH"] = "1"
        # Whether a finished training waits for disk space if its state does not fit.
        additions["MEMTOP_ON_OOM"] = spec.on_oom
    additions |= allocator_environment(allocator, os.environ)
    additions |= error_file_environment(folder.attempt(number))
    if spec.gpus is not None:
        # UUIDs and PCI order agree with the driver library. CUDA's default order is by speed.
        additions |= {"CUDA_VISIBLE_DEVICES": spec.gpus, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return additions


# torch up to 2.9 reads only the first name, newer versions prefer the second.
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def inherited_allocator(inherited: Mapping[str, str]) -> str:
    """The allocator options in the user's environment. Empty if there are none."""
    return next((inherited[name] for name in reversed(_ALLOCATOR) if inherited.get(name)), "")


def allocator_environment(wanted: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that set these allocator options.

    Options that the user has set take precedence.
    """
    options = [option for option in inherited_allocator(inherited).split(",") if option]
    names = {option.partition(":")[0] for option in options}
    added = [option for option in wanted.split(",") if option and option.partition(":")[0] not in names]
    return dict.fromkeys(_ALLOCATOR, ",".join([*options, *added])) if added else {}
