"""What memtop can change in the user's own program: one that is built on Hugging Face's Trainer, or
one that a profile describes."""

from __future__ import annotations

import glob
import math
import os
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from memtop.presets.comparison import effective_change
from memtop.presets.program_profiles import KNOB_NAMES, ProgramProfile, filled
from memtop.supervisor.errors import UsageError
from memtop.supervisor.program import Knobs, ProgramCheckpoint
from memtop.supervisor.run.positions import Split, moved
from memtop.supervisor.wire import Change, Checkpoint

WHOLE_NUMBERS = ("batch", "accumulation", "seq_len", "eval_batch", "max_updates")
KNOBS = (*WHOLE_NUMBERS, "gradient_checkpointing", "optimizer")
"""By the names of `--set`."""
_SAME_SHAPE = ("batch", "accumulation", "eval_batch", "max_updates")
POSITION = "position"
"""`--set position=lost`: restart a program that does not keep its position."""
_MOST_SEEN = 8
_BOOLEANS = {"true": True, "false": False}


class Grip(msgspec.Struct, frozen=True, kw_only=True):
    """How memtop holds the program: by its Trainer, as the agent has reported it, or by a profile,
    as its command and files were read."""

    output_dir: str = ""
    """Where the Trainer saves; an absolute path."""
    made_in: tuple[str, int] | None = None
    """The folder of its arguments before the program changed it, and which of the objects made with
    it they are."""
    profile: ProgramProfile | None = None
    """None: the program is built on Hugging Face's Trainer."""
    cwd: str = ""
    """With a profile: the folder in which the program is started."""
    values: dict[str, str] = {}
    """With a profile: what its paths and words contain, by name."""
    fixed: dict[str, str] = {}
    """With a profile: the knobs that a restart cannot change, and why."""
    knobs: Knobs = Knobs()
    """With a profile: the settings, and where they were found."""
    why: str = ""
    """Why this profile fits."""
    saves_in: str = ""
    """The folder below `output_dir` in which its agent has seen the Trainer save; empty if it saves
    in `output_dir` itself."""
    since: float | None = None
    """Checkpoints with a profile, or in `saves_in`, that are older are of another training, in
    seconds since the epoch. None: the command itself continues from what is there."""
    seen: tuple[str, ...] = ()
    """With a profile: where its agent has seen it save, as absolute paths with `*`."""
    batch: int | None = None
    """Of one process, unless the profile says otherwise. With a profile, this and the next are in
    the program's own terms."""
    accumulation: int | None = None
    processes: int = 1
    seq_len: int | None = None
    """None if the Trainer's arguments have no such field."""
    peak_rate: float | None = None
    schedule: str | None = None
    """Of the learning rate: `linear`, `cosine`, ..."""
    warmup: float = 0.0
    """Updates; a share of all if below 1."""
    fixed_length: bool = False
    """Whether its length is given in updates (max_steps), not in epochs."""
    saves_on_sigterm: bool | None = None
    """Whether the Trainer saves when it gets SIGTERM (enable_jit_checkpoint). None if its version
    cannot."""
    earlier: dict[str, int] = {}
    """The checkpoints that were in this folder before the run: `program_checkpoints.newest_of`."""
    first: int | None = None
    """The update from which the run began, if its program resumed by itself."""
    resumes: bool | None = None
    """Whether a restart has shown that it continues from its checkpoint; None before the first."""

    @property
    def effective_batch(self) -> int | None:
        if self.batch is None or self.accumulation is None:
            return None
        return self.batch * self.accumulation * (1 if self.of_all("batch") or self.of_all("accumulation") else self.processes)

    def given(self, values: Mapping[str, Any]) -> Grip:
        """With the batch and the accumulation of these values of knobs."""
        return msgspec.structs.replace(self, **{name: values[name] for name in ("batch", "accumulation") if name in values})

    def with_seen(self, knobs: Knobs) -> Grip:
        """With what memtop has seen in the program of the batch and the accumulation, where the
        profile has no rule for them."""
        if self.profile is None:
            return self
        unruled = [name for name in ("batch", "accumulation") if self.profile.knob(name) is None]
        seen = {name: knob.value for name in unruled if (knob := getattr(knobs, name)) is not None}
        return msgspec.structs.replace(self, **seen)

    @property
    def split(self) -> Split | None:
        """The batch and the accumulation of one process."""
        if self.batch is None:
            return None
        batch, accumulation = self.batch, self.accumulation or 1
        batch //= self.processes if self.of_all("batch") else 1
        accumulation //= self.processes if self.of_all("accumulation") else 1
        return Split(max(1, batch), max(1, accumulation), self.processes)

    def of_all(self, knob: str) -> bool:
        """Whether the program divides this knob by its processes."""
        rule = None if self.profile is None else self.profile.knob(knob)
        return rule is not None and rule.of == "all"

    @property
    def steps_per_update(self) -> int:
        """Of the program's counter, as far as the profile says it."""
        if self.profile is None or self.profile.position.counts != "micro_batches" or self.split is None:
            return 1
        return self.split.accumulation

    @property
    def place(self) -> str | None:
        """Where it saves, for people; None if that is not known."""
        if self.profile is None or self.profile.checkpoint is None:
            return self.saves_in or self.output_dir or None
        known = (filled(path, self.values) for path in self.profile.checkpoint.paths)
        return " and ".join([path for path in known if path is not None] or self.seen) or None

    def with_seen_at(self, path: str) -> Grip:
        """It has saved there; the next one differs in its number."""
        folder, name = os.path.split(path)
        if self.profile is None:
            below = folder if folder.startswith(os.path.join(self.output_dir, "")) else ""  # noqa: PTH118 - ends with /
            return self if below == self.saves_in else msgspec.structs.replace(self, saves_in=below)
        pattern = os.path.join(glob.escape(folder), re.sub(r"\d+", "*", glob.escape(name)))  # noqa: PTH118 - of a pattern
        if pattern in self.seen:
            return self
        return msgspec.structs.replace(self, seen=(*self.seen[-_MOST_SEEN + 1 :], pattern))

    @property
    def asks(self) -> bool:
        """Whether it asks something on its terminal before it ends."""
        return self.profile is not None and self.profile.stop.answer is not None

    @property
    def log(self) -> str | None:
        """The program's own log file, as an absolute path with `*`."""
        pattern = None if self.profile is None else self.profile.output.log
        path = None if pattern is None else filled(pattern, self.values)
        return None if path is None else os.path.normpath(os.path.join(self.cwd, path))  # noqa: PTH118 - of a pattern


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What the first update of an attempt must show."""

    before: dict[str, str] = {}
    """The knobs of the attempt before, to which the run returns if the program does not start."""
    resumed: int | None = None
    """The update that it resumes after; None if there was no checkpoint, or if that is not
    known."""
    checkpoint: Checkpoint | None = None
    """What it resumes from."""
    begun: bool = False
    """It has done an update, but has not shown where it began."""


def of_program(saved: Checkpoint) -> ProgramCheckpoint:
    return ProgramCheckpoint(path=saved.path, update=saved.updates, complete=saved.complete)


def shape_key(grip: Grip, knobs: dict[str, str], allocator: str, *, on_gpu: bool) -> str:
    """All that is known to shape the peak of memory but for the batch: peaks with the same key lie
    on one line over the batch."""
    others = {name: text for name, text in sorted(knobs.items()) if name not in _SAME_SHAPE}
    others["seq_len"] = str(grip.seq_len)
    words = [f"{name}={text}" for name, text in sorted(others.items())]
    return " ".join(["own", "gpu" if on_gpu else "cpu", f"processes={grip.processes}", *words, allocator])


def knobs_of(change: Change) -> dict[str, str]:
    """The settings of the user's own program that this change gives."""
    knobs = {name: text for name, text in change.assignments.items() if name not in ("allocator", POSITION)}
    return knobs if change.max_updates is None else {**knobs, "max_updates": str(change.max_updates)}


