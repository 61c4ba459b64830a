"""The GPU memory of a training, foreseen without a GPU.

The Hugging Face model runs on tensors without contents (fake tensors) on the CPU, as it would run
on the GPU (`cuda.py`). `trace.py` records what is allocated and released, and `allocator.py`
replays that by the rules of PyTorch's allocator. Of a deep model only a few layers run: `layers.py`
repeats what they do. `run.py` is the entrance.
"""
