"""The remedies for one failure, ranked by what they cost, and the advice for when none of them
fits; for runs of memtop's trainer and for external commands. Pure functions."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from memtop.supervisor import units
from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.recovery.configuration import TRAINED_BYTES, smaller_model
from memtop.supervisor.recovery.gpu_ladder import (
    ALLOCATOR,
    Rung,
    fewer_parameters,
    gpu_ladder,
    is_fragmented,
    strays,
    why_allocator,
    with_expandable_segments,
)
from memtop.supervisor.recovery.host_ladder import (
    beyond_all_memory,
    disk_ladder,
    host_ladder,
    more_host_memory,
    pinned_ladder,
    shm_ladder,
)
from memtop.supervisor.recovery.policy import SURE
from memtop.supervisor.recovery.situation import HostFacts, Situation, restart_command, suggested, to_do, train_command
from memtop.supervisor.recovery.values import Remedy
from memtop.supervisor.wire import TrendSubject


class Ladder(msgspec.Struct, frozen=True, kw_only=True):
    """The remedies, the best first, and the reasons for those that are left out, one line each."""

    remedies: tuple[Remedy, ...]
    left_out: tuple[str, ...] = ()


_LADDERS: dict[Kind, Callable[[Situation], Iterator[Rung]]] = {
    Kind.GPU_OOM: gpu_ladder,
    Kind.GPU_OOM_FRAGMENTED: gpu_ladder,
    Kind.GPU_OOM_OTHER_PROCESS: gpu_ladder,
    Kind.HOST_OOM_ALLOC: host_ladder,
    Kind.HOST_OOM_KILLED: host_ladder,
    Kind.PINNED_HOST_OOM: pinned_ladder,
    Kind.SHM_EXHAUSTED: shm_ladder,
    Kind.DISK_FULL: disk_ladder,
}


def remedies(situation: Situation) -> tuple[Remedy, ...]:
    """What can be done about this failure, the best first."""
    return ladder(situation).remedies


def ladder(situation: Situation) -> Ladder:
    """All remedies for this failure in order, with the reasons for those that are left out."""
    rungs = _LADDERS.get(situation.diagnosis.kind)
    found: list[Remedy] = []
    left_out: list[str] = []
    for rung in () if rungs is None else rungs(situation):
        if isinstance(rung, str):
            left_out.append(rung)
        elif rung is not None and all((rung.id, rung.assignments) != (one.id, one.assignments) for one in found):
            found.append(rung)
    return Ladder(remedies=_what_fits_first(found), left_out=tuple(dict.fromkeys(left_out)))


def _what_fits_first(found: Sequence[Remedy]) -> tuple[Remedy, ...]:
    """Remedies that are forecast to run out of memory again come after all others that need no
    consent."""
    hopeless = [one for one in found if not one.needs_consent and _runs_out(one)]
    rest = [one for one in found if one not in hopeless]
    free = [place for place, one in enumerate(rest) if not one.needs_consent]
    changing = [place for place, one in enumerate(rest) if not one.keeps_math]
    at = free[-1] + 1 if free else min(changing, default=len(rest))
    return (*rest[:at], *hopeless, *rest[at:])


def _runs_out(remedy: Remedy) -> bool:
    fraction = remedy.forecast.fraction if remedy.forecast is not None else None
    return fraction is not None and fraction >= 1


# --- when no remedy fits ------------------------------------------------------------------------

SHORT = 512
"""The shortest sequence length that the advice suggests, in tokens."""


def last_advice(situation: Situation) -> tuple[str, ...]:
    """What a person can still do if no remedy fits, one sentence with an estimate each
    (`Proposal.last_advice`)."""
    if situation.diagnosis.kind.of_gpu:
        return (_others(situation), _smaller(situation), _short(situation), *_no_evaluation(situation))
    if not situation.diagnosis.of_memory:
        return ()
    return tuple(f"{one.title}: {one.why}" for one in remedies(situation) if one.resumable == "none")


def _others(situation: Situation) -> str:
    others = situation.others_bytes
    if others is None:
        return "check which other processes use the GPU (`memtop strays`); how much they hold is not known"
    if not others:
        return "no other process used the GPU: this run used all of it"
    pids = situation.diagnosis.other_process_pids
    who = f" (pid {', '.join(map(str, pids))})" if pids else ""
    return f"end the other processes on the GPU (`memtop strays`): this frees {units.size(others)}{who}"


def _smaller(situation: Situation) -> str:
    config = situation.settings.model.get("config")
    values = None if config is None else smaller_model(config)
    if config is None or values is None:
        trained = situation.trained
        each = f"{TRAINED_BYTES} bytes per trained parameter with Adam in fp32"
        now = "" if trained is None else f": the {trained / 1e6:.1f} M of this run need {units.size(trained * TRAINED_BYTES)}"
        return f"use a smaller model in a new run, for example 0.5 B instead of 1.8 B parameters ({each}{now})"
    command = train_command(situation.settings, {f"model.config.{name}": str(value) for name, value in values.items()})
    return f"use a smaller model in a new run{fewer_parameters(config, values)}: `{command}`"


def _short(situation: Situation) -> str:
    now, line = situation.settings.seq_len, situation.line()
    if now <= SHORT:
        return f"use sequences of at most {SHORT} tokens: T is already {now}"
    saved = "how much this saves was not measured"
    if not isinstance(line, str):
        less = line.slope_bytes * situation.settings.batch * (1 - SHORT / now)
        saved = f"an estimated {units.size(less)} less, or more (the part that grows with the batch shrinks with T)"
    command = restart_command(situation.run, {"seq_len": str(SHORT)})
    return f"use sequences of {SHORT} tokens instead of {now}: {saved}; this changes the data: `{command}`"


def _no_evaluation(situation: Situation) -> Iterator[str]:
    settings = situation.settings
    if not settings.eval_every:
        yield "evaluation is already off"
        return
    during = situation.diagnosis.phase
    helps = "it failed there" if during == "evaluation" else f"it failed in another phase ({during}), so this may not help"
    off = {"eval_every": "0", **({"load_best_at_end": "false"} if settings.load_best_at_end else {})}
    yield f"do not evaluate during training: {helps}: `{restart_command(situation.run, off)}`"


_BATCH = ("per_device_train_batch_size", "per_gpu_train_batch_size", "micro_batch_size", "batch_size_per_gpu", "batch_size")
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
    return () if found is None else found()


def _gpu(diagnosis: Diagnosis, command: ExternalCommand | None) -> Iterator[Remedy]:
    if diagnosis.kind is Kind.GPU_OOM_OTHER_PROCESS:
        yield strays(diagnosis)
    fragmented = is_fragmented(diagnosis)
    expandable = command is not None and "expandable_segments" in command.allocator
    if fragmented and not expandable:
        yield _allocator(diagnosis, command)
    if diagnosis.phase == "evaluation":
        yield _option_of(
            "eval_batch", "a smaller evaluation batch", "the result of an evaluation does not depend on it", speed=1
        )
    if diagnosis.phase != "load":
        yield _smaller_batch(diagnosis, () if command is None else command.command)
        yield _option_of("checkpointing", "gradient checkpointing on", _RECOMPUTED, speed=0.75)
        yield _chunked_loss(diagnosis)
    if not fragmented and not expandable:
        yield _allocator(diagnosis, command)
    yield _option_of("offload_optimizer", "optimizer state in host memory (ZeRO with offload), or in 8 bits", _OFFLOADED)
    yield _option_of("seq_len", "shorter samples, at first 512 tokens or more", "this changes the data", changes=True)
    if command is None or command.mentions("lora"):
        yield _option_of("lora_rank", "a smaller LoRA rank with the same alpha / r", "other adapters: a new run", changes=True)
    yield _option_of(
        "smaller_model", "a smaller model", "for example 0.5 B instead of 1.8 B parameters: a new run", changes=True
    )


_RECOMPUTED = "activations are recomputed instead of kept: 30 to 50 % less of them; 20 to 30 % slower"
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


def _allocator(diagnosis: Diagnosis, command: ExternalCommand | None) -> Remedy:
    options = with_expandable_segments("" if command is None else command.allocator)
    remedy = Remedy(
        id="allocator",
        title=ALLOCATOR,
        why=f"{why_allocator(diagnosis)}; it must be set before the program starts",
        keeps_math=True,
        resumable="none",
        forecast_unknown=_UNFORESEEN,
        speed=1.0,
        # torch up to 2.9 reads the first name only; newer versions prefer the second.
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
    logits, halved = diagnosis.requested_logits, half_batch(command)
    title = "half the batch, twice the accumulation: the effective batch stays"
    why = "the same samples in smaller pieces; 5 to 15 % slower"
    if logits is not None and logits.batch > 1:
        b = logits.batch
        sizes = {batch: requested_at(diagnosis, batch) for batch in (b * 3 // 4, b * 5 // 8, b // 2)}
        at = ", ".join(f"{units.gib(size, 2)} GiB at B {batch}" for batch, size in sizes.items() if batch)
        why += f"; the logits that did not fit ({units.gib(diagnosis.requested_bytes, 2)} GiB at B {b}) need {at}"
        title = f"batch {b} -> {b // 2} and twice the accumulation: the effective batch stays"
    typed = None if halved is None else f"memtop train --name NEW -- {shlex.join(halved)}"
    return _option_of("smaller_batch", title, why, speed=0.9, command=typed)


def _chunked_loss(diagnosis: Diagnosis) -> Remedy:
    why = "the logits of all tokens are never in memory at once; training is unchanged"
    if diagnosis.requested_logits is not None:
        why += (
            f"; the request that failed ({units.size(diagnosis.requested_bytes)}) was for them, and two or three copies exist"
        )
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


def _host(diagnosis: Diagnosis, command: ExternalCommand | None) -> Iterator[Remedy]:
    host = None if command is None else command.host
    if diagnosis.confidence < SURE:
        yield suggested("who_killed")
        return
    if diagnosis.reason in _HEAPS:
        yield _larger_heap(*_HEAPS[diagnosis.reason])
        return
    if beyond_all_memory(diagnosis, host) is not None:
        return  # no setting makes that request fit
    leaks = () if command is None else command.leaks
    has_workers = command is None or command.loader_workers or command.mentions("workers")
    can_leak = not leaks or any(leak.role == "loader worker" for leak in leaks)
    if has_workers and can_leak and diagnosis.address_space_bytes is None:
        why = "each worker has its own copy of the data that it reads"
        yield _option_of("workers", "no data-loader workers (num_workers 0), or fewer", why)
    if not leaks:
        yield from _less_host_memory(command)
        yield from (one for one in more_host_memory(diagnosis, host) if isinstance(one, Remedy))


def _less_host_memory(command: ExternalCommand | None) -> Iterator[Remedy]:
    if command is None or command.on_gpu:
        yield _option_of("pin_memory", "pin_memory off", "page-locked buffers use host memory that cannot be swapped")
    if command is None or command.mentions("offload", "deepspeed", "zero"):
        why = f"offload needs {TRAINED_BYTES} bytes of host memory per parameter"
        yield _option_of("offload_off", "optimizer offload off, if the GPU has room", why)
    yield _option_of("host_level", "data read in pieces or memory-mapped", "instead of whole files in memory")


# The program, the option that sets its limit, and a command that sets it for the program and its
# children.
_HEAPS = {
    "java_heap": ("Java", "-Xmx; for Spark --driver-memory and --executor-memory", "export JAVA_TOOL_OPTIONS=-Xmx8g"),
    "node_heap": ("node", "--max-old-space-size, in MiB", "export NODE_OPTIONS=--max-old-space-size=8192"),
}


def _larger_heap(program: str, option: str, command: str) -> Remedy:
    why = (
        f"{program} limits its heap itself ({option}), so swap and smaller batches do not help; "
        "the command sets 8 GiB: leave enough for the rest of the host"
    )
    return _option_of("heap_limit", f"a larger heap for {program}", why, command=command)


def _shm() -> tuple[Remedy, ...]:
    workers = _option_of("workers", "no data-loader workers (num_workers 0)", "batches then do not use /dev/shm")
    return workers, suggested("shm"), suggested("shm_container")


def _pinned() -> tuple[Remedy, ...]:
    return _option_of("pin_memory", "pin_memory off", "copies to the GPU are a little slower"), suggested("memlock")


def _disk() -> tuple[Remedy, ...]:
    why = "memtop deletes nothing by itself"
    fewer = _option_of("save_total_limit", "fewer saved checkpoints", "saves disk space, not memory")
    return fewer, to_do("free_disk", "free disk space", why, "df -h . && du -xh --max-depth=2 . | sort -h | tail")


_OTHERS: dict[Kind, Callable[[], tuple[Remedy, ...]]] = {
    Kind.SHM_EXHAUSTED: _shm,
    Kind.PINNED_HOST_OOM: _pinned,
    Kind.DISK_FULL: _disk,
}
