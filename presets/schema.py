"""What a training run is asked to do: `Settings`, and the data files' shapes `Recipe` and `Preset`.

Units: batch in samples per micro-batch and process, seq_len in tokens, learning rate per update, memory in GiB where a
name says so.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

Positive = Annotated[int, msgspec.Meta(ge=1)]
Precision = Literal["auto", "fp32", "bf16", "fp16"]
Task = Literal["causal", "seq2seq", "sft"]
Method = Literal["full", "lora", "qlora"]
Optimizer = Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor", "cpu_adam"]
HostLevel = Literal["standard", "low", "extreme"]
Family = Literal["level", "ladder", "t5", "qlora"]

ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_TARGETS = (*ATTENTION_TARGETS, "gate_proj", "up_proj", "down_proj")


class Zero(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """DeepSpeed's ZeRO: which of optimizer state (1), gradients (2) and parameters (3) are sharded over the processes.

    Stage 0 is plain data parallelism without DeepSpeed. On one process sharding saves nothing; offloading to host memory does.
    """

    stage: Literal[0, 1, 2, 3] = 0
    offload_optimizer: bool = False
    """Keep fp32 weights and moments in host memory (stages 1-3)."""
    offload_parameters: bool = False
    """Keep the working parameters in host memory too (stage 3 only)."""

    def __str__(self) -> str:
        if not self.stage:
            return "plain"
        offloaded = [
            name for name, on in (("optimizer", self.offload_optimizer), ("parameters", self.offload_parameters)) if on
        ]
        return f"ZeRO-{self.stage}" + (f" + {' and '.join(offloaded)} offload" if offloaded else "")

    @property
    def short(self) -> str:
        """The same in at most 15 characters, for tables."""
        marks = ("+opt" if self.offload_optimizer else "") + ("+par" if self.offload_parameters else "")
        return f"ZeRO-{self.stage}{' ' if marks else ''}{marks}" if self.stage else "plain"


class Lora(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Low-rank adapters: the shapes of what is trained. The scale of an adapter is alpha / r."""

    r: int
    alpha: int
    dropout: float = 0.0
    targets: tuple[str, ...] = ALL_TARGETS
    """Names of the linear layers that get an adapter; ("all-linear",) takes every one but the output head."""


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
    target_samples: int = 0
    """The run ends when this many samples have been trained on; 0: after `epochs`."""
    epochs: float = 0.0
    """Passes over the data where target_samples is 0; the trainer, who knows the data's length, turns them into samples."""
    save_every: int
    """Updates between two writes of train_latest_state."""
    save_total_limit: int = 2
    """How many whole states are kept: the newest, the one before it, and older ones up to this number."""
    eval_every: int = 0
    """Updates between two evaluations; 0: none."""
    eval_batch: int = 0
    """Samples per evaluation micro-batch and process; 0: as `batch`."""
    load_best_at_end: bool = False
    """Export takes the state with the best evaluation loss instead of the last one."""
    log_every: int = 1
    """Updates between two progress lines in the log."""
    learning_rate: float
    warmup_fraction: float = 0.05
    """Share of target_samples over which the learning rate rises linearly; then it falls along a cosine."""
    warmup_samples: int = 0
    """The warm-up in samples; 0: warmup_fraction says."""
    final_learning_rate_fraction: float = 0.1
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    """Largest gradient norm of an update; 0 switches clipping off."""
    seed: int = 23333
    precision: Precision = "fp32"
    """`auto` takes bf16 where the GPU has it, else fp16 on GPUs and fp32 on CPUs."""
    task: Task = "causal"
    method: Method = "full"
    lora: Lora | None = None
    zero: Zero = Zero()
    optimizer: Optimizer = "adamw"
    gradient_checkpointing: bool = False
    loss_chunk: int = -1
    """Tokens whose logits exist at one time; 0: all of them; -1: chosen from the vocabulary."""
    compile: bool = False
    """torch.compile the model."""
    workers: int = 0
    """Data-loader worker processes per training process, at most: short host memory may allow fewer."""
    host_level: HostLevel = "standard"
    """How sparing with host memory: `low` and `extreme` read smaller pieces and keep fewer of them."""
    pin_memory: bool | None = None
    """Page-locked host buffers for copies to the GPU and for offloading; None: where host memory allows."""
    trackers: tuple[str, ...] = ()
    """Names of accelerate's trackers that also get the metrics: "tensorboard", "wandb"."""
    allocator: str = ""
    """Options of torch's CUDA allocator, such as "expandable_segments:True"; put into the program's environment."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    model: dict[str, Any] = {}
    """{"config": {"model_type": ..., ...}}: a Hugging Face configuration, weights drawn from `seed`; or {"path": ...}: a folder
    or a hub name."""
    data: dict[str, Any] = {}
    """Where the text comes from: {"source": "python-stdlib", "max_bytes": N} or {"train": "file.parquet", "eval": ..., ...}."""

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
    task: Task = "causal"
    method: Method = "full"
    preset: str
    """A preset's name, or "auto": chosen by free GPU memory."""
    batch: int
    accumulation: int
    seq_len: int
    max_updates: int = 0
    """0: the run lasts `epochs`."""
    epochs: float = 0.0
    save_every: int
    eval_every: int = 0
    save_total_limit: int = 2
    learning_rate: float
    warmup_fraction: float = 0.05
    final_learning_rate_fraction: float = 0.1
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    seed: int = 23333
    precision: Precision = "fp32"
    lora: Lora | None = None
    optimizer: Optimizer = "adamw"
    model: dict[str, Any]
    data: dict[str, Any]


class Guide(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A preset's values beyond its memory strategy, as its guide wrote them. They make another run: a new one takes them."""

    batch: Positive | None = None
    accumulation: Positive | None = None
    seq_len: Positive | None = None
    learning_rate: float | None = None
    warmup_updates: Positive | None = None
    epochs: float | None = None
    precision: Precision | None = None
    save_every: Positive | None = None
    eval_every: Positive | None = None
    eval_batch: Positive | None = None
    save_total_limit: Positive | None = None
    load_best_at_end: bool | None = None
    log_every: Positive | None = None
    lora: Lora | None = None


class Preset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `presets/<family>/*.toml`: a memory strategy, which any run can take up with its effective batch held, and in
    `guide` the other values of the same guide, which only a new run takes."""

    name: str
    family: Family = "level"
    key: Annotated[int, msgspec.Meta(ge=0, le=9)] | None = None
    """The dashboard's digit key, unique among the presets that one recipe can use; None: reached by name and arrows only."""
    title: str
    description: str
    recipes: tuple[str, ...] = ()
    """The recipes whose new runs take it whole, guide values included; empty: every one."""
    free_gib_from: float | None = None
    """The preset that is taken by itself from this much free GPU memory on."""
    max_batch: Positive | None = None
    """Ceiling of the micro-batch; accumulation is solved so that the effective batch stays exactly as it was."""
    zero: Zero | None = None
    """None: as the run has it."""
    gradient_checkpointing: bool | None = None
    workers: int | None = None
    host_level: HostLevel | None = None
    pin_memory: bool | None = None
    allocator: str | None = None
    guide: Guide = Guide()

    def meant_for(self, recipe: str) -> bool:
        """Whether a new run of this recipe takes the preset whole."""
        return not self.recipes or recipe in self.recipes

    def usable_with(self, recipe: str) -> bool:
        """Whether it is offered for runs of this recipe: the ladder's memory strategy serves every one."""
        return self.family == "ladder" or self.meant_for(recipe)
