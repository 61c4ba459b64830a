"""Profiles of training programs: how a family of programs that is not built on Hugging Face's
Trainer takes its settings, saves, resumes and is stopped.

A profile is a TOML file: memtop's own in `presets/programs/`, the user's in `<config
dir>/memtop/programs/*.toml`, and the project's tables `[programs.NAME]`. A profile of the same name
replaces the earlier one. Nothing here looks at a program: see `supervisor/profile/`.

Paths and words may contain `{name}`: the value of a knob or of one of the profile's `values`.
Relative paths are relative to the working directory of the run, or to the folder of the script if
they begin with `{script}/`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from memtop.presets.files import PresetFileError, tables_of

_Text = Annotated[str, Meta(min_length=1, max_length=1000)]
_Texts = tuple[_Text, ...]
KnobName = Literal["batch", "accumulation", "seq_len"]
KNOB_NAMES: tuple[KnobName, ...] = ("batch", "accumulation", "seq_len")
FAMILY = "programs"
_PLACE = re.compile(r"\{([a-z_][a-z_0-9]*)\}")
OWN_NAMES = ("script", "checkpoint", "run")
"""In `{...}`: the script's folder; the checkpoint to resume from; the folder of the run."""


class Detect(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a program must look like. Everything that is given must hold."""

    scripts: _Texts = ()
    """The script's name is one of these patterns: `train*.py`; of `python -m a.b`, the module."""
    commands: _Texts = ()
    """The program is started by one of these words: `tune run`."""
    imports: _Texts = ()
    """The script imports all of these modules."""
    imports_not: _Texts = ()
    """The script imports none of these: `transformers.Trainer` is one, too."""
    texts: _Texts = ()
    """The script contains all of these texts."""
    texts_any: _Texts = ()
    """The script contains one of these."""
    beside: dict[_Text, _Texts] = {}
    """These files are beside the script and contain these texts: `model/trainer.py = [...]`."""


class ByFlag(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="flag", tag_field="by"):
    """An option of the command: `--batch_size 8`, `--batch_size=8`, `-b 8`, `batch_size=8`."""

    names: Annotated[_Texts, Meta(min_length=1)]
    """In all spellings; `-` and `_` within a name are alike. A name without dashes is a word
    `name=value`. The first is added to a command that has none of them."""
    form: Literal["space", "equals"] = "space"
    """How the first is added: `--x 1`, or `--x=1`."""
    shortened: bool = False
    """The program takes any unique beginning of the name (argparse does)."""
    declared: bool = False
    """It is added only if the script contains one of the names, which is then the one that is
    added."""


class ByFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="file", tag_field="by"):
    """A key in a JSON or YAML file that the command names. A restart uses a changed copy."""

    flags: _Texts = ()
    """The options that name the file; the argument without a flag if there are none."""
    kind: Literal["json", "yaml"]
    key: _Text
    """`optimizer.params.lr`: `.` between the levels."""
    also: dict[_Text, _Text] = {}
    """Keys that must agree, by the value that they get: `train_batch_size = "{effective}"`."""


class ByPython(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="python", tag_field="by"):
    """A variable in a Python file: a constant of a module, or the default of a dataclass field.

    A restart uses a changed copy, with all comments; the user's file stays as it is.
    """

    file: _Text
    """`{script}/config.py`; `*.py`: the argument of the command that has this pattern."""
    name: _Text
    """`batch_size`, or `TrainConfig.batch_size`."""
    imported: bool = False
    """Programs import the file as a module: memtop's agent gives the copy to the import. Otherwise
    the copy's path replaces the file's in the command."""


class ByArgparse(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="argparse", tag_field="by"):
    """The default of an option in the script's `add_argument(...)`; it can only be read."""

    names: Annotated[_Texts, Meta(min_length=1)]


class ByScript(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="script", tag_field="by"):
    """A constant in the script itself: `batch_size = 12`; it can only be read."""

    name: _Text


Way = ByFlag | ByFile | ByPython | ByArgparse | ByScript


