"""The remedies for one failure of a run of memtop's trainer, ranked by what they cost, and the
advice for when none of them fits. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from memtop.presets.parameters import TRAINED_BYTES, smaller_model
from memtop.supervisor import units
from memtop.supervisor.diagnosis.values import Kind
from memtop.supervisor.monitor.values import EDGE_FROM
from memtop.supervisor.recovery.gpu_ladder import Rung, fewer_parameters, gpu_ladder
from memtop.supervisor.recovery.host_ladder import disk_ladder, host_ladder, pinned_ladder, shm_ladder
from memtop.supervisor.recovery.situation import Situation, restart_command, train_command
from memtop.supervisor.recovery.values import Remedy


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
    return Ladder(remedies=_what_fits_first(found, by_estimate=situation.on_gpu), left_out=tuple(dict.fromkeys(left_out)))


def _what_fits_first(found: Sequence[Remedy], *, by_estimate: bool) -> tuple[Remedy, ...]:
    """The remedies that need no consent, in this order: those that fit, those that are forecast to
    come near the limit, those that are forecast to run out of memory again."""
    judged = [one for one in found if one.forecast is not None and (by_estimate or one.forecast.source != "estimate")]
    near = sorted((one for one in judged if not one.needs_consent and _fraction(one) >= EDGE_FROM), key=_runs_out)
    rest = [one for one in found if one not in near]
    free = [place for place, one in enumerate(rest) if not one.needs_consent]
    changing = [place for place, one in enumerate(rest) if not one.keeps_math]
    at = free[-1] + 1 if free else min(changing, default=len(rest))
    return (*rest[:at], *near, *rest[at:])


def _fraction(remedy: Remedy) -> float:
    """What is foreseen of the memory; 0 if nothing is."""
    return (remedy.forecast.fraction if remedy.forecast is not None else None) or 0.0


def _runs_out(remedy: Remedy) -> bool:
    return _fraction(remedy) >= 1


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
