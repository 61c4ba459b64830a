"""Which GPU a program that memtop starts would call `cuda:N`, from CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"

_MIXED_MODELS = (
    f"{VARIABLE} holds numbers, and with different models of GPUs in the machine CUDA counts the fastest first: "
    f"set {ORDER}=PCI_BUS_ID or use UUIDs"
)
_CUT = f"{VARIABLE} holds numbers, and CUDA counts a GPU that is cut into MIG instances in its own way: use UUIDs"
_TWICE = f"{VARIABLE} names one GPU twice: CUDA takes none of them"

_LETTERS = 10
"""More digits than that are no GPU's number, and in the thousands no number that Python would read."""


class Seen(msgspec.Struct, frozen=True):
    """What must be known of a GPU to find it in the variable."""

    index: int
    uuid: str | None
    name: str | None
    cut: bool
    """Whether MIG is on."""
    mig_uuids: tuple[str, ...] = ()


def visible_indices(environment: Mapping[str, str], gpus: Sequence[Seen]) -> dict[int, int] | str:
    """CUDA's number by the driver's index. Empty where the variable is not set; a reason where it cannot be told.

    As in CUDA, the list ends at the first entry that names no GPU; UUIDs may be cut short as long as they are unique.
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
    if found and _is_number(entries[0]) and (reason := _uncertain(environment, gpus)) is not None:
        return reason
    numbers: dict[int, int] = {}
    for number, (index, _) in enumerate(found):
        numbers.setdefault(index, number)  # with several of its MIG instances, the first
    return numbers


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < _LETTERS


def _by_number(entry: str, gpus: Sequence[Seen]) -> tuple[int, str] | None:
    if not _is_number(entry):
        return None
    number = int(entry)
    return (number, "") if number in {gpu.index for gpu in gpus} else None


def _by_uuid(entry: str, gpus: Sequence[Seen]) -> tuple[int, str] | None:
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    if entry.startswith("MIG-GPU-"):
        # The old way to write an instance: MIG-<UUID of its GPU>/<GPU instance>/<compute instance>
        uuid = entry[len("MIG-") :].partition("/")[0]
        whole = [gpu.index for gpu in gpus if gpu.uuid == uuid]
        return (whole[0], entry) if whole else None
    names = [(gpu.index, uuid) for gpu in gpus for uuid in (gpu.uuid, *gpu.mig_uuids) if uuid and uuid.startswith(entry)]
    return names[0] if len(names) == 1 else None


def _uncertain(environment: Mapping[str, str], gpus: Sequence[Seen]) -> str | None:
    """Why CUDA's numbers may not be the driver's. GPUs of one model keep the driver's order, which is that of the bus."""
    if any(gpu.cut for gpu in gpus):
        return _CUT
    if environment.get(ORDER) == "PCI_BUS_ID" or (len({gpu.name for gpu in gpus}) == 1 and gpus[0].name):
        return None
    return _MIXED_MODELS
