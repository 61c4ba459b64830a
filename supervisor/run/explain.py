"""What happened, in words: how an attempt ended, why one begins, which band a gauge is in. Pure
functions that decide nothing.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from memtop.presets.comparison import describe_length, describe_split, edits_text, risk
from memtop.presets.schema import Settings
from memtop.supervisor import units
from memtop.supervisor.diagnosis.values import PHASES, Diagnosis, Kind
from memtop.supervisor.killed import describe_status, signal_status
from memtop.supervisor.monitor.values import Band, MachineSnapshot
from memtop.supervisor.recovery.configuration import failed_settings, settings_key
from memtop.supervisor.recovery.policy import SURE, Decision
from memtop.supervisor.recovery.values import UPDATE_PHASES
from memtop.supervisor.run.events import Absence, NamedProcess, NotHeard
from memtop.supervisor.run.post_mortem.log_end import DeadWorker, LogEnd
from memtop.supervisor.run.progress import Progress
from memtop.supervisor.run.reports import End, Evaluated, MemoryRecord, Oom, SettingsChanged, Written
from memtop.supervisor.wire import (
    AcceptSpike,
    Change,
    Checkpoint,
    CheckpointNow,
    Configuration,
    Edit,
    FreeCache,
    Phase,
    Request,
    Stop,
    Try,
)


class PhasePeak(NamedTuple):
    """What torch allocates at the most in one phase of an update, bytes; None: not known."""

    phase: str
    foreseen: int | None
    measured: int | None

    def before(self, of: units.Scale) -> str:
        """`~4.9`: what was foreseen."""
        return units.UNKNOWN if self.foreseen is None else f"~{of.number(self.foreseen)}"


def phase_peaks(of: Configuration) -> list[PhasePeak]:
    """By phase of an update; empty if nothing was foreseen or measured."""
    foreseen = {} if of.foreseen is None else of.foreseen.phases
    measured = {} if of.peak is None else of.peak.phases
    if not foreseen and not measured:
        return []
    return [PhasePeak(phase, foreseen.get(phase), measured.get(phase)) for phase in UPDATE_PHASES]


def why_no_phases(of: Configuration) -> str | None:
    """Why no peak of a phase was measured; None if one was."""
    peak = of.peak
    if peak is not None and peak.phases:
        return None
    if of.settings is None:
        return "only the built-in trainer measures it"
    if peak is None or not peak.updates:
        return "no update was measured"
    if peak.settings_key == settings_key(of.settings, on_gpu=False):
        return "on the CPU no allocator counts it"
    return "its trainer did not measure it"


def phases_scale(peaks: Iterable[PhasePeak]) -> units.Scale:
    """A common unit of all of them."""
    return units.scale(max((size for peak in peaks for size in (peak.foreseen, peak.measured) if size), default=None))


def outcome(
    log: LogEnd,
    end: End | None,
    status: int | None,
    phase: Phase,
    *,
    external: bool,
    end_rank: int = 0,
    lost: str | None = None,
    trained: bool = False,
) -> tuple[Phase, str | None, dict[str, Any] | None]:
    """How an attempt ended: the run's next phase, the reason in one line, and a diagnosis if it
    failed.

    `end`: the program's last report, by rank `end_rank`; `status`: its exit status (negative for a
    signal, None if not known); `external`: it is not the built-in trainer, which is only believed
    to have finished if it reported so: exit status 0 alone proves nothing. `lost`: which
    checkpoint of it is gone (`gone`). `trained`: its training is complete, and it has no checkpoint
    from which it could do the rest.
    """
    reported = end.outcome if end else None
    unsaved = not_saved(end)
    if unsaved:
        return Phase.FAILED, unsaved, {"summary": unsaved, "evidence": list(log.lines)}
    if reported == "finished" and status in (0, None):
        return Phase.FINISHED, None, None
    if trained and phase in (Phase.STOPPING, Phase.RESTARTING):
        return Phase.FINISHED, "its training was complete before the program was stopped", None
    if phase in (Phase.STOPPING, Phase.RESTARTING):
        return Phase.STOPPED, stopped_words(status, saved=reported == "stopped", lost=lost), None
    if reported == "stopped" and status in (0, None):
        if lost is not None:
            return Phase.STOPPED, f"stopped by a request from outside memtop, but the checkpoint is gone: {lost}", None
        return Phase.STOPPED, "stopped by a request from outside memtop, state saved", None
    if external and status == 0:
        return Phase.FINISHED, None, None
    lines, summary = log.lines, describe_status(status)
    message = end.message if end else None
    if log.first_dead_rank is not None:
        rank, its_status = log.first_dead_rank
        summary = f"rank {rank} died first, {describe_status(its_status)}"
        message = message if end_rank == rank else None
        lines = log.rank_lines or lines
    elif not message and status is not None and status >= 0 and lines:
        message = log.own_error or lines[-1]
    summary = f"{summary}: {message}" if message else summary
    return Phase.FAILED, summary, {"summary": summary, "evidence": list(lines)}


def killed_for_memory(found: Diagnosis) -> bool:
    """Whether the kernel has certainly killed the program itself for lack of memory."""
    return found.kind is Kind.HOST_OOM_KILLED and found.confidence >= SURE and found.phase != "data"


def with_cause(examined: Diagnosis, ending: dict[str, Any] | None, reason: str | None) -> tuple[dict[str, Any], str | None]:
    """The ledger's diagnosis and the run's reason, from the evidence (`examined`) and from the end
    of the program (`ending`).

    A failure for lack of memory is described by its evidence, any other by the end of the program,
    with the last lines of its log.
    """
    values: dict[str, Any] = msgspec.to_builtins(examined)
    if examined.of_memory and examined.confidence >= SURE:
        return values, examined.summary
    if examined.reason == "no_input" and ending is not None and reason is not None:
        reason = f"{reason}; under memtop the input of a program is empty"
        ending = {**ending, "summary": reason}
    return {**values, **(ending or {})}, reason


def oom_text(rank: int, report: Oom) -> str:
    """An allocation failure in one line."""
    update = f"update {report.update}" if report.update else None
    where = ", ".join(filter(None, (f"rank {rank}", update, PHASES.get(report.phase))))
    split = f" with batch {report.batch} x {report.accumulation}" if report.batch else ""
    words = (report.message or report.error or "no words").strip().splitlines()
    then = "; the same samples are done again in smaller pieces" if report.survived else ""
    return f"out of memory ({where}{split}): {words[0] if words else 'no words'}{then}"


def workers_started_again(restarts: int, before: Progress, dead: DeadWorker | None) -> str:
    """How often torchrun has started its workers again, and which of them had ended first.

    `before`: what they had reported.
    """
    most = f" of {before.max_restarts}" if before.max_restarts is not None else ""
    text = f"torchrun started the workers again (restart {restarts}{most})"
    failed = next((one for one in before.failures if not one[1].survived), None)
    if failed is not None:
        return f"{text} after {oom_text(*failed)}"
    if dead is None:
        return text
    rank = next((number for number, one in before.ranks.items() if one.pid == dead.pid), dead.local_rank)
    return f"{text} after rank {rank} died: {dead.message or describe_status(dead.exit_status)}"


def decided(decision: Decision) -> str:
    """What follows a failure for lack of memory, in one line."""
    words = {"restart": "it goes on with", "wait": "it waits", "ask": "nothing is done by itself", "stop": "nothing is done"}
    return f"{words[decision.action]}: {decision.why}"


def settings_text(before: Settings, after: Settings, report: SettingsChanged) -> str:
    """What the running program has changed, and why."""
    names = [name for name in before.__struct_fields__ if getattr(before, name) != getattr(after, name)]
    return f"{report.reason or 'changed'} at update {report.update}: {edits_text(before, after, names) or 'nothing'}"


def not_saved(end: End | None) -> str | None:
    """Why a program that finished or was stopped could not save its state, as it reported. None if
    it saved, or reported nothing.
    """
    if end is None or end.outcome not in ("finished", "stopped") or end.saved:
        return None
    return end.message or f"{end.outcome}, not saved: no reason given"


def none_whole(newest: Checkpoint) -> str:
    """How a restart of the built-in trainer without a complete state goes: it refuses to begin
    anew."""
    return f"it cannot resume, because no saved state seems whole: {newest.problem or 'unknown'}"


def done_again(reached: int | None, saved: Checkpoint | None) -> str | None:
    """The updates of an ended attempt that the next one must repeat; None if there are none, or if
    that is not known.
    """
    count, at = _unsaved(reached, saved)
    if not count:
        return None
    s, are = ("s", "are") if count > 1 else ("", "is")
    return f"{count} update{s} since the last saved state ({at}) {are} done again"


def lost(reached: int | None, saved: Checkpoint | None) -> str | None:
    """The updates of an ended attempt that are not saved; None if there are none, or if that is not
    known.
    """
    count, at = _unsaved(reached, saved)
    if not count:
        return None
    s, are = ("s", "are") if count > 1 else ("", "is")
    return f"{count} update{s} since the last saved state ({at}) {are} lost"


def _unsaved(reached: int | None, saved: Checkpoint | None) -> tuple[int, str]:
    """How many updates are not saved, and where the last saved state is; 0 if that is not known."""
    if reached is None or (saved is not None and not saved.complete):
        return 0, ""
    since = (saved.updates or 0) if saved is not None else 0
    return max(0, reached - since), "none" if saved is None else f"at update {since}"


FROM_ZERO = "starts again from update 0, unless it resumes by itself: memtop knows no checkpoint of this program"
"""What a restart does to the user's own program if memtop has nothing to resume from."""


