"""Describes the processes on the GPUs: owner, command, run, container.

What cannot be known gets a reason.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from memtop.supervisor.monitor.processes.proc import (
    ATTEMPT_VARIABLE,
    PROC,
    RUN_ID_VARIABLE,
    RUN_VARIABLE,
    TICKS_PER_SECOND,
    TRUST_VARIABLE,
    ProcessId,
    ProcessStat,
    boot_time,
    command_words,
    environment,
    full_name,
    holds_gpu,
    in_host_pid_namespace,
    owners_of,
    read_stat,
    readable,
    sees_all_pids,
    whole_number,
)
from memtop.supervisor.monitor.processes.signals import user_name

JOB_VARIABLES = ("RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_PTY_PORT")
_CONTAINER_VARIABLES = (
    *("HOSTNAME", "POD_NAME", "POD_NAMESPACE", "SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_STEP_ID"),
    *("APPTAINER_NAME", "SINGULARITY_NAME"),
)
_KEPT_VARIABLES = frozenset((RUN_VARIABLE, RUN_ID_VARIABLE, ATTEMPT_VARIABLE, *JOB_VARIABLES, *_CONTAINER_VARIABLES))
_WHO = ("user", "name", "command")


class ProcessFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about one process.

    `identity` is None if the pid is not a living process that we can see.
    """

    pid: int
    identity: ProcessId | None = None
    uid: int | None = None
    """The real user, who started the process."""
    effective_uid: int | None = None
    """The user whose rights the process has. None: the real user's."""
    user: str | None = None
    name: str | None = None
    command: str | None = None
    words: tuple[str, ...] = ()
    """The command line, word by word."""
    started: float | None = None
    """Seconds since the epoch."""
    parent_pid: int | None = None
    session: int | None = None
    session_led: bool = False
    """The leader of its session lives, so the process is no orphan."""
    kernel: bool = False
    run_folder: str | None = None
    run_id: str = ""
    """Runs that have had the same folder have different ids."""
    attempt: int | None = None
    run_elsewhere: bool = False
    """The run's folder is in a file system that we do not see: the run belongs to a container, not
    to us."""
    variables: dict[str, str] = {}
    """The environment variables that identify jobs, ranks and containers."""
    container: str | None = None
    zombie: bool = False
    gone: bool = False
    """Proven by two looks in a row: no such process runs on this machine. A zombie does not run."""
    unknown: dict[str, str] = {}


class ProcessDescriber:
    """Describes the driver's pids and remembers the facts of each process.

    `holds` tests whether a process has GPUs open.

    The driver reports pids of the machine's pid namespace. In a container the same pid may be an
    unrelated process. There, a pid counts as the local process only if that process has the GPUs
    open on which the driver lists it.
    """

    def __init__(
        self,
        *,
        holds: Callable[[int, frozenset[int]], bool | None] = holds_gpu,
        same_namespace: Callable[[], bool] = in_host_pid_namespace,
        sees_all: Callable[[], bool] = sees_all_pids,
        proc_root: Path = PROC,
    ) -> None:
        self._holds = holds
        self._proc_root = proc_root
        self._trusted = os.environ.get(TRUST_VARIABLE) == "1" or same_namespace()
        self._sees_all = sees_all()
        self._known: dict[int, tuple[object, ProcessFacts]] = {}
        self._missing: set[int] = set()

    def describe(self, pid: int, row: ProcessStat | None = None, minors: frozenset[int] = frozenset()) -> ProcessFacts:
        """All that is known about a pid that the driver reported.

        Facts are remembered until the process ends, executes another program or changes its user.
        `row` saves reading the stat file again. `minors` are the numbers N of the /dev/nvidiaN on
        which the driver lists the process, if known.
        """
        row = row or read_stat(pid, self._proc_root)
        if row is None:
            return self._not_found(pid)
        if not row.is_dead:
            self._missing.discard(pid)
        stamp = row.guise, row.is_dead, row.parent_pid, minors
        known = self._known.get(pid)
        if known is not None and known[0] == stamp:
            return known[1]
        facts = self._facts(row, minors)
        if facts.identity is not None:
            self._known[pid] = stamp, facts
        return facts

    def keep(self, pids: set[int]) -> None:
        """Forget all processes except these."""
        self._known = {pid: known for pid, known in self._known.items() if pid in pids}
        self._missing &= pids

    def _facts(self, row: ProcessStat, minors: frozenset[int]) -> ProcessFacts:
        pid = row.identity.pid
        if not self._trusted and not self._holds(pid, minors):
            reason = (
                f"the driver's process {pid} is not visible from this container: "
                "the local process with this pid does not have the GPU open"
            )
            return ProcessFacts(pid=pid, unknown=dict.fromkeys(_WHO, reason))
        if not row.is_dead:
            return describe_process(row.identity, self._proc_root)
        ended = row.threads <= 1
        gone = ended and pid in self._missing
        if ended:
            self._missing.add(pid)
        return _zombie(row, self._proc_root, gone)

    def _not_found(self, pid: int) -> ProcessFacts:
        """No such process is visible.

        It counts as gone at the second look, because the driver needs a moment to notice.
        """
        proven = self._trusted and self._sees_all
        gone = proven and pid in self._missing
        self._missing.add(pid)
        self._known.pop(pid, None)
        return _not_found(pid, self._trusted, proven, gone)


