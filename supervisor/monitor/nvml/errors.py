"""NVML's error codes in words for a person: what happened and, where something can be done, what to do."""

from __future__ import annotations

UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
TOO_SMALL = 7
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
IRQ_ISSUE = 11
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
OPERATING_SYSTEM = 17
LIBRARY_MISMATCH = 18
GPU_NOT_FOUND = 28
UNKNOWN = 999

WORDS: dict[int, str] = {
    UNINITIALIZED: "the driver library lost its connection to the driver; memtop connects again by itself",
    INVALID_ARGUMENT: "the driver no longer knows this GPU by its old handle; memtop opens it again by itself",
    NOT_SUPPORTED: "not supported by this GPU",
    NO_PERMISSION: "no permission: this user may not read it (check the access rights of /dev/nvidia*)",
    NOT_FOUND: "not found by the driver",
    TOO_SMALL: "the list grew while it was being read; it is read again at the next sample",
    8: "the GPU's external power cables are not properly attached: check them",
    DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded: load it (modprobe nvidia) or reboot after installing it",
    TIMEOUT: "the driver did not answer in time",
    IRQ_ISSUE: "the kernel has an interrupt problem with the GPU: see dmesg, then reboot",
    LIBRARY_NOT_FOUND: "libnvidia-ml not found",
    FUNCTION_NOT_FOUND: "this driver is too old to tell",
    14: "the GPU's information ROM is damaged: see nvidia-smi -q, the card may need replacing",
    GPU_IS_LOST: "the GPU is lost (fell off the bus): see dmesg for an Xid, then power the machine off and on",
    RESET_REQUIRED: "the GPU needs a reset before it can be used again: end its processes, then nvidia-smi --gpu-reset",
    OPERATING_SYSTEM: "the operating system or the device cgroup blocks access to the GPU: "
    "grant the container or job the device /dev/nvidia*",
    LIBRARY_MISMATCH: "driver and library have different versions, as after a driver update: "
    "reboot, or unload and load the nvidia kernel modules",
    19: "the GPU is in use by something that forbids this",
    20: "the driver is out of host memory",
    21: "the driver has no data yet",
    25: "driver and bindings disagree on the layout of this value: update nvidia-ml-py or the driver",
    27: "not ready yet",
    GPU_NOT_FOUND: "the GPU is gone: it was removed or is hidden from this container",
    UNKNOWN: "unknown error in the driver; inside a container that worked before, the container lost its GPU devices: "
    "recreate the container; elsewhere see dmesg",
}

GPU_GONE = frozenset({UNINITIALIZED, DRIVER_NOT_LOADED, GPU_IS_LOST, RESET_REQUIRED, GPU_NOT_FOUND})
"""Codes that, from whichever call, mean that nothing of this GPU can be read with the present handle."""

GPU_GONE_ON_MEMORY = GPU_GONE | {INVALID_ARGUMENT, IRQ_ISSUE, OPERATING_SYSTEM, UNKNOWN}
"""Codes that mean the same when the memory call, which every GPU with memory answers, gives them."""

NEVER_AGAIN = frozenset({NOT_SUPPORTED, FUNCTION_NOT_FOUND})
"""Codes that will be the same however often one asks."""


NOT_LISTED = "the driver does not list this GPU any more: see dmesg for an Xid"


def words(code: int) -> str:
    """What NVML's code means and what to do."""
    return WORDS.get(code, f"the driver reported error {code}")


def no_gpu_note(code: int) -> str:
    """The note that stands in place of the GPU panels when NVML cannot be started."""
    if code == FUNCTION_NOT_FOUND:
        return "no NVIDIA GPU: the driver is too old for memtop: update it"
    return f"no NVIDIA GPU: {words(code)}"