def nothing_left(run: str, done: int, length: int, *, by_memtop: bool = True, saved: bool = True) -> str:
    """Why a run that has finished is not restarted. `by_memtop`: memtop can make it longer.
    `saved`: it has a checkpoint."""
    longer = f"`memtop restart {run} --max-updates N` trains longer"
    if not saved:
        longer = f"it has no complete checkpoint; `memtop restart {run} --set position=lost` trains it again from zero"
    elif not by_memtop:
        longer = "`memtop train -- COMMAND` with a greater length in the program's own options trains longer"
    return f"nothing is left to train: {done} updates are done, and the length is {length}; {longer}"


def nothing_would_be_left(done: int, length: int) -> str:
    """Why a training is not restarted with settings that make it shorter than what is done at the
    restart."""
    longer = f"--max-updates N, with N above {done}, trains longer"
    return f"nothing would be left to train: {done} updates are done then, and the new length is {length}; {longer}"


_NOTHING: dict[type[Request], str] = {
    FreeCache: "nothing to free",
    CheckpointNow: "nothing to save",
    Stop: "nothing to stop",
    Edit: "without --live, `memtop restart` starts it with other settings",
    AcceptSpike: "nothing to decide",
    Try: "a trial needs a run in progress",
}


def over(run: str, word: str, ended: float | None, request: type[Request]) -> str:
    """Why a run that is over cannot do what is requested. `word`: its state; `ended`: in seconds
    since the epoch."""
    at = "an unknown time" if ended is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ended))
    what = {
        "stopped": f"run {run!r} was stopped at {at}",
        "failed": f"run {run!r} failed at {at}",
        "killed": f"run {run!r} was killed at {at}",
    }.get(word, f"run {run!r} finished at {at}")
    return f"{what}; {_NOTHING[request]}"