def _not_found(pid: int, trusted: bool, proven: bool, gone: bool) -> ProcessFacts:
    if not trusted:
        reason = f"process {pid} is not visible from this container"
    elif gone:
        reason = f"process {pid} has ended"
    elif proven:
        reason = f"process {pid} has just ended"
    else:
        reason = f"process {pid} is not visible: it has just ended, or this machine hides other users' processes"
    return ProcessFacts(pid=pid, gone=gone, unknown=dict.fromkeys(_WHO, reason))


def _zombie(row: ProcessStat, proc_root: Path, gone: bool) -> ProcessFacts:
    """An ended process that is still in the table.

    It has no command line and no environment and ignores signals.
    """
    pid = row.identity.pid
    if row.threads > 1:
        reason = f"the main thread of process {pid} has ended, {row.threads - 1} of its threads are still ending"
    else:
        parent = read_stat(row.parent_pid, proc_root)
        who = f"{row.parent_pid} ({parent.comm})" if parent is not None else str(row.parent_pid)
        reason = f"process {pid} has ended (zombie), but its parent {who} has not collected it: end or restart the parent"
    uid = (owners_of(pid, proc_root) or (row.file_uid,))[0]
    return ProcessFacts(
        pid=pid,
        uid=uid,
        user=user_name(uid),
        name=row.comm,
        parent_pid=row.parent_pid,
        session=row.session,
        started=boot_time() + row.identity.started_ticks / TICKS_PER_SECOND,
        zombie=True,
        gone=gone,
        unknown={"command": reason, "started_ticks": reason},
    )


def describe_process(identity: ProcessId, proc_root: Path = PROC) -> ProcessFacts:
    """Owner, name, command, start and run of a living process.

    What this user may not read is None, with the reason.
    """
    pid = identity.pid
    owners, words, variables = owners_of(pid, proc_root), command_words(pid, proc_root), environment(pid, proc_root)
    row = read_stat(pid, proc_root)
    if row is None or row.identity != identity or row.is_dead:
        return _not_found(pid, trusted=True, proven=False, gone=False)
    if owners is None:
        unknown = dict.fromkeys(_WHO, "this user may not inspect the process")
        return ProcessFacts(pid=pid, identity=identity, parent_pid=row.parent_pid, session=row.session, unknown=unknown)
    unknown = {}
    kernel = pid == 2 or row.parent_pid == 2
    if not words:
        unknown["command"] = "a kernel thread" if kernel else "the process has no command line"
    if variables is None:
        unknown["run"] = "this user may not read the environment of the process"
    kept = {name: readable(value) for name, value in (variables or {}).items() if name in _KEPT_VARIABLES and value}
    folder = (variables or {}).get(RUN_VARIABLE) or None
    return ProcessFacts(
        pid=pid,
        identity=identity,
        uid=owners.real,
        effective_uid=owners.effective,
        user=user_name(owners.real),
        name=full_name(row.comm, words or ()),
        command=" ".join(words or ()) or None,
        words=words or (),
        started=boot_time() + identity.started_ticks / TICKS_PER_SECOND,
        parent_pid=row.parent_pid,
        session=row.session,
        kernel=kernel,
        run_folder=folder,
        run_id=kept.get(RUN_ID_VARIABLE, ""),
        attempt=whole_number(kept.get(ATTEMPT_VARIABLE)),
        run_elsewhere=folder is not None and _is_elsewhere(pid, folder, proc_root),
        variables=kept,
        container=_container(pid, kept, proc_root, unknown),
        unknown=unknown,
    )


def _is_elsewhere(pid: int, folder: str, proc_root: Path) -> bool:
    """Whether the process means another folder by this path than we do.

    Also True if we cannot find out.
    """
    try:
        if (proc_root / f"{pid}/ns/mnt").readlink() == (proc_root / "self/ns/mnt").readlink():
            return False
        theirs, ours = os.stat(f"{proc_root}/{pid}/root{folder}"), os.stat(folder)  # noqa: PTH116
    except OSError:
        return True
    return (theirs.st_dev, theirs.st_ino) != (ours.st_dev, ours.st_ino)


