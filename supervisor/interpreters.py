"""The Python that trains a recipe. It needs torch, which memtop's own Python need not have.

`candidates` is the rule: which interpreters come into question, in which order. `prove` starts one
once and lets it import torch. Its answer is kept until something changes in its packages.
`why_unsafe` is the rule for those that nobody named: others may have put them there.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

import memtop
from memtop.presets import user_cache
from memtop.presets.decoding import decoder_of
from memtop.presets.gpu_support import TorchBuild
from memtop.presets.measured import GpuKind, Learned, learned
from memtop.presets.torch_build import installed_build

TRAINER_PATH = Path(memtop.__file__).absolute().parent / "train" / "path"
"""On the PYTHONPATH of another Python, it has memtop's modules and nothing else."""
NEEDED = ("torch", "transformers", "accelerate", "safetensors", "numpy", "msgspec", "platformdirs", "psutil", "pynvml")
"""The modules that the trainer imports in every run."""
_BEFORE_3_11 = ("tomli",)
_SOMETIMES = ("peft", "bitsandbytes", "deepspeed", "pyarrow", "tensorboard", "tensorboardX", "wandb", "pip")
_PACKAGES = {"pynvml": "nvidia-ml-py"}
"""By module: the package to install, where the names differ."""
OLDEST = (3, 10)
_PROOF_SECONDS = 120.0
"""torch's first import from a network file system takes most of a minute."""
_KEPT = 16
_BASE = "base"

# Runs in any Python 3, which may be too old for memtop.
_PROBE = """
import sys
if sys.path[0] == "":
    del sys.path[0]
import json, os
found = {"version": list(sys.version_info[:3]), "packages": {}, "paths": [p for p in sys.path if os.path.isdir(p)]}
try:
    from importlib import metadata, util
    for word in sys.argv[1:]:
        name, package = word.split("=")
        if util.find_spec(name) is not None:
            found["packages"][name] = ""
            try:
                found["packages"][name] = metadata.version(package)
            except Exception:
                pass
    if "torch" in found["packages"]:
        import torch
        found["torch_folder"] = os.path.dirname(torch.__file__)
        found["packages"]["torch"] = str(torch.__version__)
except BaseException as error:
    found["problem"] = "%s: %s" % (type(error).__name__, (str(error).strip() or "no reason given").splitlines()[0])
sys.stdout.write("\\n" + json.dumps(found) + "\\n")
"""


class Candidate(msgspec.Struct, frozen=True):
    """An interpreter that comes into question, and why."""

    path: str
    why: str
    named: bool = False
    """Whether it was named: then no other is tried."""
    chosen: bool = True
    """Whether you chose it: you named it, activated it, or run memtop with it. memtop finds the
    others in a folder, on PATH or in the project's file."""


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """What an interpreter says about itself."""

    version: tuple[int, int, int] = (0, 0, 0)
    """(0, 0, 0) if it gave no answer."""
    packages: dict[str, str] = {}
    """By module that is there: the version of its package, empty if not known."""
    torch_folder: str | None = None
    paths: tuple[str, ...] = ()
    """Where it looks for modules."""
    problem: str | None = None
    """Why it cannot import torch."""

    def why_not(self) -> str | None:
        """Why this Python cannot train; None if it has torch. It may still lack other packages."""
        if self.version != (0, 0, 0) and self.version < OLDEST:
            return f"it is Python {self.version[0]}.{self.version[1]}, and the trainer needs 3.10 or newer"
        if self.problem is not None:
            return self.problem
        return None if "torch" in self.packages else "it has no torch"


class Interpreter(msgspec.Struct, frozen=True, kw_only=True):
    """A Python that has torch."""

    path: str
    why: str
    proof: Proof
    not_taken: str = ""
    """The interpreters before it, without memtop's own, and why each was not taken."""

    def missing(self, modules: Sequence[str]) -> list[str]:
        """The packages of those of the modules that it lacks."""
        return missing_in(self.proof, modules)

    @property
    def is_own(self) -> bool:
        return is_own(self.path)

    def text(self) -> str:
        """For people: the path, what it has, and why it was taken."""
        return (
            f"{self.path} ({self.why}; Python {'.'.join(map(str, self.proof.version))}, torch {self.proof.packages['torch']})"
        )


