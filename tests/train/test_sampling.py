"""Samples during a training: they change nothing in it, and without memory for them it goes on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from memtop.presets import Settings, SettingsError, edit_settings
from memtop.presets.schema import Lora, Sampling, Zero
from memtop.train.data.tokens import ByteTokens
from memtop.train.sampling import Writer, prompt_ids, unchanged
from tests.train.launching import two_ranks
from tests.train.support import TINY, Training, edited

T5 = {
    "model_type": "t5",
    "vocab_size": 260,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 258,
}


def sampling(tmp_path: Path, every: int = 2, **fields: Any) -> Sampling:
    path = tmp_path / "prompts.txt"
    path.write_text("def f\n\nclass Ärger\n", encoding="utf-8")
    return Sampling(prompts=str(path), every=every, max_new_tokens=10, **fields)


def run(tmp_path: Path, name: str, **changes: Any) -> Training:
    training = Training(tmp_path / name, edited(**changes), tokens=ByteTokens())
    assert training.run() == "finished"
    return training


LORA = {"method": "lora", "lora": Lora(r=4, alpha=8, dropout=0.3)}


@pytest.mark.parametrize(
    ("temperature", "changes"),
    [
        (0.9, {}),
        (0.0, LORA),
        (0.9, {"gradient_checkpointing": True}),
        pytest.param(0.0, {}, marks=pytest.mark.long),
        pytest.param(0.9, LORA, marks=pytest.mark.long),
        pytest.param(0.0, {"gradient_checkpointing": True}, marks=pytest.mark.long),
        pytest.param(0.0, {"packing": False}, marks=pytest.mark.long),
        pytest.param(0.9, {"packing": False}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_weights_and_moments_are_bitwise_those_of_a_training_without_samples(
    tmp_path: Path, changes: dict[str, Any], temperature: float
) -> None:
    plain = run(tmp_path, "plain", **changes)
    sampled = run(tmp_path, "sampled", sample=sampling(tmp_path, temperature=temperature), **changes)
    assert [report["update"] for report in sampled.channel.of("sample")] == [2, 4, 6, 8, 10]
    assert sampled.losses == plain.losses
    for ours, theirs in zip(sampled.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        for kind in sampled.optimizer.state.get(ours, {}):
            assert torch.equal(sampled.optimizer.state[ours][kind], plain.optimizer.state[theirs][kind]), kind
    assert plain.channel.of("sample") == []


def test_memory_that_runs_out_on_one_of_two_ranks_ends_only_the_sampling(tmp_path: Path) -> None:
    """Under ZeRO-3 each pass gathers weights from both: neither may wait for one that has left, and
    one that wrote alone would wait forever."""
    settings = edited(world_size=2, batch=2, zero=Zero(stage=3), target_samples=8 * 8)
    places = [(1, "layer"), (0, "gathering"), (1, "input"), (0, "end"), (2, "layer"), (1, "gathering")]
    found = []
    for name, sample in (("plain", Sampling()), ("sampled", sampling(tmp_path, every=1, temperature=0.7))):
        folder = tmp_path / name
        folder.mkdir()
        if sample.every:
            sample = msgspec.structs.replace(sample, max_new_tokens=512)
        (folder / "settings.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(settings, sample=sample)))
        found.append(two_ranks("tests.train.sampling_worker", folder, str(folder / "settings.json"), json.dumps(places)))
    plain, sampled = found
    assert [one["ended"] for one in (*plain, *sampled)] == ["finished"] * 4
    assert sampled[0]["losses"] == plain[0]["losses"] != []
    assert {one["weights"] for one in sampled} == {plain[0]["weights"]}
    reports = sampled[0]["samples"]
    assert [report["max_new_tokens"] for report in reports] == [512, 256, 128, 64, 32, 16, 8, 8]
    assert [report["problem"] is None for report in reports] == [*[False] * 6, True, True]
    assert [len(report["texts"]) for report in reports[-2:]] == [2, 2]
    assert reports[0]["problem"].endswith("the next ones have at most 256 tokens"), "the rank that failed was not the first"


def test_a_sampling_has_a_text_for_each_prompt_and_the_same_ones_with_the_same_seed(tmp_path: Path) -> None:
    reports = [
        run(tmp_path, f"run{number}", sample=sampling(tmp_path, temperature=0.8, seed=number // 2)).channel.of("sample")
        for number in range(3)
    ]
    first = reports[0][-1]
    assert first["prompts"] == ["def f", "class Ärger"]
    assert len(first["texts"]) == 2
    assert 0 < first["tokens"] <= 20
    assert first["problem"] is None
    texts = [[report["texts"] for report in one] for one in reports]
    assert texts[0] == texts[1] != texts[2]


def test_modes_buffers_and_random_states_are_restored() -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = torch.nn.Dropout(0.5).eval()
            self.open = torch.nn.Dropout(0.5)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self) -> None:
            assert not any(module.training for module in self.modules())
            self.seen: torch.Tensor
            self.seen += 1

    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(1))

    module = Odd()
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = drawn()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])

    def fails() -> None:
        with unchanged(module):
            module()
            drawn()
            raise MemoryError

    with pytest.raises(MemoryError):
        fails()
    assert drawn() == expected
    assert (module.training, module.frozen.training, module.open.training) == (True, False, True)
    assert module.seen.item() == 0


def test_a_lack_of_memory_makes_the_next_sampling_smaller_and_then_ends_only_it(tmp_path: Path) -> None:
    sample = sampling(tmp_path)
    training = Training(tmp_path / "state", edited(sample=sample, target_samples=96), tokens=ByteTokens())
    objective = training.engine.objective
    forward = objective.forward

    def short_of_memory(*args: Any, **inputs: Any) -> Any:
        if "labels" not in inputs and not args:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        return forward(*args, **inputs)

    objective.forward = short_of_memory
    trainer: Any = training.trainer
    trainer._sampler._most = 32
    trainer._live.now = edited(target_samples=96, sample=Sampling(prompts=sample.prompts, every=2, max_new_tokens=32))
    assert training.run() == "finished"
    reports = training.channel.of("sample")
    assert [report["max_new_tokens"] for report in reports] == [32, 16, 8]
    assert all(report["texts"] == [] for report in reports)
    assert reports[0]["problem"].endswith("the next ones have at most 16 tokens")
    assert reports[-1]["problem"].endswith("no samples any more")
    assert training.channel.of("oom") == []
    assert objective.training


@pytest.mark.parametrize("most", [1, 5])
def test_a_small_number_of_tokens_that_a_person_gives_is_honoured(tmp_path: Path, most: int) -> None:
    sample = msgspec.structs.replace(sampling(tmp_path), max_new_tokens=most)
    reports = run(tmp_path, "state", sample=sample).channel.of("sample")
    assert [report["update"] for report in reports] == [2, 4, 6, 8, 10]
    assert [(report["max_new_tokens"], len(report["texts"]), report["problem"]) for report in reports] == [(most, 2, None)] * 5
    assert all(0 <= report["tokens"] <= 2 * most for report in reports)
    assert any(report["tokens"] for report in reports)


def test_a_missing_file_is_a_warning_and_the_training_goes_on(tmp_path: Path) -> None:
    training = run(tmp_path, "state", sample=Sampling(prompts=str(tmp_path / "none.txt"), every=1))
    assert training.channel.of("sample") == []
    (warning,) = training.channel.of("warning")
    assert "none.txt: cannot be read: " in warning["message"]


def test_an_encoder_and_decoder_writes_too() -> None:
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    from memtop.train.objective import Objective

    config = AutoConfig.for_model(**T5)
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(config)
    objective = Objective(model, seq2seq=True, chunk=0).eval()
    settings: Settings = edited(task="seq2seq")
    write = Writer(objective, ByteTokens(), settings, config, torch.device("cpu"))
    with torch.no_grad():
        found = write("ab", Sampling(max_new_tokens=5))
        wanted = model.generate(torch.tensor([[97, 98, 257]]), max_new_tokens=5, do_sample=False, eos_token_id=257)
    assert found == [token for token in wanted[0, 1:].tolist() if token != 257]


def test_a_causal_model_writes_what_transformers_would(tmp_path: Path) -> None:
    training = run(tmp_path, "state")
    write = Writer(training.engine.objective, ByteTokens(), TINY, training.model.config, torch.device("cpu"))
    ids = prompt_ids(ByteTokens(), "causal", "def ")
    assert ids == [256, *b"def "]
    training.model.eval()
    with torch.no_grad():
        found = write("def ", Sampling(max_new_tokens=12))
        model: Any = training.model
        wanted = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=257, pad_token_id=258)
    assert found == [token for token in wanted[0, len(ids) :].tolist() if token < 257]
    # A prompt that is longer than the model's positions keeps its end.
    assert len(write("x" * 200, Sampling(max_new_tokens=12))) <= 12


@pytest.mark.parametrize(
    "given",
    [
        {"sample.every": "5"},
        {"sample.prompts": "p.txt"},
        {"sample.every": "5", "sample.prompts": "p", "sample.temperature": "-1"},
    ],
)
def test_settings_that_cannot_work_are_refused(given: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match=r"^sample\."):
        edit_settings(TINY, assignments=given)
