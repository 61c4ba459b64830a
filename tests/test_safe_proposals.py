"""What memtop proposes by itself is foreseen to stay below 85 % of the GPU, or says that it is not:
for every recipe and preset on the cards that people have."""

from __future__ import annotations

import re
from functools import lru_cache

import pytest
from msgspec.structs import replace

from memtop.cli.common import proposal_lines
from memtop.presets import Settings, load_presets, load_recipes, resolve
from memtop.presets.comparison import outlook
from memtop.presets.files import usable
from memtop.supervisor.monitor.values import EDGE_FROM, Band
from memtop.supervisor.plan import Card, Need, estimated, is_safe, largest_safe, splits_of, ways
from memtop.supervisor.recovery.batch_trial import larger_splits, next_split
from memtop.supervisor.recovery.forecast import Estimates, Outlook, words_at_launch
from memtop.supervisor.recovery.remedies import ladder
from memtop.supervisor.recovery.situation import HostFacts, situation_of
from memtop.supervisor.recovery.values import Forecast, Remedy
from memtop.supervisor.wire import Proposal
from memtop.train.batch_choice import first_size
from tests.recovery.support import died

GIB = 1 << 30
CARDS = (8, 12, 16, 24, 48, 80)
"""GiB."""
LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
QWEN = {
    "model_type": "qwen2",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 151936,
}
# The batches are those with which a run on the smaller cards runs out of memory.
ASKED = {
    "first-run": {"batch": 128, "accumulation": 1, "model": {"config": LLAMA}},
    "pretrain-causal": {"batch": 16, "accumulation": 2, "model": {"config": LLAMA}},
    "pretrain-t5": {"batch": 64, "accumulation": 2},
    "sft-lora": {"batch": 8, "accumulation": 2, "model": {"config": QWEN}},
    "sft-qlora": {"batch": 16, "accumulation": 1, "model": {"config": QWEN}},
}
LADDER = [(recipe, preset) for recipe in ASKED for preset in usable(load_presets(), recipe)]


def card(gib: int) -> Card:
    return Card(total_bytes=gib * GIB, generation=86)


@lru_cache
def asked(recipe: str) -> Settings:
    settings = resolve(load_recipes()[recipe], preset=load_presets()["standard"], whole=False)
    return replace(settings, device="cuda", **ASKED[recipe])


def under(recipe: str, preset: str) -> Settings | None:
    """The settings of that preset; None if it refuses them."""
    found = outlook(asked(recipe), load_presets()[preset])
    return None if found.switch == "refused" else found.kept


def foresee(settings: Settings, on: Card) -> Need | None:
    found = estimated(settings, on)
    return None if isinstance(found, str) else found


def safe(settings: Settings, on: Card) -> bool:
    return is_safe(foresee(settings, on), on)


def test_all_recipes_are_asked_for() -> None:
    assert set(ASKED) == set(load_recipes())
    assert {asked(recipe).method for recipe in ASKED} == {"full", "lora", "qlora"}
    assert {asked(recipe).task for recipe in ASKED} == {"causal", "seq2seq", "sft"}


@pytest.mark.parametrize("gib", CARDS)
@pytest.mark.parametrize("recipe", ASKED)
def test_a_plan_and_a_launch_propose_what_is_safe(recipe: str, gib: int) -> None:
    settings, on = asked(recipe), card(gib)
    others = [replace(settings, gradient_checkpointing=True), replace(settings, seq_len=settings.seq_len // 2)]
    others += [found for preset in usable(load_presets(), recipe) if (found := under(recipe, preset)) is not None]

    def ask(tried: Settings) -> Need | None:
        return foresee(tried, on)

    best = largest_safe(settings, on, ask, ask)
    assert best is None or safe(best[0], on)
    found = ways(settings, others, on, ask)
    assert gib < 80 or (best is not None and found), "there, something fits"
    for way in found:
        assert safe(way.settings, on), way
        assert way.peak.band is Band.SAFE
    said = list(words_at_launch(settings, on))
    split = re.search(r"--batch (\d+) --accum (\d+) keeps", " ".join(said))
    if split is not None:
        assert safe(replace(settings, batch=int(split[1]), accumulation=int(split[2])), on)
    if not safe(settings, on):
        assert ", danger)" in said[0] or ", edge)" in said[0], "what was asked for is labelled"
        assert (split is None) == (best is None)


@pytest.mark.parametrize(("recipe", "preset"), LADDER)
def test_the_restart_form_advice_and_the_search_of_a_batch_propose_what_is_safe(recipe: str, preset: str) -> None:
    settings = under(recipe, preset)
    if settings is None:
        return
    for gib in CARDS:
        on = card(gib)
        estimates = Estimates(card=on)
        look = Outlook(total_bytes=on.total_bytes, on_gpu=True, estimates=estimates)
        smaller = look.safe_split(settings)
        assert smaller is None or safe(smaller[0], on)
        sizes = sorted(batch for batch, _ in splits_of(settings))

        def fullness(batch: int, estimates: Estimates = estimates, settings: Settings = settings) -> float | None:
            found = estimates.forecast(replace(settings, batch=batch, accumulation=settings.effective_batch // batch))
            return found.fraction if isinstance(found, Forecast) else None

        begins = first_size(sizes, settings.batch, fullness)
        assert begins == sizes[0] or (fullness(begins) or 0) < EDGE_FROM, "the search measures the smallest, if none is safe"
        small = replace(settings, batch=1, accumulation=settings.effective_batch)
        if larger_splits(small):
            split, _ = next_split(small, lambda batch, ask=fullness, on=on: _forecast(ask(batch), on))  # type: ignore[misc]
            assert split is None or (fullness(split.batch) or 0) < EDGE_FROM


def _forecast(fraction: float | None, on: Card) -> Forecast | None:
    assert on.total_bytes is not None
    if fraction is None:
        return None
    return Forecast(
        peak_bytes=round(fraction * on.total_bytes), total_bytes=on.total_bytes, fraction=fraction, basis="estimate"
    )


@pytest.mark.parametrize(("recipe", "preset"), LADDER)
def test_what_remedies_propose_is_safe_or_labelled_and_comes_last(recipe: str, preset: str) -> None:
    settings = under(recipe, preset)
    if settings is None:
        return
    for gib in CARDS:
        on = card(gib)
        if safe(settings, on):
            continue
        total = gib * GIB
        diagnosis = died(total_bytes=total, process_bytes=total, requested_bytes=GIB // 4, context_bytes=on.context_bytes)
        host = HostFacts(available_bytes=256 * GIB, limit_bytes=256 * GIB)
        found = ladder(situation_of(diagnosis, settings, estimates=Estimates(card=on), host=host)).remedies
        free = [one for one in found if not one.needs_consent]
        unsafe = [_full(one) for one in free]
        assert unsafe == sorted(unsafe), "what is not known to be safe comes last"
        text = "\n".join(proposal_lines(Proposal(diagnosis=diagnosis, remedies=found)))
        for one in found:
            if _full(one):
                assert one.forecast is not None
                assert one.forecast.band in (Band.EDGE, Band.DANGER)
                assert f" %, {one.forecast.band.value}): " in text


def _full(remedy: Remedy) -> bool:
    return remedy.forecast is not None and (remedy.forecast.fraction or 0) >= EDGE_FROM
