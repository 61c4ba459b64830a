"""The training loop in this process: splits, stops, saves, and what an interrupted save leaves
behind.
"""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from memtop.supervisor import units
from memtop.train import BadInputError, TrainingError, state_files
from memtop.train.data.tokens import ByteTokens
from memtop.train.model import blaming_config, model_config
from memtop.train.optimizers import MOMENTS
from memtop.train.order import SampleOrder
from memtop.train.run import open_accelerator, open_engine
from memtop.train.state_files import BrokenStateError, newest_complete, newest_update, previous_of, read_manifest
from tests.train.support import Recorder, Training, edited


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Training:
    training = Training(tmp_path_factory.mktemp("undisturbed") / "train_latest_state")
    assert training.run() == "finished"
    return training


def test_the_loss_falls_and_the_state_is_saved(undisturbed: Training) -> None:
    assert len(undisturbed.losses) == 10
    assert undisturbed.losses[-1] < undisturbed.losses[0] - 1
    assert [saved["updates"] for saved in undisturbed.channel.of("checkpoint")] == [3, 6, 9, 10]


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": 8, "accumulation": 1},
        {"batch": 1, "accumulation": 8},
        {"batch": 2, "accumulation": 4, "gradient_checkpointing": True},
        {"workers": 1},
    ],
)
def test_the_split_changes_nothing_but_rounding(undisturbed: Training, tmp_path: Path, changes: dict[str, Any]) -> None:
    other = Training(tmp_path / "state", edited(**changes))
    other.run()
    assert other.digests == undisturbed.digests
    assert other.losses == pytest.approx(undisturbed.losses, rel=1e-5)


