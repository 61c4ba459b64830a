"""The environment of a run's program: what the run keeps of its first start, and what it adds."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from memtop.presets.schema import Settings
from memtop.supervisor.errors import MemtopError
from memtop.supervisor.interpreters import TRAINER_PATH, is_own
from memtop.supervisor.monitor.cgroup import CgroupReader
from memtop.supervisor.monitor.processes.proc import RUN_ID_VARIABLE
from memtop.supervisor.run.grip import Grip
from memtop.supervisor.run.post_mortem.log_end import error_file_environment
from memtop.supervisor.run.processes.agent import AGENT_SITE, ATTEMPT_VARIABLE
from memtop.supervisor.run.record.folder import RunFolder, RunSpec, read_json, write_json
from memtop.supervisor.wire import Checkpoint

TRAINER_VARIABLE = "MEMTOP_TRAINER"
"""The changes for a program built on Hugging Face's Trainer: see `train/agent/knobs.py`."""
SOURCES_VARIABLE = "MEMTOP_SOURCES"
"""Modules that are imported from a changed copy: see `train/agent/sources.py`."""
START_VARIABLE = "MEMTOP_START_UPDATE"
"""How many updates the program had done when the checkpoint was saved from which it resumes."""
RUN_VARIABLES = (
    "MEMTOP_RUN",
    "MEMTOP_RUN_ID",
    "MEMTOP_ATTEMPT",
    "MEMTOP_ATTEMPT_DIR",
    "MEMTOP_SOCKET",
    "MEMTOP_ON_OOM",
    TRAINER_VARIABLE,
    SOURCES_VARIABLE,
    START_VARIABLE,
)
"""The variables of memtop that a run sets for its program. People set the others."""