def missing_in(proof: Proof, modules: Sequence[str]) -> list[str]:
    """The packages of those of the modules that an interpreter lacks, or has in a version that is
    too old: `transformers>=4.56`."""
    older = _BEFORE_3_11 if modules == NEEDED and proof.version < (3, 11) else ()
    least, missing = least_versions(), []
    for name in (*modules, *older):
        package = _PACKAGES.get(name, name)
        found, needed = proof.packages.get(name), least.get(package, "0")
        if found is None:
            missing.append(package)
        elif found and _numbers(found) < _numbers(needed):
            missing.append(f"{package}>={needed}")
    return missing


@functools.cache
def least_versions() -> dict[str, str]:
    """The oldest version of each package with which memtop works, from memtop's own metadata."""
    import importlib.metadata  # takes 10 ms

    try:
        lines = importlib.metadata.requires("memtop") or []
    except importlib.metadata.PackageNotFoundError:
        return {}  # not installed: run from its folder
    found = (re.match(r"([\w.-]+)>=([\d.]+)", line) for line in lines)
    return {match[1]: match[2] for match in found if match}


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:3]))


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """Which interpreter was found, and why the ones before it were not taken."""

    found: Interpreter | None
    refused: tuple[tuple[Candidate, Proof], ...] = ()

    def reasons(self) -> str:
        return _reasons(self.refused)


def _reasons(refused: Iterable[tuple[Candidate, Proof]]) -> str:
    return "; ".join(f"{one.why} ({one.path}): {proof.why_not()}" for one, proof in refused)


def environment_of(python: str) -> dict[str, str]:
    """The variables for a module of the trainer that this interpreter runs; empty: memtop's own."""
    paths = [path for path in ("" if is_own(python) else str(TRAINER_PATH), os.environ.get("PYTHONPATH", "")) if path]
    # A folder named `tokenizers` in the current directory must not shadow the library.
    return {**os.environ, "PYTHONSAFEPATH": "1", **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})}


def is_own(path: str) -> bool:
    """Whether this is the Python that runs memtop. Empty: the run names none."""
    return path in ("", sys.executable)


# --- which come into question ---------------------------------------------------------------------


class Named(msgspec.Struct, frozen=True):
    """An interpreter that was named."""

    text: str
    where: str
    by_project: bool = False
    """By the project's file, which may be another user's."""


def candidates(named: Named | None, environment: Mapping[str, str], cwd: Path) -> Iterator[Candidate]:
    """The interpreters that come into question, the first choice first.

    memtop's own comes before those of the shell: who installed torch beside memtop trains with it,
    whichever environment is active.
    """
    if named is not None:
        yield Candidate(_named_path(named.text, environment, cwd), named.where, named=True, chosen=not named.by_project)
        return
    seen = set()
    for one in (Candidate(sys.executable, "memtop's own"), *_around(environment, cwd)):
        # On PATH, `python` and `python3` of one folder are most often links to one file.
        same = (str(Path(one.path).parent), os.path.realpath(one.path))
        if same not in seen:
            seen.add(same)
            yield one


def _around(environment: Mapping[str, str], cwd: Path) -> Iterator[Candidate]:
    if environment.get("VIRTUAL_ENV"):
        yield Candidate(_python_of(cwd / environment["VIRTUAL_ENV"]), "VIRTUAL_ENV")
    # conda's base is active in every shell: nobody chose it.
    if environment.get("CONDA_PREFIX") and environment.get("CONDA_DEFAULT_ENV") != _BASE:
        yield Candidate(_python_of(cwd / environment["CONDA_PREFIX"]), "CONDA_PREFIX")
    for folder in (cwd, *cwd.parents):
        path = _python_of(folder / ".venv")
        if os.path.lexists(path):
            yield Candidate(path, f".venv in {folder}", chosen=False)
            break
    for name in ("python3", "python"):
        found = shutil.which(name, path=environment.get("PATH", os.defpath))
        if found is not None:
            yield Candidate(str(cwd / found), f"{name} on PATH", chosen=False)


def _python_of(environment: Path) -> str:
    # Never resolved: what the link leads to is the Python without the environment.
    return str(environment.absolute() / "bin" / "python")