def _container(pid: int, variables: Mapping[str, str], proc_root: Path, unknown: dict[str, str]) -> str | None:
    try:
        text = (proc_root / str(pid) / "cgroup").read_text(errors="replace")
    except OSError as error:
        unknown["container"] = f"cannot read its cgroup: {error.strerror}"
        return None
    return container_of(text, variables, os.uname().nodename)


_ID_SHOWN = 12  # people know containers by the first 12 characters of their id
_ID = r"([0-9a-f]{64}|[0-9a-f]{32}-\d+)"  # the second form is Amazon's container service
_POD = re.compile(r"(?:^|[-/])pod([0-9a-f]{8}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{12}|[0-9a-f]{32})\b")
_SLURM = re.compile(r"/job_(\d+)(?:/step_(\w+))?")
_WITH_ID = (
    ("podman", re.compile(rf"libpod-(?:payload-)?{_ID}")),
    ("docker", re.compile(rf"/docker[-/]{_ID}")),
    ("containerd", re.compile(rf"(?:cri-containerd|nerdctl|containerd)[-:/]{_ID}")),
    ("cri-o", re.compile(rf"crio-{_ID}")),
    ("ecs", re.compile(rf"/ecs/(?:.*/)?{_ID}")),
    ("container", re.compile(rf"(?:^|[-/:]){_ID}(?:\.scope)?(?:/|$)")),
)
_WITH_NAME = (
    ("nspawn", re.compile(r"systemd-nspawn@([^/]+)\.service")),
    ("machine", re.compile(r"/machine\.slice/machine-([^/]+)\.scope")),
    ("lxc", re.compile(r"/lxc\.payload[./]([^/]+)")),
    ("lxc", re.compile(r"^/lxc/([^/]+)")),
)


def container_of(cgroup: str, variables: Mapping[str, str], own_host: str) -> str | None:
    """The container, pod or batch job of a process. None if it is in none that can be recognized.

    `cgroup` is the text of /proc/PID/cgroup, `variables` the readable part of its environment.
    `own_host` is the name of this machine: HOSTNAME has this value in a pod on the host's network,
    where it is not the pod's name.
    """
    paths = list(dict.fromkeys(line.split(":", 2)[2] for line in cgroup.splitlines() if line.count(":") >= 2))
    for read in (lambda path: _pod(path, variables, own_host), _with_id, _with_name, lambda path: _slurm(path, variables)):
        found = next((name for name in map(read, paths) if name), None)
        if found:
            return found
    image = variables.get("APPTAINER_NAME") or variables.get("SINGULARITY_NAME")
    if image:
        return f"apptainer {image}"
    job = variables.get("SLURM_JOB_ID")
    return _slurm_job(job, variables.get("SLURM_STEP_ID"), variables) if job else None


def _pod(path: str, variables: Mapping[str, str], own_host: str) -> str | None:
    found = _POD.search(path)
    if found is None or "kube" not in path:
        return None
    host = variables.get("HOSTNAME")
    name = variables.get("POD_NAME") or (host if host != own_host else None) or found[1].replace("_", "-")
    space = variables.get("POD_NAMESPACE")
    return f"pod {space}/{name}" if space else f"pod {name}"


def _with_id(path: str) -> str | None:
    for kind, pattern in _WITH_ID:
        # In nested containers the innermost one counts.
        found = pattern.findall(path)
        if found:
            return f"{kind} {found[-1][:_ID_SHOWN]}"
    return None


def _with_name(path: str) -> str | None:
    for kind, pattern in _WITH_NAME:
        found = pattern.search(path)
        if found:
            # systemd escapes special characters in unit names, for example as \x2d.
            name = re.sub(r"\\x([0-9a-f]{2})", lambda escape: chr(int(escape[1], 16)), found[1])
            return f"{kind} {name}"
    return None


def _slurm(path: str, variables: Mapping[str, str]) -> str | None:
    found = _SLURM.search(path)
    return _slurm_job(found[1], found[2], variables) if found is not None and "slurm" in path else None


def _slurm_job(job: str, step: str | None, variables: Mapping[str, str]) -> str:
    name = variables.get("SLURM_JOB_NAME") if variables.get("SLURM_JOB_ID") in (None, job) else None
    text = f"slurm job {job} ({name})" if name else f"slurm job {job}"
    return f"{text} step {step}" if step else text