class Setting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value of the program, and how it is given."""

    ways: tuple[Way, ...] = ()
    """The value is that of the first way that has one. The first way that can be written is how
    memtop changes it."""
    default: str | int | None = None
    """The value if no way has one; None: unknown then."""


class KnobRule(Setting, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A setting that a restart can change."""

    of: Literal["process", "all"] = "process"
    """The value is of one process, or of all: nanoGPT divides its accumulation by them."""
    fixed: _Text | None = None
    """Why a restart cannot change it, in words; None if it can."""


class Position(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the program counts how far it is."""

    counts: Literal["updates", "micro_batches", "samples"] = "updates"
    """What its steps are, in its output and its checkpoints."""
    per_epoch: bool = False
    """The steps begin again with each epoch; the checkpoint then has an epoch, too."""
    order: Literal["random", "skipped", "reshuffled", "lost"] = "random"
    """Samples after a resume. random: drawn anew for each batch; with a fixed seed, those
    of the beginning again. skipped: those before the position are left out. reshuffled: as many are
    left out, but the order of the epoch is another one. lost: the epoch begins again."""
    length: Literal["updates", "epochs"] = "updates"
    """In what the length of the training, and so the learning rate's schedule, is given."""


class Counter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the position is in a checkpoint."""

    read: Literal["name", "json", "torch"]
    """In the name of the file or folder, in a JSON file, or in a file of torch.save."""
    file: _Text | None = None
    """Of a checkpoint that is a folder: the file in it."""
    key: _Text | None = None
    """In JSON and torch files: `trainer.step`; in a name: a regular expression with the group
    `step`, and `epoch` if there is one."""
    epoch_key: _Text | None = None
    """In JSON and torch files: where the epoch is."""


class CheckpointRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the program saves, and what a complete checkpoint has."""

    paths: Annotated[_Texts, Meta(min_length=1)]
    """Patterns of paths: `{out_dir}/ckpt.pt`, `{output_dir}/step_*`. The newest counts."""
    needs: _Texts = ()
    """Of a checkpoint that is a folder: patterns of the files that a complete one has, the last
    written at the end."""
    step: Counter | None = None
    """None: the position of a checkpoint is not known."""
    convert: bool = False
    """The position counts micro-batches or samples of the old settings: memtop converts it in the
    checkpoint that it resumes from."""


class Resume(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the program continues from a checkpoint."""

    how: Literal["flag", "automatic", "never"]
    """By words of the command; by itself, if it finds a checkpoint; not at all."""
    words: _Texts = ()
    """Added to the command: `--init_from=resume`, `--resume_from_checkpoint={checkpoint}`. An
    option that the command has already gets the new value. Without `{checkpoint}` the program reads
    the path of `checkpoint.paths`."""
    holds: Literal["position", "weights"] = "position"
    """weights: it loads what it has learned, and begins to count again."""
    why: _Text | None = None
    """Why it does not resume, or not its position, in words for people."""


class StopRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the program is asked to end."""

    signal: Literal["SIGINT", "SIGTERM", "SIGUSR1"] = "SIGINT"
    to: Literal["group", "program"] = "group"
    """Which processes get it: the program's process group, or the first process alone."""
    saves: bool = False
    """Whether it saves before it ends."""
    asks: _Text | None = None
    """A text of the question that it asks on its terminal before it ends."""
    answer: _Text | None = None
    """What is typed as the answer, without the line's end."""


class OutputRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the program writes its progress. memtop also learns common lines by itself."""

    log: _Text | None = None
    """A log file of its own, as a pattern: the newest that this attempt has written counts."""
    step: _Text | None = None
    """A regular expression of its lines with the groups step, total, loss, lr and epoch."""
    settings: dict[KnobName | Literal["effective", "tokens"], _Text] = {}
    """Regular expressions of lines that name what the program uses, with the group `value`.
    effective: samples of one update of all processes. tokens: tokens of it."""


class ProgramProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A family of training programs."""

    name: _Text
    title: _Text
    detect: Detect
    batch: KnobRule | None = None
    """Samples of one forward pass."""
    accumulation: KnobRule | None = None
    """Forward passes of one update."""
    seq_len: KnobRule | None = None
    values: dict[str, Setting] = {}
    """Other values of the program that its paths contain: `out_dir`."""
    position: Position = Position()
    checkpoint: CheckpointRule | None = None
    resume: Resume
    stop: StopRule = StopRule()
    output: OutputRule = OutputRule()

    def knob(self, name: str) -> KnobRule | None:
        """The rule of `batch`, `accumulation` or `seq_len`."""
        return {"batch": self.batch, "accumulation": self.accumulation, "seq_len": self.seq_len}[name]

    def settings(self) -> Iterator[tuple[str, Setting]]:
        """All knobs and values by name."""
        yield from ((name, rule) for name in KNOB_NAMES if (rule := self.knob(name)) is not None)
        yield from self.values.items()


def load_profiles() -> dict[str, ProgramProfile]:
    """All profiles by name, memtop's own first. PresetFileError names the file and the key."""
    found: dict[str, ProgramProfile] = {}
    for origin, name, table in tables_of(FAMILY):
        try:
            profile = msgspec.convert({"name": name, **table}, ProgramProfile)
        except msgspec.ValidationError as error:
            raise PresetFileError(f"{origin}: {error}") from None
        if (problem := _problem(profile)) is not None:
            raise PresetFileError(f"{origin}: {problem}")
        found[profile.name] = profile
    return found


def names_in(text: str) -> list[str]:
    """The names in `{...}`."""
    return _PLACE.findall(text)


def filled(text: str, values: dict[str, str]) -> str | None:
    """The text with its values; None if one is not known."""
    if any(name not in values for name in names_in(text)):
        return None
    return _PLACE.sub(lambda match: values[match[1]], text)


def _problem(profile: ProgramProfile) -> str | None:
    """What is wrong with a profile that has the right shape."""
    if profile.detect == Detect():
        return "detect: it is empty, so every program would fit; give scripts, texts or imports"
    known = {name for name, _ in profile.settings()} | set(OWN_NAMES)
    for where, text in _templates(profile):
        unknown = [name for name in names_in(text) if name not in known]
        if unknown:
            return f"{where}: {{{unknown[0]}}} is neither a knob nor in [values]; there are {', '.join(sorted(known))}"
    for where, pattern, groups in _patterns(profile):
        try:
            missing = [group for group in groups if group not in re.compile(pattern).groupindex]
        except re.error as error:
            return f"{where}: {pattern!r} is not a regular expression: {error}"
        if missing:
            return f"{where}: {pattern!r} has no group (?P<{missing[0]}>...)"
    return _missing(profile)


def _templates(profile: ProgramProfile) -> Iterator[tuple[str, str]]:
    if profile.checkpoint is not None:
        yield from (("checkpoint.paths", text) for text in profile.checkpoint.paths)
    yield from (("resume.words", text) for text in profile.resume.words)
    if profile.output.log is not None:
        yield "output.log", profile.output.log
    for name, setting in profile.settings():
        yield from ((f"{name}.ways", way.file) for way in setting.ways if isinstance(way, ByPython))


def _patterns(profile: ProgramProfile) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    if profile.output.step is not None:
        yield "output.step", profile.output.step, ("step",)
    for name, pattern in profile.output.settings.items():
        yield f"output.settings.{name}", pattern, ("value",)
    step = profile.checkpoint.step if profile.checkpoint is not None else None
    if step is not None and step.read == "name":
        yield "checkpoint.step.key", step.key or "", ("step",)


def _missing(profile: ProgramProfile) -> str | None:
    resume = profile.resume
    if resume.how == "flag" and not resume.words:
        return 'resume.words: give the words that make it resume, or how = "automatic" or "never"'
    if (resume.how == "never" or resume.holds == "weights") and not resume.why:
        return "resume.why: say in words why it cannot resume its position"
    if resume.how != "never" and profile.checkpoint is None:
        return "checkpoint: say where the program saves, since it resumes"
    if profile.stop.asks is not None and profile.stop.answer is None:
        return "stop.answer: say what is typed when the program asks"
    if profile.checkpoint is not None and (step := profile.checkpoint.step) is not None and step.key is None:
        return "checkpoint.step.key: say where the step is"
    return None
