"""When no remedy fits: what is left to a person, in the guides' order. When a run is merely slow: what memory can give back.

Each line is one sentence with its estimate, and says what the estimate rests on. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from memtop.presets.schema import exact_splits
from memtop.supervisor import units
from memtop.supervisor.diagnosis.values import Diagnosis
from memtop.supervisor.monitor.bands import EDGE_FROM
from memtop.supervisor.recovery.gpu_ladder import offload_bytes
from memtop.supervisor.recovery.host_ladder import offload_off
from memtop.supervisor.recovery.learning import model_words
from memtop.supervisor.recovery.parameters import TRAINED_BYTES, smaller_model
from memtop.supervisor.recovery.remedies import ladder
from memtop.supervisor.recovery.situation import HostFacts, Situation, restart_command, train_command
from memtop.supervisor.recovery.to_copy import commands_to_copy
from memtop.supervisor.recovery.values import Remedy

SHORT = 512
"""The guides' last sequence length."""


def last_advice(situation: Situation) -> tuple[str, ...]:
    """What is left when no remedy fits (`Proposal.last_advice`): other processes, a smaller model, T of 512, no evaluation."""
    if situation.diagnosis.kind.of_gpu:
        return (_others(situation), _smaller(situation), _short(situation), *_no_evaluation(situation))
    if not situation.diagnosis.of_memory:
        return ()
    return tuple(f"{one.title}: {one.why}" for one in ladder(situation).remedies if one.resumable == "none")


def _others(situation: Situation) -> str:
    others = situation.others_bytes
    if others is None:
        return "see who else holds the card (`memtop strays`): how much that is, is not known"
    if not others:
        return "nobody else holds the card: all of it was this run's"
    pids = situation.diagnosis.other_process_pids
    who = f" by pid {', '.join(map(str, pids))}" if pids else ""
    return f"see who else holds the card (`memtop strays`): {units.size(others)}{who} would come back"


def _smaller(situation: Situation) -> str:
    config = situation.settings.model.get("config")
    values = None if config is None else smaller_model(config)
    if config is None or values is None:
        trained = situation.trained
        each = f"{TRAINED_BYTES} bytes per trained parameter with Adam in fp32"
        now = "" if trained is None else f": the {trained / 1e6:.1f} M trained here take {units.size(trained * TRAINED_BYTES)}"
        return f"a smaller model in a new run, for example 0.5 B instead of 1.8 B parameters ({each}{now})"
    command = train_command(situation.settings, {f"model.config.{name}": str(value) for name, value in values.items()})
    return f"a smaller model in a new run, {model_words(config, values)}: `{command}`"


def _short(situation: Situation) -> str:
    now, line = situation.settings.seq_len, situation.line()
    if now <= SHORT:
        return f"sequences of at most {SHORT} tokens: T is {now} already"
    saved = "how much that saves was not measured"
    if not isinstance(line, str):
        less = line.slope_bytes * situation.settings.batch * (1 - SHORT / now)
        saved = f"at least {units.size(less)} less by estimate (what grows with the batch shrinks with T)"
    command = restart_command(situation.run, {"seq_len": str(SHORT)})
    return f"sequences of {SHORT} tokens instead of {now}: {saved}; other data: `{command}`"


def _no_evaluation(situation: Situation) -> Iterator[str]:
    settings = situation.settings
    if not settings.eval_every:
        yield "evaluation is off already"
        return
    during = situation.diagnosis.phase
    helps = "that is where it failed" if during == "evaluation" else f"it failed in {during}, so that this may save nothing"
    off = {"eval_every": "0", **({"load_best_at_end": "false"} if settings.load_best_at_end else {})}
    yield f"no evaluation while training: {helps}: `{restart_command(situation.run, off)}`"


def when_slow(situation: Situation) -> tuple[Remedy | str, ...]:
    """What speed can be had for memory, where the forecast allows it: offload off before sharding off, then checkpointing off,
    then a larger micro-batch. Strings say what does not help, or why something must not be done now."""
    found: list[Remedy | str | None] = [
        offload_off(situation),
        _sharding_off(situation),
        _checkpointing_off(situation),
        _larger_batch(situation),
        "more accumulation: does the same work in larger updates; no sample is faster, and the peak stays as it is",
    ]
    if not situation.settings.zero.offload_optimizer:
        found.append(offload_needs(situation))
    return tuple(one for one in found if one is not None)


