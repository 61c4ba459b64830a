"""Whether a saved file is whole, and the numbers in it, without torch."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pickle
import re
import subprocess
import sys
import time
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import save_file

from memtop.presets.program_profiles import CheckpointRule, Position
from memtop.presets.program_profiles import Counter as Step
from memtop.supervisor.observed.checkpoints import newest_checkpoint
from memtop.supervisor.run.record.checkpoints import checked
from memtop.supervisor.run.record.profile_checkpoints import Place, newest_of
from memtop.supervisor.run.record.whole_files import numbers_in, why_no_whole_folder, why_not_whole
from memtop.supervisor.wire import Checkpoint
from tests.run.interrupted import interrupt_save


def state(step: int) -> dict[str, Any]:
    model = torch.nn.Linear(200, 200)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(200)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": step, "loss": torch.tensor(2.5)}


def cut(path: Path, size: int) -> Path:
    os.truncate(path, size)
    return path


@pytest.mark.parametrize("share", [0.001, 0.3, 0.9, 0.999])
def test_a_file_of_torch_save_without_its_end_is_not_whole(tmp_path: Path, share: float) -> None:
    path = tmp_path / "ckpt.pt"
    torch.save(state(7), path)
    assert why_not_whole(path) is None
    assert numbers_in(path, ("iter_num", "missing", "loss")) == {"iter_num": 7}
    cut(path, int(path.stat().st_size * share))
    assert "its end is missing: the save was interrupted, or goes on" in str(why_not_whole(path))
    with pytest.raises(ValueError, match="its values cannot be read"):
        numbers_in(path, ("iter_num",))


def test_an_interrupted_save_is_not_whole_although_torch_has_closed_its_file(tmp_path: Path) -> None:
    path = tmp_path / "ckpt.pt"
    lacks = []
    for record in itertools.count(1):
        if not interrupt_save({"weights": [torch.ones(50) for _ in range(12)], "iter_num": 3}, path, record):
            break
        assert zipfile.is_zipfile(path)
        with pytest.raises(RuntimeError, match="failed locating file data"):
            torch.load(path)
        (lack,) = re.findall(r"it has no (\S+): the save was interrupted", str(why_not_whole(path)))
        lacks.append(lack)
    assert list(dict.fromkeys(lacks)) == ["data.pkl", *(f"data/{key}" for key in range(12))]
    assert why_not_whole(path) is None


def test_a_storage_has_the_bytes_that_the_pickle_says(tmp_path: Path) -> None:
    path = tmp_path / "ckpt.pt"
    for dtype, item in ((torch.float32, 4), (torch.bfloat16, 2), (torch.uint16, 2), (torch.complex128, 16), (torch.bool, 1)):
        torch.save({"weights": torch.zeros(50, dtype=dtype)}, path)
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "new.pt", "w") as new:
            for one in old.infolist():
                new.writestr(one.filename, old.read(one)[: -1 if one.filename.endswith("data/0") else None])
        told = f"its data/0 has {50 * item - 1} of {50 * item} bytes: the save was interrupted"
        assert told in str(why_not_whole(tmp_path / "new.pt"))


def test_no_whole_file_is_refused(tmp_path: Path) -> None:
    """Whatever torch can write."""
    path, base = tmp_path / "ckpt.pt", torch.arange(24, dtype=torch.float32)
    values = {
        "kinds": [torch.zeros(3, dtype=one) for one in (torch.float8_e5m2, torch.uint64, torch.complex64, torch.int8)],
        "views": [base[2:4], base.view(4, 6).T, torch.ones(4).untyped_storage()],
        "part of an element": torch.frombuffer(bytearray(11), dtype=torch.uint8)[:8].view(torch.float64),
        "others": [torch.empty(0), torch.ones(3, device="meta"), torch.eye(3).to_sparse(), torch.nn.Linear(2, 2)],
        "objects": [argparse.Namespace(a=1), Counter("ab"), Path("x"), Runs.__reduce__],
    }
    for protocol in (2, 3, 4, 5):
        torch.save(values, path, pickle_protocol=protocol)
        assert why_not_whole(path) is None
    torch.jit.save(torch.jit.script(torch.nn.Linear(3, 4)), path)  # type: ignore[no-untyped-call]
    assert why_not_whole(path) is None
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("weights.npy", b"numbers")
    assert why_not_whole(path) is None
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("ckpt/data.pkl", b"no pickle")
    assert why_not_whole(path) is None


def test_a_file_without_checksums_is_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(compute_crc32=False)
    try:
        torch.save(state(7), tmp_path / "ckpt.pt")
        interrupt_save(state(7), tmp_path / "interrupted.pt", 7)
    finally:
        torch.serialization.set_crc32_options(compute_crc32=True)
    assert why_not_whole(tmp_path / "ckpt.pt") is None
    assert numbers_in(tmp_path / "ckpt.pt", ("iter_num",)) == {"iter_num": 7}
    assert "it has no data/" in str(why_not_whole(tmp_path / "interrupted.pt"))


def test_an_empty_or_missing_file_and_a_pipe_are_not_whole(tmp_path: Path) -> None:
    (tmp_path / "empty.pt").touch()
    assert "it is empty" in str(why_not_whole(tmp_path / "empty.pt"))
    assert "No such file" in str(why_not_whole(tmp_path / "none.pt"))
    os.mkfifo(tmp_path / "pipe")
    os.utime(tmp_path / "pipe", (1, 1))
    assert why_not_whole(tmp_path / "pipe")


def test_a_safetensors_file_has_all_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1000), "b": torch.ones(10)}, path)
    assert why_not_whole(path) is None
    size = path.stat().st_size
    assert f"it has {size - 1} of {size} bytes" in str(why_not_whole(cut(path, size - 1)))
    assert "its header is not whole" in str(why_not_whole(cut(path, 40)))
    path.write_bytes(b"\xff" * 40)
    assert "does not begin like" in str(why_not_whole(path))


def test_a_file_of_an_unknown_format_must_be_steady(tmp_path: Path) -> None:
    path = tmp_path / "state.bin"
    path.write_bytes(b"anything")
    assert "it was written just now" in str(why_not_whole(path))
    os.utime(path, (time.time() - 60, time.time() - 60))
    assert why_not_whole(path) is None


def test_numbers_are_found_below_other_values(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps({"trainer": {"step": 12, "done": True}}))
    assert numbers_in(tmp_path / "state.json", ("trainer.step", "trainer.done", "trainer")) == {"trainer.step": 12}
    values = {"args": argparse.Namespace(batch=4), "loops": OrderedDict(fit=Counter(steps=3))}
    torch.save(values, tmp_path / "state.ckpt")
    assert numbers_in(tmp_path / "state.ckpt", ("args.batch", "loops.fit.steps")) == {"args.batch": 4}


class Runs:
    """A pickle that would run a command."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("made",)


