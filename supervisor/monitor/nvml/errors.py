"""NVML's error codes and NVIDIA's Xid codes in words: what happened and what a person can do about
it."""

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

CODE_WORDS: dict[int, str] = {
    UNINITIALIZED: "the driver library lost its connection to the driver; memtop reconnects",
    INVALID_ARGUMENT: "the driver no longer accepts the old handle of this GPU; memtop opens the GPU again",
    NOT_SUPPORTED: "not supported by this GPU",
    NO_PERMISSION: "no permission to read it: check the access rights of /dev/nvidia*",
    NOT_FOUND: "not found by the driver",
    TOO_SMALL: "the list grew while it was read; memtop reads it again at the next sample",
    8: "the GPU's external power cables are not attached properly: check them",
    DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded: load it (modprobe nvidia) or reboot after installing it",
    TIMEOUT: "the driver did not answer in time",
    IRQ_ISSUE: "the kernel has an interrupt problem with the GPU: see dmesg, then reboot",
    LIBRARY_NOT_FOUND: "no NVIDIA driver found",
    FUNCTION_NOT_FOUND: "this driver is too old to report it",
    14: "the GPU's information ROM is damaged: see nvidia-smi -q, the card may need replacing",
    GPU_IS_LOST: "the GPU is lost (fell off the bus): see dmesg for an Xid, then power the machine off and on",
    RESET_REQUIRED: "the GPU needs a reset before it can be used again: end its processes, then nvidia-smi --gpu-reset",
    OPERATING_SYSTEM: "the operating system or the device cgroup blocks access to the GPU: "
    "grant the container or job the device /dev/nvidia*",
    LIBRARY_MISMATCH: "driver and library have different versions, as after a driver update: "
    "reboot, or unload and load the nvidia kernel modules",
    19: "the GPU is in use in a way that does not allow this",
    20: "the driver is out of host memory",
    21: "the driver has no data yet",
    25: "driver and bindings disagree on the layout of this value: update nvidia-ml-py or the driver",
    27: "not ready yet",
    GPU_NOT_FOUND: "the GPU is gone: it was removed, or this container no longer sees it",
    UNKNOWN: "unknown error in the driver; a container that worked before has lost its GPU devices: "
    "recreate it; elsewhere see dmesg",
}

GPU_GONE = frozenset({UNINITIALIZED, DRIVER_NOT_LOADED, GPU_IS_LOST, RESET_REQUIRED, GPU_NOT_FOUND})
"""Codes that mean, whichever call returns them, that the present handle of this GPU is of no use
any more."""

GPU_GONE_ON_MEMORY = GPU_GONE | {INVALID_ARGUMENT, IRQ_ISSUE, OPERATING_SYSTEM, UNKNOWN}
"""Codes that mean the same if the memory call returns them, because every GPU with memory supports
this call."""

NEVER_AGAIN = frozenset({NOT_SUPPORTED, FUNCTION_NOT_FOUND})
"""Codes that do not change if the call is repeated."""

NOT_LISTED = "the driver no longer lists this GPU: see dmesg for an Xid"


def words(code: int) -> str:
    """What an NVML code means and what to do."""
    return CODE_WORDS.get(code, f"the driver reported error {code}")


def no_gpu_note(code: int) -> str:
    """The note that replaces the GPU panels if NVML cannot be started."""
    if code == FUNCTION_NOT_FOUND:
        return "no NVIDIA GPU: the driver is too old for memtop: update the driver"
    return f"no NVIDIA GPU: {words(code)}"


FAULTS_OF_PROGRAMS = frozenset({13, 31, 43, 45})
"""Xids that a program causes and that do not damage the card."""

_XID_WORDS: dict[int, str] = {
    13: "a program made an invalid access or executed an invalid instruction on the GPU (often an index out of range): "
    "its process fails; look for the error in that program",
    31: "a program accessed GPU memory that it does not own (page fault): its process fails; "
    "look for the error in that program",
    43: "the driver stopped a program's work on the GPU after a fault of that program: start its process again",
    45: "the driver discarded a process's work on the GPU, because the process was ended or after an earlier error",
    48: "an uncorrectable (double-bit) memory error: processes on this GPU may compute wrongly; "
    "end them, reset the GPU, and have the card checked if it happens again",
    63: "the card replaces bad memory by a spare row or page: reset the GPU when its work is done, to complete this",
    64: "the card could not replace bad memory by spare memory: end its work and reset the GPU; "
    "if it happens again, have the card replaced",
    74: "an NVLink connection had an error: jobs over several GPUs may fail; reset the GPUs, "
    "then check bridge, cable or switch",
    79: "the GPU has fallen off the bus and cannot be reached: power the machine off and on, "
    "and check power supply, cables and cooling if it happens again",
    94: "a contained uncorrectable memory error: only the process that used the memory fails; start it again, "
    "and reset the GPU when its work is done",
    95: "an uncontained uncorrectable memory error: all work on this GPU is at risk; end it and reset the GPU",
    119: "the GPU's own firmware does not answer: reset the GPU; if that does not help, power the machine off and on",
    120: "the GPU's own firmware reported an error: reset the GPU; if that does not help, power the machine off and on",
}


def xid_words(code: int) -> str:
    """One sentence: what this Xid means and what to do."""
    meaning = _XID_WORDS.get(code, "the driver reported a GPU error that memtop does not know: see dmesg")
    return f"Xid {code}: {meaning}"
