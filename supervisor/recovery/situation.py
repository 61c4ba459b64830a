"""What a ladder of remedies looks at, and how a rung becomes a `Remedy`: judged, forecast and written as a command. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from memtop.presets import SettingsError, compatibility, edit_settings
from memtop.presets.comparison import changes
from memtop.presets.fields import OPTIONS, can_change_live, training_unchanged
from memtop.presets.schema import Settings
from memtop.supervisor.diagnosis.values import Diagnosis
from memtop.supervisor.recovery.applying import key
from memtop.supervisor.recovery.forecast import Line, line_through, peaks_of, settings_key
from memtop.supervisor.recovery.parameters import trained_parameters
from memtop.supervisor.recovery.values import Class, Forecast, Peak, Remedy


class KeptState(msgspec.Struct, frozen=True, kw_only=True):
    """A saved state of the run on disk."""

    path: str
    size_bytes: int


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The machine beside the GPUs, as the supervisor saw it. None: not known."""

    limit_bytes: int | None = None
    """Of host memory: the machine's, or the cgroup's where that is lower."""
    in_cgroup: bool = False
    """The limit is a cgroup's (a container, a batch system, systemd)."""
    available_bytes: int | None = None
    """What the run could still take beside what it takes: measured before the end, or what it took included after it."""
    memory_bytes: int | None = None
    """All memory there is: RAM and swap, whatever limits there are."""
    shm_total_bytes: int | None = None
    disk_free_bytes: int | None = None
    states: tuple[KeptState, ...] = ()
    """What the run keeps on disk, the newest first."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """One failure of a run of the built-in trainer, with all that is known of it."""

    diagnosis: Diagnosis
    settings: Settings
    run: str = "RUN"
    peaks: tuple[Peak, ...] = ()
    total_bytes: int | None = None
    """Of the device that training needs: the fullest card, or on the CPU the host's limit."""
    base_bytes: int | None = None
    """What was measured to be there without a batch: context, weights, optimizer."""
    others_bytes: int | None = None
    """What other processes hold of the device."""
    host: HostFacts = field(default_factory=HostFacts)
    failed: tuple[Settings, ...] = ()
    alive: bool = False
    """The trainer runs (it has survived): what it can change at an update boundary needs no restart."""
    on_gpu: bool = True
    can_checkpoint: bool = True
    """The model can recompute its activations."""
    deepspeed: bool = True
    """ZeRO can be had on this machine."""
    allocator: str = ""
    """Allocator options that the user's environment holds; they win over the run's."""
    model_config: Mapping[str, Any] | None = None
    """The model's configuration where the settings only name it by path."""
    _gone: frozenset[str] = field(init=False, default=frozenset())

    def __post_init__(self) -> None:
        object.__setattr__(self, "_gone", frozenset(key(one) for one in (*self.failed, self.settings)))

    @property
    def trained(self) -> int | None:
        """Parameters that are trained."""
        return trained_parameters(self.settings, self.model_config)

    def tried(self, after: Settings) -> bool:
        """These settings have failed before, or are the ones that just did."""
        return key(after) in self._gone

    def line(self, after: Settings | None = None) -> Line | str:
        """The line of peaks under these settings (None: the present ones), or why there is none."""
        settings = self.settings if after is None else after
        return line_through(peaks_of(settings, self.peaks, on_gpu=self.on_gpu), base_bytes=self.base_bytes)

    def foresee(self, after: Settings, estimate: Line | None = None) -> Forecast | str:
        """From peaks under `after`; else where only the split differs from the present; else from an estimate, called that."""
        line: Line | str = self.line(after)
        if isinstance(line, str) and estimate is not None:
            line = estimate
        if isinstance(line, str):
            same = settings_key(after, on_gpu=self.on_gpu) == settings_key(self.settings, on_gpu=self.on_gpu)
            if same:
                return line
            present = self.line()
            known = f"; under the present ones: {present}" if isinstance(present, str) else ""
            return f"{line}{known}"
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
        estimate: Line | None = None,
        unforeseen: str | None = None,
        consent: bool = False,
    ) -> Remedy | str:
        """The remedy that changes these settings, or why it is none. `estimate`: the line to use where nothing was measured;
        `unforeseen`: why no forecast is meant, where GPU memory is not what the remedy is about."""
        values = dict(assignments or {})
        try:
            after = edit_settings(self.settings, preset=preset, assignments=values)
        except SettingsError as error:
            return str(error)
        if self.tried(after):
            return "leads to a configuration that has failed" if after != self.settings else "changes nothing here"
        fit, _ = compatibility(self.settings, after)
        foreseen = unforeseen if unforeseen is not None else self.foresee(after, estimate)
        another = fit == "new run"
        unchanged = training_unchanged(self.settings, after)
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
            command=train_command(self.settings, values) if another else restart_command(self.run, values, preset),
        )


def to_do(id: str, title: str, why: str, command: str | None, *, keeps_math: bool = True) -> Remedy:
    """Something for a person: memtop shows the command and never runs it."""
    resumable: Class = "none"
    return Remedy(
        id=id,
        title=title,
        why=why,
        keeps_math=keeps_math,
        resumable=resumable,
        needs_consent=True,
        forecast_unknown="memtop does not do it, so it is not forecast",
        command=command,
    )


def restart_command(run: str, assignments: Mapping[str, str], preset: str | None = None) -> str:
    """`memtop restart RUN --batch 4 --accum 8`, as a person would type it."""
    words = ["memtop", "restart", run, *(("--preset", preset) if preset else ()), *_edits(assignments)]
    return shlex.join(words)


def train_command(settings: Settings, assignments: Mapping[str, str], *extra: str) -> str:
    """A new run like this one but for the assignments; `NEW` stands for its name."""
    own = {name: str(getattr(settings, name)) for name in OPTIONS}
    data = {f"data.{name}": str(settings.data[name]) for name in ("train", "eval") if settings.data.get(name)}
    path = {"model.path": str(settings.model["path"])} if settings.model.get("path") else {}
    values = {**own, **data, **path, **assignments}
    words = ["memtop", "train", settings.recipe, "--name", "NEW", "--preset", settings.preset, *extra, *_edits(values)]
    return shlex.join(words)


def _edits(assignments: Mapping[str, str]) -> list[str]:
    options = [word for name, option in OPTIONS.items() if name in assignments for word in (option, assignments[name])]
    rest = [word for name, text in assignments.items() if name not in OPTIONS for word in ("--set", f"{name}={text}")]
    return [*options, *rest]
