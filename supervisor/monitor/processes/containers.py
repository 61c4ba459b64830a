"""In which container, pod or batch job a process runs, from its cgroup path and its environment. Pure text."""

from __future__ import annotations

import re
from collections.abc import Mapping

VARIABLES = (
    *("HOSTNAME", "POD_NAME", "POD_NAMESPACE", "SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_STEP_ID"),
    *("APPTAINER_NAME", "SINGULARITY_NAME"),
)
"""What is wanted of a process's environment."""

_SHORT = 12  # letters of a container's number that people know it by
_ID = r"([0-9a-f]{64}|[0-9a-f]{32}-\d+)"  # the second is Amazon's container service
_POD = re.compile(r"(?:^|[-/])pod([0-9a-f]{8}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{12}|[0-9a-f]{32})\b")
_SLURM = re.compile(r"/job_(\d+)(?:/step_(\w+))?")
_NUMBERED = (
    ("podman", re.compile(rf"libpod-(?:payload-)?{_ID}")),
    ("docker", re.compile(rf"/docker[-/]{_ID}")),
    ("containerd", re.compile(rf"(?:cri-containerd|nerdctl|containerd)[-:/]{_ID}")),
    ("cri-o", re.compile(rf"crio-{_ID}")),
    ("ecs", re.compile(rf"/ecs/(?:.*/)?{_ID}")),
    ("container", re.compile(rf"(?:^|[-/:]){_ID}(?:\.scope)?(?:/|$)")),
)
_NAMED = (
    ("nspawn", re.compile(r"systemd-nspawn@([^/]+)\.service")),
    ("machine", re.compile(r"/machine\.slice/machine-([^/]+)\.scope")),
    ("lxc", re.compile(r"/lxc\.payload[./]([^/]+)")),
    ("lxc", re.compile(r"^/lxc/([^/]+)")),
)


def container_of(cgroup: str, marks: Mapping[str, str], own_host: str) -> str | None:
    """The container, pod or batch job; None where the process is in none that can be told.

    `cgroup` is the text of /proc/PID/cgroup, `marks` what could be read of its environment, `own_host` this machine's name:
    a pod on the host's network carries it, and it is no pod's name then.
    """
    paths = list(dict.fromkeys(line.split(":", 2)[2] for line in cgroup.splitlines() if line.count(":") >= 2))
    for read in (lambda path: _pod(path, marks, own_host), _numbered, _named, lambda path: _slurm(path, marks)):
        found = next((name for name in map(read, paths) if name), None)
        if found:
            return found
    image = marks.get("APPTAINER_NAME") or marks.get("SINGULARITY_NAME")
    if image:
        return f"apptainer {image}"
    return _slurm_words(marks["SLURM_JOB_ID"], marks.get("SLURM_STEP_ID"), marks) if marks.get("SLURM_JOB_ID") else None


def _pod(path: str, marks: Mapping[str, str], own_host: str) -> str | None:
    found = _POD.search(path)
    if found is None or "kube" not in path:
        return None
    host = marks.get("HOSTNAME")
    name = marks.get("POD_NAME") or (host if host != own_host else None) or found[1].replace("_", "-")
    space = marks.get("POD_NAMESPACE")
    return f"pod {space}/{name}" if space else f"pod {name}"


def _numbered(path: str) -> str | None:
    for word, pattern in _NUMBERED:
        # The innermost counts where containers run in containers.
        found = pattern.findall(path)
        if found:
            return f"{word} {found[-1][:_SHORT]}"
    return None


def _named(path: str) -> str | None:
    for word, pattern in _NAMED:
        found = pattern.search(path)
        if found:
            # systemd writes what is special in a unit's name as \x2d.
            name = re.sub(r"\\x([0-9a-f]{2})", _unescaped, found[1])
            return f"{word} {name}"
    return None


def _unescaped(escape: re.Match[str]) -> str:
    return chr(int(escape[1], 16))


def _slurm(path: str, marks: Mapping[str, str]) -> str | None:
    found = _SLURM.search(path)
    return _slurm_words(found[1], found[2], marks) if found is not None and "slurm" in path else None


def _slurm_words(job: str, step: str | None, marks: Mapping[str, str]) -> str:
    name = marks.get("SLURM_JOB_NAME") if marks.get("SLURM_JOB_ID") in (None, job) else None
    words = f"slurm job {job} ({name})" if name else f"slurm job {job}"
    return f"{words} step {step}" if step else words
