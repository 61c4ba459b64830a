"""What a training run is asked to do: `Settings`, and the data files' shapes `Recipe` and `Preset`.

Units: batch in samples per micro-batch and process, seq_len in tokens, learning rate per update.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Precision = Literal["fp32", "bf16", "fp16"]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the built-in trainer needs, resolved; the trainer reads it from `attempts/NNNN/settings.json`."""

    recipe: str
    preset: str
    batch: int
    """B: samples per micro-batch and process."""
    accumulation: int
    """A: micro-batches per update."""
    world_size: int = 1
    """W: number of training processes."""
    seq_len: int
    """T: tokens per sample."""
    target_samples: int
    """The run ends when this many samples have been trained on."""
    save_every: int
    """Updates between two writes of train_latest_state."""
    learning_rate: float
    warmup_fraction: float = 0.05
    """Share of target_samples over which the learning rate rises linearly; then it falls along a cosine."""
    final_learning_rate_fraction: float = 0.1
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    """Largest gradient norm of an update; 0 switches clipping off."""
    seed: int = 23333
    precision: Precision = "fp32"
    gradient_checkpointing: bool = False
    workers: int = 0
    """Data-loader worker processes per training process."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    model: dict[str, Any] = {}
    """{"config": {"model_type": ..., ...}}: a Hugging Face configuration, weights drawn from `seed`."""
    data: dict[str, Any] = {}
    """{"source": "python-stdlib", "max_bytes": N}: where the text comes from."""

    @property
    def effective_batch(self) -> int:
        """Samples per update: B x A x W."""
        return self.batch * self.accumulation * self.world_size

    @property
    def tokens_per_update(self) -> int:
        """Upper bound of tokens per update: effective batch x T."""
        return self.effective_batch * self.seq_len


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `presets/recipes/*.toml`: what is trained on what, with the default settings."""

    name: str
    title: str
    description: str
    preset: str
    batch: int
    accumulation: int
    seq_len: int
    max_updates: int
    save_every: int
    learning_rate: float
    warmup_fraction: float = 0.05
    final_learning_rate_fraction: float = 0.1
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    seed: int = 23333
    precision: Precision = "fp32"
    model: dict[str, Any]
    data: dict[str, Any]


class Preset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `presets/levels/*.toml`: a memory strategy. It never changes the effective batch of a run."""

    name: str
    key: int
    """The dashboard's digit key."""
    title: str
    description: str
    max_batch: int | None = None
    """Ceiling of the micro-batch; accumulation is solved so that the effective batch stays exactly as it was."""
    gradient_checkpointing: bool = False
    workers: int | None = None
