"""What decides the memory of a training by Hugging Face's Trainer, read from its command: for
`memtop plan -- COMMAND`. Nothing is started.

The options are those of `TrainingArguments` and of the scripts around it: transformers' examples,
TRL, LLaMA-Factory. They may be in a JSON or YAML file that the command names; the command's own
come first.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import NamedTuple

import msgspec

from memtop.presets import Settings
from memtop.presets.comparison import given
from memtop.presets.fields import differing, value_of
from memtop.presets.program_profiles import ByFile
from memtop.supervisor.errors import UsageError
from memtop.supervisor.profile.config_text import has_key, value_in
from memtop.supervisor.profile.reading import ProgramFiles, no_such_file

_BATCH = ("per_device_train_batch_size", "per_gpu_train_batch_size")
_LENGTH = ("block_size", "max_seq_length", "max_seq_len", "cutoff_len", "max_length", "model_max_length", "max_source_length")
_ACCUMULATION = "gradient_accumulation_steps"
_CHECKPOINTING = ("gradient_checkpointing", "disable_gradient_checkpointing")
_DEFAULT_BATCH = 8
"""Of `TrainingArguments`."""
_MISSPELT = 0.9
"""Names this similar are one option. Those of the Trainer itself are less so."""
_OPTIMIZERS = {
    "adamw_torch_fused": "adamw",
    "adamw_torch": "adamw",
    "adamw_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
    "adafactor": "adafactor",
}
_REFUSED = (
    *("fsdp", "torch_compile", "use_liger_kernel", "enable_liger_kernel", "use_unsloth", "use_unsloth_gc", "load_in_8bit"),
    *("use_dora", "auto_find_batch_size", "pure_bf16", "use_galore", "upcast_lmhead_output"),
)
"""Options that change the memory in a way that memtop does not foresee."""
_REFUSED_OF_LAUNCHERS = ("use_fsdp", "use_deepspeed", "use_megatron_lm", "use_parallelism_config")
_FORESEEN_BY_ACCELERATE = (None, "NO", "MULTI_GPU")
"""Of `distributed_type` in the file of `accelerate launch --config_file`."""


class _Defaults(NamedTuple):
    """What a program does if its command does not say it."""

    of: str
    starter: str | None = None
    """The words that start it, if it is no script."""
    checkpointing: bool = False
    bf16: bool = False
    length: int | None = None
    rank: int | None = None
    alpha: int = 1
    """As a multiple of the rank."""
    dropout: str = "0"
    targets: str | None = None
    """None: those of peft."""
    narrow_norms: bool = False
    """With a base in 4 bits, the norms are in 16 bits. Otherwise they are in fp32, as peft prepares
    such a base."""


_TRAINER = _Defaults("TrainingArguments")
_TRL = _Defaults("TRL", "trl sft", True, True, length=1024, rank=16, alpha=2, dropout="0.05", narrow_norms=True)
_LLAMA_FACTORY = _Defaults(
    *("LLaMA-Factory", "llamafactory-cli train", True), length=2048, rank=8, alpha=2, targets="all", narrow_norms=True
)
_OWN_LENGTH = {"TRL": "max_length", "LLaMA-Factory": "cutoff_len"}
_OFF = ("false", "no", "0", "", "none")
_FILES = tuple(ByFile(flags=flags, kind=kind, key="-") for flags in ((), ("--config",)) for kind in ("json", "yaml"))
"""How a command names the file with its options: as an argument, or with --config."""


class TrainerCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A training that a command would begin, in memtop's terms."""

    model: str
    """A folder or a hub name."""
    method: str
    """full | lora | qlora"""
    processes: int
    values: dict[str, str]
    """The settings as `--set` takes them."""
    ddp: bool = False
    """Whether DistributedDataParallel sums the gradients, as with the Trainer on several GPUs
    without DeepSpeed."""
    assumed: tuple[str, ...] = ()
    """What the command does not say."""


