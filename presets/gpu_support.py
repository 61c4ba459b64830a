"""Whether a build of torch can compute on a GPU: a pure rule for the trainer and the supervisor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

_NO_GPU = (0, 0)
_DRIVERS = {11: 450, 12: 525, 13: 580}
"""By major CUDA version: the first driver that runs its programs (NVIDIA's table of minor version
compatibility)."""
_BUILDS = "see https://pytorch.org/get-started/locally/"


class TorchBuild(msgspec.Struct, frozen=True, kw_only=True):
    """What an installed torch was built for."""

    version: str
    cuda: str | None
    """The CUDA version, such as "13.0". None for a build without CUDA."""
    rocm: bool = False
    """Whether it is built for AMD GPUs."""
    kernels: tuple[str, ...] | None = None
    """The architectures in the build, as `torch.cuda.get_arch_list` names them: machine code
    ("sm_90") and PTX ("compute_90"). None if not known."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU as its driver describes it."""

    name: str
    capability: tuple[int, int] | None = None
    """The compute capability. None if not known."""


class Unusable(msgspec.Struct, frozen=True):
    """Why a build cannot compute on a GPU. `str()` gives one line."""

    found: str
    advice: str

    def __str__(self) -> str:
        return f"{self.found}; {self.advice}"


def why_unusable(
    build: TorchBuild, gpu: Gpu, *, driver_version: str | None = None, driver_cuda: tuple[int, int] | None = None
) -> Unusable | None:
    """Why this build cannot compute on this NVIDIA GPU, and what to do. None if nothing is known
    against it.

    `driver_cuda` is the newest CUDA version that the driver supports. A driver runs programs of
    every release of the same major CUDA version.
    """
    if build.cuda is None:
        made = "AMD GPUs" if build.rocm else "CPUs only"
        found = f"torch {build.version} is built for {made} and cannot use the GPU here ({gpu.name})"
        return Unusable(found, f"install a build for CUDA, {_BUILDS}")
    needed = int(build.cuda.partition(".")[0])
    if driver_cuda is not None and driver_cuda[0] < needed:
        driver = "the NVIDIA driver" if driver_version is None else f"the NVIDIA driver {driver_version}"
        newer = f"driver {_DRIVERS[needed]} or newer" if needed in _DRIVERS else "a newer driver"
        found = f"{driver} supports CUDA up to {driver_cuda[0]}.{driver_cuda[1]}, and torch {build.version} needs CUDA {needed}"
        return Unusable(found, f"install {newer}, or a torch build for CUDA {driver_cuda[0]}, {_BUILDS}")
    if gpu.capability is None or not build.kernels or has_kernels(build.kernels, gpu.capability):
        return None
    has = f"; the build has {', '.join(_capabilities(build.kernels))}"
    return _without_kernels(build, gpu.name, gpu.capability, "install a torch build that has them", has)


def why_no_kernels(build: TorchBuild, gpu: Gpu) -> Unusable | None:
    """Why this build has no kernels for the GPU, as far as its CUDA version shows; None if it does
    not.

    From CUDA 13 on, NVIDIA's compiler makes no code for GPUs before Turing. PyTorch's own builds
    (2.9.0+cu128) have none for GPUs before Volta from CUDA 12.8 on, and none for Blackwell before.
    What other builds have only torch knows (`torch.cuda.get_arch_list`).
    """
    if build.cuda is None or gpu.capability is None:
        return None
    cuda, official = tuple(map(int, build.cuda.split(".")[:2])), "+cu" in build.version
    least = (7, 5) if cuda >= (13, 0) else (7, 0) if cuda >= (12, 8) and official else (0, 0)
    if gpu.capability < least:
        wanted = "CUDA 12.6"
    elif gpu.capability >= (10, 0) and cuda < (12, 8) and official:
        wanted = "CUDA 12.8 or newer"
    else:
        return None
    return _without_kernels(build, gpu.name, gpu.capability, f"install a torch build for {wanted}")


def _without_kernels(build: TorchBuild, name: str, capability: tuple[int, int], advice: str, has: str = "") -> Unusable:
    where = f"the {name} (compute capability {capability[0]}.{capability[1]}{has})"
    return Unusable(f"torch {build.version} has no kernels for {where}", f"{advice}, {_BUILDS}")


def has_kernels(kernels: Iterable[str], capability: tuple[int, int]) -> bool:
    """Whether one of these architectures runs on a GPU of this compute capability.

    Machine code runs on its own and later minor versions of the same major version. The driver
    compiles PTX for every later GPU. The suffix of "sm_90a" limits it to one version, that of
    "sm_100f" to one major version.
    """
    return any(_runs(kind, version, suffix, capability) for kind, version, suffix in map(_taken_apart, kernels))


def _runs(kind: str, version: tuple[int, int], suffix: str, capability: tuple[int, int]) -> bool:
    if suffix == "a":
        return version == capability
    if kind == "compute" and not suffix:
        return version <= capability
    return version[0] == capability[0] and version[1] <= capability[1]


def _taken_apart(kernel: str) -> tuple[str, tuple[int, int], str]:
    """The kind, the version and the suffix: ("sm", (9, 0), "a") for "sm_90a"."""
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", kernel)
    return ("", _NO_GPU, "") if found is None else (found[1], (int(found[2]), int(found[3])), found[4])


def _capabilities(kernels: Sequence[str]) -> list[str]:
    versions = sorted({version for kind, version, _ in map(_taken_apart, kernels) if kind})
    return [f"{major}.{minor}" for major, minor in versions]
