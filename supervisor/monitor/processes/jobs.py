"""Groups GPU processes into jobs: a launcher, its ranks and their loader workers.

Uses only the rows of a process table; the command lines show which program is what.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import PurePosixPath
from typing import NamedTuple

import msgspec

from memtop.supervisor.monitor.processes.proc import ProcessStat
from memtop.supervisor.monitor.processes.table import children_of

_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


class Program(NamedTuple):
    """The program that a process executes: command line, environment, and what they reveal.

    See `read_program`.
    """

    words: tuple[str, ...] = ()
    variables: Mapping[str, str] = {}
    """The environment variables that matter. Empty if this user may not read them."""
    run: tuple[str, int | None] | None = None
    """The run's folder and attempt, from MEMTOP_RUN and MEMTOP_ATTEMPT."""
    is_launcher: bool = False
    is_host: bool = False
    is_wrapper: bool = False
    helper: str | None = None
    """See multiprocessing_helper."""
    title: str | None = None
    """See title_role."""


def read_program(
    words: tuple[str, ...], comm: str, variables: Mapping[str, str] | None = None, run: tuple[str, int | None] | None = None
) -> Program:
    """Interpret a command line. `comm` is the kernel's name of the process."""
    return Program(
        words,
        variables or {},
        run,
        is_launcher(words),
        is_host(words, comm),
        is_wrapper(words, comm),
        multiprocessing_helper(words),
        title_role(words, comm),
    )


class JobDraft(msgspec.Struct, frozen=True, kw_only=True):
    """The processes of a job, before anything is measured."""

    key: str
    leader: int
    pids: tuple[int, ...]
    """The leader first, then in order of start."""
    roles: dict[int, str]
    """The role of each process, by pid."""
    run: tuple[str, int | None] | None = None

    @property
    def counts(self) -> dict[str, int]:
        """How many processes have each role. Ranks and workers count without their numbers."""
        found: dict[str, int] = {}
        for role in self.roles.values():
            kind = role.split(" ", 1)[0] if role.startswith(("rank ", "worker ")) else role
            found[kind] = found.get(kind, 0) + 1
        return found


_GroupKey = tuple[object, ...]