def values_of(knobs: dict[str, str], grip: Grip) -> dict[str, Any]:
    """The values of the knobs; UsageError if one is not possible."""
    known = KNOBS if grip.profile is None else KNOB_NAMES
    unknown = [name for name in knobs if name not in known]
    if unknown:
        raise UsageError(f"{', '.join(unknown)}: {only_knobs(grip)}")
    if grip.profile is not None:
        return _of_profile(knobs, grip)
    if "seq_len" in knobs and grip.seq_len is None:
        raise UsageError("seq_len: the arguments of this program's Trainer have no such field; change it in the script")
    return {name: _value(name, text) for name, text in knobs.items()}


def only_knobs(grip: Grip) -> str:
    """What memtop can change in the program, and how a person changes the rest."""
    what = "is built on Hugging Face's Trainer" if grip.profile is None else f"has the profile {grip.profile.name}"
    known = ", ".join(KNOBS if grip.profile is None else KNOB_NAMES)
    return f"this program is your own and {what}: memtop can change only {known}; for others, memtop train -- COMMAND"


def _of_profile(knobs: dict[str, str], grip: Grip) -> dict[str, Any]:
    values = {name: _value(name, text) for name, text in knobs.items()}
    for name, value in values.items():
        if name in grip.fixed and value != getattr(grip, name):
            raise UsageError(f"{name}: {grip.fixed[name]}")
        if grip.of_all(name) and int(value) % grip.processes:
            raise UsageError(
                f"{name} {value}: the program divides it by its {grip.processes} processes; give a multiple of them"
            )
    return values


