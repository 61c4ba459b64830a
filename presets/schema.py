"""The settings of a training run (`Settings`), the shapes of the data files (`Recipe`, `Preset`),
and how a batch is split.

Units: batch in samples per micro-batch and process, seq_len in tokens, learning rate per update;
memory in GiB if the name ends in `_gib` or contains it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec.structs import replace

Positive = Annotated[int, msgspec.Meta(ge=1)]
Split = tuple[int, int]
"""A process's B, the samples of a micro-batch, and A, the micro-batches of an update."""
Precision = Literal["auto", "fp32", "bf16", "fp16"]
Task = Literal["causal", "seq2seq", "sft"]
Method = Literal["full", "lora", "qlora"]
Optimizer = Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor", "cpu_adam"]
HostLevel = Literal["standard", "low", "extreme"]
Family = Literal["level", "ladder", "t5", "qlora"]
OnSpike = Literal["ask", "back", "stop"]

TRACKERS = ("tensorboard", "wandb")
ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_TARGETS = (*ATTENTION_TARGETS, "gate_proj", "up_proj", "down_proj")


class Zero(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """DeepSpeed's ZeRO shards the optimizer state (1), the gradients too (2), and the parameters
    too (3) over the processes.

    Stage 0 is plain data parallelism without DeepSpeed. On one process sharding saves no memory;
    offloading to host memory does.
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
    def words(self) -> str:
        """The strategy as people read it. As text it is stored, too."""
        return str(self) if self.stage else "no ZeRO"

    def saves_memory(self, processes: int) -> bool:
        """Whether a GPU needs less memory than without ZeRO. On one process only offloading saves
        any."""
        return self.offload_optimizer or self.offload_parameters or (self.stage > 0 and processes > 1)

    @property
    def short(self) -> str:
        """The strategy in at most 15 characters, for tables."""
        marks = ("+opt" if self.offload_optimizer else "") + ("+par" if self.offload_parameters else "")
        return f"ZeRO-{self.stage}{' ' if marks else ''}{marks}" if self.stage else self.words


class Lora(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The low-rank adapters that are trained. The output of an adapter is scaled by alpha / r."""

    r: int
    alpha: int
    dropout: float = 0.0
    targets: tuple[str, ...] = ALL_TARGETS
    """Names of the linear layers that get an adapter; ("all-linear",) means all but the output
    head."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the model writes for given prompts while it trains."""

    prompts: str = ""
    """A text file with one prompt in each line."""
    every: int = 0
    """Updates between two samplings; 0: none."""
    max_new_tokens: int = 64
    temperature: float = 0.0
    """0: always the most probable token."""
    seed: int = 0
    """Of the random choices; the same at every sampling."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the built-in trainer needs. It reads them from `attempts/NNNN/settings.json`;
    `fields.py` gives their meaning."""

    recipe: str
    preset: str
    batch: int
    """B: samples per micro-batch and process; the largest of `rank_splits`."""
    accumulation: int
    """A: micro-batches per update; the largest of `rank_splits`."""
    rank_splits: tuple[tuple[Positive, Positive], ...] = ()
    """Each process's B and A, if they differ; empty: `batch` and `accumulation` in all of them."""
    auto_batch: bool = False
    """Whether the trainer finds each process's B and A at the start: the largest B whose measured
    peak stays below 85 % of the GPU, and shares by speed if the GPUs differ. `batch` and
    `accumulation` are those it begins with; the effective batch is kept."""
    world_size: int = 1
    """W: number of training processes."""
    ddp: bool = False
    """Whether torch's DistributedDataParallel sums the gradients, which has buckets as large as all
    of them: only in the plan of a program of the user's own, never in a run of the built-in
    trainer."""
    gpus: str = ""
    """Their CUDA_VISIBLE_DEVICES: indices or UUIDs with commas between them; empty: that of the
    environment."""
    python: str = ""
    """The interpreter that trains, by its whole path; empty: the one that runs memtop."""
    seq_len: int
    """T: tokens per sample."""
    target_samples: int = 0
    """The run ends after this many training samples; 0: after `epochs`."""
    epochs: float = 0.0
    """Passes over the data, if target_samples is 0. The trainer knows the length of the data and
    turns them into samples."""
    save_every: int
    """Updates between two saves of train_latest_state."""
    save_total_limit: int = 2
    """How many saved states are kept, the newest first."""
    eval_every: int = 0
    """Updates between two evaluations; 0: none."""
    eval_batch: int = 0
    """Samples per evaluation micro-batch and process; 0: the smallest batch of any process."""
    load_best_at_end: bool = False
    """Export the state with the best evaluation loss instead of the last one."""
    sample: Sampling = Sampling()
    on_spike: OnSpike = "ask"
    """When the loss jumps and stays high: say how to go back, go back without those samples, or
    stop before the state is saved."""
    leave_out: tuple[tuple[int, int], ...] = ()
    """Positions in the order of the samples that are left out on purpose: each from the first up
    to, but not including, the second."""
    log_every: int = 1
    """Updates between two progress lines in the log."""
    learning_rate: float
    warmup_fraction: float = 0.05
    """Share of target_samples over which the learning rate rises linearly, before it decays along a
    cosine."""
    warmup_samples: int = 0
    """The warm-up in samples; 0: as warmup_fraction gives it."""
    final_learning_rate_fraction: float = 0.1
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    """Largest gradient norm of an update; 0: no clipping."""
    seed: int = 23333
    precision: Precision = "fp32"
    """`auto`: bf16 if the GPU supports it, otherwise fp16; fp32 on a CPU."""
    task: Task = "causal"
    method: Method = "full"
    lora: Lora | None = None
    zero: Zero = Zero()
    optimizer: Optimizer = "adamw"
    gradient_checkpointing: bool = False
    loss_chunk: int = -1
    """Tokens whose logits are in memory at one time; 0: all; -1: chosen by the vocabulary and,
    on a GPU, by the free memory."""
    packing: bool = True
    """Short samples share a row without padding, if the model can do that; otherwise samples of
    similar length share a micro-batch."""
    compile: bool = False
    """torch.compile each layer of the model."""
    bf16_residual: bool = False
    """With precision bf16: the sum to which the layers add their outputs is in bf16, too."""
    workers: int = 0
    """The most data-loader processes per training process; if host memory is short, the trainer
    starts fewer."""
    host_level: HostLevel = "standard"
    """`low` and `extreme` read the data in smaller pieces and keep fewer of them in host memory."""
    pin_memory: bool | None = None
    """Page-locked host buffers for copies to the GPU and for offloading; None: if host memory
    allows it."""
    trackers: tuple[str, ...] = ()
    """accelerate's trackers that also receive the metrics, of `TRACKERS`."""
    allocator: str = ""
    """Options of torch's CUDA allocator, such as "expandable_segments:True", set in the program's
    environment."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    model: dict[str, Any] = {}
    """{"path": ...}: a folder or a hub name; or {"config": {"model_type": ..., ...}}: a Hugging
    Face configuration, whose weights are initialized from `seed`."""
    data: dict[str, Any] = {}
    """The source of the text: {"source": "python-stdlib", "max_bytes": N} or {"train":
    "file.parquet", "eval": ..., ...}."""

    @property
    def effective_batch(self) -> int:
        """Samples per update: the sum of B x A over the processes."""
        if self.rank_splits:
            return sum(b * a for b, a in self.rank_splits)
        return self.batch * self.accumulation * self.world_size

    def rate_at(self, samples_seen: int, target_samples: int) -> float:
        """The learning rate of the update that ends at `samples_seen`: linear warm-up, then a
        cosine.

        It depends on progress in samples alone, so a changed batch neither restarts nor stretches
        it.
        """
        warmup = self.warmup_samples or self.warmup_fraction * target_samples
        if samples_seen < warmup:
            return self.learning_rate * samples_seen / warmup
        rest = min(1.0, (samples_seen - warmup) / max(1.0, target_samples - warmup))
        final = self.final_learning_rate_fraction
        return self.learning_rate * (final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * rest)))

    @property
    def splits(self) -> tuple[Split, ...]:
        """B and A of each process."""
        return self.rank_splits or ((self.batch, self.accumulation),) * self.world_size

    @property
    def accumulates(self) -> bool:
        """Whether the gradients of a micro-batch stay while the next one runs: then the peak is
        higher. How large A is makes no difference."""
        return any(accumulation > 1 for _, accumulation in self.splits)

    @property
    def split_text(self) -> str:
        """For people: `8 x 4 x 2`; with different batches `3+1 x 8`, or `2 x 12 + 1 x 8`."""
        if not self.rank_splits:
            return f"{self.batch} x {self.accumulation} x {self.world_size}"
        if all(a == self.accumulation for _, a in self.rank_splits):
            return f"{'+'.join(str(b) for b, _ in self.rank_splits)} x {self.accumulation}"
        return " + ".join(f"{b} x {a}" for b, a in self.rank_splits)

    @property
    def batch_text(self) -> str:
        """As `--batch` takes it: `8`, `3,1` or `2x12,1x8`."""
        if not self.rank_splits:
            return str(self.batch)
        if all(a == self.accumulation for _, a in self.rank_splits):
            return ",".join(str(b) for b, _ in self.rank_splits)
        return ranks_text(self.rank_splits)

    @property
    def tokens_per_update(self) -> int:
        """Upper bound of tokens per update: effective batch x T."""
        return self.effective_batch * self.seq_len


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `presets/recipes/*.toml`: a model, its data and the default settings."""

    name: str
    title: str
    description: str
    task: Task = "causal"
    method: Method = "full"
    preset: str
    """A preset's name, or "auto": see `choosing.py`."""
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
    """The values of a preset's guide beyond its memory strategy. They change training, so only new
    runs take them."""

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
    """One `presets/<family>/*.toml`: a memory strategy. Any run can switch to it and keeps its
    effective batch. `guide` has the other values of the same guide: only a new run takes them."""

    name: str
    family: Family = "level"
    key: Annotated[int, msgspec.Meta(ge=0, le=9)] | None = None
    """The dashboard's digit key, unique among the presets for one recipe; None: chosen by name or
    arrow keys only."""
    title: str
    description: str
    recipes: tuple[str, ...] = ()
    """The recipes whose new runs also take the guide's values; empty: all."""
    free_gib_from: float | None = None
    """With preset "auto", several processes, and every run of a recipe with a family of its own,
    take this preset from this much free GPU memory on."""
    max_batch: Positive | None = None
    """The largest micro-batch; accumulation follows so that the effective batch stays exactly the
    same."""
    zero: Zero | None = None
    """None: unchanged; so for all of the following."""
    gradient_checkpointing: bool | None = None
    workers: int | None = None
    """None: unchanged, or the default if the present preset has set them. So for `pin_memory`."""
    host_level: HostLevel | None = None
    pin_memory: bool | None = None
    allocator: str | None = None
    guide: Guide = Guide()

    def meant_for(self, recipe: str) -> bool:
        """Whether a new run of this recipe also takes the guide's values."""
        return not self.recipes or recipe in self.recipes

    def usable_with(self, recipe: str) -> bool:
        """Whether the preset is offered for runs of this recipe. Those of the ladder are offered
        for all."""
        return self.family == "ladder" or self.meant_for(recipe)


def exact_splits(effective_batch: int, world_size: int = 1) -> list[Split]:
    """All (batch, accumulation) with exactly this effective batch, largest batch first; empty if
    `world_size` does not divide it."""
    if effective_batch < 1 or world_size < 1 or effective_batch % world_size:
        return []
    share = effective_batch // world_size
    small = [b for b in range(1, math.isqrt(share) + 1) if share % b == 0]
    return [(b, share // b) for b in sorted({*small, *(share // b for b in small)}, reverse=True)]


def split_below(effective_batch: int, world_size: int, max_batch: int) -> Split | None:
    """The exact split with the largest batch up to `max_batch`; None if `world_size` does not
    divide the effective batch."""
    return next((s for s in exact_splits(effective_batch, world_size) if s[0] <= max_batch), None)


def nearest_splits(effective_batch: int, world_size: int, batch: int) -> list[Split]:
    """The two exact splits whose batch is nearest to `batch`, nearest first."""
    return sorted(exact_splits(effective_batch, world_size), key=lambda s: (abs(s[0] - batch), s[0]))[:2]


def ranks_text(splits: Sequence[Sequence[int]]) -> str:
    """B and A of each process in one word: `2x12,1x8`; empty without any."""
    return ",".join(f"{b}x{a}" for b, a in splits)


def with_splits(settings: Settings, splits: Sequence[Split]) -> Settings:
    """The settings with this B and A of each process."""
    batch, accumulation = max(b for b, _ in splits), max(a for _, a in splits)
    differing = tuple(splits) if len(set(splits)) > 1 else ()
    return replace(settings, batch=batch, accumulation=accumulation, rank_splits=differing)


def capped(settings: Settings, most: int) -> Settings:
    """The settings with micro-batches of at most `most` samples; each process keeps its share."""
    return with_splits(settings, [split if split[0] <= most else below(split, most) for split in settings.splits])


def below(split: Split, most: int) -> Split:
    """The largest B up to `most`, which is at least 1, and its A with the same product."""
    batch, accumulation = split
    found = split_below(batch * accumulation, 1, most)
    assert found is not None, most
    return found
