"""`memtop doctor`: what memtop finds on this machine, and what to do about what is missing. It
changes nothing."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from memtop.cli.configuration import default_runs_dir
from memtop.cli.gpus import why_closed, why_unusable
from memtop.cli.installing import install_extra
from memtop.cli.interpreters import command_for, search
from memtop.cli.options import json_option, runs_dir_option
from memtop.cli.output import print_json, print_lines, row
from memtop.presets import PresetFileError, load_presets, load_recipes, user_cache
from memtop.supervisor import units
from memtop.supervisor.errors import MemtopError
from memtop.supervisor.interpreters import NEEDED, Interpreter, Search, build_of
from memtop.supervisor.monitor.nvml.thread import ONCE_SECONDS
from memtop.supervisor.monitor.processes.proc import sees_all_pids
from memtop.supervisor.monitor.sampler import Sampler
from memtop.supervisor.monitor.values import GpuSample, MachineSnapshot
from memtop.supervisor.run.client import socket_path

_SHOWN = ("torch", "transformers", "accelerate", "safetensors")
"""The packages of the trainer that are listed; the others only if they are missing."""
_NOT_NEEDED = "not needed for your own programs"
_TORCH_SECONDS = 60.0
# Host values that are worth a note if they are unknown; the others are often unknown.
_NOTED_IF_UNKNOWN = {
    "total_bytes": "RAM",
    "swap_fraction": "swap",
    "pressure_fraction": "memory pressure",
    "oom_kills": "kernel's kills",
    "shm_fraction": "/dev/shm",
}


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """One check. `ok` is None for a note, which is neither good nor bad."""

    check: str
    ok: bool | None
    found: str
    advice: str | None = None


@click.command()
@json_option
@runs_dir_option
def doctor(as_json: bool, runs_dir: Path | None) -> int:
    """Check what memtop finds on this machine.

    The exit status is 1 if something that memtop needs is missing.
    """
    findings = list(_findings(runs_dir or default_runs_dir()))
    if as_json:
        print_json(msgspec.to_builtins(findings))
    else:
        for finding in findings:
            word = {True: "ok", False: "MISSING", None: "note"}[finding.ok]
            print_lines(row((word, 8), (finding.check, 16), (finding.found, 0)))
            if finding.advice:
                print_lines(row(("", 25), ("->", 0), (finding.advice, 0)))
    return 1 if any(finding.ok is False for finding in findings) else 0


def _findings(runs_dir: Path) -> Iterator[CheckResult]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield CheckResult(check="python", ok=sys.version_info >= (3, 10), found=version)
    result = search()
    yield from _packages(result)
    yield from _machine(result.found)
    yield _writable(runs_dir)
    yield _prepared_data()
    yield _socket(runs_dir)
    yield _kernel()
    yield _data_files()


def _packages(result: Search) -> Iterator[CheckResult]:
    """The packages of the dashboard here, and those of the trainer in the Python that trains."""
    try:
        yield CheckResult(check="textual", ok=True, found=importlib.metadata.version("textual"))
    except importlib.metadata.PackageNotFoundError:
        yield CheckResult(check="textual", ok=False, found="not installed", advice="pip install textual")
    python = result.found
    if python is None:
        found = f"no Python with torch was found: {result.reasons()}"
        yield CheckResult(check="trains with", ok=None, found=found, advice=f"{install_extra('train')} ({_NOT_NEEDED})")
        return
    before = f"; not taken before it: {result.reasons()}" if result.refused else ""
    yield CheckResult(check="trains with", ok=True, found=f"{python.text()}{before}")
    for name in NEEDED:
        if python.missing([name]):
            advice = f"{command_for(python, python.missing([name]))} ({_NOT_NEEDED})"
            yield CheckResult(check=name, ok=None, found="not installed", advice=advice)
        elif name in _SHOWN:
            yield CheckResult(check=name, ok=True, found=python.proof.packages[name] or "version not known")


def _machine(python: Interpreter | None) -> Iterator[CheckResult]:
    sampler = Sampler(patience=ONCE_SECONDS)
    machine = sampler.sample()
    sampler.close()
    if machine.gpu_note:
        yield CheckResult(check="gpu", ok=None, found=machine.gpu_note, advice="training runs on the CPU")
    if machine.driver_version:
        yield CheckResult(
            check="driver", ok=True, found=f"{machine.driver_version}, CUDA up to {machine.cuda_version or 'unknown'}"
        )
    for gpu in machine.gpus:
        yield _gpu(gpu)
    if machine.gpus:
        yield _processes(machine)
        if python is not None:
            yield from _torch(machine, python.path)
    host = machine.host
    limit = "" if host.limit_bytes is None else f", cgroup limit {units.size(host.limit_bytes)}"
    yield CheckResult(check="host RAM", ok=True, found=f"{units.size(host.available_bytes)} available{limit}")
    for field, name in _NOTED_IF_UNKNOWN.items():
        if field in host.unknown:
            yield CheckResult(check=name, ok=None, found=host.unknown[field])


def _gpu(gpu: GpuSample) -> CheckResult:
    found = f"{gpu.name or '?'}, {units.size(gpu.free_bytes)} of {units.size(gpu.total_bytes)} free"
    closed = why_closed(gpu)
    if gpu.error is None and closed is not None:
        return CheckResult(check=f"gpu {gpu.index}", ok=None, found=f"{found}; {closed.found}", advice=closed.advice)
    return CheckResult(check=f"gpu {gpu.index}", ok=gpu.error is None, found=found, advice=gpu.error)


def _torch(machine: MachineSnapshot, python: str) -> Iterator[CheckResult]:
    """Whether the torch of the Python that trains can compute on each GPU."""
    build = build_of(python)
    if build is None:
        return
    gpus = [gpu for gpu in machine.gpus if gpu.error is None]
    if build.cuda is not None and not any(why_unusable(machine, gpu, build) for gpu in gpus):
        build = msgspec.structs.replace(build, kernels=_kernels(python))
    for gpu in gpus:
        problem = why_unusable(machine, gpu, build)
        check = f"torch, gpu {gpu.index}"
        if problem is None:
            yield CheckResult(check=check, ok=True, found=f"torch {build.version} can compute on it")
        else:
            yield CheckResult(check=check, ok=None, found=problem.found, advice=problem.advice)


def _kernels(python: str) -> tuple[str, ...] | None:
    """What torch itself says about its kernels; None if it does not."""
    code = "import torch; print(*torch.cuda.get_arch_list())"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=_TORCH_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return tuple(done.stdout.split()) or None


def _processes(machine: MachineSnapshot) -> CheckResult:
    """Whether the memory of each process is known, and which process it is."""
    rows = [process for gpu in machine.gpus for process in gpu.processes]
    reason = next((row.unknown["used_bytes"] for row in rows if "used_bytes" in row.unknown), None)
    if reason is not None:
        return CheckResult(check="gpu processes", ok=None, found=f"their memory is not known: {reason}")
    if not sees_all_pids():
        advice = "start the container with the host's pids (docker run --pid=host) to see them"
        return CheckResult(
            check="gpu processes", ok=None, found="processes outside this container are not visible", advice=advice
        )
    return CheckResult(check="gpu processes", ok=True, found=f"{len({row.pid for row in rows})} on {len(machine.gpus)} GPUs")


def _writable(runs_dir: Path) -> CheckResult:
    place, problem = _place_for(runs_dir)
    if problem is not None:
        return CheckResult(check="runs folder", ok=False, found=f"{place}: {problem}", advice="give another --runs-dir")
    free = shutil.disk_usage(place).free
    return CheckResult(check="runs folder", ok=True, found=f"{runs_dir.absolute()}, {units.size(free)} free")


def _prepared_data() -> CheckResult:
    folder = user_cache()
    place, problem = (None, "this user has no home folder") if folder is None else _place_for(folder)
    if problem is None:
        return CheckResult(check="prepared data", ok=True, found=f"in {folder}")
    advice = "set XDG_CACHE_HOME to a folder that you can write, before you train with data.train"
    found = problem if place is None else f"{place}: {problem}"
    return CheckResult(check="prepared data", ok=None, found=found, advice=advice)


def _place_for(folder: Path) -> tuple[Path, str | None]:
    """The folder, or the nearest one above it that exists, and why nothing can be written there."""
    place = folder.absolute()
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir():
        return place, "not a folder"
    if not os.access(place, os.R_OK | os.W_OK | os.X_OK):
        return place, "not readable" if os.access(place, os.W_OK) else "not writable"
    return place, None


def _socket(runs_dir: Path) -> CheckResult:
    try:
        return CheckResult(check="control socket", ok=True, found=f"in {socket_path(runs_dir / 'doctor').parent}")
    except MemtopError as error:
        return CheckResult(check="control socket", ok=False, found=str(error))


def _kernel() -> CheckResult:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return CheckResult(
            check="pidfd", ok=False, found=error.strerror or str(error), advice="memtop needs Linux 5.3 or newer"
        )
    return CheckResult(check="pidfd", ok=True, found="signals reach exactly the intended process")


def _data_files() -> CheckResult:
    try:
        found = f"{len(load_recipes())} recipes, {len(load_presets())} presets"
    except PresetFileError as error:
        return CheckResult(check="presets", ok=False, found=str(error), advice="correct the file or remove it")
    return CheckResult(check="presets", ok=True, found=found)