def outside_any_run(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what a run has added to it.

    A program of a run may start another run. With these variables, its supervisor would count as a
    part of the first run, and end with it. Its error files would be those of the first run.
    """
    inside = environment.get("MEMTOP_ATTEMPT_DIR", os.devnull) + os.sep
    left = {name: value for name, value in environment.items() if name not in RUN_VARIABLES and not value.startswith(inside)}
    if "MEMTOP_RUN" in environment and "PYTHONPATH" in left:
        ours = (str(AGENT_SITE), str(TRAINER_PATH))
        left["PYTHONPATH"] = os.pathsep.join(path for path in left["PYTHONPATH"].split(os.pathsep) if path not in ours)
    return left


_KEPT_FILE = "environment.json"
_OF_SESSION = frozenset(
    {
        *("TERM", "COLUMNS", "LINES", "STY", "DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY"),
        *("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS", "KRB5CCNAME", "TMPDIR", "GPG_TTY", "WINDOWID"),
        *("JOURNAL_STREAM", "INVOCATION_ID", "HOSTNAME", "JOB_ID", "PE_HOSTFILE"),
    }
)
_OF_SESSION_START = (
    *("MEMTOP_", "SSH_", "TMUX", "XDG_SESSION_", "VSCODE_", "KUBERNETES_"),
    *("SLURM_", "PBS_", "LSB_", "LSF_", "SGE_", "FLUX_", "PMI", "OMPI_"),
)
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")
"""Of Slurm, PBS, LSF and Grid Engine."""
_GPUS_OF_JOB = frozenset({"CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"})
_OF_SHELL = frozenset({"_", "PWD", "OLDPWD", "SHLVL"})
_SHOWN = ("CUDA_VISIBLE_DEVICES", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "OMP_NUM_THREADS", "WORLD_SIZE")
"""Variables whose values are printed. Others may be secrets."""
_MOST_NAMES = 12
_SECRET = re.compile(
    r"TOKEN(?!IZ)|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|PWD|DSN|CRED|AUTH|JWT|COOKIE|WEBHOOK|HEADERS|CONNECTION_STRING"
    r"|(^|_)PASS(_|$)|(?<!BY)PASS$|(^|_)PAT(_|$)"
)
# scheme://user:password@host, and a token in the user's place.
_WITH_PASSWORD = re.compile(r"[a-z][a-z0-9+.-]*://[^\s@]+@|\bbearer |[?&;](sig|accountkey|sharedaccesskey)=", re.IGNORECASE)
_RANDOM = re.compile(r"(?=[A-Za-z]*[0-9])(?=[0-9]*[A-Za-z])[A-Za-z0-9]{24,}")
"""Letters and digits as a generator of tokens draws them. A UUID has hyphens between fewer."""


def is_secret(name: str, value: str = "") -> bool:
    """Whether a variable looks like a secret, by its name or by the form of its value."""
    if _WITH_PASSWORD.search(value) or _RANDOM.search(value):
        return True
    is_count = name.upper().endswith("TOKENS") and value.isdecimal()
    return name not in _OF_SHELL and not is_count and _SECRET.search(name.upper()) is not None


class Kept(msgspec.Struct, frozen=True):
    """`environment.json`: the environment of the run's first start."""

    variables: dict[str, str]
    left_out: tuple[str, ...]
    """What is in no file, since it looks like a secret, or is not UTF-8."""


def keep_environment(folder: RunFolder, environment: Mapping[str, str] | Kept) -> None:
    """Later attempts of the run get this environment. RunFolderError if it cannot be written."""
    kept = environment if isinstance(environment, Kept) else _to_keep(environment)
    write_json(folder.path / _KEPT_FILE, kept, mode=0o600)


def _to_keep(environment: Mapping[str, str]) -> Kept:
    found = {name: value for name, value in outside_any_run(environment).items() if name in _JOBS or not _is_of_session(name)}
    variables = {name: value for name, value in found.items() if not is_secret(name, value) and _is_utf8(name + value)}
    return Kept(variables, tuple(name for name in found if name not in variables and _is_utf8(name)))


@contextlib.contextmanager
def moved_environment(folder: RunFolder, environment: Mapping[str, str]) -> Iterator[None]:
    """Later attempts of the run get this environment, unless what follows is refused."""
    former = kept_by(folder)
    keep_environment(folder, environment)
    try:
        yield
    except MemtopError:
        path = folder.path / _KEPT_FILE
        if former is None:
            path.unlink()
        else:
            write_json(path, former, mode=0o600)
        raise


def kept_environment(folder: RunFolder, here: Mapping[str, str]) -> dict[str, str]:
    """The environment that the run keeps. Those variables that belong to a session, and those that
    are in no file, are as here. A run of an older memtop has kept nothing: all is as here."""
    here, kept = outside_any_run(here), kept_by(folder)
    if kept is None:
        return here
    moved = _job(here) not in (None, _job(kept.variables))
    of_job = _GPUS_OF_JOB if moved else frozenset()

    def is_of_here(name: str, value: str) -> bool:
        if name in kept.left_out or name in of_job or _is_of_session(name):
            return True
        return name not in kept.variables and is_secret(name, value)

    return {
        **{name: value for name, value in kept.variables.items() if not is_of_here(name, value)},
        **{name: value for name, value in here.items() if is_of_here(name, value)},
    }


def missing_here(folder: RunFolder, here: Mapping[str, str]) -> list[str]:
    """The variables of the first start that are in no file, and not here either."""
    kept = kept_by(folder)
    return [] if kept is None else sorted(name for name in kept.left_out if name not in here)


def different(environment: Mapping[str, str], here: Mapping[str, str]) -> str:
    """The variables of an environment that are not the same here, in words; empty if all are. Most
    values are hidden: they may be secrets."""
    ignored = _OF_SHELL | {"COLUMNS", "LINES", "TERM"}
    names = {name for name in {*environment, *here} - ignored if environment.get(name) != here.get(name)}
    names = {name for name in names if not name.startswith("MEMTOP_")}
    shown = [f"{name}={environment.get(name, '(not set)')}" for name in _SHOWN if name in names]
    others = sorted(names - set(_SHOWN))
    more = [*others[:_MOST_NAMES], f"and {len(others) - _MOST_NAMES} more"] if len(others) > _MOST_NAMES else others
    return ", ".join([*shown, *more])


def kept_by(folder: RunFolder) -> Kept | None:
    """What the run keeps; None for one of an older memtop. RunFolderError if it cannot be read."""
    path = folder.path / _KEPT_FILE
    return read_json(path, Kept, own=True) if os.path.lexists(path) else None


def _job(environment: Mapping[str, str]) -> str | None:
    return next((environment[name] for name in _JOBS if name in environment), None)


def _is_of_session(name: str) -> bool:
    return name in _OF_SESSION or name.startswith(_OF_SESSION_START)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def program_environment(
    folder: RunFolder, number: int, spec: RunSpec, settings: Settings | None, socket: Path, *, allocator: str = ""
) -> dict[str, str]:
    """What an attempt's program gets in addition to the supervisor's environment.

    `allocator` and the spec's GPUs are for a command of the user. Those of the built-in trainer are
    in its settings.
    """
    inherited = os.environ.get("PYTHONPATH")
    # Another Python gets memtop's modules, never the packages beside them, which are for this one.
    trainer = [] if settings is None or is_own(settings.python) else [str(TRAINER_PATH)]
    additions = {
        "MEMTOP_RUN": str(folder.path),
        RUN_ID_VARIABLE: folder.id,
        "MEMTOP_ATTEMPT": str(number),
        ATTEMPT_VARIABLE: str(folder.attempt(number)),
        "MEMTOP_SOCKET": str(socket),
        "PYTHONPATH": os.pathsep.join([str(AGENT_SITE), *trainer, *([inherited] if inherited else [])]),
        "PYTHONUNBUFFERED": "1",
    }
    if not spec.command:
        # A folder `tokenizers` in the working directory must not shadow the library (Python 3.11
        # and newer).
        additions["PYTHONSAFEPATH"] = "1"
        # Whether a finished training waits for disk space if its state does not fit.
        additions["MEMTOP_ON_OOM"] = spec.on_oom
    gpus = spec.gpus
    if settings is not None:
        allocator, gpus = settings.allocator, settings.gpus
        additions |= threads_environment(settings.world_size, os.environ)
    additions |= allocator_environment(allocator, os.environ)
    additions |= error_file_environment(folder.attempt(number))
    if gpus:
        # UUIDs and PCI order agree with the driver library. CUDA's default order is by speed.
        additions |= {"CUDA_VISIBLE_DEVICES": gpus, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return additions


_BEFORE_ENV = 6
"""Words of a command in which `env` is looked for: `nice -n 5 env PYTHONPATH=. python`."""


def with_agent_in_front(command: Sequence[str]) -> tuple[str, ...]:
    """The user's command. Where `env` gives it a PYTHONPATH, the agent stays in front of it."""
    words = list(command)
    start = next((at for at, word in enumerate(words[:_BEFORE_ENV]) if word.rpartition("/")[2] == "env"), len(words))
    for at, word in enumerate(words[start + 1 :], start=start + 1):
        name, given, value = word.partition("=")
        if given and name == "PYTHONPATH":
            words[at] = f"{name}={os.pathsep.join([str(AGENT_SITE), *([value] if value else [])])}"
        elif not given and not word.startswith("-") and words[at - 1] not in ("-u", "--unset", "-C", "--chdir"):
            break  # the program
    return tuple(words)


def changes_for_trainer(grip: Grip | None, knobs: Mapping[str, Any], resumed: Checkpoint | None) -> dict[str, str]:
    """The variable with these changes; none if nothing is to change."""
    if grip is None or not (knobs or resumed):
        return {}
    where = {"output_dir": grip.output_dir, "made_in": grip.made_in}
    changes: dict[str, Any] = {**where, "knobs": knobs, "resume": None, "update": None}
    if resumed is not None:
        changes |= {"resume": resumed.path, "update": resumed.updates}
    return {TRAINER_VARIABLE: msgspec.json.encode(changes).decode()}


# torch up to 2.9 reads only the first name. Newer versions read some options from the first and
# others from the second name if both are set, so both get the same.
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


def threads_environment(processes: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """The number of threads for each of these training processes. The user's choice comes first.

    torchrun would give each of several processes one thread. The optimizer's step on offloaded
    tensors then takes many times longer. A single process would get a thread for every
    core of the machine, more than a container may use.
    """
    if inherited.get("OMP_NUM_THREADS") or inherited.get("MKL_NUM_THREADS"):
        return {}
    return {"OMP_NUM_THREADS": str(max(1, usable_cores() // processes))}


def usable_cores(cpus: Path = Path("/sys/devices/system/cpu"), quota: float | None = None) -> int:
    """The physical cores on which this process may run, limited by its cgroup's CPU time.

    A second hardware thread of a core does not make arithmetic faster. `quota` replaces the
    cgroup's limit, in cores.
    """
    cores = {_core_of(cpus, number) for number in os.sched_getaffinity(0)}
    if quota is None:
        reader = CgroupReader(Path("/proc"), Path("/sys/fs/cgroup"))
        reader.refresh(None)
        quota = reader.limits(None).cpus
    return len(cores) if quota is None else max(1, min(len(cores), math.ceil(quota)))


def _core_of(cpus: Path, number: int) -> str:
    """A text that all hardware threads of one core share. Without it, each counts as a core."""
    with contextlib.suppress(OSError):
        return (cpus / f"cpu{number}/topology/thread_siblings_list").read_text().strip()
    return str(number)