def trainer_command(
    words: tuple[str, ...],
    cwd: str,
    *,
    model: str | None = None,
    batch: int | None = None,
    seq_len: int | None = None,
    processes: int | None = None,
) -> TrainerCommand:
    """The training that a command would begin. UsageError names what is missing, and an option
    whose memory cannot be foreseen.

    `model`, `batch`, `seq_len`, `processes`: in place of what the command says, or does not say.
    """
    options = _Options(words, cwd)
    if options.missing is not None:
        raise no_such_file(*options.missing, cwd)
    for name in _REFUSED:
        if options.is_on(name):
            raise _unforeseen(name, options.text(name))
    path = model or options.text("model_name_or_path", "model_name", "model", "config_name")
    if path is None:
        raise UsageError("-- COMMAND: it names no model (--model_name_or_path); give --model NAME|PATH before the dashes")
    method = _method(options)
    found = _shape(options, batch, seq_len)
    assumed = ["each sample has as many tokens as the sequence length", "the loss is the model's own"]
    if not options.names_trainer:
        assumed.append("the program uses Hugging Face's Trainer, which its script does not name")
    if batch is None and options.text(*_BATCH) is None:
        assumed.append(f"a batch of {_DEFAULT_BATCH}, the default of TrainingArguments")
    if options.text(*_CHECKPOINTING) is None:
        of = options.defaults.of
        with_it, without = f"gradient checkpointing, the default of {of}", f"no gradient checkpointing, the default of {of}"
        assumed.append(with_it if options.defaults.checkpointing else without)
    assumed += options.misspelt()
    found |= _precision(options, method, assumed)
    found |= _optimizer(options)
    if method != "full":
        found |= _adapters(options, assumed)
    processes = processes or options.processes
    zero = _zero(options, cwd)
    ddp = zero is None and processes > 1
    if ddp:
        assumed.append("DistributedDataParallel sums the gradients, with buckets as large as all of them")
    return TrainerCommand(
        model=path if model is not None or not (Path(cwd) / path).exists() else str(Path(cwd) / path),
        method=method,
        processes=processes,
        values=found | (zero or {}),
        ddp=ddp,
        assumed=tuple(assumed),
    )


def added_options(words: tuple[str, ...], cwd: str, before: Settings, after: Settings) -> list[str] | None:
    """What to add to a command that trains with `before`, so that it trains with `after`; None if
    memtop knows no option for one of the settings that differ."""
    options, found = _Options(words, cwd), []
    names = {
        "batch": options.named(*_BATCH) or _BATCH[0],
        "accumulation": _ACCUMULATION,
        "seq_len": options.named(*_LENGTH) or _OWN_LENGTH.get(options.defaults.of),
        "gradient_checkpointing": _CHECKPOINTING[0],
        "optimizer": "optim",
    }
    for setting in differing(before, after):
        name, text = names.get(setting), given(value_of(after, setting))
        if setting == "optimizer":
            text = next((option for option, kind in reversed(_OPTIMIZERS.items()) if kind == text), "")
        if not name or not text:
            return None
        found += [f"{name}={text}"] if options.defaults is _LLAMA_FACTORY else [f"--{name}", text]
    return found


