"""What can be known before the driver is called: whether the GPUs sleep, and which GPU
CUDA_VISIBLE_DEVICES calls `cuda:N`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

ASLEEP = "the GPU sleeps: memtop shows it once a program uses it, and does not wake it"
VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"

_NVIDIA = "0x10de"
# class of VGA and 3D controllers; the card's sound and USB functions sleep on their own
_DISPLAY = "0x03"
_MIXED_MODELS = (
    f"{VARIABLE} contains numbers, and with different GPU models CUDA numbers the fastest GPU first: "
    f"set {ORDER}=PCI_BUS_ID or use UUIDs"
)
_WITH_MIG = f"{VARIABLE} contains numbers, and CUDA numbers a GPU with MIG instances in its own way: use UUIDs"
_TWICE = f"{VARIABLE} names one GPU twice: CUDA then uses none"
_DIGITS = 10
"""A number with this many digits is no GPU's number. Python refuses to parse numbers with thousands
of digits."""


def all_asleep(sys_root: Path) -> bool:
    """True if there are NVIDIA GPUs and the kernel has suspended all of them, as on a laptop.

    Reading this wakes no GPU. The first call of the driver library would, at the cost of battery
    and time.
    """
    try:
        devices = sorted((sys_root / "bus/pci/devices").iterdir())
    except OSError:
        return False  # no PCI bus is visible
    states = [_read(device / "power/runtime_status") for device in devices if _is_gpu(device)]
    return bool(states) and all(state == "suspended" for state in states)


def _is_gpu(device: Path) -> bool:
    return _read(device / "vendor") == _NVIDIA and _read(device / "class").startswith(_DISPLAY)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""  # the device is gone, or the kernel has no such file: it is not known to sleep


class CudaDevice(msgspec.Struct, frozen=True):
    """What must be known about a GPU to find it in CUDA_VISIBLE_DEVICES."""

    index: int
    uuid: str | None
    name: str | None
    has_mig: bool
    mig_uuids: tuple[str, ...] = ()


def visible_indices(environment: Mapping[str, str], gpus: Sequence[CudaDevice]) -> dict[int, int] | str:
    """CUDA's number of each GPU, by the driver's index.

    Empty if the variable is not set; a reason if it is ambiguous.

    As in CUDA, the list ends at the first entry that matches no GPU. UUIDs may be abbreviated if
    they stay unique.
    """
    text = environment.get(VARIABLE)
    if text is None:
        return {}
    entries = [entry.strip() for entry in text.split(",")]
    found: list[tuple[int, str]] = []
    for entry in entries:
        match = _by_number(entry, gpus) if _is_number(entries[0].lstrip("+-")) else _by_uuid(entry, gpus)
        if match is None:
            break
        if match in found:
            return _TWICE
        found.append(match)
    if found and _is_number(entries[0]) and (reason := _why_ambiguous(environment, gpus)) is not None:
        return reason
    numbers: dict[int, int] = {}
    for number, (index, _) in enumerate(found):
        numbers.setdefault(index, number)  # the first of its MIG instances
    return numbers


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < _DIGITS


def _by_number(entry: str, gpus: Sequence[CudaDevice]) -> tuple[int, str] | None:
    if not _is_number(entry):
        return None
    number = int(entry)
    return (number, "") if number in {gpu.index for gpu in gpus} else None


def _by_uuid(entry: str, gpus: Sequence[CudaDevice]) -> tuple[int, str] | None:
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    if entry.startswith("MIG-GPU-"):
        # The old form of an instance: MIG-<UUID of its GPU>/<GPU instance>/<compute instance>
        uuid = entry[len("MIG-") :].partition("/")[0]
        whole = [gpu.index for gpu in gpus if gpu.uuid == uuid]
        return (whole[0], entry) if whole else None
    names = [(gpu.index, uuid) for gpu in gpus for uuid in (gpu.uuid, *gpu.mig_uuids) if uuid and uuid.startswith(entry)]
    return names[0] if len(names) == 1 else None


def _why_ambiguous(environment: Mapping[str, str], gpus: Sequence[CudaDevice]) -> str | None:
    """Why CUDA's numbers may differ from the driver's.

    GPUs of one model have the driver's order, which is the bus order.
    """
    if any(gpu.has_mig for gpu in gpus):
        return _WITH_MIG
    if environment.get(ORDER) == "PCI_BUS_ID" or (len({gpu.name for gpu in gpus}) == 1 and gpus[0].name):
        return None
    return _MIXED_MODELS
