"""A failure with everything known about it (`Situation`), and how a change of settings becomes a
`Remedy`: an edit of the run, or commands for a person to type, which memtop never runs."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace

from memtop.presets import PresetFileError, SettingsError, compatibility, edit_settings, load_presets
from memtop.presets.comparison import assignments_of_new_run, changes, pace
from memtop.presets.fields import OPTIONS, can_change_live, training_unchanged
from memtop.presets.files import load_recipes
from memtop.presets.parameters import trained_parameters
from memtop.presets.schema import Settings
from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.recovery.configuration import configuration_key, settings_key
from memtop.supervisor.recovery.forecast import Estimates, or_estimated
from memtop.supervisor.recovery.host_forecast import HostEstimates
from memtop.supervisor.recovery.peak_line import PeakLine, line_through, peaks_of
from memtop.supervisor.recovery.values import Forecast, Peak, Remedy, Snippet


class KeptState(msgspec.Struct, frozen=True, kw_only=True):
    """A saved state of the run on disk."""

    path: str
    size_bytes: int


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The machine apart from its GPUs, as the supervisor measured it. None: not known."""

    limit_bytes: int | None = None
    """The limit of host memory: the machine's, or the cgroup's if that is lower."""
    in_cgroup: bool = False
    """Whether the limit is a cgroup's (of a container, a batch system or systemd)."""
    available_bytes: int | None = None
    """Host memory that the run could use in addition to its own. Measured after the run's end, it
    includes the run's."""
    memory_bytes: int | None = None
    """All RAM and swap of the machine, whatever the limits are."""
    disk_free_bytes: int | None = None
    states: tuple[KeptState, ...] = ()
    """The run's saved states, the newest first."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """One failure of a run of the built-in trainer, with everything known about it."""

    diagnosis: Diagnosis
    settings: Settings
    run: str = "RUN"
    peaks: tuple[Peak, ...] = ()
    total_bytes: int | None = None
    """Memory of the device that trains: the fullest GPU, or the host's limit for training on the
    CPU."""
    base_bytes: int | None = None
    """The measured part that does not depend on the batch: context, weights, optimizer."""
    others_bytes: int | None = None
    """What other processes hold on the device."""
    host: HostFacts = field(default_factory=HostFacts)
    failed: tuple[Settings, ...] = ()
    alive: bool = False
    """Whether the trainer still runs: what it can change at an update boundary needs no restart."""
    on_gpu: bool = True
    can_checkpoint: bool = True
    """Whether the model can recompute its activations."""
    deepspeed: bool = True
    """Whether DeepSpeed (ZeRO) is installed."""
    allocator: str = ""
    """The allocator options of the user's environment, which override the run's."""
    model_config: Mapping[str, Any] | None = None
    """The model's configuration, if the settings name the model only by path."""
    estimates: Estimates | None = None
    """None on the CPU, or if the GPU is not known."""
    host_estimates: HostEstimates | None = None
    """On the CPU. They are only shown: what was measured decides, and else half of the batch."""
    seconds_left: float | None = None
    """What the run would take from its saved state to its end, at the speed that was measured."""
    _gone: frozenset[str] = field(init=False, default=frozenset())

    def __post_init__(self) -> None:
        object.__setattr__(self, "_gone", frozenset(configuration_key(one) for one in (*self.failed, self.settings)))

    @property
    def trained(self) -> int | None:
        """The number of trained parameters; None if not known."""
        return trained_parameters(self.settings, self.model_config)

    def tried(self, after: Settings) -> bool:
        """Whether these settings have failed before, or have just failed."""
        return configuration_key(after) in self._gone

    def line(self, after: Settings | None = None) -> PeakLine | str:
        """The line of peaks with these settings (None: the current ones), or the reason why there
        is none."""
        settings = self.settings if after is None else after
        return line_through(peaks_of(settings, self.peaks, on_gpu=self.on_gpu), base_bytes=self.base_bytes)

    def foresee(self, after: Settings, estimate: PeakLine | None = None) -> Forecast | str:
        """The forecast for `after`, or the reason why there is none.

        A line through two measured batches comes first, then the calibrated estimate, then a line
        through one batch, and the line `estimate` at last.
        """
        line = line_through(peaks_of(after, self.peaks, on_gpu=self.on_gpu))
        if isinstance(line, PeakLine):
            return self._on(line, after)
        found = or_estimated("", self.estimates, after)
        if isinstance(found, Forecast):
            return found
        line = self.line(after)
        if isinstance(line, str) and estimate is not None:
            line = estimate
        if isinstance(line, PeakLine):
            return self._on(line, after)
        if settings_key(after, on_gpu=self.on_gpu) != settings_key(self.settings, on_gpu=self.on_gpu):
            present = self.line()
            line += f"; with the current ones: {present}" if isinstance(present, str) else ""
        return f"{line}{found}"

    @property
    def has_whole_peak(self) -> bool:
        """Whether a peak was measured with the current settings that no failure cut short."""
        return any(peak.updates and not peak.failed for peak in peaks_of(self.settings, self.peaks, on_gpu=self.on_gpu))

    def _on(self, line: PeakLine, after: Settings) -> Forecast:
        return line.forecast(after.batch, self.total_bytes, self.others_bytes)

    def rung(
        self,
        id: str,
        why: str,
        assignments: Mapping[str, str] | None = None,
        *,
        preset: str | None = None,
        title: str | None = None,
        speed: float | None = None,
        estimate: PeakLine | None = None,
        unforeseen: str | None = None,
        consent: bool = False,
    ) -> Remedy | str:
        """The remedy that makes these changes, or the reason why it is left out.

        `estimate`: the line to use if nothing was measured; `unforeseen`: why there is no forecast,
        for remedies that do not concern the device's memory; `consent`: ask a person even if
        training is unchanged.
        """
        values = dict(assignments or {})
        try:
            after = edit_settings(self.settings, preset=preset, assignments=values)
        except SettingsError as error:
            return str(error)
        if self.tried(after):
            return "leads to a configuration that has failed before" if after != self.settings else "changes nothing here"
        fit, _ = compatibility(self.settings, after)
        foreseen = unforeseen if unforeseen is not None else self.foresee(after, estimate)
        if unforeseen is None and isinstance(foreseen, str):
            foreseen = or_estimated(foreseen, self.host_estimates, after)
        another = fit == "new run"
        unchanged, expected = training_unchanged(self.settings, after), pace(self.settings, after)
        return Remedy(
            id=id,
            title=title or "; ".join(changes(self.settings, after)),
            why=why,
            keeps_math=unchanged and fit == "resumes",
            resumable="live" if self.alive and can_change_live(self.settings, after) else fit,
            needs_consent=consent or another or not unchanged,
            assignments=values,
            preset=preset,
            forecast=foreseen if isinstance(foreseen, Forecast) else None,
            forecast_unknown=foreseen if isinstance(foreseen, str) else None,
            speed=speed,
            speed_class=expected.speed,
            speed_basis=expected.basis,
            seconds_left=self.seconds_left / speed if self.seconds_left is not None and speed and not another else None,
            command=train_command(self.settings, values) if another else restart_command(self.run, values, preset),
        )


