"""`memtop restart RUN --batch B --accum A` of programs with a profile: small programs of our own in
the style of each."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from memtop.supervisor.run.record.whole_files import why_not_whole
from tests.conftest import Runs, wait_for_file

PROGRAMS = Path(__file__).with_name("programs")


def start(runs: Runs, name: str, script: str, *words: str, until: str = "10 ", file: str = "updates.txt") -> None:
    """Start the program in a folder of its own, and wait until it has written this text: its first
    attempt waits there for a signal."""
    shutil.copytree(PROGRAMS / name, runs.root, dirs_exist_ok=True)
    runs.memtop("train", "--detach", "--name", "a", "--", sys.executable, script, *words)
    written = runs.root / file
    runs.wait("a", lambda _: written.exists() and until in written.read_text())


def rows(runs: Runs, name: str = "updates.txt") -> list[list[int]]:
    return [[int(word) for word in line.split()] for line in (runs.root / name).read_text().splitlines()]


def command(runs: Runs, attempt: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((runs.path / f"a/attempts/{attempt:04d}/command.json").read_text())
    return found


def test_global_variables_and_a_checkpoint_that_is_overwritten(runs: Runs) -> None:
    start(runs, "globals", "train.py", "small.py")
    program = runs.wait("a", lambda d: d["program"]["checkpoint"])["program"]
    assert (program["grip"], program["profile"]) == ("profile", "nanogpt")
    assert program["knobs"]["batch"] == {"value": 4, "name": "batch_size", "source": "small.py"}
    assert program["knobs"]["accumulation"]["source"] == "train.py"
    refused = runs.memtop("restart", "a", "--seq-len", "4", "--detach", status=2).stderr
    assert refused.startswith("memtop: seq_len: block_size belongs to the model")
    answer = runs.memtop("restart", "a", "--batch", "2", "--accum", "8", "--detach").stderr
    assert "batch 4 x 4 -> 2 x 8: the effective batch stays 16; its samples are drawn at random" in answer
    document = runs.wait("a", lambda d: d["state"] == "finished")
    done = rows(runs)
    assert done == [[step, 4, 4] for step in range(11)] + [[step, 2, 8] for step in range(8, 41)]
    argv = command(runs, 2)["argv"]
    assert argv[2:] == ["small.py", "--batch_size=2", "--gradient_accumulation_steps=8", "--init_from=resume"]
    assert document["attempts"][1]["start_updates"] == 8
    assert document["effective_batch"] == 16
    assert [event.message for event in runs.events("a", "resume")][-1].startswith("the program has resumed")
    assert runs.events("a", "knob") == []
    metrics = json.loads(runs.memtop("show", "a", "--json", "--metrics").stdout)["metrics"]
    assert [row["update"] for row in metrics] == sorted({row["update"] for row in metrics})


def test_a_save_that_the_stop_interrupts_costs_no_more_than_that_save(runs: Runs) -> None:
    start(runs, "globals", "train.py", "--hangs_in_save=True", until="7 ")
    path, copy = runs.root / "out/ckpt.pt", runs.path / "a/program_checkpoint/ckpt.pt"
    wait_for_file(copy.with_name("kept.json"))
    (runs.root / "go").touch()
    while why_not_whole(path) is None:
        time.sleep(0.02)
    stop = runs.start("stop", "a", stderr=subprocess.PIPE)
    says = f"the program is saving {path}: SIGINT follows when it has saved"
    runs.wait("a", lambda _: says in [event.message for event in runs.events("a", "stop")])
    (runs.root / "stuck").touch()
    assert says in stop.communicate()[1]
    assert zipfile.is_zipfile(path)
    with pytest.raises(RuntimeError, match="failed locating file data/"):
        torch.load(path)
    assert torch.load(copy)["iter_num"] == 4
    runs.memtop("restart", "a", "--detach")
    document = runs.wait("a", lambda d: d["state"] == "finished")
    assert document["attempts"][1]["start_updates"] == 4
    assert [step for step, *_ in rows(runs)] == [*range(8), *range(4, 41)]
    assert path.with_name("ckpt.pt.incomplete").exists()


def test_a_program_inside_a_shell_has_a_profile_too(runs: Runs) -> None:
    shutil.copytree(PROGRAMS / "globals", runs.root, dirs_exist_ok=True)
    text = f"{sys.executable} train.py small.py"
    said = runs.memtop("train", "--detach", "--name", "a", "--", "sh", "-c", text).stderr
    assert "memtop: profile nanogpt: " in said
    assert runs.show("a")["command"] == text.split()
    runs.memtop("stop", "a")
    many = ("--name", "b", "--headless", "--", "sh", "-c", f"true && {text} --help")
    said = runs.memtop("train", *many, status=None).stderr
    assert "memtop: no profile: `sh -c` has more than one simple command, so memtop can change no options in it; " in said
    refused = runs.memtop("train", "--program-profile", "nanogpt", *many, status=2).stderr
    assert refused.startswith("memtop: --program-profile nanogpt: `sh -c` has more than one simple command")


def test_a_knob_without_effect_is_an_event(runs: Runs) -> None:
    start(runs, "globals", "train.py", "--ignores_batch=True")
    runs.memtop("restart", "a", "--batch", "1", "--detach")
    runs.wait("a", lambda d: d["state"] == "finished")
    (event,) = runs.events("a", "knob")
    text = "this setting had no effect: the number of tokens of an update 32 was asked for, the program uses 128"
    assert event.message == text


def test_a_program_that_does_not_start_returns_to_the_settings_before(runs: Runs) -> None:
    start(runs, "globals", "train.py", "--dies_with_batch=1")
    runs.memtop("restart", "a", "--batch", "1", "--accum", "8", "--detach")
    document = runs.wait("a", lambda d: d["state"] == "finished")
    assert [attempt["outcome"] for attempt in document["attempts"]] == ["restarted", "failed", "finished"]
    assert {tuple(row[1:]) for row in rows(runs)} == {(2, 4)}
    assert [row["knobs"] for row in document["configurations"]] == [{}, {"batch": "1", "accumulation": "8"}, {}]


def test_a_position_in_micro_batches_is_converted(runs: Runs) -> None:
    start(runs, "micro", "train_small.py", "--batch_size=4", until="[0, 10, ", file="samples.jsonl")
    answer = runs.memtop("restart", "a", "--batch", "2", "--accum", "4", "--detach").stderr
    assert "its position is converted in a copy of the checkpoint" in answer
    runs.wait("a", lambda d: d["state"] == "finished")
    done = samples(runs)
    # The new attempt goes on with the sample after the last that the checkpoint counts.
    assert done[10][:2] == [0, 17]
    before = [one for _, number, batch in done[:10] if number <= 8 for one in batch]
    after = [one for number, _, batch in done[10:] if number == 0 for one in batch]
    assert sorted(before + after) == list(range(96))
    assert sorted(one for number, _, batch in done if number == 1 for one in batch) == list(range(96))


def samples(runs: Runs) -> list[Any]:
    return [json.loads(line) for line in (runs.root / "samples.jsonl").read_text().splitlines()]


def test_a_folder_for_each_checkpoint_and_a_path_to_resume_from(runs: Runs) -> None:
    start(runs, "folders", "train_folders.py", "--output_dir", "out", "--per_device_train_batch_size=8")
    answer = runs.memtop("restart", "a", "--batch", "4", "--accum", "2", "--detach").stderr
    assert "the program draws the order of its epoch again" in answer
    document = runs.wait("a", lambda d: d["state"] == "finished")
    argv = command(runs, 2)["argv"][2:]
    assert argv[:-1] == [
        *["--output_dir", "out", "--per_device_train_batch_size=4"],
        *["--gradient_accumulation_steps", "2", "--resume_from_checkpoint"],
    ]
    assert argv[-1] == str(runs.path / "a/program_checkpoint/step_8")
    assert [row for row in rows(runs) if row[1] == 4] == [[step, 4, 2] for step in range(9, 31)]
    assert document["attempts"][1]["start_updates"] == 8
    assert runs.events("a", "knob") == []


def test_a_program_that_loses_its_position_is_restarted_only_if_somebody_wants_it(runs: Runs) -> None:
    start(runs, "chat", "train.py", "train", until="step:10,", file="logs/chat_trainer-20260101.log")
    before = (runs.root / "config.py").read_bytes()
    refused = runs.memtop("restart", "a", "--batch", "8", "--accum", "16", "--detach", status=2).stderr
    assert "it loads weights, optimizer and schedule, and begins its epochs again; `--set position=lost`" in refused
    runs.memtop("restart", "a", "--batch", "8", "--accum", "16", "--set", "position=lost", "--detach")
    runs.wait("a", lambda d: d["state"] == "finished")
    used = [json.loads(line) for line in (runs.root / "used.jsonl").read_text().splitlines()]
    folder = str(runs.root / "model_save/train_latest_state")
    assert used == [[16, 8, False, folder], [8, 16, True, folder]]
    assert (runs.root / "config.py").read_bytes() == before
    copy = (runs.path / "a/attempts/0002/config.py").read_text()
    assert "batch_size_per_gpu: int = 8  # of one process" in copy
    # The same without a supervisor.
    runs.wait("a", lambda d: d["supervisor_pid"] is None)
    refused = runs.memtop("restart", "a", "--set", "position=yes", "--detach", status=2).stderr
    assert "position yes: lost is the only value" in refused
    runs.memtop("restart", "a", "--set", "position=lost", "--detach")
    runs.wait("a", lambda d: d["state"] == "finished" and len(d["attempts"]) == 3)


@pytest.mark.parametrize("words", [(), ("--program-profile", "none")])
def test_without_a_profile_settings_are_refused(runs: Runs, words: tuple[str, ...]) -> None:
    source = "import time\nfor step in range(99):\n    print(f'step {step}/99 loss: 1.0', flush=True)\n    time.sleep(0.2)\n"
    (runs.root / "train.py").write_text(source)
    runs.memtop("train", "--detach", *words, "--name", "a", "--", sys.executable, "train.py")
    runs.wait("a", lambda d: d["state"] == "training")
    refused = runs.memtop("restart", "a", "--batch", "8", "--detach", status=2).stderr
    assert "a profile tells memtop more" in refused
    runs.memtop("stop", "a")
