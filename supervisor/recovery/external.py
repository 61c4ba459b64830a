"""The remedies for a program that is not memtop's trainer: for a command that memtop runs, and for
a program of which only the log is known. Pure functions.

They depend on where it ran (`Diagnosis.environment`): nothing is offered that does not exist there.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from memtop.presets.parameters import TRAINED_BYTES
from memtop.supervisor import units
from memtop.supervisor.diagnosis.environment import FRAMEWORKS, MANAGED, PROGRAMS, Place
from memtop.supervisor.diagnosis.values import Diagnosis, Kind, size
from memtop.supervisor.recovery.advice import advice, larger_than_device, refusals, set_variable
from memtop.supervisor.recovery.gpu_ladder import ALLOCATOR, is_fragmented, strays, why_allocator, with_expandable_segments
from memtop.supervisor.recovery.host_ladder import beyond_all_memory, more_host_memory
from memtop.supervisor.recovery.policy import SURE
from memtop.supervisor.recovery.situation import HostFacts, restart_command, to_do
from memtop.supervisor.recovery.values import Remedy, TrendSubject

_BATCH_OF_TRAINER = ("per_device_train_batch_size", "per_gpu_train_batch_size")
"""Options of Hugging Face's Trainer."""
_BATCH = (*_BATCH_OF_TRAINER, "micro_batch_size", "batch_size_per_gpu", "batch_size")
_ACCUMULATION = ("gradient_accumulation_steps", "accumulation_steps", "accumulate_grad_batches", "grad_accum_steps")
_UNFORESEEN = "the peak of this program was not measured at two batch sizes"


class ExternalCommand(msgspec.Struct, frozen=True, kw_only=True):
    """What memtop knows about a command that it runs. It offers nothing that the command does not
    have."""

    run: str = "RUN"
    command: tuple[str, ...] = ()
    allocator: str = ""
    """The allocator options of the environment and of the run."""
    host: HostFacts | None = None
    loader_workers: bool = False
    """Whether data-loader processes were seen."""
    on_gpu: bool = False
    has_tokens: bool = False
    """Whether the length of its samples is known, in tokens."""
    leaks: tuple[TrendSubject, ...] = ()
    """What grew from update to update until the end."""

    def mentions(self, *words: str) -> bool:
        """Whether one of these words is in the command line."""
        text = " ".join(self.command).lower()
        return any(word in text for word in words)


def remedies_for_command(diagnosis: Diagnosis, command: ExternalCommand | None = None) -> tuple[Remedy, ...]:
    """What can be done, ranked as for memtop's own trainer. `command` is None if only the log is
    known.

    memtop can set the allocator's options only; a person has to do everything else in the program's
    own options.
    """
    kind = diagnosis.kind
    if kind.of_gpu:
        return tuple(_gpu(diagnosis, command))
    if kind.of_host:
        return tuple(_host(diagnosis, command))
    found = _OTHERS.get(kind)
    return () if found is None else tuple(found(diagnosis))


# --- where it ran ---------------------------------------------------------------------------------


def _is(diagnosis: Diagnosis, *places: Place) -> bool:
    return any(place in diagnosis.environment for place in places)


def _has_workers(diagnosis: Diagnosis, command: ExternalCommand | None) -> bool:
    """Whether the program has processes that load data, as far as that is known."""
    if command is not None:
        return command.loader_workers or command.mentions("workers")
    if diagnosis.phase == "data":
        return True
    trains = _is(diagnosis, Place.PYTORCH) and not _is(diagnosis, Place.INFERENCE)
    return trains and (diagnosis.requested_bytes or 0) < _MUCH


def _trains(diagnosis: Diagnosis, command: ExternalCommand | None) -> bool:
    """Whether the program trains a neural network, as far as that is known."""
    if _is(diagnosis, Place.INFERENCE):
        return False
    known = command is not None or _is(diagnosis, *FRAMEWORKS, Place.TPU)
    return known or diagnosis.phase in ("forward", "backward", "optimizer", "evaluation")


# --- a full GPU -----------------------------------------------------------------------------------

MEMORY_BUDGET = "memory_budget"
"""The reason of a program that refused to start with the share of the GPU that it was given."""


