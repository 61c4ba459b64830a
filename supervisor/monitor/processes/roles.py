"""What a command line reveals about a program: launcher, shell, loader worker, script.

Pure functions of text.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import PurePosixPath

_LAUNCHERS = frozenset(
    {
        *("torchrun", "deepspeed", "horovodrun", "colossalai", "composer", "mpirun", "mpiexec", "mpiexec.hydra"),
        *("orterun", "prterun", "prted", "orted", "hydra_pmi_proxy", "hydra_bstrap_proxy", "srun", "raylet", "pdsh"),
    }
)
_LAUNCHER_MODULES = (
    *("torch.distributed.run", "torch.distributed.launch", "torch.distributed.launcher", "accelerate.commands.launch"),
    *("deepspeed.launcher", "horovod.runner", "memtop.supervisor"),
)
_NEEDS_LAUNCH = frozenset({"accelerate", "fabric", "lightning"})
"""Programs with several commands, of which only `launch` and `run` start ranks."""

_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "fish", "ksh", "tcsh", "csh", "busybox"})
_WRAPPERS = frozenset(
    {
        *("env", "nice", "ionice", "numactl", "taskset", "time", "timeout", "stdbuf", "nohup", "setsid", "script"),
        *("nsys", "ncu", "strace", "uv", "poetry", "pixi", "conda", "mamba", "micromamba", "make", "xargs", "parallel"),
    }
)
_HOSTS = frozenset(
    {
        *("tmux", "screen", "zellij", "sshd", "sshd-session", "systemd", "init", "login", "su", "sudo", "cron", "crond", "atd"),
        *("slurmstepd", "slurmd", "containerd-shim", "containerd", "dockerd", "docker-init", "tini", "dumb-init", "conmon"),
        *("runc", "crun", "supervisord", "s6-svscan", "code", "code-server", "cursor", "pycharm", "gnome-shell", "Xorg"),
        *("gnome-terminal-", "konsole", "xterm", "kitty", "alacritty", "node", "java", "jupyter", "jupyter-lab", "mosh-server"),
    }
)
_HOST_MODULES = ("ipykernel", "ipykernel_launcher", "jupyter", "jupyterlab", "notebook", "debugpy")
_SERVERS = ("VLLM::", "sglang::")
RAY_WORKER = "ray worker"
_PYTHON = re.compile(r"(?:python|pypy)[\d.]*$")
_MULTIPROCESSING = re.compile(r"^from multiprocessing\.(\w+) import")
_PYTHON_FLAGS_WITH_VALUE = frozenset({"-W", "-X"})


def program(words: tuple[str, ...]) -> str:
    """The name of the program file.

    If the program has written a title, the first word of the title.
    """
    first = words[0].split(" ", 1)[0].rstrip(":") if words else ""
    # The name of a login shell begins with a dash.
    return first.rpartition("/")[2].lstrip("-")


def script(words: tuple[str, ...]) -> tuple[str | None, bool]:
    """What a Python interpreter runs: (path or module, whether it is a module). (None, False) for
    other programs."""
    if not words or not _PYTHON.match(program(words)):
        return None, False
    rest = iter(words[1:])
    for word in rest:
        if word in _PYTHON_FLAGS_WITH_VALUE:
            next(rest, None)
        elif word == "-c":
            return None, False
        elif word == "-m":
            return next(rest, None), True
        elif not word.startswith("-"):
            return word, False
    return None, False


def is_launcher(words: tuple[str, ...]) -> bool:
    """Whether the program's children are the ranks of one job."""
    found, is_module = script(words)
    if is_module and found is not None:
        return found.startswith(_LAUNCHER_MODULES)
    name = found.rpartition("/")[2] if found is not None else program(words)
    if name in _NEEDS_LAUNCH:
        return "launch" in words or "run" in words
    inside = "/" + (found or "")
    return name in _LAUNCHERS or inside.endswith(("/torch/distributed/run.py", "/accelerate/commands/launch.py"))


def is_host(words: tuple[str, ...], name: str) -> bool:
    """Whether other programs are started from it without being part of it: terminal, service,
    notebook, editor."""
    found, is_module = script(words)
    if found is not None:
        file = PurePosixPath(found).stem if not is_module else found
        return file.startswith(_HOST_MODULES)
    # The name of a container's shim ends with its version: containerd-shim-runc-v2.
    return name in _HOSTS or program(words) in _HOSTS or name.startswith("containerd-shim")


def is_wrapper(words: tuple[str, ...], name: str) -> bool:
    """A shell or wrapper. It never leads a job, but its parent may be a launcher."""
    return name in _SHELLS or program(words) in _SHELLS or name in _WRAPPERS


def multiprocessing_helper(words: tuple[str, ...]) -> str | None:
    """spawn | forkserver | resource_tracker if Python's multiprocessing started the program, else
    None."""
    for flag, code in pairwise(words):
        if flag == "-c":
            found = _MULTIPROCESSING.match(code)
            return found[1] if found else None
    return None


def title_role(words: tuple[str, ...], name: str) -> str | None:
    """The role in the title that a program has written: engines and workers of vLLM and SGLang,
    Ray's workers."""
    title = words[0] if words else name
    if title.startswith("ray::"):
        return RAY_WORKER
    server = next((server for server in _SERVERS if title.startswith(server)), None)
    if server is None:
        return None
    part = title.removeprefix(server).split(" ", 1)[0]
    if part.startswith("EngineCore"):
        return "engine"
    return f"worker {part.removeprefix('Worker').strip('_')}".strip()


def is_part_of_parent(title: str | None) -> bool:
    """Engines and workers belong to the server that started them.

    Ray's workers belong to no single parent.
    """
    return title is not None and title != RAY_WORKER


def job_name(words: tuple[str, ...], name: str) -> str:
    """The name that a person would use: the script or module, else the name of the program."""
    found, is_module = script(words)
    if found is not None:
        return found if is_module else PurePosixPath(found).name
    title = title_role(words, name)
    return words[0] if title is not None and words else program(words) or name