class _Options:
    """The options of a command, and of the file that it names."""

    def __init__(self, words: tuple[str, ...], cwd: str) -> None:
        self.defaults = _TRAINER
        program = ProgramFiles(words, cwd)
        for own in (_TRL, _LLAMA_FACTORY):
            if program.command is None:
                program, self.defaults = ProgramFiles(words, cwd, starter=own.starter), own
        if program.command is None:
            raise UsageError(
                "-- COMMAND: memtop can read only a Python script (python train.py ...); "
                "leave out the command and give --model NAME|PATH --method full|lora|qlora"
            )
        script, module = program.command.script, program.command.module
        is_there = script is None or (program.cwd / script).exists()
        self.missing = None if script is None or is_there else (" ".join(words[: program.command.begins]), script)
        """The command up to its script, and the script, if there is no such file."""
        self.is_trl_itself = self.defaults is _TRL or "trl/scripts/sft" in f"{script or module}".replace(".", "/")
        if self.is_trl_itself or "SFTConfig" in program.script:
            self.defaults = _TRL
        # The scripts of TRL and LLaMA-Factory are in their packages.
        self.names_trainer = self.defaults is not _TRAINER or "Trainer" in program.script
        self._given = _given(program.command.arguments)
        if self.defaults is _LLAMA_FACTORY:
            # After its file, it takes options without dashes.
            pairs = (word.partition("=") for word in program.command.arguments if not word.startswith("-"))
            self._given |= {name: value for name, equals, value in pairs if equals}
        self._processes = program.command.processes
        self._read_launcher(program)
        self._file: tuple[ByFile, str] | None = None
        for way in _FILES:
            named = program.named_file(way)
            if named is None or (named[2].suffix == ".json") != (way.kind == "json"):
                continue
            if (text := program.text(named[2])) is not None:
                self._file = way, text
        if self.defaults is _TRAINER and self.text("finetuning_type") is not None:
            self.defaults = _LLAMA_FACTORY

    def _read_launcher(self, program: ProgramFiles) -> None:
        assert program.command is not None
        given = _given(program.command.words[: program.command.begins - 1])
        for name in _REFUSED_OF_LAUNCHERS:
            if name in given:
                raise _unforeseen(name, given[name].partition(",")[0])
        if "config_file" not in given:
            return
        file = given["config_file"].partition(",")[0]
        text = program.text(program.cwd / file)
        if text is None:
            raise UsageError(f"--config_file {file}: cannot be read")
        kind = value_in(text, "yaml", "distributed_type")
        if kind not in _FORESEEN_BY_ACCELERATE:
            raise UsageError(f"--config_file {file}: the memory of a program with distributed_type {kind} cannot be foreseen")
        count = value_in(text, "yaml", "num_processes")
        if "num_processes" not in given and isinstance(count, int):
            self._processes = count

    @property
    def processes(self) -> int:
        if self._processes is None:
            raise UsageError("-- COMMAND: does not say how many processes its launcher starts; give --gpus N")
        return self._processes

    def text(self, *names: str) -> str | None:
        """The value of the option that has one of these names."""
        for name in names:
            if name in self._given:
                return self._given[name]
        if self._file is None:
            return None
        way, text = self._file
        for name in names:
            if has_key(text, way.kind, name):
                value = value_in(text, way.kind, name)
                return None if value is None else str(value)
        return None

    def named(self, *names: str) -> str | None:
        """Which of these names the command or its file gives."""
        return next((name for name in names if name in self._given or self.has(name)), None)

    def misspelt(self) -> list[str]:
        """What the command gives under a name that is nearly that of an option read here."""
        known = (*_BATCH, *_LENGTH, _ACCUMULATION, *_CHECKPOINTING)
        others = (name for name in self._given if name not in known)
        near = ((name, difflib.get_close_matches(name, known, n=1, cutoff=_MISSPELT)) for name in others)
        return [f"memtop does not read --{name} (did you mean --{meant[0]}?)" for name, meant in near if meant]

    def has(self, *names: str) -> bool:
        """Whether the file has one of these keys."""
        return self._file is not None and any(has_key(self._file[1], self._file[0].kind, name) for name in names)

    def is_on(self, name: str, *, default: bool = False) -> bool:
        text = self.text(name)
        return default if text is None else text.lower() not in _OFF

    def whole(self, *names: str) -> int | None:
        for name in names:
            text = self.text(name)
            if text is not None and (not text.isdecimal() or int(text) == 0):
                raise UsageError(f"--{name} {text}: must be a whole number above 0")
            if text is not None:
                return int(text)
        return None


def _unforeseen(name: str, value: str | None) -> UsageError:
    return UsageError(f"--{name} {value}: the memory of a program with it cannot be foreseen")


def _given(words: tuple[str, ...]) -> dict[str, str]:
    """By name without dashes; an option without a value is on."""
    found: dict[str, str] = {}
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if not name.startswith("--"):
            continue
        if not equals:
            values = []
            for following in words[at + 1 :]:
                if following.startswith("--"):
                    break
                values.append(following)
            value = ",".join(values) or "true"
        name = name.lstrip("-").replace("-", "_")
        found[name] = value
        if name.startswith("no_"):
            # How the parser of the Trainer's options negates one that is on.
            found[name[3:]] = "false"
    return found


def _method(options: _Options) -> str:
    kind = options.text("finetuning_type")
    if kind not in (None, "full", "lora"):
        raise _unforeseen("finetuning_type", kind)
    bits = options.text("quantization_bit")
    if bits not in (None, "4"):
        raise _unforeseen("quantization_bit", bits)
    if options.is_on("load_in_4bit") or bits is not None:
        return "qlora"
    adapters = options.is_on("use_peft") or options.is_on("use_lora") or (kind is None and options.text("lora_r") is not None)
    adapters = adapters or (kind is None and options.defaults is _LLAMA_FACTORY)
    return "lora" if adapters or kind == "lora" else "full"