def _gpu(diagnosis: Diagnosis, command: ExternalCommand | None) -> Iterator[Remedy]:
    beyond, refused = larger_than_device(diagnosis), refusals(diagnosis)
    if beyond is not None:
        yield beyond
    elif diagnosis.kind is Kind.GPU_OOM_OTHER_PROCESS:
        yield strays(diagnosis)
        yield from advice("ranks", diagnosis.environment)
    else:
        yield from refused or _in_the_way(diagnosis)
    if diagnosis.reason == MEMORY_BUDGET:
        yield from _budget(diagnosis)
        return
    if not refused or diagnosis.allowed_bytes is not None:
        found = _of_program(diagnosis, command)
        yield from found if beyond is None else (one for one in found if one.id in _MAKES_REQUESTS_SMALLER)


def _in_the_way(diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Other processes without which the request would have fitted."""
    others, free, requested = diagnosis.other_process_bytes or 0, diagnosis.free_bytes, diagnosis.requested_bytes
    if others >= _MUCH and free is not None and requested is not None and free < requested <= free + others:
        yield replace(strays(diagnosis), why=f"without them the request for {size(requested)} would have fitted")


_MAKES_REQUESTS_SMALLER = frozenset(
    ("eval_batch", "chunked_loss", "seq_len", "smaller_inputs", "context_length", "max_model_len", "tiles")
)
"""What helps if a single request is larger than the device."""


def _of_program(diagnosis: Diagnosis, command: ExternalCommand | None) -> Iterator[Remedy]:
    """What the program can do with less of a full GPU."""
    if _is(diagnosis, *PROGRAMS):
        yield from advice("program", diagnosis.environment, diagnosis.phase)
    elif _trains(diagnosis, command):
        yield from _training(diagnosis, command)
    elif _is(diagnosis, Place.INFERENCE):
        allocator, fragmented = tuple(_allocator(diagnosis, command)), is_fragmented(diagnosis)
        if fragmented:
            yield from allocator
        yield from advice("inference", diagnosis.environment, diagnosis.phase)
        if not fragmented:
            yield from allocator
    else:
        yield from advice("unknown", diagnosis.environment)


def _budget(diagnosis: Diagnosis) -> Iterator[Remedy]:
    """A share of the GPU that is too small, or one of which a part is in use before the start."""
    free, total, wanted = diagnosis.free_bytes, diagnosis.total_bytes, diagnosis.requested_bytes
    if _is(diagnosis, Place.VLLM) and free is not None and total is not None and wanted is not None and free < wanted <= total:
        yield strays(diagnosis)
        if 2 * free < wanted:
            return  # what is free holds no model for which the engine was set up
        share = int(100 * free / total) / 100
        yield to_do(
            "gpu_memory_utilization",
            f"vLLM: --gpu-memory-utilization {share:.2f} or less",
            f"{size(free)} of {size(total)} are free when it starts, and it wants {size(wanted)}",
            f"vllm serve MODEL --gpu-memory-utilization {share:.2f}",
        )
        return
    yield from advice("budget", diagnosis.environment)


def _training(diagnosis: Diagnosis, command: ExternalCommand | None) -> Iterator[Remedy]:
    """What a program that trains can change."""
    fragmented = is_fragmented(diagnosis)
    allocator = tuple(_allocator(diagnosis, command))
    if fragmented:
        yield from allocator
    if diagnosis.phase == "load":
        yield from advice("loading", diagnosis.environment)
        if not fragmented:
            yield from allocator
        return
    if diagnosis.phase == "evaluation":
        yield _eval_batch()
    of_torch = _is(diagnosis, Place.PYTORCH)
    yield _smaller_batch(diagnosis, () if command is None else command.command)
    if of_torch and command is None and diagnosis.phase == "unknown":
        yield from advice("perhaps", diagnosis.environment)
    own = tuple(advice("recompute", diagnosis.environment))
    yield from own or (_option_of("checkpointing", "gradient checkpointing on", _RECOMPUTED, speed=0.75),)
    if of_torch or command is not None or diagnosis.requested_logits is not None:
        yield _chunked_loss(diagnosis)
    if not fragmented:
        yield from allocator
    if of_torch and not _is(diagnosis, Place.MPS, Place.TPU, Place.DIRECTML):
        yield _option_of("offload_optimizer", "optimizer state in host memory (ZeRO with offload), or in 8 bits", _OFFLOADED)
    shorter = "shorter or smaller samples"
    if command is None or command.has_tokens or diagnosis.requested_logits is not None:
        images = ", or smaller images" if command is None else ""
        shorter = f"shorter samples: try 512 tokens or more first{images}"
    yield _option_of("seq_len", shorter, "this changes the data", changes=True)
    if command is not None and command.mentions("lora"):
        yield _option_of("lora_rank", "a smaller LoRA rank with the same alpha / r", "other adapters: a new run", changes=True)
    why = "for example 0.5 B instead of 1.8 B parameters: a new run"
    yield _option_of("smaller_model", "a smaller model", why, changes=True)


def _eval_batch() -> Remedy:
    why = "the result of an evaluation does not depend on it"
    return _option_of("eval_batch", "a smaller evaluation batch", why, speed=1)


_RECOMPUTED = "only the inputs of the layers are kept, and the other activations are computed again; 20 to 30 % slower"
_OFFLOADED = f"it needs about {TRAINED_BYTES} bytes of host memory per trained parameter"


def _option_of(
    id: str, title: str, why: str, *, speed: float | None = None, changes: bool = False, command: str | None = None
) -> Remedy:
    """Something to set in the program's own options or code."""
    return Remedy(
        id=id,
        title=f"{title}, in your program's options",
        why=why,
        keeps_math=not changes,
        resumable="none",
        needs_consent=True,
        forecast_unknown=_UNFORESEEN,
        speed=speed,
        command=command,
    )


_OTHER_DEVICES = (Place.ROCM, Place.MPS, Place.TPU, Place.XPU, Place.NPU, Place.HPU, Place.DIRECTML, Place.OPENCL, Place.VULKAN)


def _allocator(diagnosis: Diagnosis, command: ExternalCommand | None) -> Iterator[Remedy]:
    """PyTorch's allocator option on CUDA, or else what the framework and the device have
    instead."""
    other = tuple(advice("allocator", diagnosis.environment))
    if other or _is(diagnosis, *_OTHER_DEVICES) or not _is(diagnosis, Place.PYTORCH):
        yield from other
    elif command is None or "expandable_segments" not in command.allocator:
        yield _expandable(diagnosis, command)


def _expandable(diagnosis: Diagnosis, command: ExternalCommand | None) -> Remedy:
    options = with_expandable_segments("" if command is None else command.allocator)
    remedy = Remedy(
        id="allocator",
        title=ALLOCATOR,
        why=f"{why_allocator(diagnosis)}; it must be set before the program starts",
        keeps_math=True,
        resumable="none",
        forecast_unknown=_UNFORESEEN,
        speed=1.0,
        # torch 2.9 and newer reads PYTORCH_ALLOC_CONF; PYTORCH_CUDA_ALLOC_CONF still works there.
        command=f"export PYTORCH_CUDA_ALLOC_CONF={options} PYTORCH_ALLOC_CONF={options}",
    )
    if command is None:
        return remedy
    values = {"allocator": options}
    why = f"{remedy.why}; your program continues from its own checkpoint, if it does that when it starts"
    return replace(remedy, resumable="resumes", why=why, assignments=values, command=restart_command(command.run, values))


def requested_at(diagnosis: Diagnosis, batch: int) -> int | None:
    """The size of the failed request at another micro-batch, in bytes; None if it was not for the
    logits."""
    logits, requested = diagnosis.requested_logits, diagnosis.requested_bytes
    return None if logits is None or requested is None else round(requested * batch / logits.batch)


def _smaller_batch(diagnosis: Diagnosis, command: Sequence[str]) -> Remedy:
    """`command`: empty if it is not known."""
    logits, halved, accumulates = diagnosis.requested_logits, half_batch(command), _accumulates(command)
    title, why = "half the batch", ""
    if logits is not None and logits.batch > 1:
        b = logits.batch
        sizes = {batch: requested_at(diagnosis, batch) for batch in (b * 3 // 4, b * 5 // 8, b // 2)}
        at = ", ".join(f"{units.gib(size, 2)} GiB at B {batch}" for batch, size in sizes.items() if batch)
        why = f"; the logits that did not fit ({units.gib(diagnosis.requested_bytes, 2)} GiB at B {b}) need {at}"
        title = f"batch {b} -> {b // 2}"
    if accumulates:
        title = f"{title} and twice the accumulation: the effective batch stays"
        why = f"the same samples in smaller pieces; 5 to 15 % slower{why}"
    elif not command:
        why = f"fewer samples are in memory at once; if the program can accumulate, the effective batch can stay{why}"
    else:
        why = f"the command has no option for accumulation: an update then has half the samples{why}"
    typed = None if halved is None else f"memtop train --name NEW -- {shlex.join(halved)}"
    changes = bool(command) and not accumulates
    return _option_of("smaller_batch", title, why, speed=0.9 if accumulates else None, changes=changes, command=typed)


def _accumulates(command: Sequence[str]) -> bool:
    """Whether the program can take several batches in an update: its command says so, or has an
    option of Hugging Face's Trainer, which can."""
    return _option(command, _ACCUMULATION) is not None or _option(command, _BATCH_OF_TRAINER) is not None


def _chunked_loss(diagnosis: Diagnosis) -> Remedy:
    why = "the logits of all tokens are never in memory at once; training is unchanged"
    if diagnosis.requested_logits is not None:
        failed = units.size(diagnosis.requested_bytes)
        why += f"; the request that failed ({failed}) was for them, and two or three copies exist"
    return _option_of("chunked_loss", "a fused loss, or one over a few tokens at a time", why)


def half_batch(command: Sequence[str]) -> list[str] | None:
    """The command with half the B and twice the A, in its own options for both; None if one is
    missing or B is odd."""
    words = list(command)
    batch, accumulation = _option(words, _BATCH), _option(words, _ACCUMULATION)
    if batch is None or accumulation is None or batch.value % 2:
        return None
    for option, value in ((batch, batch.value // 2), (accumulation, accumulation.value * 2)):
        words[option.place] = f"{option.before}{value}"
    return words


class _Option(NamedTuple):
    """A number in a command line: the index of its word, the text before it in that word, and its
    value."""

    place: int
    before: str
    value: int


def _option(words: Sequence[str], names: Sequence[str]) -> _Option | None:
    """The last option with one of these names, which is the one that programs use."""
    for place in reversed(range(len(words))):
        name, equals, text = words[place].partition("=")
        plain = name.lstrip("-").rpartition(".")[2].replace("-", "_")
        if plain not in names:
            continue
        if equals and text.isdecimal():
            return _Option(place, f"{name}=", int(text))
        if not equals and name.startswith("-") and place + 1 < len(words) and words[place + 1].isdecimal():
            return _Option(place + 1, "", int(words[place + 1]))
    return None


# --- host memory, shared memory, page-locked memory, disk ----------------------------------------


def _host(diagnosis: Diagnosis, command: ExternalCommand | None) -> Iterator[Remedy]:
    host = None if command is None else command.host
    if diagnosis.confidence < SURE:
        killed = diagnosis.kind is Kind.HOST_OOM_KILLED
        yield from advice("who_killed" if killed else "unproven", diagnosis.environment)
        return
    if diagnosis.reason in _HEAPS:
        yield _larger_heap(diagnosis.environment, *_HEAPS[diagnosis.reason])
        return
    if beyond_all_memory(diagnosis, host) is not None:
        return  # no setting makes that request fit
    if host is None and (diagnosis.requested_bytes or 0) >= _MORE_THAN_MACHINES_HAVE:
        yield _wrong_size(diagnosis)
        return
    leaks = () if command is None else command.leaks
    more = () if leaks else tuple(_more(diagnosis, host))
    # What a manager or `ulimit -v` limits is cheaper to request than to save.
    first = _is(diagnosis, Place.CGROUP, *MANAGED - {Place.DOCKER}) or diagnosis.address_space_bytes is not None
    if first:
        yield from more
    large = host is None and (diagnosis.requested_bytes or 0) >= _MUCH and not _is(diagnosis, *PROGRAMS)
    if large:
        yield _in_pieces(diagnosis)
    can_leak = not leaks or any(leak.role == "loader worker" for leak in leaks)
    if _has_workers(diagnosis, command) and can_leak and diagnosis.address_space_bytes is None:
        why = "each worker has its own copy of the data that it reads"
        yield _option_of("workers", "no data-loader workers (num_workers 0), or fewer", why)
    if not leaks:
        yield from (one for one in _less_host_memory(diagnosis, command) if not large or one.id != "host_level")
    if not first:
        yield from more


def _more(diagnosis: Diagnosis, host: HostFacts | None) -> Iterator[Remedy]:
    """What a person can do about the limit or the machine, without swap that is too small."""
    small = host is None and (diagnosis.requested_bytes or 0) > _SWAP_HELPS
    for one in more_host_memory(diagnosis, host):
        if isinstance(one, Remedy) and not (small and one.id == "swap"):
            yield one


_SWAP_HELPS = 32 << 30
"""The largest request for which the 8 GiB of swap of the advice can make a difference."""
_MUCH = 1 << 30
"""A refused request for so much memory is the cause of the failure itself."""
_MORE_THAN_MACHINES_HAVE = 4 << 40
"""A request for so much memory (4 TiB) comes from a wrong size, whatever the machine is."""


def _wrong_size(diagnosis: Diagnosis) -> Remedy:
    return to_do(
        "one_request",
        f"find what requests {size(diagnosis.requested_bytes)} at once",
        "hardly any machine has so much memory: look for a wrong shape or type, or read the data in pieces",
        None,
    )


def _less_host_memory(diagnosis: Diagnosis, command: ExternalCommand | None) -> Iterator[Remedy]:
    if own := tuple(advice("program_host", diagnosis.environment, diagnosis.phase)):
        yield from own
        return
    of_torch = _is(diagnosis, Place.PYTORCH)
    on_gpu = of_torch and _is(diagnosis, Place.CUDA, Place.ROCM) if command is None else command.on_gpu
    if command is None and of_torch and not on_gpu and diagnosis.phase in ("forward", "backward", "optimizer", "evaluation"):
        why = "a program that computes on the CPU has its activations in host memory"
        yield _option_of("smaller_batch", "a smaller batch, if it runs on the CPU", why)
    if command is not None and of_torch and not on_gpu and diagnosis.phase in ("forward", "backward"):
        yield _smaller_batch(diagnosis, command.command)
    if on_gpu and (of_torch or not _is(diagnosis, *FRAMEWORKS, *PROGRAMS)) and not _is(diagnosis, Place.INFERENCE):
        yield _option_of("pin_memory", "pin_memory off", "page-locked buffers use host memory that cannot be swapped")
    if _is(diagnosis, Place.DEEPSPEED) if command is None else command.mentions("offload", "deepspeed", "zero"):
        why = f"offload needs {TRAINED_BYTES} bytes of host memory per parameter"
        yield _option_of("offload_off", "optimizer offload off, if the GPU has room", why)
    if command is None and diagnosis.kind is Kind.HOST_OOM_KILLED and not _is(diagnosis, Place.PYTORCH, *MANAGED):
        why = "each has its own copy of the data that it reads"
        yield _option_of("workers", "fewer processes at once, such as workers and parallel jobs", why)
    yield _in_pieces(diagnosis)


def _in_pieces(diagnosis: Diagnosis) -> Remedy:
    requested = diagnosis.requested_bytes
    at_once = f": {size(requested)} were requested at once" if requested is not None and requested >= _MUCH else ""
    return _option_of("host_level", "data read in pieces or memory-mapped", f"instead of whole files in memory{at_once}")


# The program, the option that sets its limit, and an environment variable that sets it for the
# program and its children.
_HEAPS = {
    "java_heap": ("Java", "-Xmx; for Spark --driver-memory and --executor-memory", "JAVA_TOOL_OPTIONS=-Xmx8g"),
    "node_heap": ("node", "--max-old-space-size, in MiB", "NODE_OPTIONS=--max-old-space-size=8192"),
}


def _larger_heap(environment: Sequence[Place], program: str, option: str, variable: str) -> Remedy:
    why = (
        f"{program} limits its heap itself ({option}), so swap and smaller batches do not help; "
        "the command sets 8 GiB: leave enough for the rest of the host"
    )
    typed, writes = set_variable(variable, environment)
    remedy = _option_of("heap_limit", f"a larger heap for {program}", why, command="\n".join(typed) or None)
    return replace(remedy, writes=writes)


def _shm(diagnosis: Diagnosis) -> Iterator[Remedy]:
    if diagnosis.phase == "data" or (_is(diagnosis, Place.PYTORCH) and diagnosis.phase != "unknown"):
        yield _option_of("workers", "no data-loader workers (num_workers 0)", "batches then do not use /dev/shm")
    yield from advice("shm", diagnosis.environment)


def _pinned(diagnosis: Diagnosis) -> Iterator[Remedy]:
    if _is(diagnosis, Place.PYTORCH):
        yield _option_of("pin_memory", "pin_memory off", "copies to the GPU are a little slower")
    yield from advice("pinned", diagnosis.environment)


def _disk(diagnosis: Diagnosis) -> Iterator[Remedy]:
    if diagnosis.phase == "save":
        yield _option_of("save_total_limit", "fewer saved checkpoints", "saves disk space, not memory")
    yield from advice("disk", diagnosis.environment)


_OTHERS: dict[Kind, Callable[[Diagnosis], Iterator[Remedy]]] = {
    Kind.SHM_EXHAUSTED: _shm,
    Kind.PINNED_HOST_OOM: _pinned,
    Kind.DISK_FULL: _disk,
}
