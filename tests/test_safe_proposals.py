"""What memtop proposes by itself stays below 85 % of the GPU, or says that it does not: for every
recipe and preset on the cards that people have, and after earlier runs that took more or less.

A proposal is judged by what its training takes in truth, which is computed here: the estimate of
`presets` times a ratio, with what a process holds outside torch's memory. memtop knows the ratio
only from what earlier runs have measured, or from where they failed.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from memtop.cli.common import proposal_lines
from memtop.presets import Settings, load_presets, load_recipes, resolve
from memtop.presets.comparison import outlook
from memtop.presets.files import usable
from memtop.presets.measured import GpuKind, Learned, Measured, model_key
from memtop.presets.parameters import stored_config
from memtop.supervisor import dry_runs as dry_runs_of
from memtop.supervisor import plan
from memtop.supervisor.dry_runs import DryRuns
from memtop.supervisor.monitor.values import Band
from memtop.supervisor.plan import Card, Need, largest_safe, splits_of, ways
from memtop.supervisor.recovery.batch_trial import larger_splits, next_split
from memtop.supervisor.recovery.configuration import applied
from memtop.supervisor.recovery.forecast import Estimates, Forecaster, words_at_launch
from memtop.supervisor.recovery.remedies import ladder
from memtop.supervisor.recovery.situation import HostFacts, situation_of
from memtop.supervisor.recovery.values import Forecast, Remedy
from memtop.supervisor.wire import Proposal
from memtop.train.batch_choice import first_size
from tests.forking import Program
from tests.recovery.support import died
from tests.test_plan import estimated_once

MIB, GIB = 1 << 20, 1 << 30
SAFE = 0.85
CARDS = (12, 24, 80)
"""GiB."""
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11264,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
QWEN = {
    "model_type": "qwen2",
    "hidden_size": 8192,
    "intermediate_size": 22016,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 151936,
}
T5 = {"model_type": "t5", "vocab_size": 40960, "d_model": 1536, "d_ff": 6144, "d_kv": 64, "num_heads": 24}
# The batches are those with which a run on the smaller cards runs out of memory.
ASKED = {
    "first-run": {"batch": 128, "accumulation": 1, "model": {"config": LLAMA}},
    "pretrain-causal": {"batch": 16, "accumulation": 2, "model": {"config": LLAMA}},
    "pretrain-t5": {"batch": 64, "accumulation": 2, "seq_len": 512, "model": {"config": T5 | {"num_layers": 3}}},
    "sft-lora": {"batch": 8, "accumulation": 2, "model": {"config": QWEN}},
    "sft-qlora": {"batch": 16, "accumulation": 1, "model": {"config": QWEN}},
}
REFUSED = {("sft-qlora", "stage3"), ("sft-qlora", "minimal")}
LADDER = [(recipe, preset) for recipe in ASKED for preset in usable(load_presets(), recipe) if (recipe, preset) not in REFUSED]


@pytest.fixture(autouse=True)
def _each_estimate_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "estimate", estimated_once)


class World(NamedTuple):
    """What trainings take in truth, and what memtop knows of it."""

    ratio: float = 1.0
    """Times the estimate."""
    knows: str = "nothing"
    """`peak`: of the same model with another batch; `failure`: it needed so much at the least."""
    processes: int = 1
    outside: int = GIB // 2
    """Bytes outside torch's memory."""

    def estimates(self, settings: Settings, on: Card) -> Estimates:
        """With one row of an earlier run of this model."""
        of = settings if self.knows == "failure" else replace(settings, batch=1, accumulation=settings.effective_batch)
        config, kind = stored_config(settings), GpuKind("card", on.total_bytes or 0)
        assert config is not None
        row = Measured(
            run="/runs/a",
            time=1.0,
            gpu=kind,
            model=model_key(config),
            settings=of,
            reserved_bytes=self.reserved(of, on),
            outside_bytes=self.outside if self.knows == "peak" else None,
            failed=self.knows == "failure",
        )
        return Estimates(card=on, learned=Learned(rows=() if self.knows == "nothing" else (row,)))

    def reserved(self, settings: Settings, on: Card) -> int:
        assert on.total_bytes is not None
        config, room = stored_config(settings), on.total_bytes - self.outside
        assert config is not None
        room -= room % (64 * MIB)
        return round(self.ratio * estimated_once(settings, config, generation=on.generation, capacity=room).reserved)

    def is_safe(self, settings: Settings, on: Card) -> bool:
        assert on.total_bytes is not None
        # What was measured is kept in whole bytes.
        return self.reserved(settings, on) + self.outside < SAFE * on.total_bytes + MIB