def _named_path(text: str, environment: Mapping[str, str], cwd: Path) -> str:
    """The interpreter that a person named: its path, the folder of its environment, or a word that
    is on PATH."""
    path = cwd / expanded(text)
    if os.sep not in text and not path.exists():
        path = cwd / (shutil.which(text, path=environment.get("PATH", os.defpath)) or path)
    short = Path(os.path.normpath(path))
    if os.path.realpath(short) == os.path.realpath(path):  # no link is before a `..`
        path = short
    return _python_of(path) if path.is_dir() else str(path)


def expanded(text: str) -> Path:
    """The path with the home folder for `~`, which stays if there is none."""
    # Path's own method would raise then.
    return Path(os.path.expanduser(text))  # noqa: PTH111


def find(named: Named | None, environment: Mapping[str, str], cwd: Path, asking: Callable[[str], None] | None = None) -> Search:
    """The first candidate that has torch. It starts them one after the other; see `prove`."""
    refused: list[tuple[Candidate, Proof]] = []
    for candidate in candidates(named, environment, cwd):
        path, problem = candidate.path, None if candidate.chosen else why_unsafe(candidate.path)
        if problem is None:
            path = _behind_shim(path)
            proof = prove(path, asking)
        else:
            proof = Proof(problem=f"memtop does not start it by itself: {problem}; --python {shlex.quote(path)} takes it")
        if proof.why_not() is None:
            others = [(one, why) for one, why in refused if not is_own(one.path)]
            found = Interpreter(path=path, why=candidate.why, proof=proof, not_taken=_reasons(others))
            return Search(found=found, refused=tuple(refused))
        refused.append((candidate, proof))
    return Search(found=None, refused=tuple(refused))


def why_unsafe(path: str) -> str | None:
    """Why another user may have put this interpreter there, or may exchange it; None if nobody can.

    It looks at the file (a link is not followed: who made it chose where it leads), at its folder
    and at the folder of the environment.
    """
    # The owner of / is root by another number where a container maps the users.
    trusted = (os.geteuid(), 0, Path("/").stat().st_uid)
    file = Path(path).absolute()
    for place in (file.parents[1], file.parent, file) if len(file.parents) > 1 else (file,):
        try:
            found = place.lstat() if place == file else place.stat()
        except OSError:
            return None  # it is gone: to start it says so
        if found.st_uid not in trusted:
            return f"{place} belongs to another user (uid {found.st_uid})"
        # In a sticky folder (/tmp), nobody exchanges what belongs to you.
        if found.st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH and not stat.S_ISLNK(found.st_mode):
            return f"every user may write to {place}"
    return None


# --- what an interpreter has ----------------------------------------------------------------------


def prove(path: str, asking: Callable[[str], None] | None = None) -> Proof:
    """What this interpreter has. memtop's own is not started: its files say it.

    `asking` is called with the path before an interpreter is started, which takes a while.
    """
    if is_own(path):
        return _own_proof()
    if (problem := why_gone(path)) is not None:
        return Proof(problem=problem)
    kept = _read_kept()
    entry = kept.get(path)
    python_path = os.environ.get("PYTHONPATH", "")
    if entry is not None and (entry.python_path, entry.times) == (python_path, _times(path, entry.proof.paths)):
        return entry.proof
    if asking is not None:
        asking(path)
    proof = _asked(path)
    # A torch that cannot be imported is asked again: that may depend on variables of the shell.
    if proof.version != (0, 0, 0) and proof.problem is None:
        others = {name: one for name, one in kept.items() if name != path}
        newest = dict(list(others.items())[1 - _KEPT :])
        _keep({**newest, path: _Kept(proof, _times(path, proof.paths), python_path)})
    return proof


