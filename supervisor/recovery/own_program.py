"""What can be said and typed for a program of the user's own, or one that is known by its log alone. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from memtop.supervisor import units
from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.recovery.applying import with_allocator
from memtop.supervisor.recovery.gpu_ladder import ALLOCATOR, is_fragmented, strays, why_allocator
from memtop.supervisor.recovery.host_ladder import PROVEN, beyond_all_memory, more_host_memory
from memtop.supervisor.recovery.situation import HostFacts, restart_command, to_do
from memtop.supervisor.recovery.to_copy import copied
from memtop.supervisor.recovery.values import Remedy
from memtop.supervisor.wire import TrendSubject

_BATCH = ("per_device_train_batch_size", "per_gpu_train_batch_size", "micro_batch_size", "batch_size_per_gpu", "batch_size")
_ACCUMULATION = ("gradient_accumulation_steps", "accumulation_steps", "accumulate_grad_batches", "grad_accum_steps")
_UNFORESEEN = "no peaks of this program were measured at two batch sizes"


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What memtop knows of a program that it has started: nothing is offered that the program does not have."""

    command: tuple[str, ...] = ()
    loader_workers: bool = False
    """Processes that load its data were seen."""
    on_gpu: bool = False
    leaks: tuple[TrendSubject, ...] = ()
    """What grew from update to update when the program died."""

    def mentions(self, *words: str) -> bool:
        """Whether one of these words is in the command."""
        text = " ".join(self.command).lower()
        return any(word in text for word in words)


def remedies_for_program(
    diagnosis: Diagnosis,
    *,
    run: str | None = None,
    seen: Seen | None = None,
    allocator: str = "",
    host: HostFacts | None = None,
) -> tuple[Remedy, ...]:
    """Ranked as for memtop's own trainer. `run` and `seen` where memtop started the program; None: known by its log alone.

    Only the allocator's option can be set by memtop; all else is for a person to do in the program's own options.
    """
    kind = diagnosis.kind
    if kind.of_gpu:
        return tuple(_gpu(diagnosis, run, seen, allocator))
    if kind in (Kind.HOST_OOM_ALLOC, Kind.HOST_OOM_KILLED):
        return tuple(_host(diagnosis, seen, host))
    found = _OTHERS.get(kind)
    return () if found is None else found()


def _gpu(of: Diagnosis, run: str | None, seen: Seen | None, allocator: str) -> Iterator[Remedy]:
    if of.kind is Kind.GPU_OOM_OTHER_PROCESS:
        yield strays(of)
    fragmented = is_fragmented(of)
    expandable = "expandable_segments" in allocator
    if fragmented and not expandable:
        yield _allocator(of, run, allocator)
    if of.phase == "evaluation":
        yield _typed("eval_batch", "a smaller evaluation batch", "an evaluation's result does not depend on it", speed=1.0)
    if of.phase != "load":
        yield _smaller_batch(of, () if seen is None else seen.command)
        yield _typed("checkpointing", "gradient checkpointing on", _RECOMPUTED, speed=0.75)
        yield _chunked_loss(of)
    if not fragmented and not expandable:
        yield _allocator(of, run, allocator)
    yield _typed("offload_optimizer", "optimizer state in host memory (ZeRO with offload), or in 8 bits", _OFFLOADED)
    yield _typed("seq_len", "shorter samples, 512 tokens or more first", "other data: ask whoever uses the model", changes=True)
    if seen is None or seen.mentions("lora"):
        yield _typed("lora_rank", "a smaller LoRA rank with alpha / r held", "other adapters: a new run", changes=True)
    yield _typed("smaller_model", "a smaller model", "for example 0.5 B parameters instead of 1.8 B: a new run", changes=True)


_RECOMPUTED = "activations are computed again instead of kept, 30 to 50 % less of them; the guides: 20 to 30 % slower"
_OFFLOADED = "needs about 16 bytes of host memory per trained parameter"


def _typed(
    id: str, title: str, why: str, *, speed: float | None = None, changes: bool = False, command: str | None = None
) -> Remedy:
    """Something to set in the program's own options or code."""
    return Remedy(
        id=id,
        title=f"{title}, in your program's own options",
        why=why,
        keeps_math=not changes,
        resumable="none",
        needs_consent=True,
        forecast_unknown=_UNFORESEEN,
        speed=speed,
        command=command,
    )


def _allocator(of: Diagnosis, run: str | None, present: str) -> Remedy:
    options = with_allocator(present)
    remedy = Remedy(
        id="allocator",
        title=ALLOCATOR,
        why=f"{why_allocator(of)}; must be set before the program starts",
        keeps_math=True,
        resumable="none",
        forecast_unknown=_UNFORESEEN,
        speed=1.0,
        # torch up to 2.9 reads the first name alone, newer ones prefer the second.
        command=f"export PYTORCH_CUDA_ALLOC_CONF={options} PYTORCH_ALLOC_CONF={options}",
    )
    if run is None:
        return remedy
    values = {"allocator": options}
    why = f"{remedy.why}; your program goes on from its own checkpoint, if it does that when it is started again"
    return replace(remedy, resumable="resumes", why=why, assignments=values, command=restart_command(run, values))


def logits_of(of: Diagnosis) -> tuple[int, int, int] | None:
    """B, T and V where the request was named as the logits."""
    found = re.search(r"\bB (\d+) x T (\d+) x V (\d+)", of.requested_for or "")
    return None if found is None else (int(found[1]), int(found[2]), int(found[3]))


def requested_at(of: Diagnosis, batch: int) -> int | None:
    """What the request that failed would be at another B, in bytes; None where it is not known to be the logits."""
    shape = logits_of(of)
    return None if shape is None or of.requested_bytes is None else round(of.requested_bytes * batch / shape[0])


