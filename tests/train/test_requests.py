"""A live edit trains like a restart with the same edit at that update."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from memtop.presets import Settings, SettingsError
from memtop.presets.schema import Lora, Zero
from memtop.train.channel import edit_live
from tests.forking import Program
from tests.train.failing import fresh, small, splits_of
from tests.train.support import Training, edited, held_out
from tests.train.test_processes import converse, environment
from tests.train.test_processes import listener as listener

AT, UPDATES = 4, 9


def base(**changes: Any) -> Settings:
    return small(dropout=0.1, batch=4, accumulation=2, target_samples=8 * UPDATES, eval_every=3, **changes)


def live(folder: Path, settings: Settings, values: dict[str, Any]) -> Training:
    """A whole training that is edited after update AT."""
    training = fresh(folder, settings, evaluation=held_out())
    training.channel.commands[AT] = [(7, "change", values)]
    training.run()
    return training


def restarted(folder: Path, settings: Settings, after: Settings) -> tuple[Training, Training]:
    """The same training in two parts, stopped after update AT and resumed with the other
    settings."""
    first = fresh(folder, settings, evaluation=held_out())
    first.channel.commands[AT] = [(7, "stop", {})]
    first.run()
    second = fresh(folder, after, evaluation=held_out())
    second.run()
    return first, second


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"batch": 8, "accumulation": 1}, {"batch": 8, "accumulation": 1}),
        ({"batch": "2"}, {"batch": 2}),
        ({"accumulation": 1, "batch": None}, {"accumulation": 1}),
        ({"batch": 4, "accumulation": 4}, {"accumulation": 4}),
        ({"gradient_checkpointing": True}, {"gradient_checkpointing": True}),
        ({"workers": "1"}, {"workers": 1}),
        ({"eval_batch": 3}, {"eval_batch": 3}),
        ({"batch": 2, "accumulation": 4, "gradient_checkpointing": "true", "eval_batch": 1}, None),
    ],
    ids=str,
)
def test_a_live_edit_trains_like_a_restart_with_it(
    tmp_path: Path, values: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    settings = base()
    training = live(tmp_path / "live", settings, values)
    expected = expected or {"batch": 2, "accumulation": 4, "gradient_checkpointing": True, "eval_batch": 1}
    after = msgspec.structs.replace(settings, **expected)
    first, second = restarted(tmp_path / "restarted", settings, after)
    assert training.digests == first.digests + second.digests
    assert training.losses == first.losses + second.losses
    for name, weight in second.weights().items():
        assert torch.equal(training.weights()[name], weight), name
    evaluations = [report["loss"] for t in (first, second) for report in t.channel.of("evaluation")]
    assert [report["loss"] for report in training.channel.of("evaluation")] == evaluations
    # All reports of the edit agree.
    ((number, ok, message),) = training.channel.answers
    assert (number, ok) == (7, True)
    assert message.startswith(f"from update {AT + 1} on: ")
    assert training.channel.results == [{"update": AT + 1, "changes": expected}]
    (change,) = training.channel.of("settings")
    assert (change["update"], change["changes"], change["reason"]) == (AT + 1, expected, "asked")
    assert change["total_updates"] == len(training.losses)
    assert training.trainer.settings == after
    saved = msgspec.json.decode((tmp_path / "live" / "train_latest_state" / "manifest.json").read_bytes())
    assert msgspec.convert(saved["settings"], Settings) == after
    assert saved["updates"] == len(training.losses)


def test_checkpointing_is_switched_on_and_off_under_adapters(tmp_path: Path) -> None:
    adapters = {"method": "lora", "lora": Lora(r=2, alpha=4, dropout=0.1, targets=("c_attn", "c_proj"))}
    for number, on in enumerate((True, False)):
        settings = base(gradient_checkpointing=not on, **adapters)
        training = live(tmp_path / f"live{number}", settings, {"gradient_checkpointing": on})
        calls = [m for m in training.model.modules() if getattr(m, "gradient_checkpointing", False)]
        assert bool(calls) is on
        after = msgspec.structs.replace(settings, gradient_checkpointing=on)
        first, second = restarted(tmp_path / f"restarted{number}", settings, after)
        assert training.losses == first.losses + second.losses
        for name, weight in second.weights().items():
            assert torch.equal(training.weights()[name], weight), name


def test_an_edit_that_changes_nothing_says_so(tmp_path: Path) -> None:
    training = live(tmp_path, base(), {"batch": 4})
    assert training.channel.answers == [(7, True, "nothing to change: these are the present values")]
    assert training.channel.of("settings") == []


def test_an_invalid_edit_is_refused_and_the_training_continues(tmp_path: Path) -> None:
    training = live(tmp_path, base(), {"batch": 0})
    assert training.channel.answers == [(7, False, "batch 0: must be at least 1")]
    assert len(training.losses) == UPDATES
    assert set(splits_of(training.channel).values()) == {(4, 2)}


@pytest.mark.parametrize(
    ("settings", "values", "message"),
    [
        (edited(), {}, "change {}: names no setting; choose from batch, accumulation"),
        (edited(), {"batch": None}, "change {}: names no setting"),
        (edited(), {"seq_len": 32}, "seq_len 32: cannot change during a run, only batch, accumulation"),
        (edited(), {"batch": "many"}, "batch 'many': must be a whole number"),
        (edited(), {"batch": 0}, "batch 0: must be at least 1"),
        (edited(), {"batch": 0, "accumulation": 4}, "batch 0: must be at least 1"),
        (edited(), {"workers": -1}, "workers -1: must be 0 or more"),
        (edited(zero=Zero(stage=2)), {"batch": 2}, "batch 2: cannot change while ZeRO-2 runs; restart with it"),
        (edited(zero=Zero(stage=3)), {"accumulation": 4, "batch": 4}, "accumulation 4: cannot change while ZeRO-3 runs"),
        (
            edited(zero=Zero(stage=1)),
            {"gradient_checkpointing": "true"},
            "gradient_checkpointing true: cannot change while ZeRO-1",
        ),
    ],
)
def test_every_refusal_names_field_value_and_reason(settings: Settings, values: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        edit_live(settings, values)
    assert str(refused.value).startswith(message)
    assert len(str(refused.value).splitlines()) == 1


def test_under_zero_only_independent_settings_may_change() -> None:
    settings = edit_live(edited(zero=Zero(stage=2)), {"eval_batch": 2, "workers": 3, "batch": 4})
    assert (settings.eval_batch, settings.workers) == (2, 3)


def test_a_checkpoint_requested_with_a_change_has_the_new_settings(tmp_path: Path) -> None:
    training = fresh(tmp_path, base(), evaluation=held_out())
    training.channel.commands[AT] = [(7, "change", {"batch": 2}), (8, "checkpoint", {}), (9, "stop", {})]
    assert training.run() == "stopped"
    saved = msgspec.json.decode((tmp_path / "train_latest_state" / "manifest.json").read_bytes())
    assert (saved["updates"], saved["settings"]["batch"], saved["settings"]["accumulation"]) == (AT, 2, 2)
    assert {number: ok for number, ok, _ in training.channel.answers} == {7: True, 8: True, 9: True}


def whole_reports(folder: Path) -> list[dict[str, Any]]:
    """The complete lines of the journal, which may not exist yet."""
    path = folder / "rank-0.jsonl"
    text = path.read_text() if path.exists() else ""
    return [msgspec.json.decode(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def test_a_running_process_is_changed_over_its_socket(tmp_path: Path, listener: socket.socket) -> None:
    settings = edited(target_samples=8 * 100_000, save_every=100_000)
    (tmp_path / "settings.json").write_bytes(msgspec.json.encode(settings))
    module = ("-m", "memtop.train", "--settings", str(tmp_path / "settings.json"), "--state-dir", str(tmp_path / "state"))
    process = Program(
        [sys.executable, *module],
        env=environment(tmp_path, MEMTOP_SOCKET=listener.getsockname()),
        stdout=subprocess.DEVNULL,
    )
    try:
        # The agent greets before the trainer offers commands.
        until = time.monotonic() + 120
        while not any(report["type"] == "step" for report in whole_reports(tmp_path)):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.1)
        _, changed, refused, stopped = converse(
            listener,
            {"type": "command", "id": 1, "name": "change", "values": {"batch": 2, "accumulation": None}},
            {"type": "command", "id": 2, "name": "change", "values": {"batch": 0}},
            {"type": "command", "id": 3, "name": "stop"},
        )
        assert process.wait(timeout=120) == 0
    finally:
        process.kill()
        process.wait()
    answers = {answer["id"]: answer for answer in (changed, refused, stopped)}
    assert answers[1]["ok"]
    assert answers[1]["result"]["changes"] == {"batch": 2}
    assert not answers[2]["ok"]
    sent = whole_reports(tmp_path)
    (change,) = [report for report in sent if report["type"] == "settings"]
    assert change["update"] == answers[1]["result"]["update"]
    saved = msgspec.json.decode((tmp_path / "state" / "manifest.json").read_bytes())
    assert (saved["settings"]["batch"], saved["settings"]["accumulation"]) == (2, settings.accumulation)