WORLDS = [
    World(),
    World(ratio=1.3, knows="peak", outside=700 * MIB),
    World(ratio=1.25, knows="failure"),
    World(processes=2, outside=GIB),
    World(processes=2, ratio=1.2, knows="peak", outside=1300 * MIB),
]
EVERY = pytest.mark.parametrize(
    ("recipe", "world"),
    [
        pytest.param(
            recipe,
            world,
            id=f"{recipe}-{world.processes} process(es), {world.knows} known, x {world.ratio}",
            # Each recipe and each world is once in `make test`.
            marks=[] if column == row else [pytest.mark.long],
        )
        for row, recipe in enumerate(ASKED)
        for column, world in enumerate(WORLDS)
    ],
)


def card(gib: int) -> Card:
    return Card(total_bytes=gib * GIB, generation=86)


def asked(recipe: str, world: World) -> Settings:
    settings = resolve(load_recipes()[recipe], preset=load_presets()["standard"], whole=False)
    # What fails was tried with the same options of the allocator.
    return replace(settings, device="cuda", world_size=world.processes, **ASKED[recipe])


def under(recipe: str, preset: str, world: World) -> Settings:
    found = outlook(asked(recipe, world), load_presets()[preset])
    assert found.switch != "refused", found.reason
    return replace(found.kept, allocator=asked(recipe, world).allocator)


def test_all_recipes_are_asked_for() -> None:
    world = World()
    assert set(ASKED) == set(load_recipes())
    assert {asked(recipe, world).method for recipe in ASKED} == {"full", "lora", "qlora"}
    assert {asked(recipe, world).task for recipe in ASKED} == {"causal", "seq2seq", "sft"}
    everything = [(recipe, preset) for recipe in ASKED for preset in usable(load_presets(), recipe)]
    refused = {one for one in everything if outlook(asked(one[0], world), load_presets()[one[1]]).switch == "refused"}
    assert refused == REFUSED