class Grouping:
    """Groups one table.

    `gpu` are the pids that compute on a GPU; `program` is called only for them and their relatives.
    """

    def __init__(self, rows: Mapping[int, ProcessStat], gpu: frozenset[int], program: Callable[[int], Program]) -> None:
        self._rows = rows
        self._gpu = gpu
        self._program = program
        self._children = children_of(rows)
        self.relatives: set[int] = set(gpu)
        """All processes that were examined. Their rows must be fresh at the next look."""

    def drafts(self) -> list[JobDraft]:
        """All jobs. Each GPU process is in exactly one."""
        groups: dict[_GroupKey, list[int]] = {}
        for pid in sorted(self._gpu):
            if pid in self._rows:
                group, top = self._group_of(pid)
                tops = groups.setdefault(group, [])
                if top not in tops:
                    tops.append(top)
        owned = {top: group for group, tops in groups.items() for top in tops}
        return [self._draft(group, tops, owned) for group, tops in groups.items()]

    # --- who leads ---

    def _group_of(self, pid: int) -> tuple[_GroupKey, int]:
        """What the process has in common with the others of its job, and its topmost relative in
        the job."""
        program, uid = self._program(pid), self._rows[pid].file_uid
        if program.run is not None:
            return ("run", *program.run, uid), self._top_of_run(pid, program.run)
        top = self._top(pid)
        variables = program.variables
        tasks = variables.get("SLURM_NTASKS", "")
        # All tasks of a Slurm step are children of the batch system's daemon. An interactive shell
        # is no such step.
        if "SLURM_STEP_ID" in variables and tasks.isdecimal() and int(tasks) > 1 and "SLURM_PTY_PORT" not in variables:
            return ("slurm", variables.get("SLURM_JOB_ID", ""), variables["SLURM_STEP_ID"], uid), top
        return ("pid", self._rows[top].identity), top

    def _top_of_run(self, pid: int, run: tuple[str, int | None]) -> int:
        top = pid
        for above in self._above(pid):
            if self._program(above).run != run:
                break
            top = above
        return top

    def _top(self, pid: int) -> int:
        """The launcher above the process, the program that forked it, or the process itself."""
        top = child = pid
        for above in self._above(pid):
            program = self._program(above)
            if self._rows[above].file_uid != self._rows[pid].file_uid or program.run is not None:
                break
            if program.is_host:
                break
            if program.is_launcher or above in self._gpu or self._is_fork(child, above):
                top = above
            elif not program.is_wrapper:
                break
            child = above
        return top

    def _above(self, pid: int) -> list[int]:
        found: list[int] = []
        current = self._rows[pid].parent_pid
        while current > 1 and current in self._rows and current not in found and current != pid:
            found.append(current)
            self.relatives.add(current)
            current = self._rows[current].parent_pid
        return found

    def _is_fork(self, child: int, parent: int) -> bool:
        """Whether the child runs the same program: forked by the parent, or started by its
        multiprocessing."""
        mine = self._program(child)
        if self._rows[child].comm == "pt_data_worker" or mine.helper == "spawn" or is_part_of_parent(mine.title):
            return True
        # A script's subshells have the same command line as the script, and may run programs that
        # are unrelated.
        return bool(mine.words) and not mine.is_wrapper and mine.words == self._program(parent).words

    # --- who belongs to the job ---

    def _draft(self, group: _GroupKey, tops: list[int], owned: Mapping[int, _GroupKey]) -> JobDraft:
        leader = min(tops, key=lambda pid: (self._rows[pid].identity.started_ticks, pid))
        pids = dict.fromkeys([leader, *tops])
        for top in tops:
            pids |= dict.fromkeys(self._below(top, group, owned))
        if group[0] == "run" and self._rows[leader].session == leader:
            # Loader workers of a rank that has died have another parent now, but are still in the
            # run's session.
            pids |= dict.fromkeys(pid for pid, row in self._rows.items() if row.session == leader and pid not in owned)
        living = [pid for pid in pids if not self._rows[pid].is_dead or pid in self._gpu]
        order = [leader, *sorted((pid for pid in living if pid != leader), key=self._start)]
        self.relatives.update(order)
        run = (str(group[1]), group[2] if isinstance(group[2], int) else None) if group[0] == "run" else None
        identity = self._rows[leader].identity
        key = f"slurm {group[1]}.{group[2]}" if group[0] == "slurm" else f"pid {leader}@{identity.started_ticks}"
        return JobDraft(key=key, leader=leader, pids=tuple(order), roles=self._roles(order), run=run)

    def _start(self, pid: int) -> tuple[int, int]:
        return self._rows[pid].identity.started_ticks, pid

    def _below(self, top: int, group: _GroupKey, owned: Mapping[int, _GroupKey]) -> list[int]:
        """All descendants except those that lead another job, and their descendants."""
        found: list[int] = []
        waiting, seen = [top], {top}
        while waiting:
            # The table is not read in one instant, so it may contain a circle: follow no process
            # twice.
            below = [pid for pid in self._children.get(waiting.pop(), ()) if pid not in seen and owned.get(pid, group) == group]
            seen.update(below)
            waiting += below
            found += below
        return found

    # --- which role each process has ---

    def _roles(self, pids: list[int]) -> dict[int, str]:
        members = set(pids)
        found: dict[int, str] = {}
        for pid in pids:
            found[pid] = self._role(pid, members, found)
        self._number_ranks(found)
        return found

    def _role(self, pid: int, members: set[int], known: Mapping[int, str]) -> str:
        program, row = self._program(pid), self._rows[pid]
        parent = row.parent_pid if row.parent_pid in members else None
        if program.title is not None:
            return program.title
        if program.is_launcher:
            return "launcher"
        rank = next((program.variables[name] for name in _RANK_VARIABLES if name in program.variables), None)
        if rank is None and "SLURM_STEP_ID" in program.variables and "SLURM_PTY_PORT" not in program.variables:
            rank = program.variables.get("SLURM_PROCID")
        below_rank = self._is_below_rank(pid, members, known)
        if rank is not None and not below_rank and (pid in self._gpu or parent is None or known.get(parent) == "launcher"):
            return f"rank {rank}"
        if pid in self._gpu:
            return "rank" if parent is not None and known.get(parent) == "launcher" else "process"
        if self._starts_ranks(pid):
            return "launcher"
        return "loader worker" if self._is_loader(pid, parent) else "process"

    def _is_below_rank(self, pid: int, members: set[int], known: Mapping[int, str]) -> bool:
        """Processes that a rank starts inherit its environment, and with it the rank's number."""
        return any(
            above in self._gpu or known.get(above, "").startswith("rank") for above in self._above(pid) if above in members
        )

    def _starts_ranks(self, pid: int) -> bool:
        """A program without a GPU whose forks compute on one acts as a launcher."""
        return any(child in self._gpu and self._is_fork(child, pid) for child in self._children.get(pid, ()))

    def _is_loader(self, pid: int, parent: int | None) -> bool:
        if self._rows[pid].comm == "pt_data_worker":
            return True
        if parent is None or self._program(pid).helper == "resource_tracker":
            return False
        if self._program(parent).helper == "forkserver":
            return True
        return self._program(pid).helper != "forkserver" and self._is_fork(pid, parent)

    def _number_ranks(self, found: dict[int, str]) -> None:
        """Launchers start their ranks in order.

        If no rank's number is known, the order gives it.
        """
        nameless = [pid for pid, role in found.items() if role == "rank"]
        numbered = any(role.startswith("rank ") for role in found.values())
        for place, pid in enumerate(sorted(nameless, key=self._start)):
            found[pid] = "process" if numbered else f"rank {place}"


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
