"""Whether the GPUs of a laptop sleep: the first call of the driver library would wake them, and that costs battery and time."""

from __future__ import annotations

from pathlib import Path

ASLEEP = "the GPU sleeps; memtop does not wake it: it is shown once a program uses it"

_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # class of VGA and 3D controllers; the card's sound and USB functions sleep by themselves


def all_asleep(sys_root: Path) -> bool:
    """True where there are NVIDIA GPUs and the kernel has put every one of them to sleep. Reading it wakes none."""
    try:
        devices = sorted((sys_root / "bus/pci/devices").iterdir())
    except OSError:
        return False  # no PCI bus is to be seen from here
    states = [_read(device / "power/runtime_status") for device in devices if _is_gpu(device)]
    return bool(states) and all(state == "suspended" for state in states)


def _is_gpu(device: Path) -> bool:
    return _read(device / "vendor") == _NVIDIA and _read(device / "class").startswith(_DISPLAY)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""  # the device has gone, or the kernel tells nothing of the kind: it is not known to sleep