@EVERY
def test_a_plan_and_a_launch_propose_what_is_safe(recipe: str, world: World) -> None:
    settings, judged, unsafe = asked(recipe, world), 0, 0
    others = [replace(settings, gradient_checkpointing=True), replace(settings, seq_len=settings.seq_len // 2)]
    others += [under(*one, world) for one in LADDER if one[0] == recipe]
    for gib in CARDS:
        on = card(gib)
        estimates = world.estimates(settings, on)
        whole = estimates.card_for(settings)
        assert whole.outside_bytes == world.outside

        def ask(tried: Settings, estimates: Estimates = estimates) -> Need | None:
            found = estimates.need(tried)
            return None if isinstance(found, str) else found

        best, found = largest_safe(settings, whole, ask, ask), ways(settings, others, whole, ask)
        for tried in [way.settings for way in found] + ([] if best is None else [best[0]]):
            assert world.is_safe(tried, on), (gib, tried)
            judged += 1
        assert {way.peak.band for way in found} <= {Band.SAFE}
        said = list(words_at_launch(settings, on, estimates.learned))
        split = re.search(r"--batch (\d+) --accum (\d+) keeps", " ".join(said))
        if split is not None:
            assert world.is_safe(replace(settings, batch=int(split[1]), accumulation=int(split[2])), on)
            judged += 1
        if not world.is_safe(settings, on):
            unsafe += 1
            assert ", danger)" in said[0] or ", edge)" in said[0], "what was asked for is labelled"
            assert (split is None) == (best is None)
    assert judged >= 4
    assert unsafe


@EVERY
def test_the_restart_form_advice_and_the_search_of_a_batch_propose_what_is_safe(recipe: str, world: World) -> None:
    judged = dict.fromkeys(("form", "search", "advice"), 0)
    for _, preset in (one for one in LADDER if one[0] == recipe):
        settings = under(recipe, preset, world)
        for gib in CARDS:
            on = card(gib)
            estimates = world.estimates(settings, on)
            look = Forecaster(total_bytes=on.total_bytes, on_gpu=True, estimates=estimates)
            smaller = look.safe_split(settings)
            if smaller is not None:
                assert world.is_safe(smaller[0], on)
                judged["form"] += 1
            sizes = sorted(batch for batch, _ in splits_of(settings))
            each = settings.effective_batch // settings.world_size

            def split(batch: int, of: Settings = settings, each: int = each) -> Settings:
                return replace(of, batch=batch, accumulation=each // batch, rank_splits=())

            def fullness(batch: int, estimates: Estimates = estimates, split: Any = split) -> float | None:
                found = estimates.forecast(split(batch))
                return found.fraction if isinstance(found, Forecast) else None

            begins = first_size(sizes, settings.batch, fullness)
            if begins != sizes[0]:  # the search measures the smallest, if none is safe
                assert world.is_safe(split(begins), on)
                judged["search"] += 1
            small = split(1)
            if larger_splits(small):
                larger, _ = next_split(small, lambda batch, ask=fullness, on=on: _forecast(ask(batch), on))  # type: ignore[misc]
                if larger is not None:
                    assert world.is_safe(split(larger.batch), on)
                    judged["advice"] += 1
    assert min(judged.values()) >= 3, judged


def _forecast(fraction: float | None, on: Card) -> Forecast | None:
    assert on.total_bytes is not None
    if fraction is None:
        return None
    return Forecast(
        peak_bytes=round(fraction * on.total_bytes), total_bytes=on.total_bytes, fraction=fraction, basis="estimate"
    )


@EVERY
def test_what_remedies_propose_is_safe_or_labelled_and_comes_last(recipe: str, world: World) -> None:
    judged = 0
    for _, preset in (one for one in LADDER if one[0] == recipe):
        settings = under(recipe, preset, world)
        for gib in CARDS:
            on = card(gib)
            if world.is_safe(settings, on):
                continue
            total, estimates = gib * GIB, world.estimates(settings, on)
            diagnosis = died(total_bytes=total, process_bytes=total, requested_bytes=GIB // 4, context_bytes=world.outside)
            host = HostFacts(available_bytes=256 * GIB, limit_bytes=256 * GIB)
            found = ladder(situation_of(diagnosis, settings, estimates=estimates, host=host)).remedies
            free = [one for one in found if not one.needs_consent]
            unsafe = [_full(one) for one in free]
            assert unsafe == sorted(unsafe), "what is not known to be safe comes last"
            text = "\n".join(proposal_lines(Proposal(diagnosis=diagnosis, remedies=found)))
            for one in found:
                if _full(one):
                    assert one.forecast is not None
                    assert one.forecast.band in (Band.EDGE, Band.DANGER)
                    assert f" %, {one.forecast.band.value}): " in text
                elif one.forecast is not None and not one.needs_consent:
                    after = applied(settings, one)
                    assert world.is_safe(replace(after, allocator=settings.allocator), on), (gib, one)
                    judged += 1
    assert judged


def _full(remedy: Remedy) -> bool:
    return remedy.forecast is not None and (remedy.forecast.fraction or 0) >= SAFE


@pytest.fixture
def dry_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DryRuns]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(dry_runs_of, "subprocess", SimpleNamespace(Popen=Program, PIPE=subprocess.PIPE))
    with contextlib.closing(DryRuns("")) as runs:
        yield runs


def test_what_a_launch_proposes_fits_by_the_dry_run(dry_runs: DryRuns) -> None:
    """The model runs, so this number knows nothing of the estimate. The estimate may be off by a
    quarter at the most, so that what it calls safe fits on the card."""
    settings = resolve(load_recipes()["first-run"], preset=load_presets()["standard"], whole=False)
    settings = replace(settings, device="cuda", batch=512, accumulation=1)
    proposed = []
    for mib in (1200, 2000):
        on = Card(total_bytes=mib * MIB, generation=86)
        said = " ".join(words_at_launch(settings, on))
        split = re.search(r"--batch (\d+) --accum (\d+) keeps", said)
        assert split is not None, said
        tried = replace(settings, batch=int(split[1]), accumulation=int(split[2]))
        found = dry_runs.foresee(tried, generation=86, capacity=on.torch_bytes)
        assert found.reserved + GIB // 2 < mib * MIB
        proposed.append(tried.batch)
    assert proposed == sorted(set(proposed)), "more memory, a larger batch"
