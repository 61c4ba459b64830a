"""`memtop plan`: what memory a run would take, before it starts and without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from msgspec.structs import replace

from memtop.cli import completion
from memtop.cli.interpreters import refuse_wrong_model, search
from memtop.cli.options import GIB, PLANNED_BATCH, WHOLE, assignments_of, json_option, set_option
from memtop.cli.output import print_json, print_lines, print_message
from memtop.cli.plan_host import PlannedHost, host_text, planned_host
from memtop.cli.plan_output import (
    PresetRow,
    bound_row,
    bound_text,
    document,
    heading,
    instead_row,
    instead_text,
    measured_row,
    measured_text,
    of_model,
    of_unknown_gpu,
    peak_row,
    plan_text,
    print_all,
    train_command,
)
from memtop.cli.plan_proposals import (
    Instead,
    OwnProgram,
    largest,
    of_named_preset,
    other_methods,
    others,
    proposed,
    tried_in_vain,
)
from memtop.cli.plan_question import METHODS, Question, settings_of, whole_options
from memtop.cli.wrapping import for_terminal
from memtop.presets import Settings, load_presets
from memtop.presets.checks import longer_than_known
from memtop.presets.comparison import pace
from memtop.presets.files import usable
from memtop.presets.measured import Measured, learned
from memtop.presets.parameters import stored_config, unreadable_model
from memtop.supervisor import units
from memtop.supervisor.dry_runs import DryRuns, Foreseen, NotForeseenError
from memtop.supervisor.errors import UsageError
from memtop.supervisor.interpreters import Interpreter, learned_on
from memtop.supervisor.monitor.values import Band, band_of
from memtop.supervisor.plan import (
    GENERATION,
    Bound,
    Card,
    Need,
    Way,
    bound_of,
    can_fit,
    confirmed,
    is_safe,
    largest_safe,
    peak_of,
    smallest,
    ways,
)
from memtop.supervisor.profile.trainer_command import trainer_command
from memtop.supervisor.recovery.forecast import Estimates

if TYPE_CHECKING:
    from memtop.supervisor.monitor.values import MachineSnapshot

_GIB = 1 << 30


@click.command()
@click.argument("recipe", required=False, metavar="[RECIPE]", shell_complete=completion.recipes)
@click.option("--model", metavar="NAME|PATH", help="a folder, a config.json or a hub name, in place of the recipe's model")
@click.option(
    "--method",
    type=click.Choice(tuple(METHODS)),
    help="train all weights, adapters, or adapters on a base in 4 bits [as the recipe]",
)
@click.option("--preset", metavar="NAME", help="the memory strategy [the recipe's]", shell_complete=completion.presets)
@click.option("--all", "every", is_flag=True, help="each preset that the recipe can have")
@click.option("--batch", type=PLANNED_BATCH, metavar="B", help="samples per micro-batch and process")
@click.option("--accum", type=WHOLE, metavar="A", help="micro-batches per update")
@click.option("--seq-len", type=WHOLE, metavar="T", help="tokens per sample")
@set_option
@click.option("--gpus", type=WHOLE, metavar="N", help="processes, one on each GPU [1]")
@click.option("--vram", type=GIB, metavar="GIB", help="of a GPU [as the one here]")
@click.option("--host-ram", type=GIB, metavar="GIB", help="of the machine [as this one]")
@json_option
@click.pass_obj
def plan(
    program: tuple[str, ...] | None,
    recipe: str | None,
    model: str | None,
    method: str | None,
    preset: str | None,
    every: bool,
    batch: int | None,
    accum: int | None,
    seq_len: int | None,
    assignments: tuple[str, ...],
    gpus: int | None,
    vram: float | None,
    host_ram: float | None,
    as_json: bool,
) -> int:
    """Foresee the GPU and the host memory of a run before it starts.

    It needs no GPU: it runs the model without numbers, in the Python that would train it, and says
    what else would fit. Without torch it estimates. `memtop plan -- COMMAND` reads the options of a
    program with Hugging Face's Trainer, and does not start it.
    """
    if every and preset is not None:
        raise UsageError(f"--all with --preset {preset}: give one of them")
    if gpus is not None and gpus < 1:
        raise UsageError(f"--gpus {gpus}: at least one; here it is how many GPUs, not which")
    from memtop.cli.gpus import emptiest, sample

    machine = sample()
    values = assignments_of(assignments, batch=batch, accumulation=accum, seq_len=seq_len)
    by_set = frozenset(text.partition("=")[0] for text in assignments)
    own, typed = None, None
    if program:
        refused = {
            "RECIPE": recipe,
            "--method": method,
            "--preset": preset,
            "--all": every or None,
            "--set": assignments or None,
        }
        for name, given in refused.items():
            if given is not None:
                raise UsageError(f"{name} with -- COMMAND: leave it out; the command says what it trains")
        given_too: dict[str, Any] = {"model": model, "batch": batch, "seq_len": seq_len, "processes": gpus}
        own = trainer_command(program, str(Path.cwd()), **given_too)
        typed = OwnProgram(program, own, given_too, values)
        model, method, preset, gpus, values = own.model, own.method, "standard", own.processes, own.values | values
    card = _card(machine, vram, gpus or 1)
    if values.get("device") == "cpu" and card.total_bytes is not None:
        raise UsageError("device cpu: this plan is for a GPU, and a training on the CPU takes no GPU memory; leave it out")
    python = search().found
    question = Question(recipe, model, method, preset, values, by_set, gpus or 1, card, python)
    settings, is_chosen = settings_of(question)
    settings = replace(settings, ddp=own is not None and own.ddp)
    config = stored_config(settings) or {}
    if (unread := unreadable_model(settings)) is not None:
        raise UsageError(unread)
    refuse_wrong_model(python, settings)
    answers = _Answers(card, gpus or 1, python)
    card, assumed = answers.card, [] if own is None else list(own.assumed)
    if vram is not None and emptiest(machine) is None:
        assumed += of_unknown_gpu(settings.precision)
    assumed += of_model(settings, config, "" if python is None else python.proof.packages.get("transformers", ""))
    try:
        if every:
            rows = [_of_preset(question, settings, name, answers) for name in usable(load_presets(), settings.recipe)]
            on_gpu = card.total_bytes is not None
            hosts = [planned_host(row.settings, machine.host, host_ram, on_gpu=on_gpu) for row in rows]
            print_all(rows, hosts, card, as_json=as_json)
            if not as_json:
                asked = f"{settings.split_text}, T {settings.seq_len}"
                print_message(f"memtop: faster and slower: than preset {settings.preset} with {asked}")
            return 0
        path = None if model is None or own is not None else str(settings.model["path"])
        begins = path and train_command(settings, path, preset, values)
        _print_one(settings, typed, question, begins, assumed, card, answers, host_ram, machine, as_json=as_json)
        if is_chosen and card.total_bytes is not None:
            # The estimated peaks that chose it are left out: a dry run foresees other ones.
            name, free = settings.preset, units.size(card.total_bytes - card.others_bytes)
            print_message(f"memtop: preset {name} is chosen for {free} of free GPU memory; --preset NAME chooses another")
            if differs := of_named_preset(question, settings):
                print_message(f"memtop: --preset {settings.preset} would give other settings: {differs}")
        if (longer := longer_than_known(settings)) is not None:
            print_message(f"memtop: {longer}")
    finally:
        answers.close()
    return 0


def _card(machine: MachineSnapshot, vram: float | None, processes: int) -> Card:
    """The GPU with --vram; else the emptiest one here, if there is one. Of several, which train
    together, the fullest counts."""
    from memtop.cli.gpus import emptiest

    gpu = emptiest(machine, processes)
    if vram is not None:
        return Card(total_bytes=round(vram * _GIB), generation=GENERATION if gpu is None else Card.of(gpu).generation)
    return Card(total_bytes=None, generation=GENERATION) if gpu is None else Card.of(gpu)


class _Answers:
    """What configurations need: by a dry run if a Python with torch is there, else by the
    estimate.

    The dry run is better than the estimate. What an earlier run has measured with the same settings
    is better than both, and what a failure needed is a lower bound for both. Other measurements
    scale only the estimate, as long as there is no dry run.
    """

    def __init__(self, card: Card, processes: int, found: Interpreter | None) -> None:
        """`found`: the Python that would train; None: none has torch."""
        self._known: dict[bytes, Need | None] = {}
        self._factor: float | None = None
        """How many times the estimate alone the newest dry run foresees."""
        self.problem: str | None = None
        """Why there is no dry run."""
        self.is_wrong = False
        """Whether that is for the settings: no model could run with them."""
        self.lacks_size = False
        """Whether a dry run could foresee it if it were known how large the GPU is."""
        self._runs = None if found is None else DryRuns(found.path)
        self.learned = learned(card.kind) if found is None else learned_on(card.kind, found.path)
        self.card = card.with_processes(processes, self.learned.context_bytes(processes))
        self._estimates = Estimates(card=card, learned=self.learned)
        if found is None:
            self.problem = "no Python with torch was found"

    def close(self) -> None:
        if self._runs is not None:
            self._runs.close()

    def sure(self, settings: Settings) -> Need | None:
        """By the dry run, or the estimate without one; and by what earlier runs have measured."""
        found, rough = self._dry_run(settings), self._estimated(settings)
        if found is None:
            return self.quick(settings)
        factor = None
        if rough is not None:
            # The estimate is near for settings like these.
            self._factor = factor = found.reserved / rough.reserved
        return self._estimates.corrected(settings, found, factor)

    def alone(self, settings: Settings) -> Need | None:
        """By the dry run, or the estimate without one; whatever was measured."""
        return self._dry_run(settings) or self._estimated(settings)

    def _dry_run(self, settings: Settings) -> Need | None:
        """None without one, or if it cannot foresee these settings."""
        # The pieces of the loss follow the GPU's memory.
        open_loss = self.card.torch_bytes is None and settings.loss_chunk < 0
        if self._runs is None or (open_loss and self._estimated(settings) is not None):
            return None
        key = msgspec.json.encode(settings, order="deterministic")
        if key not in self._known:
            try:
                if open_loss:
                    self._known[key] = None
                    self._check(settings)
                else:
                    self._known[key] = _need(self._foreseen(settings))
            except NotForeseenError as error:
                self.problem, self.is_wrong, self._known[key] = str(error), not error.of_model, None
        return self._known[key]

    def quick(self, settings: Settings) -> Need | None:
        """By the estimate, as far as it is off where a dry run was made, or else where an earlier
        run has measured."""
        rough, factor = self._estimated(settings), self._factor
        if rough is None:
            return None if self._runs is None or self.problem is not None else self.sure(settings)
        if factor is None:
            return self.rough(settings)
        least = sum(rough.components.values())
        return self._estimates.corrected(settings, replace(rough, reserved=max(least, round(rough.reserved * factor))), factor)

    def rough(self, settings: Settings) -> Need | None:
        """By the estimate, and what earlier runs have measured."""
        found = self._estimates.need(settings)
        return None if isinstance(found, str) else found

    def measured(self, settings: Settings) -> Measured | None:
        """What the newest earlier run with these settings has measured, if possible one that has
        the whole peak; else the highest."""
        rows = self.learned.of_same(settings)
        whole = [row for row in rows if row.is_whole_for(settings)]
        return whole[-1] if whole else max(rows, key=lambda row: row.reserved_bytes, default=None)

    def bound(self, settings: Settings) -> Bound | str:
        """What it needs at the least, if more is not known; or why that is not known."""
        return str(self.problem) if self.is_wrong else bound_of(settings, self.card)

    def _check(self, settings: Settings) -> None:
        """NotForeseenError if no model works with these settings; else why they are not known."""
        assert self._runs is not None
        self._runs.check(settings, generation=self.card.generation)
        # The check may have downloaded the model's configuration.
        reason = self._estimates.plain(settings)
        if isinstance(reason, str):
            self.problem, self.lacks_size = reason, True

    def _foreseen(self, settings: Settings) -> Foreseen:
        assert self._runs is not None
        return self._runs.foresee(settings, generation=self.card.generation, capacity=self.card.torch_bytes)

    def _estimated(self, settings: Settings) -> Need | None:
        """By the estimate alone."""
        found = self._estimates.plain(settings)
        return None if isinstance(found, str) else found


def _need(found: Foreseen) -> Need:
    return Need(reserved=found.reserved, phase=found.peak_phase, components=found.components, basis="dry run")


# --- what it prints -------------------------------------------------------------------------------

_WITH_VRAM = "no GPU is here: with --vram GIB, which says how large yours is, a dry run foresees this model"


def _print_one(
    settings: Settings,
    program: OwnProgram | None,
    question: Question,
    begins: str | None,
    assumed: list[str],
    card: Card,
    answers: _Answers,
    host_ram: float | None,
    machine: MachineSnapshot,
    *,
    as_json: bool,
) -> None:
    own = None if program is None else program.read

    hosts: dict[bytes, PlannedHost] = {}

    def on_host(settings: Settings) -> PlannedHost:
        if card.total_bytes is None:
            return planned_host(settings, machine.host, host_ram, on_gpu=False)
        # Of a run on a GPU, the shape of a micro-batch is not in host memory.
        shape: dict[str, Any] = {"preset": "", "batch": 1, "accumulation": min(2, settings.accumulation), "seq_len": 1}
        key = msgspec.json.encode(replace(settings, **shape, gradient_checkpointing=False))
        if key not in hosts:
            hosts[key] = planned_host(settings, machine.host, host_ram, on_gpu=True)
        return hosts[key]

    host = on_host(settings)
    if own is not None:
        host = host._replace(foreseen=None, reason="not foreseen for your own program")
    need, name = answers.sure(settings), settings.recipe if own is None else "-- COMMAND"
    if need is None:
        bound = answers.bound(settings)
        if answers.is_wrong:
            raise UsageError(f"{name}: the memory of this run cannot be foreseen: {answers.problem}")
        if isinstance(bound, str):
            why = f"{name}: the memory of this run cannot be foreseen: {answers.problem}; there is no bound: {bound}"
            raise UsageError(f"{why}; {_WITH_VRAM}" if answers.lacks_size else why)
        if as_json:
            gpu = {**bound_row(bound, card), "peak_phase": None, "total_bytes": card.total_bytes, "reason": answers.problem}
            unknown: dict[str, Any] = {"measured": None, "smallest_peak_bytes": None, "tried": [], "instead": None}
            print_json(document(settings, own, gpu, host, None, []) | unknown | {"assumed": assumed})
            return
        print_lines(*heading(settings, own, assumed), *bound_text(bound, card))
        print_lines(*host_text(host, on_gpu=card.total_bytes is not None))
        print_message(f"memtop: this is no peak, only a bound: {answers.problem}")
        if answers.lacks_size:
            print_message(f"memtop: {_WITH_VRAM}")
        return
    peak, seen, alone = peak_of(need, card), answers.measured(settings), answers.alone(settings) or need
    fitting = largest_safe(settings, card, answers.quick, answers.sure)
    best = None if fitting is None else largest(*fitting, question, program)
    least = smallest(settings, card, answers.quick) if best is None else None
    gaining: list[Way] = []
    suffices = band_of(host.fraction) is not Band.DANGER

    def host_has_room(tried: Settings) -> bool:
        found = host if own is not None else on_host(tried)
        return not found.is_too_little and (suffices or band_of(found.fraction) is not Band.DANGER)

    def fits(tried: Settings) -> bool:
        # Without an estimate each answer would be a dry run.
        return answers.rough(tried) is None or (can_fit(tried, card, answers.quick) and host_has_room(tried))

    if card.total_bytes is not None:
        possible = filter(host_has_room, others(settings, question, fits, own=own is not None))
        gaining = ways(settings, possible, card, answers.quick, host_suffices=suffices)
        gaining = confirmed(settings, gaining, card, answers.quick, answers.sure)
    found = [proposed(way, host if own is not None else on_host(way.settings), question, program) for way in gaining]
    needs_another = card.total_bytes is not None and not found and own is None and (best is None or host.is_too_little)
    instead = _instead(question, settings, answers, on_host) if needs_another else None
    tried = tried_in_vain(settings, estimated=answers.rough(settings) is not None) if needs_another else []
    if as_json:
        parts = {"peak_phase": peak.phase, "components": dict(peak.components), "total_bytes": card.total_bytes}
        gpu = {**peak_row(peak), **parts, "context_measured": card.context_measured}
        gpu["fits"] = None if card.total_bytes is None else best is not None
        row = document(settings, own, gpu, host, best, found)
        row["measured"] = None if seen is None else measured_row(seen, settings, alone, card)
        row["smallest_peak_bytes"] = None if least is None else least[1].bytes
        print_json(row | {"assumed": assumed, "tried": tried, "instead": instead_row(instead)})
        return
    print_lines(
        *plan_text(settings, own, assumed, peak, card, best, least, found, measured_text(seen, settings, alone, card)),
        *host_text(host, on_gpu=card.total_bytes is not None),
    )
    if needs_another:
        print_lines(*instead_text(instead, tried))
    elif begins is not None and peak.band is not Band.DANGER and suffices:
        print_lines(*for_terminal([f"train       {begins}"]))
    if answers.learned.problem is not None:
        print_message(f"memtop: earlier runs: {answers.learned.problem}")
    if answers.problem is not None and need.basis == "dry run":
        print_message(f"memtop: alternatives are estimated without a dry run: {answers.problem}")
    elif answers.problem is not None:
        print_message(f"memtop: estimated without a dry run: {answers.problem}")
    if card.total_bytes is None:
        print_message("memtop: no GPU is here: --vram GIB says how large yours is")


def _instead(
    question: Question, asked: Settings, answers: _Answers, on_host: Callable[[Settings], PlannedHost]
) -> Instead | None:
    """Another method that fits GPU and host; None: none does, or none is known to."""
    card = answers.card
    for other in other_methods(question, asked):
        try:
            settings, _ = settings_of(other)
        except UsageError:
            continue  # a value of the user's does not go with it
        if not can_fit(settings, card, answers.rough):
            continue
        need = answers.sure(settings)
        if not is_safe(need, card):
            settings, need = largest_safe(settings, card, answers.quick, answers.sure) or (settings, None)
        host, options = on_host(settings), whole_options(other, settings)
        if need is not None and options is not None and host.foreseen is not None and band_of(host.fraction) is not Band.DANGER:
            return Instead(settings, peak_of(need, card), host.foreseen.peak, options)
    return None


def _of_preset(question: Question, settings: Settings, name: str, answers: _Answers) -> PresetRow:
    """What `--preset NAME` gives in place of the present settings."""
    try:
        after, _ = settings_of(question._replace(preset=name))
    except UsageError as error:
        return PresetRow(name, None, None, str(error))
    if sys.stderr.isatty():
        print_message(f"memtop: foreseeing preset {name}")
    need: Need | Bound | str | None = answers.sure(after)
    need = answers.bound(after) if need is None else need
    return PresetRow(name, after, None if isinstance(need, str) else need, answers.problem or "", pace(settings, after))