def situation_of(
    diagnosis: Diagnosis,
    settings: Settings,
    *,
    peaks: Iterable[Peak] = (),
    total_bytes: int | None = None,
    others_bytes: int | None = None,
    host: HostFacts | None = None,
    on_gpu: bool | None = None,
    **more: Any,
) -> Situation:
    """A situation with what the diagnosis contains filled in: the GPU's size, other processes, the
    peak that failed."""
    of_gpu, host = diagnosis.kind.of_gpu, host or HostFacts()
    gpu = _on_gpu(diagnosis, settings, total_bytes) if on_gpu is None else on_gpu
    if diagnosis.address_space_bytes is not None and not gpu:
        # The measured memory in use says nothing about an address space that is full.
        total_bytes = None
    elif total_bytes is None:
        total_bytes = diagnosis.total_bytes if of_gpu else None if gpu else host.limit_bytes
    if of_gpu and diagnosis.allowed_bytes is not None:
        total_bytes = min(total_bytes or diagnosis.allowed_bytes, diagnosis.allowed_bytes)
    if others_bytes is None and of_gpu:
        others_bytes = diagnosis.other_process_bytes
    own = _failed_peak(diagnosis, settings, on_gpu=gpu)
    estimates = more.pop("estimates", None)
    if estimates is not None:
        card = replace(estimates.card, total_bytes=total_bytes, others_bytes=others_bytes or 0)
        known = (*estimates.known, *(() if own is None else ((settings, own),)))
        more["estimates"] = replace(estimates, card=card, known=known)
    if (on_host := more.get("host_estimates")) is not None:
        known = (*on_host.known, *(() if own is None else ((settings, own),)))
        more["host_estimates"] = replace(on_host, total_bytes=total_bytes, others_bytes=others_bytes, known=known)
    return Situation(
        diagnosis=diagnosis,
        settings=settings,
        peaks=(*peaks, *(() if own is None else (own,))),
        total_bytes=total_bytes,
        others_bytes=others_bytes,
        host=host,
        on_gpu=gpu,
        **more,
    )