def _behind_shim(path: str) -> str:
    """The interpreter that a shim of pyenv or asdf starts; any other path stays what it is.

    What a shim starts depends on the working directory and on variables, which may change before a
    restart. Other scripts stay: they may set variables that their interpreter needs.
    """
    try:
        with Path(path).open("rb") as file:
            if Path(path).parent.name != "shims" or file.read(2) != b"#!":
                return path
        done = subprocess.run(
            [path, "-c", "import sys; print(sys.executable)"],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=_PROOF_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return path  # to prove it says what is wrong
    return os.fsdecode(done.stdout).strip() or path


def why_gone(path: str) -> str | None:
    """Why this interpreter cannot be started; None if it can."""
    if not os.path.lexists(path):
        return "there is no such file"
    if not Path(path).is_file():
        return "it leads to no file"
    return None if os.access(path, os.X_OK) else "you may not start it"


def has(path: str, module: str) -> bool:
    """Whether the interpreter of a run can import this module."""
    return importlib.util.find_spec(module) is not None if is_own(path) else module in prove(path).packages


def folder_of(python: Interpreter, module: str) -> Path | None:
    """The folder of a package that this interpreter would import; None if that is not known."""
    if python.is_own:
        spec = importlib.util.find_spec(module)
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
    else:
        places = [f"{path}/{module}" for path in python.proof.paths]
    return next((Path(place) for place in places if os.path.isfile(f"{place}/__init__.py")), None)  # noqa: PTH113


def build_of(path: str) -> TorchBuild | None:
    """What the torch of this interpreter was built for; None if that is not known."""
    if is_own(path):
        return installed_build()
    folder = prove(path).torch_folder
    return None if folder is None else installed_build(folder)


def learned_on(gpu: GpuKind | None, python: str, *, without: str = "") -> Learned:
    """What earlier runs have measured on such a GPU with the torch of this interpreter (empty:
    memtop's own). `without`: see `learned`."""
    build = None if gpu is None else build_of(python)
    return learned(gpu, None if build is None else build.version, without=without)


def _own_proof() -> Proof:
    version = (sys.version_info.major, sys.version_info.minor, sys.version_info.micro)
    there = [name for name in _asked_for() if importlib.util.find_spec(name) is not None]
    return Proof(version=version, packages={name: _version(_PACKAGES.get(name, name)) for name in there})


def _version(package: str) -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _asked_for() -> tuple[str, ...]:
    return (*NEEDED, *_BEFORE_3_11, *_SOMETIMES)


def _asked(path: str) -> Proof:
    """The answer of the interpreter itself."""
    words = [f"{name}={_PACKAGES.get(name, name)}" for name in _asked_for()]
    try:
        done = subprocess.run(
            [path, "-c", _PROBE, *words],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=_PROOF_SECONDS,
            check=False,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )
    except subprocess.TimeoutExpired:
        return Proof(problem=f"it did not import torch within {_PROOF_SECONDS:.0f} s")
    except OSError as error:
        return Proof(problem=f"it cannot be started: {error.strerror}")
    # Packages may print before and after it.
    answer = next((line for line in reversed(done.stdout.splitlines()) if b'"version"' in line), b"")
    end = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
    try:
        return decoder_of(Proof).decode(answer)
    except msgspec.DecodeError:
        words = done.stderr.decode(errors="replace").strip().splitlines()
        return Proof(problem=f"it ended with {end}{': ' + words[-1] if words else ''}")


# --- the answers that are kept --------------------------------------------------------------------


class _Kept(msgspec.Struct, frozen=True):
    """An answer, and the times of the interpreter and of its folders of modules when it was given:
    to install a package changes one of them."""

    proof: Proof
    times: tuple[int, ...]
    python_path: str
    """PYTHONPATH when it was given."""


def _times(path: str, folders: Sequence[str]) -> tuple[int, ...]:
    times = []
    for place in (path, *folders):
        try:
            times.append(Path(place).stat().st_mtime_ns)
        except OSError:
            times.append(0)
    return tuple(times)


def _file() -> Path | None:
    folder = user_cache()
    return None if folder is None else folder / "pythons.json"


def _read_kept() -> dict[str, _Kept]:
    file = _file()
    if file is None:
        return {}
    try:
        return decoder_of(dict[str, _Kept]).decode(file.read_bytes())
    except (OSError, msgspec.DecodeError):
        return {}  # none is kept: each is asked again


def _keep(kept: dict[str, _Kept]) -> None:
    file = _file()
    if file is None:
        return
    new = file.with_name(f"{file.name}.{os.getpid()}")
    with contextlib.suppress(OSError):  # without a folder for it, the interpreter is asked each time
        file.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(msgspec.json.encode(kept))
        new.replace(file)