def test_the_update_is_the_token_weighted_mean_of_its_samples(tmp_path: Path) -> None:
    """Compared with a gradient that is computed sample by sample."""
    training = Training(tmp_path / "state", edited(clip_norm=0.0, target_samples=8))
    model, total, tokens = training.model, torch.zeros(()), 0
    order = SampleOrder(training.samples, training.settings.seed, training.trainer.position.cuts)
    for key in order.take(0, 8):
        sample = training.samples[key][0][None]
        logits = model(input_ids=sample).logits[:, :-1].flatten(0, 1)
        total = total + torch.nn.functional.cross_entropy(logits, sample[:, 1:].flatten(), reduction="sum")
        tokens += sample.shape[1] - 1
    expected = torch.autograd.grad(total / tokens, list(model.parameters()))
    seen: list[torch.Tensor] = []
    training.optimizer.register_step_pre_hook(
        lambda *_: seen.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
    )
    training.run()
    assert len(seen) == len(expected)
    for found, wanted in zip(seen, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("stop_after", [1, 4, 9])
def test_a_stopped_and_resumed_run_ends_with_the_same_weights(undisturbed: Training, tmp_path: Path, stop_after: int) -> None:
    first = Training(tmp_path / "state")
    first.channel.commands[stop_after] = [(7, "stop", {})]
    assert first.run() == "stopped"
    assert first.channel.answers == [(7, True, "stopping after this update")]
    second = Training(tmp_path / "state")
    assert second.trainer.position.updates == stop_after
    assert second.run() == "finished"
    assert first.digests + second.digests == undisturbed.digests
    assert first.losses + second.losses == undisturbed.losses
    for name, weight in undisturbed.weights().items():
        assert torch.equal(second.weights()[name], weight), name


def test_a_stop_in_the_last_update_leaves_a_finished_training(undisturbed: Training, tmp_path: Path) -> None:
    training = Training(tmp_path / "state")
    training.channel.commands[len(undisturbed.digests)] = [(7, "stop", {})]
    assert training.run() == "finished"
    assert (training.digests, training.trainer.unsaved) == (undisturbed.digests, None)
    assert Training(tmp_path / "state").trainer.position.updates == len(undisturbed.digests)


def test_a_checkpoint_command_is_answered_when_it_is_on_disk(tmp_path: Path) -> None:
    training = Training(tmp_path / "state")
    training.channel.commands[2] = [(5, "checkpoint", {})]
    training.run()
    ((number, ok, message),) = training.channel.answers
    assert (number, ok) == (5, True)
    (saved,) = [report for report in training.channel.of("checkpoint") if report["updates"] == 2]
    # As the event and the list of states show it.
    assert message.startswith(f"checkpoint at update 2: {units.size(saved['size_bytes'])} in ")


def test_a_loss_that_stays_nan_stops_without_saving(tmp_path: Path) -> None:
    training = Training(tmp_path / "state", edited(save_every=1))
    with torch.no_grad():
        next(iter(training.model.parameters())).fill_(float("nan"))
    with pytest.raises(TrainingError, match=r"^loss is nan at update 8 \(8 updates in a row\); stopped, "):
        training.run()
    assert newest_complete(tmp_path / "state") is None
    assert len(training.channel.of("warning")) == 1


def broken_at(training: Training, updates: set[int]) -> None:
    """Make a gradient infinite in the last micro-batch of these updates."""
    calls = 0

    def changed(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        last = calls % training.settings.accumulation == 0
        return gradient * (math.inf if last and training.trainer.position.updates + 1 in updates else 1)

    next(iter(training.model.parameters())).register_hook(changed)


@pytest.mark.parametrize("clip_norm", [1.0, 0.0])
def test_a_gradient_that_is_not_finite_leaves_out_only_the_optimizer_step(tmp_path: Path, clip_norm: float) -> None:
    skipped = {1, 4, 5}
    training, other = (Training(tmp_path / name, edited(clip_norm=clip_norm)) for name in ("state", "other"))
    broken_at(training, skipped)
    optimizer: Any = other.optimizer
    step = optimizer.step
    optimizer.step = lambda closure: None if other.trainer.position.updates + 1 in skipped else step(closure)
    assert training.run() == other.run() == "finished"
    assert (training.losses, training.digests) == (other.losses, other.digests)
    assert [report["update"] for report in training.channel.of("step") if report["skipped"]] == sorted(skipped)
    for ours, theirs in zip(training.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        for kind in (*MOMENTS, "step"):
            assert torch.equal(training.optimizer.state[ours][kind], other.optimizer.state[theirs][kind]), kind
    warnings = [report["message"] for report in training.channel.of("warning")]
    assert len(warnings) == 2, "one for each row of them"
    assert warnings[1].startswith("update 4: a gradient is not finite (loss ")


def test_a_row_of_skipped_steps_is_counted_from_0_after_one_that_was_done(tmp_path: Path) -> None:
    training = Training(tmp_path / "state", edited(target_samples=160))
    broken_at(training, {*range(1, 8), *range(9, 17)})
    with pytest.raises(TrainingError, match=r"^gradient norm is (nan|inf) at update 16 \(8 updates in a row\); "):
        training.run()


def weights_broken_after(training: Training, update: int) -> None:
    """As after a step that was too large: the loss of the later updates is nan."""
    report = training.channel.report

    def then_break(kind: str, **values: Any) -> None:
        report(kind, **values)
        if kind == "step" and values["update"] == update:
            with torch.no_grad():
                next(iter(training.model.parameters())).fill_(math.inf)

    training.channel.report = then_break  # type: ignore[method-assign]


@pytest.mark.parametrize("request_", ["stop", "checkpoint"])
def test_no_state_is_saved_while_the_loss_is_not_finite(tmp_path: Path, request_: str) -> None:
    training = Training(tmp_path / "state", edited(save_every=2))
    weights_broken_after(training, 3)
    training.channel.commands[6] = [(5, request_, {})]
    why = "the loss is nan since update 4"
    if request_ == "stop":
        assert training.run() == "stopped"
        assert (training.trainer.unsaved or "").startswith(f"stopped at update 6, not saved: {why}")
    else:
        with pytest.raises(TrainingError, match=r"^loss is nan at update 10 \(.* updates in a row\); stopped, "):
            training.run()
        ((number, ok, message),) = training.channel.answers
        assert (number, ok) == (5, False)
        assert message.startswith(f"not saved: {why}")
    found = newest_complete(tmp_path / "state") or pytest.fail("no state")
    assert found[1].updates == 2
    assert all(tensor.isfinite().all() for tensor in Training(tmp_path / "state").weights().values())


def test_a_training_does_not_finish_with_several_skipped_steps(tmp_path: Path) -> None:
    once = Training(tmp_path / "once")
    broken_at(once, {10})
    assert once.run() == "finished"
    twice = Training(tmp_path / "twice", edited(save_every=8))
    broken_at(twice, {9, 10})
    with pytest.raises(TrainingError, match=r"^gradient norm is (nan|inf) at update 10 \(2 updates in a row\); "):
        twice.run()
    assert newest_update(tmp_path / "twice") == 8


def test_an_optimizer_that_cannot_skip_its_step_stops_without_saving(tmp_path: Path) -> None:
    training = Training(tmp_path / "state", edited(optimizer="adafactor", save_every=1))
    broken_at(training, {3})
    with pytest.raises(TrainingError, match=r"^gradient norm is (nan|inf) at update 3; stopped, the last saved checkpoint"):
        training.run()
    assert len(training.losses) == 2
    found = newest_complete(tmp_path / "state") or pytest.fail("no state")
    assert found[1].updates == 2


def test_a_finished_run_that_is_resumed_has_nothing_to_do(tmp_path: Path) -> None:
    Training(tmp_path / "state").run()
    again = Training(tmp_path / "state")
    assert again.run() == "finished"
    assert again.losses == []


def test_weights_moments_and_step_are_restored_exactly(undisturbed: Training, tmp_path: Path) -> None:
    training = Training(tmp_path / "state")
    training.run()
    again = Training(tmp_path / "state")
    for (name, before), after in zip(training.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(before, after), name
        for kind in (*MOMENTS, "step"):
            assert torch.equal(training.optimizer.state[before][kind], again.optimizer.state[after][kind]), (name, kind)


def test_another_models_state_is_refused(tmp_path: Path) -> None:
    Training(tmp_path / "state").run()
    wider = edited()
    wider.model["config"] = {**wider.model["config"], "intermediate_size": 128}
    with pytest.raises(BadInputError, match=r"holds another model .*; give another --name, or --fresh"):
        Training(tmp_path / "state", wider)


# --- interrupted saves
# --------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Acts like SIGKILL: no code runs after it, and no handler catches it."""


def save_cut_at(training: Training, step: int, monkeypatch: pytest.MonkeyPatch, *, background: bool) -> bool:
    """Save, and die at the given file operation; False if the save has fewer operations."""
    count = 0

    def dying(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == step:
                raise Killed
            return original(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        for owner, name in (
            *((os, n) for n in ("fsync", "open")),
            *((Path, n) for n in ("mkdir", "rename", "write_bytes")),
            (state_files, "write_safetensors"),
        ):
            patch.setattr(owner, name, dying(getattr(owner, name)))
        patch.setattr(shutil, "rmtree", dying(shutil.rmtree))
        try:
            training.trainer.save(background=background)
            # It waits for the save in the background.
            training.trainer.save()
        except Killed:
            return True
    return False


@pytest.mark.parametrize("background", [False, True])
def test_a_save_killed_at_any_step_leaves_a_complete_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    state = tmp_path / "train_latest_state"
    Training(state, edited(target_samples=64)).run()
    step, cuts = 1, 0
    while True:
        training = Training(state)
        before = training.trainer.position.updates
        training.trainer.position.updates += 1
        cut = save_cut_at(training, step, monkeypatch, background=background)
        found = newest_complete(state)
        assert found is not None, f"nothing whole is left after a cut at operation {step}"
        assert found[1].updates in (before - 1, before, before + 1)
        if not cut:
            break
        cuts, step = cuts + 1, step + 1
    assert cuts > 12
    # The next save removes the leftovers of the interrupted ones.
    assert list(tmp_path.glob("*.tmp-*")) == []


@pytest.mark.parametrize("where", ["write", "free"])
def test_a_full_disk_keeps_the_old_state_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    state = tmp_path / "train_latest_state"
    Training(state, edited(target_samples=24)).run()
    before = read_manifest(state)
    channel = Recorder()
    training = Training(state, edited(), channel)
    with monkeypatch.context() as patch:
        if where == "free":
            usage = shutil.disk_usage(tmp_path)
            patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        else:

            def full(*_: Any) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

            patch.setattr(state_files, "write_safetensors", full)
        assert training.run() == "finished"
    assert len(training.losses) == 7
    assert read_manifest(state) == before
    assert list(tmp_path.glob("*.tmp-*")) == []
    assert training.trainer.unsaved is not None
    assert training.trainer.unsaved.startswith("finished update 10, not saved: 2 MiB needed, ")
    failed = channel.of("save_failed")
    assert [(report["update"], report["waiting"]) for report in failed] == [(6, False), (9, False), (10, False)]
    assert all(report["message"].endswith("; the state of update 3 is kept; free some space") for report in failed)


def test_a_changed_byte_is_detected_and_the_previous_state_is_used(tmp_path: Path) -> None:
    state = tmp_path / "train_latest_state"
    Training(state).run()
    weights = state / "state-00001.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    found = newest_complete(state)
    assert found is not None
    folder, manifest, problems = found
    assert (folder, manifest.updates) == (previous_of(state), 9)
    assert problems == {state: f"{weights}: size or checksum differs from the manifest"}
    (previous_of(state) / "manifest.json").write_text("{")
    with pytest.raises(BrokenStateError, match=r"state-00001.safetensors: size or checksum differs"):
        newest_complete(state)


def test_a_manifest_names_files_of_its_own_folder_and_no_others(tmp_path: Path) -> None:
    state = tmp_path / "train_latest_state"
    Training(state).run()
    manifest = state / "manifest.json"
    text = manifest.read_text()
    outside = tmp_path / "state-00001.safetensors"
    outside.write_bytes((state / outside.name).read_bytes())
    for name in (f"../{outside.name}", str(outside), "..", "", "/dev/zero"):
        manifest.write_text(text.replace("state-00001.safetensors", name))
        with pytest.raises(BrokenStateError, match="is no name of a file"):
            read_manifest(state)
    # Opened, a pipe without a writer would never end.
    manifest.write_text(text)
    (state / outside.name).unlink()
    os.mkfifo(state / outside.name)
    with pytest.raises(BrokenStateError, match=r"state-00001.safetensors: missing, or not a regular file"):
        read_manifest(state)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("hidden_size", 7, r"model.config: .*hidden size \(7\) is not a multiple of the number of attention heads"),
        ("hidden_size", "abc", "model.config: .*'hidden_size'.* expected int, got str"),
        ("model_type", "zzz", "model.config: Unrecognized model identifier: zzz"),
        ("vocab_size", 10, "model.config.vocab_size 10: the tokenizer needs 259"),
        ("hiden_size", 64, r"^model.config.hiden_size: LlamaConfig has no such key; did you mean hidden_size\?$"),
        ("vocabsize", 260, r"^model.config.vocabsize: LlamaConfig has no such key; did you mean vocab_size\?$"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_in_one_short_line(key: str, value: object, reason: str) -> None:
    settings = edited()
    config = {**settings.model["config"], key: value}
    with pytest.raises(BadInputError, match=reason) as refused:
        model_config(msgspec.structs.replace(settings, model={"config": config}), ByteTokens())
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("llama", "rope_theta", 5000.0),  # an older name, which the class converts
        ("llama", "rope_scaling", {"rope_type": "linear", "factor": 2.0}),
        ("llama", "max_length", 20),  # a value for generation
        ("llama", "torch_dtype", "float32"),
        ("llama", "attn_implementation", "eager"),
        ("gpt2", "hidden_size", 24),  # another name of n_embd
        ("olmoe", "sliding_window", 8),  # only the model's source names it
        # Published configurations contain these, though nothing reads them.
        ("gpt2", "n_ctx", 1024),
        ("llama", "task_specific_params", {}),
        ("llama", "quantization_config", {"bits": 4}),
        ("mistral", "attention_bias", False),
        ("qwen2", "use_mrope", False),
        ("t5", "output_past", True),
        ("bart", "classif_dropout", 0.1),
    ],
)
def test_a_key_that_is_not_misspelt_is_accepted(kind: str, key: str, value: object) -> None:
    task = "seq2seq" if kind == "t5" else "causal"
    config = {"model_type": kind, "vocab_size": 260, key: value}
    model_config(msgspec.structs.replace(edited(), task=task, model={"config": config}), ByteTokens())


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("hidden_act", "nope", "model.config: no llama model works with these values: KeyError: 'nope'"),
        ("num_key_value_heads", 3, "model.config: no llama model works with these values: RuntimeError: The size of tensor"),
    ],
)
def test_a_configuration_that_only_the_model_refuses_is_bad_input(key: str, value: object, reason: str) -> None:
    """If a model is read from files, the user's configuration is not the cause."""
    settings = edited()
    bad = msgspec.structs.replace(settings, model={"config": {**settings.model["config"], key: value}})
    config = model_config(bad, ByteTokens())
    with pytest.raises(BadInputError, match=re.escape(reason)):
        open_engine(bad, open_accelerator(bad, config), config, None)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        BadInputError("another"),
    ],
)
def test_a_lack_of_memory_is_no_fault_of_the_configuration(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, blaming_config(edited()):
        raise error
    assert raised.value is error