def _shape(options: _Options, batch: int | None, seq_len: int | None) -> dict[str, str]:
    length = seq_len or options.whole(*_LENGTH) or options.defaults.length
    if length is None:
        raise UsageError(
            "-- COMMAND: does not say how long a sample is (--block_size, --max_length, --cutoff_len); "
            "give --seq-len T before the dashes"
        )
    checkpointing = options.is_on("gradient_checkpointing", default=options.defaults.checkpointing)
    return {
        "batch": str(batch or options.whole(*_BATCH) or _DEFAULT_BATCH),
        "accumulation": str(options.whole(_ACCUMULATION) or 1),
        "seq_len": str(length),
        "gradient_checkpointing": str(checkpointing and not options.is_on("disable_gradient_checkpointing")).lower(),
        "loss_chunk": "0",
    }


def _precision(options: _Options, method: str, assumed: list[str]) -> dict[str, str]:
    dtype = options.text("torch_dtype", "dtype", "model_dtype")
    narrow = dtype in ("bfloat16", "float16", "bf16", "fp16")
    is_fp16 = options.is_on("fp16")
    is_bf16 = options.is_on("bf16", default=options.defaults.bf16 and not is_fp16)
    computes = "bf16" if is_bf16 else "fp16" if is_fp16 else "fp32"
    if method == "full":
        if narrow:
            raise _unforeseen("torch_dtype", dtype)
        if dtype != "float32":
            assumed.append("the weights are in fp32")
        return {"precision": computes}
    if computes == "fp32":
        raise UsageError(f"-- COMMAND: the memory of {method} without --bf16 or --fp16 cannot be foreseen")
    if not narrow:
        if options.is_trl_itself:
            raise UsageError("-- COMMAND: TRL keeps the base in fp32 without --dtype bfloat16; that memory cannot be foreseen")
        assumed.append(f"the base is in {computes}")
    if method == "qlora" and options.defaults.narrow_norms and not options.is_on("upcast_layernorm") and computes == "bf16":
        return {"precision": computes, "bf16_residual": "true"}
    if method == "qlora":
        assumed.append("the norms of the base are in fp32, as peft prepares a base in 4 bits")
    return {"precision": computes}


def _optimizer(options: _Options) -> dict[str, str]:
    name = options.text("optim") or "adamw_torch"
    if name not in _OPTIMIZERS:
        raise _unforeseen("optim", name)
    return {"optimizer": _OPTIMIZERS[name]}


def _adapters(options: _Options, assumed: list[str]) -> dict[str, str]:
    defaults = options.defaults
    rank = options.whole("lora_r", "lora_rank", "r") or defaults.rank
    if rank is None:
        raise UsageError("-- COMMAND: does not say the rank of the adapters; give it --lora_r")
    found = {"lora.r": str(rank), "lora.alpha": str(options.whole("lora_alpha") or rank * defaults.alpha)}
    names = ("lora_target_modules", "lora_target", "target_modules")
    targets = options.text(*names)
    if targets is None and options.has(*names):
        raise UsageError(f"{names[0]}: is a list in the file; give it to the command, as --{names[0]} q_proj v_proj")
    targets = targets or defaults.targets
    if targets == "all":
        targets = "all-linear"
    if targets is None:
        assumed.append("the adapters are at q_proj and v_proj, the default of peft")
    return found | {
        "lora.targets": targets or "q_proj,v_proj",
        "lora.dropout": options.text("lora_dropout") or defaults.dropout,
    }


def _zero(options: _Options, cwd: str) -> dict[str, str] | None:
    """DeepSpeed's strategy, from its JSON file."""
    name = options.text("deepspeed", "deepspeed_config")
    if name is None or name.lower() in _OFF:
        return None
    try:
        document = msgspec.json.decode((Path(cwd) / name).read_bytes())
        zero = document.get("zero_optimization") or {}
        stage = int(zero.get("stage") or 0)
        offloads = [((zero.get(key) or {}).get("device") or "none") for key in ("offload_optimizer", "offload_param")]
    except OSError as error:
        raise UsageError(f"--deepspeed {name}: cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, AttributeError, TypeError, ValueError):
        raise UsageError(f"--deepspeed {name}: is no configuration of DeepSpeed in JSON") from None
    if "nvme" in offloads:
        raise _unforeseen("deepspeed", name)
    keys = ("zero.offload_optimizer", "zero.offload_parameters")
    return {"zero.stage": str(stage)} | {key: str(to == "cpu").lower() for key, to in zip(keys, offloads, strict=True)}