def why_not_continued(grip: Grip) -> str | None:
    """Why a restart would not continue where the program was; None if it does."""
    if grip.profile is None or (grip.profile.resume.how != "never" and grip.profile.resume.holds == "position"):
        return None
    what = "would begin from zero" if grip.profile.resume.how == "never" else "would count its updates from zero"
    return f"this program {what} (profile {grip.profile.name}): {grip.profile.resume.why}"


def no_checkpoint(grip: Grip, found: Checkpoint | None) -> str:
    """Why the program has nothing to resume from. `found`: a checkpoint that is not complete."""
    if grip.place is None:
        return "where this program saves is not known"
    why = "" if found is None or not found.problem else f" ({found.problem})"
    return f"there is no complete checkpoint of this run in {grip.place}{why}"


def _value(name: str, text: str) -> int | bool | str:
    if name in WHOLE_NUMBERS:
        if not text.isdecimal() or not 0 < int(text) < 1 << 31:
            raise UsageError(f"{name} {text}: must be a whole number from 1 on")
        return int(text)
    if name == "gradient_checkpointing":
        if text.lower() not in _BOOLEANS:
            raise UsageError(f"{name} {text}: must be true or false")
        return _BOOLEANS[text.lower()]
    return text


def rate_at(grip: Grip, update: int, total: int) -> float | None:
    """The learning rate of the update after this one; None for a schedule that memtop does not
    know."""
    if grip.peak_rate is None or grip.schedule not in ("linear", "cosine", "constant", "constant_with_warmup"):
        return None
    warmup = math.ceil(grip.warmup * total) if grip.warmup < 1 else int(grip.warmup)
    if grip.schedule == "constant":
        return grip.peak_rate
    if update < warmup:
        return grip.peak_rate * update / warmup
    done = min(1.0, (update - warmup) / max(1, total - warmup))
    if grip.schedule == "linear":
        return grip.peak_rate * (1 - done)
    return grip.peak_rate * (0.5 * (1 + math.cos(math.pi * done)) if grip.schedule == "cosine" else 1)


def after_stop(saved: Checkpoint | None, update: int | None, *, saves: bool) -> Checkpoint | None:
    """The checkpoint from which a program resumes that is stopped now: of the present update if it
    `saves` when it is stopped, otherwise the newest one."""
    if not saves or update is None:
        return saved
    return Checkpoint(path=saved.path if saved is not None else "", updates=update, complete=True)


def consequences(
    grip: Grip,
    knobs: dict[str, str],
    at: Checkpoint | None,
    reached: int | None,
    total: int | None = None,
    rate: float | None = None,
    *,
    ended: bool = False,
) -> str:
    """What a restart with these knobs means for the position of the training, as the end of a
    sentence. `total`: how many updates the program does now. `rate`: the learning rate at the
    checkpoint, about. `ended`: the program has ended already."""
    values = values_of(knobs, grip)
    after = msgspec.structs.replace(grip.given(values), fixed_length=grip.fixed_length or "max_updates" in values)
    # A profile says whether the program saves when it is stopped.
    text = _lost(at, reached, is_certain=ended or (grip.profile is not None and not grip.profile.stop.saves))
    if (length := values.get("seq_len")) is not None and length != grip.seq_len:
        text += f"; ! seq_len {grip.seq_len} -> {length}: samples are cut at another length, which changes training"
    done = (at.updates if at is not None and at.complete else None) or 0
    updates = values.get("max_updates")
    lengthened = False
    if updates is not None and total is not None and updates != total:
        lengthened = True
        rates = _rate_change(grip, done, total, updates) or "the schedule of the learning rate has another length, too"
        text += f"; {total} -> {updates} updates: {rates}"
    if grip.batch is None or grip.accumulation is None or (after.batch, after.accumulation) == (grip.batch, grip.accumulation):
        return text
    text += f"; batch {grip.batch} x {grip.accumulation} -> {after.batch} x {after.accumulation}"
    before, then = grip.effective_batch or 0, after.effective_batch or 0
    if before == then and grip.profile is not None:
        return f"{text}: the effective batch stays {before}{_moved(grip, after, at, rate)}"
    if before == then:
        if lengthened:
            return f"{text}: the effective batch stays {before}, and so does the order"
        return f"{text}: the effective batch stays {before}, and so do order and learning rate"
    if grip.profile is not None:
        return f"{text}; effective batch {effective_change(before, then)}: changes training{_moved(grip, after, at, rate)}"
    verb, moved_by = "repeated" if then < before else "skipped", abs(before - then) * done
    rates = "" if lengthened else f"; {_rates(after, done, total, before / then)}"
    if not moved_by:
        return f"{text}: ! the effective batch changes from {before} to {then}{rates}"
    return (
        f"{text}: ! the effective batch changes from {before} to {then}. The Trainer counts in updates, so about {moved_by} "
        f"samples are {verb}{rates}"
    )