def test_nothing_that_a_file_names_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"bad": Runs(), "step": 3}, "ckpt.pt")
    assert numbers_in(tmp_path / "ckpt.pt", ("step",)) == {"step": 3}
    assert not (tmp_path / "made").exists()
    pickle.loads(pickle.dumps(Runs()))
    assert (tmp_path / "made").exists(), "the file really names it"


def test_torch_is_not_loaded() -> None:
    code = "import sys, memtop.supervisor.run.record.whole_files; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def save_sharded(folder: Path) -> Path:
    """As Lightning does with FSDP; one process writes all shards."""
    saved = state(0)
    torch.distributed.checkpoint.save({"model": saved["model"], "optimizer_0": saved["optimizer"]}, checkpoint_id=folder)
    torch.save({"global_step": 50, "epoch": 1}, folder / "meta.pt")
    return folder


def save_with_deepspeed(folder: Path, stage: int = 2) -> Path:
    """As Lightning does with DeepSpeed on two processes, of which the second is the slower one."""
    (folder / "checkpoint").mkdir(parents=True)
    saved = state(0)
    names = ["zero_pp_rank_0_", "zero_pp_rank_1_"]
    for name in names if stage == 3 else [""]:
        values = {"module": saved["model"], "dp_world_size": 2, "global_step": 50, "epoch": 1}
        torch.save(values, folder / f"checkpoint/{name}mp_rank_00_model_states.pt")
    for name in names:
        torch.save({"optimizer_state_dict": saved["optimizer"]}, folder / f"checkpoint/{name}mp_rank_00_optim_states.pt")
        if name == names[0]:
            (folder / "latest").write_text("checkpoint")
    (folder / "zero_to_fp32.py").touch()
    return folder


def save_with_zero_3(folder: Path) -> Path:
    return save_with_deepspeed(folder, 3)


@pytest.mark.parametrize(
    ("save", "last"), [(save_sharded, "meta.pt"), (save_with_deepspeed, "latest"), (save_with_zero_3, "latest")]
)
def test_a_folder_of_lightning_is_complete_when_all_shards_are_there(tmp_path: Path, save: Any, last: str) -> None:
    path = save(tmp_path / "epoch=1-step=50.ckpt")
    place = Place(
        paths=(str(tmp_path / "*.ckpt"),),
        rule=CheckpointRule(paths=("*",), step=Step(read="torch", key="global_step")),
        position=Position(counts="updates", order="reshuffled", length="epochs"),
    )

    def verdicts() -> set[bool]:
        """Of a program with a profile, one that reports the path, and one that is observed."""
        found, observed = newest_of(place), newest_checkpoint([tmp_path], 0.0)
        reported = checked(Checkpoint(path=str(path), updates=50, complete=False))
        assert found is not None
        assert not found.complete or (found.updates, found.problem) == (50, None)
        assert reported.problem == found.problem == why_no_whole_folder(path)
        return {found.complete, reported.complete, observed is not None}

    assert verdicts() == {True}
    needed = [file for file in path.rglob("*") if file.is_file() and file.suffix != ".py"]
    for file in needed:
        file.rename(tmp_path / "away")
        assert verdicts() == {False}, file
        (tmp_path / "away").rename(file)
        if file.name not in (last, ".metadata"):
            content, times = file.read_bytes(), file.stat()
            cut(file, times.st_size // 2)
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
            assert verdicts() == {False}, file
            file.write_bytes(content)
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert verdicts() == {True}
    # It saves over the folder: the last file is that of the save before.
    os.utime(path / last, (1e9, 1e9))
    assert verdicts() == {False}