def gone(saved: Checkpoint, reached: int | None, newest: Checkpoint | None) -> str:
    """Which checkpoint that the program has saved is not there any more, and what that means.
    `newest`: what is there."""
    again = done_again(reached, newest)
    return f"{saved.path}; {again}" if again else saved.path


def stopped_words(status: int | None, *, saved: bool, lost: str | None = None) -> str:
    """How a program ended that memtop was asked to stop. `saved`: it has reported that it saved.
    `lost`: its checkpoint is gone."""
    if saved and lost is not None:
        return f"stopped as requested, but the checkpoint is gone: {lost}"
    if saved:
        return "stopped as requested, state saved"
    # SIGINT is the request itself, and what a program makes of it.
    if status in (None, 0) or signal_status(status) == -signal.SIGINT:
        return "stopped as requested"
    return f"stopped as requested: {describe_status(status)}"


_ABSENCES = {
    Absence.ENVIRONMENT: "was started with another environment (env -i): pass on MEMTOP_* and PYTHONPATH",
    Absence.OTHER_USER: "runs as root or another user (sudo), so memtop cannot read its reports: start it without sudo",
    Absence.PYTHONPATH: "was started with a PYTHONPATH of its own: append the old one (PYTHONPATH=.:$PYTHONPATH)",
    Absence.ISOLATED: "was started with -I, -E or -S, so that Python loads nothing of memtop: leave the option out",
    Absence.NO_PYTHON: "memtop sees no Python process of it; one in a container or on another machine cannot report",
    Absence.NO_UPDATE: "memtop runs in the program but has seen no update yet. The program is still loading, or it uses no "
    "torch optimizer.",
}


def program_stopped(pids: Sequence[int], trainer_pid: int | None) -> str:
    """What to do about a program, or ranks of it, that a signal has stopped."""
    ranks = [str(pid) for pid in pids if pid != trainer_pid]
    what = f"the program (pid {trainer_pid})" if trainer_pid in pids else ""
    if ranks:
        of = "it" if what else "the program"
        some = f"ranks of {of} (pids {', '.join(ranks)})" if len(ranks) > 1 else f"a rank of {of} (pid {ranks[0]})"
        what = f"{what} and {some}" if what else some
    many = len(pids) > 1
    words = " ".join(map(str, pids))
    return (
        f"{what} {'are' if many else 'is'} stopped (SIGSTOP or Ctrl-Z): "
        f"`kill -CONT {words}` lets {'them' if many else 'it'} continue"
    )