def _moved(grip: Grip, after: Grip, at: Checkpoint | None, rate: float | None) -> str:
    """What another split means for the samples and the learning rate of a program with a
    profile."""
    profile, before, then = grip.profile, grip.split, after.split
    if profile is None or profile.checkpoint is None or before is None or then is None:
        return ""
    return moved(profile.checkpoint, profile.position, at, before, then, rate)


def _rates(grip: Grip, done: int, total: int | None, longer: float) -> str:
    """The learning rate there, before and after; `longer`: how many times as many updates an epoch
    has."""
    if grip.fixed_length:
        return "the learning rate continues as it was, because the length is given in updates"
    change = _rate_change(grip, done, total, math.ceil(total * longer)) if total else None
    return change or f"the learning rate now follows a schedule with {longer:g} times as many updates"


def _rate_change(grip: Grip, done: int, total: int, then: int) -> str | None:
    """The learning rate at this update with each length of the training; None if not known, or if
    only that of later updates changes."""
    before, after = rate_at(grip, done, total), rate_at(grip, done, then)
    same = before is not None and after is not None and math.isclose(before, after, rel_tol=1e-3)
    if grip.schedule == "constant" or (same and grip.schedule == "constant_with_warmup"):
        return "the learning rate stays the same"
    if same or before is None or after is None:
        return None
    return f"the learning rate there changes from {before:.3g} to {after:.3g}"


def length_after(grip: Grip, values: dict[str, Any], total: int | None) -> int | None:
    """How many updates a Trainer does with these values of knobs, if it does `total` now. None if
    not known."""
    if "max_updates" in values:
        return int(values["max_updates"])
    after = grip.given(values)
    if total is None or grip.fixed_length or grip.effective_batch == after.effective_batch:
        return total
    if grip.profile is not None or not grip.effective_batch or not after.effective_batch:
        return None
    return math.ceil(total * grip.effective_batch / after.effective_batch)


def length_with(
    grip: Grip, knobs: Mapping[str, str], now: Mapping[str, str], uses: Mapping[str, Any], total: int | None
) -> int | None:
    """How many updates the program does with these knobs in place of `now`, the present ones.
    `uses`: what an earlier configuration really used. None if not known: what other knobs make of
    the length of a program with a profile, and which length a Trainer has of its own."""
    if grip.profile is not None:
        return total if knobs == now else None
    if "max_updates" in now and "max_updates" not in knobs:
        return None
    split = {name: str(uses[name]) for name in ("batch", "accumulation") if name in uses}
    return length_after(grip, values_of({**split, **knobs}, grip), total)


def done_after_stop(saved: int | None, update: int | None, *, saves: bool, finished: bool) -> int | None:
    """How many updates are done when the program starts again. A program that `saves` when it is
    stopped completes the present update first. A program that has `finished` has done all its
    updates, also if its newest checkpoint is older."""
    if saves and update is not None:
        return update + 1
    return max(saved, update or 0) if finished and saved is not None else saved


def lost_by_stop(grip: Grip, at: Checkpoint | None, reached: int | None) -> str | None:
    """How many updates are lost if the Trainer is stopped and does not save; None if none, or if it
    saves."""
    saved = (at.updates or 0) if at is not None and at.complete else 0
    if grip.profile is not None or grip.saves_on_sigterm or not reached or reached <= saved:
        return None
    text = f"the {reached - saved} updates since update {saved} are lost, unless it saves then"
    return text if grip.saves_on_sigterm is None else f"{text}; with enable_jit_checkpoint=True in its arguments it would save"


def _lost(at: Checkpoint | None, reached: int | None, *, is_certain: bool) -> str:
    """How many updates are done again, as far as that is known. `is_certain`: the program does not
    save any more."""
    if at is not None and at.complete and at.updates is None:
        return ""  # a program with a profile may count otherwise
    saved = (at.updates or 0) if at is not None and at.complete else 0
    if not reached or reached <= saved:
        return ""
    many = reached - saved
    again = (
        f"{many} updates since update {saved} are done again" if many > 1 else f"1 update since update {saved} is done again"
    )
    text = f"; {again}"
    return text if is_certain else f"{text}, unless the program saves when it is stopped"