def offload_needs(situation: Situation) -> str | None:
    """What an offload would take of host memory, for those who want to trade it for room on the card."""
    needed, host = offload_bytes(situation), situation.host
    if needed is None:
        return None
    free = "unknown" if host.available_bytes is None else units.size(host.available_bytes)
    return f"an optimizer offload would need {units.size(needed)} of host memory (free: {free}) and make updates slower"


def _sharding_off(situation: Situation) -> Remedy | str | None:
    settings = situation.settings
    if not settings.zero.stage:
        return None
    if settings.zero.offload_optimizer:
        return "sharding off: the offload goes first, it costs more time"
    if settings.world_size > 1:
        return f"sharding off: each card would hold {settings.world_size} times its share, which was not measured"
    values = {"zero.stage": "0", **({"zero.offload_parameters": "false"} if settings.zero.offload_parameters else {})}
    line = situation.line()
    return situation.rung(
        "sharding_off",
        "on one process sharding saves nothing and costs its bookkeeping",
        values,
        title=f"{settings.zero} -> plain",
        estimate=None if isinstance(line, str) else line,
    )


def _checkpointing_off(situation: Situation) -> Remedy | str | None:
    if not situation.settings.gradient_checkpointing:
        return None
    line, total = situation.line(), situation.total_bytes
    if isinstance(line, str) or total is None:
        return "checkpointing off: what it would need was not measured"
    # The other way round from switching it on, and again on the safe side: the guides' larger saving is given back.
    estimate = line.with_activations(1 / _MOST_SAVED, "what grows with the batch doubles (the guides: 30 to 50 % saved)")
    fraction = estimate.at(situation.settings.batch) / total
    if fraction >= EDGE_FROM:
        return f"checkpointing off: forecast at {units.percent(fraction)}"
    return situation.rung(
        "checkpointing_off",
        "activations are kept instead of computed again; the guides: 20 to 30 % of the time",
        {"gradient_checkpointing": "false"},
        title="gradient checkpointing off",
        speed=1 / 0.75,
        estimate=estimate,
    )


_MOST_SAVED = 0.5


def _larger_batch(situation: Situation) -> Remedy | str:
    settings, line, total = situation.settings, situation.line(), situation.total_bytes
    larger = [s for s in exact_splits(settings.effective_batch, settings.world_size) if s[0] > settings.batch]
    if not larger:
        return "a larger micro-batch: the whole update is one already"
    batch, accumulation = larger[-1]
    if isinstance(line, str) or total is None:
        why = line if isinstance(line, str) else "nor is the size of the card"
        return f"a larger micro-batch: its peak is not known ({why})"
    fraction = (line.at(batch) + (situation.others_bytes or 0)) / total
    if fraction >= EDGE_FROM:
        return f"batch {settings.batch} -> {batch}: forecast at {units.percent(fraction)}"
    return situation.rung(
        "larger_batch",
        "fewer, larger pieces of the same update",
        {"batch": str(batch), "accumulation": str(accumulation)},
        title=f"batch {settings.batch} -> {batch}, accumulation {settings.accumulation} -> {accumulation}: "
        f"effective batch stays {settings.effective_batch}",
    )


def system_commands(diagnosis: Diagnosis, host: HostFacts | None = None) -> tuple[str, ...]:
    """The names in `to_copy.toml` that may help here; swap never where the card is what is full."""
    names = {
        "host_oom_alloc": ("swap",),
        "host_oom_killed": ("swap",),
        "shm_exhausted": ("shm", "shm_container"),
        "pinned_host_oom": ("memlock",),
    }.get(diagnosis.kind.value, ())
    limited = diagnosis.allowed_bytes is not None or (host is not None and host.in_cgroup)
    limit = ("memory_limit",) if limited and diagnosis.kind.value.startswith("host_oom") else ()
    return tuple(name for name in (*limit, *names) if name in commands_to_copy())
