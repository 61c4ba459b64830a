"""NVIDIA's driver: `reader` reads all GPUs, `thread` asks it so that a hung driver holds up nobody else."""

from memtop.supervisor.monitor.nvml.reader import NvmlReader, NvmlReading

__all__ = ["NvmlReader", "NvmlReading"]