def not_heard(found: NotHeard, *, by_output: bool = False) -> str | None:
    """Why a program has reported nothing, and what to do. `by_output`: its step is read from its
    output; None if nothing is missing then.
    """
    if found.absence is Absence.NO_UPDATE:
        return None if by_output else _ABSENCES[found.absence]
    who = "" if found.process is None else f"{names([found.process])} "
    if by_output:
        return (
            f"memtop is not inside the program: the step is read from its output, and more is not known: {who}"
            + (_ABSENCES[found.absence])
        )
    return f"the program has reported nothing so far, so updates and loss are not known: {who}{_ABSENCES[found.absence]}"


_NAMED = 6


def names(processes: Collection[NamedProcess]) -> str:
    """Processes in words: `pid 123 (python), pid 124 (sleep)`."""
    first = ", ".join(f"pid {one.pid} ({one.name})" for one in list(processes)[:_NAMED])
    more = len(processes) - _NAMED
    return f"{first} and {more} more" if more > 0 else first or "no process"


def report_text(report: MemoryRecord | Evaluated) -> str:
    """A memory record or an evaluation of the trainer in one line."""
    if isinstance(report, Evaluated):
        loss = "not reported" if report.loss is None else f"{report.loss:.4f}"
        over = "" if report.samples is None else f" over {report.samples} samples"
        return f"evaluation at update {report.update}: loss {loss}{over}"
    return f"{report.stage}: host {units.size(report.used_bytes)} of {units.size(report.total_bytes)} used"


def written_text(report: Written) -> str:
    """A sampling of the trainer in one line."""
    text = f"samples at update {report.update}: {len(report.texts)} of {len(report.prompts)} prompts, {report.tokens} tokens"
    text += "" if report.seconds is None else f" in {report.seconds:.1f} s"
    text += "" if report.peak_bytes is None else f", peak {units.size(report.peak_bytes)}"
    return text if report.problem is None else f"{text}; {report.problem}"


def restart_reason(change: Change) -> str:
    """Why an attempt begins: `restart with batch 4, accumulation 8`."""
    prefix = f"{change.reason}: " if change.reason else ""
    edits = [f"preset {change.preset}"] if change.preset is not None else []
    edits += [f"{name} {text}" for name, text in change.assignments.items()]
    if change.gpus is not None:
        edits.append(f"GPUs {change.gpus}")
    if change.max_updates is not None:
        edits.append(f"max_updates {change.max_updates}")
    if change.configuration is not None:
        edits.insert(0, f"the settings of configuration {change.configuration}")
    if change.state_before is not None:
        edits.append(f"the state at update {change.state_before}")
    return prefix + (f"restart with {', '.join(edits)}" if edits else "restart")


def split_change(before: Settings | None, after: Settings | None) -> str:
    """How a restart changes the samples of an update or their length, as the end of a sentence;
    empty if it does not."""
    if before is None or after is None or (before.splits, before.seq_len) == (after.splits, after.seq_len):
        return ""
    return f"; {describe_split(before, after)}"


def length_change(
    before: Settings | None, after: Settings | None, reached: Checkpoint | None, total_updates: int | None
) -> str | None:
    """How a restart from there moves the end of the run, in one line; None if it does not.

    `total_updates`: with the settings before.
    """
    if before is None or after is None:
        return None
    if reached is None or not reached.complete:
        return describe_length(before, after, 0, 0, total_updates)
    return describe_length(before, after, reached.updates or 0, reached.samples_seen, total_updates)


def risk_of(after: Settings | None, rows: Iterable[Configuration]) -> str:
    """A warning if these settings ran out of memory before, as the end of a sentence."""
    found = None if after is None else risk(after, failed_settings(rows))
    return f"; ! {found}" if found else ""


def bands(machine: MachineSnapshot) -> Iterator[tuple[str, Band, str]]:
    """Each gauge of the machine: its name, its band, and the numbers behind it."""
    for gpu in machine.gpus:
        text = f"{units.percent(gpu.used_fraction)} of {units.size(gpu.total_bytes)} taken"
        yield f"GPU {gpu.index}", gpu.band, text
    host = machine.host
    of = host.limit_bytes or host.total_bytes
    yield "host RAM", host.band, f"{units.percent(host.used_fraction)} of {units.size(of)} used"
    if host.swap_fraction is not None:
        swap = f"{units.percent(host.swap_fraction)} of {units.size(host.swap_total_bytes)} used"
        yield "swap", host.swap_band, swap