def _on_gpu(diagnosis: Diagnosis, settings: Settings, total_bytes: int | None) -> bool:
    if settings.device != "auto":
        return settings.device == "cuda"
    return diagnosis.kind.of_gpu or diagnosis.kind is Kind.PINNED_HOST_OOM or total_bytes is not None


def _failed_peak(diagnosis: Diagnosis, settings: Settings, *, on_gpu: bool) -> Peak | None:
    """What the process held plus the request that failed: a lower bound of what it needed."""
    if diagnosis.process_bytes is None or diagnosis.phase in ("evaluation", "load", "save"):
        return None
    if diagnosis.kind.of_gpu != on_gpu or not diagnosis.of_memory:
        return None
    needed = diagnosis.process_bytes + (diagnosis.requested_bytes or 0)
    key = settings_key(settings, on_gpu=on_gpu)
    outside = diagnosis.context_bytes if on_gpu else None
    return Peak(batch=settings.batch, bytes=needed, updates=0, failed=True, outside_bytes=outside, settings_key=key)


def to_do(
    id: str, title: str, why: str, command: str | None, *, writes: tuple[Snippet, ...] = (), keeps_math: bool = True
) -> Remedy:
    """Something for a person to do: memtop shows the command and never runs it."""
    return Remedy(
        id=id,
        title=title,
        why=why,
        keeps_math=keeps_math,
        resumable="none",
        needs_consent=True,
        forecast_unknown="you run this command, not memtop, so there is no forecast",
        command=command,
        writes=writes,
    )


def restart_command(run: str, assignments: Mapping[str, str], preset: str | None = None, gpus: str | None = None) -> str:
    """For example `memtop restart RUN --batch 4 --accum 8`."""
    options = {"--preset": preset, "--gpus": gpus}
    words = [word for option, text in options.items() if text for word in (option, text)]
    return shlex.join(["memtop", "restart", run, *words, *_edits(assignments)])


def train_command(settings: Settings, assignments: Mapping[str, str], *extra: str) -> str:
    """A new run with these settings and assignments; `NEW` stands for its name."""
    own, updates = _own_edits(settings)
    data = {f"data.{name}": str(settings.data[name]) for name in ("train", "eval") if settings.data.get(name)}
    path = {"model.path": str(settings.model["path"])} if settings.model.get("path") else {}
    # One process may have another GPU next time.
    gpus = ("--gpus", settings.gpus) if settings.gpus and settings.world_size > 1 else ()
    length = ("--max-updates", str(updates)) if updates else ()
    words = ["memtop", "train", settings.recipe, "--name", "NEW", "--preset", settings.preset, *gpus, *length, *extra]
    return shlex.join([*words, *_edits({**own, **data, **path, **assignments})])


def _own_edits(settings: Settings) -> tuple[dict[str, str], int]:
    """What a new run of the recipe and preset must be given, and its updates; 0 for those of the
    recipe."""
    try:
        recipe, preset = load_recipes()[settings.recipe], load_presets()[settings.preset]
        edits = assignments_of_new_run(settings, recipe, preset)
    except (PresetFileError, SettingsError, KeyError):
        # Its file was changed since: what the person changed from it is not known any more.
        return {"batch": settings.batch_text, "accumulation": str(settings.accumulation), "seq_len": str(settings.seq_len)}, 0
    updates = settings.target_samples // settings.effective_batch
    return edits, 0 if updates == recipe.max_updates else updates


def _edits(assignments: Mapping[str, str]) -> list[str]:
    options = [word for name, option in OPTIONS.items() if name in assignments for word in (option, assignments[name])]
    rest = [word for name, text in assignments.items() if name not in OPTIONS for word in ("--set", f"{name}={text}")]
    return [*options, *rest]
