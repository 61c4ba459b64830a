"""`memtop presets`: what each preset would change in the run in progress, or in its recipe."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.cells import cell_len

from memtop.cli import completion
from memtop.cli.common import living_runs
from memtop.cli.configuration import default_runs_dir
from memtop.cli.options import json_option
from memtop.cli.output import print_json, print_lines, print_message
from memtop.cli.wrapping import for_terminal
from memtop.presets import Preset, PresetFileError, Settings, SettingsError, load_presets, load_recipes, resolve
from memtop.presets.comparison import Outlook, effective_change, outlook
from memtop.presets.edits import find_preset
from memtop.presets.files import usable
from memtop.presets.measured import Learned, learned
from memtop.supervisor import units
from memtop.supervisor.errors import UsageError
from memtop.supervisor.interpreters import learned_on
from memtop.supervisor.language import Verbatim, tr
from memtop.supervisor.plan import Card, gpu_kind
from memtop.supervisor.recovery.configuration import failed_settings
from memtop.supervisor.recovery.forecast import Estimates, forecaster_of, foreseen_text, gpu_of
from memtop.supervisor.recovery.values import Forecast
from memtop.supervisor.run.view import read_configurations
from memtop.supervisor.wire import RunState

_DEFAULT_RECIPE = "first-run"


@click.command()
@click.argument("name", required=False, metavar="[NAME]", shell_complete=completion.presets)
@json_option
def presets(name: str | None, as_json: bool) -> int:
    """List the presets, what each would change, and its peak of memory.

    They are compared with the newest run in progress, or with the recipe that they are for. NAME
    shows one preset in full.
    """
    try:
        run = _run_in_progress(default_runs_dir())
        groups = _groups(run, name)
        foresee, on_gpu = _foresee(run)
    except (SettingsError, PresetFileError) as error:
        raise UsageError(str(error)) from None
    if as_json:
        rows = [_row(look, _peak(look, foresee)) for _, looks in groups for look in looks]
        print_json(rows[0] if name else rows)
        return 0
    print_lines(*for_terminal(map(Verbatim, _table(groups, foresee, on_gpu=on_gpu))), own=False)
    if name:
        print_lines(*(line for _, looks in groups for look in looks for line in _full(look)))
    else:
        print_message(
            "(no run of a recipe is in progress: each preset is compared with a recipe that it is for)"
            if run is None
            else f"(compared with {run.name}, the newest run in progress; "
            "`memtop presets NAME` compares a preset for another recipe with that recipe)",
            "(B x A x W: batch of one pass x passes per update x processes = effective batch; T: tokens per sample)",
            "(strategy: what ZeRO divides among the GPUs; +opt, +par: optimizer state, parameters in host memory)",
            "(switch: whether a run in progress goes on where it is; effective batch, T, LoRA and learning rate stay the same)",
            "(a new run: what differs with `memtop train --fresh --preset NAME`, which takes all values of the preset)",
        )
    return 0


def _run_in_progress(runs_dir: Path) -> RunState | None:
    """The newest run of the built-in trainer in progress."""
    states = (state for _, state in reversed(living_runs(runs_dir)))
    return next((state for state in states if state.settings is not None), None)


def _groups(run: RunState | None, name: str | None) -> list[tuple[str, list[Outlook]]]:
    """The presets by the settings with which they are compared, each group with its heading."""
    presets = load_presets()
    settings = None if run is None else run.settings
    if name is not None:
        chosen = find_preset(name, _DEFAULT_RECIPE if settings is None else settings.recipe)
        presets = {chosen.name: chosen}
    if run is not None and settings is not None:
        offered = usable(presets, settings.recipe)
        if offered:
            failed = failed_settings(read_configurations(Path(run.folder)))
            looks = [outlook(settings, preset, failed) for preset in offered.values()]
            return [(f"run {run.name}: {_describe(settings)}", looks)]
        # A preset that was named but is for another recipe is compared with that recipe.
    groups: dict[str, list[Preset]] = {}
    for preset in presets.values():
        groups.setdefault(preset.recipes[0] if preset.recipes else _DEFAULT_RECIPE, []).append(preset)
    found = []
    for recipe, members in groups.items():
        base = _base(recipe)
        found.append((f"recipe {base.recipe}: {_describe(base)}", [outlook(base, preset) for preset in members]))
    return found


def _base(recipe: str) -> Settings:
    recipes = load_recipes()
    # A user's preset may name a recipe that no longer exists.
    known = recipes.get(recipe, recipes[_DEFAULT_RECIPE])
    return resolve(known, preset=load_presets()["standard"], whole=False)


Foresee = Callable[[Settings], Forecast | str]


def _foresee(run: RunState | None) -> tuple[Foresee, bool]:
    """A function that foresees the peak of settings or says why it cannot, and whether that is GPU
    memory: of the GPU that the run uses, or of the emptiest one here."""
    from memtop.cli.gpus import emptiest, sample

    machine = sample()
    if run is not None:
        used = gpu_of(run, machine.gpus)
        python = "" if run.settings is None else run.settings.python
        earlier = Learned() if used is None else learned_on(gpu_kind(used), python, without=run.folder)
        forecaster = forecaster_of(run, read_configurations(Path(run.folder)), machine.gpus, machine.host, earlier)
        return forecaster.predicted, forecaster.on_gpu
    gpu = emptiest(machine)
    if gpu is None:
        why = machine.gpu_note or "no NVIDIA GPU"
        return lambda settings: why, True
    # Which torch would train is not known before a start.
    found = learned(gpu_kind(gpu))
    return Estimates(card=Card.of(gpu), learned=found).forecast, True


def _peak(look: Outlook, foresee: Foresee) -> Forecast | str:
    return look.reason if look.switch == "refused" else foresee(look.kept)


def _describe(s: Settings) -> str:
    method = "" if s.lora is None else f", {s.method} r {s.lora.r}"
    return f"{s.split_text} = {s.effective_batch}, T {s.seq_len}, {s.zero.words}{method}"


def _row(look: Outlook, peak: Forecast | str) -> dict[str, Any]:
    kept, whole = look.kept, look.whole
    return {
        **msgspec.to_builtins(look.preset),
        "recipe": kept.recipe,
        "batch": kept.batch,
        "accumulation": kept.accumulation,
        "world_size": kept.world_size,
        "seq_len": kept.seq_len,
        "effective_batch": kept.effective_batch,
        "tokens_per_update": kept.tokens_per_update,
        "zero": msgspec.to_builtins(kept.zero),
        "guide_effective_batch": whole.effective_batch,
        "guide_tokens_per_update": whole.tokens_per_update,
        "changes": look.changes,
        "changes_whole": look.whole_changes,
        "switch": look.switch,
        "switch_whole": look.switch_whole,
        "reason": look.reason,
        "reason_whole": look.reason_whole,
        "risk": look.risk,
        "speed_class": look.pace.speed,
        "speed_basis": look.pace.basis,
        "forecast": msgspec.to_builtins(peak) if isinstance(peak, Forecast) else None,
        "forecast_unknown": peak if isinstance(peak, str) else None,
    }


_HEADS = ("key", "preset", "B x A x W", "effective", "T", "tokens/update", "strategy", "switch")
_NUMBERS = ("effective", "T", "tokens/update")
_LESS = "tokens/update"
"""The column that a narrow terminal has no room for."""


def _table(groups: list[tuple[str, list[Outlook]]], foresee: Foresee, *, on_gpu: bool) -> Iterator[str]:
    """One heading for all groups; below each preset, what it changes."""
    cells = [_cells(look) for _, looks in groups for look in looks]
    widths = [max(map(cell_len, column)) for column in zip(map(tr, _HEADS), *cells, strict=True)]
    narrow = sys.stdout.isatty() and shutil.get_terminal_size().columns < sum(widths) + 2 * len(widths)
    shown = [place for place, head in enumerate(_HEADS) if not (narrow and head == _LESS)]

    def aligned(row: Sequence[str]) -> str:
        padded = []
        for place in shown:
            blanks = " " * (widths[place] - cell_len(row[place]))
            padded.append(blanks + row[place] if _HEADS[place] in _NUMBERS else row[place] + blanks)
        return "  ".join(padded).rstrip()

    yield aligned([tr(head) for head in _HEADS])
    reasons: dict[str, dict[str, None]] = {}  # why no peak is known, and of which recipes
    for heading, looks in groups:
        yield ""
        yield tr(heading)
        for look in looks:
            yield aligned(_cells(look))
            yield from map(tr, _details(look))
            peak = _peak(look, foresee)
            if isinstance(peak, Forecast):
                yield tr(f"     {foreseen_text(peak, on_gpu=on_gpu)}")
            elif look.switch != "refused":
                reasons.setdefault(peak, {})[look.kept.recipe] = None
    for reason, recipes in reasons.items():
        yield ""
        if on_gpu:
            yield tr(f"the peak of GPU memory ({', '.join(recipes)}) cannot be foreseen: {reason}")
        else:
            yield tr(f"the peak of host memory ({', '.join(recipes)}) cannot be foreseen: {reason}")


def _cells(look: Outlook) -> tuple[str, ...]:
    key = units.UNKNOWN if look.preset.key is None else str(look.preset.key)
    kept = look.kept
    numbers = (str(kept.effective_batch), str(kept.seq_len), str(kept.tokens_per_update))
    return (key, look.preset.name, kept.split_text, *numbers, tr(kept.zero.short), tr(look.switch))


def _details(look: Outlook) -> Iterator[str]:
    yield f"     {look.preset.title}. {'; '.join(look.changes) or 'nothing changes'}"
    if look.switch == "refused":
        yield f"     switch: refused: {look.reason}"
    if look.switch_whole == "refused":
        if look.reason_whole != look.reason:
            yield f"     a new run: refused: {look.reason_whole}"
    elif look.whole.effective_batch != look.kept.effective_batch:
        yield f"     a new run: effective batch {effective_change(look.kept.effective_batch, look.whole.effective_batch)}"
    if look.switch != "refused" and look.changes:
        yield f"     speed: {look.pace.speed or 'not known'}: {'; '.join(look.pace.basis)}"
    if look.risk is not None:
        yield f"     ! {look.risk}"


def _full(look: Outlook) -> Iterator[str]:
    whole = look.whole
    yield f"   {look.preset.description}"
    yield f"   a switch   {look.switch}: {look.reason}"
    if look.switch_whole == "refused":
        yield f"   a new run  refused: {look.reason_whole}"
    else:
        yield f"   a new run  {_describe(whole)}; {whole.tokens_per_update} tokens per update"
    for change in look.whole_changes:
        yield f"              {change}"
