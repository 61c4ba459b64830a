"""NVIDIA's driver: `reader` reads all GPUs, `thread` calls it so that a hung driver delays nothing
else."""