def _smaller_batch(of: Diagnosis, command: Sequence[str]) -> Remedy:
    shape, halved = logits_of(of), half_batch(command)
    title = "half the batch, twice the accumulation: the effective batch stays"
    why = "the same samples in smaller pieces; the guides: 5 to 15 % slower"
    if shape is not None and shape[0] > 1:
        half = shape[0] // 2
        sizes = {batch: requested_at(of, batch) for batch in (shape[0] * 3 // 4, shape[0] * 5 // 8, half)}
        at = ", ".join(f"{units.gib(size, 2)} GiB at B {batch}" for batch, size in sizes.items() if batch)
        why += f"; the logits that could not be had ({units.gib(of.requested_bytes, 2)} GiB at B {shape[0]}) need {at}"
        title = f"batch {shape[0]} -> {half} and twice the accumulation: the effective batch stays"
    typed = None if halved is None else f"memtop train --name NEW -- {shlex.join(halved)}"
    return _typed("smaller_batch", title, why, speed=0.9, command=typed)


def _chunked_loss(of: Diagnosis) -> Remedy:
    why = "the logits never exist as a whole, which keeps the mathematics"
    if logits_of(of) is not None:
        why += f": they are what could not be had ({units.size(of.requested_bytes)}), and there are two to three times as many"
    return _typed("chunked_loss", "a fused loss, or one over a few tokens at a time", why)


def half_batch(command: Sequence[str]) -> list[str] | None:
    """The command with B halved and A doubled in whatever options it has for both; None where one is missing or B is odd."""
    words = list(command)
    batch, accumulation = _option(words, _BATCH), _option(words, _ACCUMULATION)
    if batch is None or accumulation is None or batch.value % 2:
        return None
    for option, value in ((batch, batch.value // 2), (accumulation, accumulation.value * 2)):
        words[option.place] = f"{option.before}{value}"
    return words


class _Option:
    """A number in a command: at which word, what stands before it in that word, and its value."""

    def __init__(self, place: int, before: str, value: int) -> None:
        self.place, self.before, self.value = place, before, value


def _option(words: Sequence[str], names: Sequence[str]) -> _Option | None:
    """The last one of these names: programs take the last."""
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


def _host(of: Diagnosis, seen: Seen | None, host: HostFacts | None) -> Iterator[Remedy]:
    if of.confidence < PROVEN:
        yield copied("who_killed")
        return
    if of.reason in _HEAPS:
        yield _larger_heap(*_HEAPS[of.reason])
        return
    if beyond_all_memory(of, host) is not None:
        return  # no setting makes room for that
    leaks = () if seen is None else seen.leaks
    limited = of.address_space_bytes is not None
    has_workers = seen is None or seen.loader_workers or seen.mentions("workers")
    if has_workers and not limited and _may_be_in(leaks, "loader worker"):
        why = "each holds its own copy of what it touches"
        yield _typed("workers", "no data-loader workers (num_workers 0), or fewer", why)
    if not leaks:
        yield from _smaller_host(seen)
        yield from (one for one in more_host_memory(of, host) if isinstance(one, Remedy))


def _may_be_in(leaks: Sequence[TrendSubject], role: str) -> bool:
    """Whether processes of this role leaked; true where no leak is known."""
    return not leaks or any(leak.role == role for leak in leaks)


def _smaller_host(seen: Seen | None) -> Iterator[Remedy]:
    if seen is None or seen.on_gpu:
        yield _typed("pin_memory", "pin_memory off", "page-locked buffers come out of host memory and cannot be swapped")
    if seen is None or seen.mentions("offload", "deepspeed", "zero"):
        why = "offload takes 16 bytes of host memory per parameter"
        yield _typed("offload_off", "optimizer offload off, if the card has room", why)
    yield _typed("host_level", "data read in pieces or memory-mapped", "instead of whole files in memory")


# Whose heap, the option that sets its limit, and a command that sets it for the program and its children.
_HEAPS = {
    "java_heap": ("Java", "-Xmx; for Spark --driver-memory and --executor-memory", "export JAVA_TOOL_OPTIONS=-Xmx8g"),
    "node_heap": ("node", "--max-old-space-size, in MiB", "export NODE_OPTIONS=--max-old-space-size=8192"),
}


def _larger_heap(whose: str, option: str, command: str) -> Remedy:
    why = (
        f"the limit is {whose}'s own ({option}): swap and smaller batches do not move it; 8 GiB here, leave the host its share"
    )
    return _typed("heap_limit", f"a larger heap for {whose}", why, command=command)


def _shm() -> tuple[Remedy, ...]:
    workers = _typed("workers", "no data-loader workers (num_workers 0)", "batches then do not pass through /dev/shm")
    return workers, copied("shm"), copied("shm_container")


def _pinned() -> tuple[Remedy, ...]:
    return _typed("pin_memory", "pin_memory off", "copies to the card wait a little"), copied("memlock")


def _disk() -> tuple[Remedy, ...]:
    why = "memtop deletes nothing by itself"
    fewer = _typed("save_total_limit", "fewer kept checkpoints", "saves disk, not memory")
    return fewer, to_do("free_disk", "make room on the disk", why, "df -h . && du -xh --max-depth=2 . | sort -h | tail")


_OTHERS: dict[Kind, Callable[[], tuple[Remedy, ...]]] = {
    Kind.SHM_EXHAUSTED: _shm,
    Kind.PINNED_HOST_OOM: _pinned,
    Kind.DISK_FULL: _disk,
}
