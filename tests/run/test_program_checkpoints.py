"""The checkpoints of Hugging Face's Trainer: which one is complete, and the copy that memtop
keeps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from memtop.supervisor.errors import RunFolderError
from memtop.supervisor.run.grip import Grip
from memtop.supervisor.run.record import program_checkpoints
from memtop.supervisor.run.record.program_checkpoints import KEPT, keep, newest_for, newest_of


def save(output: Path, update: int, *names: str) -> Path:
    folder = output / f"checkpoint-{update}"
    (folder / "global").mkdir(parents=True)
    for name in names or ("model.safetensors", "optimizer.pt", "trainer_state.json"):
        text = json.dumps({"global_step": update, "train_batch_size": 8}) if name == "trainer_state.json" else name
        (folder / name).write_text(text)
    return folder


def test_the_newest_complete_one_counts_by_its_number(tmp_path: Path) -> None:
    assert newest_of(tmp_path / "none") is None
    for update in (9, 10, 100):
        save(tmp_path, update)
    (tmp_path / "checkpoint-last").mkdir()
    found = newest_of(tmp_path)
    assert found is not None
    assert (found.updates, found.complete, Path(found.path).name) == (100, True, "checkpoint-100")
    (tmp_path / "checkpoint-100" / "checkpoint-is-incomplete.txt").touch()
    (tmp_path / "checkpoint-10" / "trainer_state.json").write_text('{"global_step": 1')
    found = newest_of(tmp_path)
    assert found is not None
    assert found.updates == 9


def test_what_was_there_before_the_run_is_of_another_training(tmp_path: Path) -> None:
    for update in (5, 500):
        save(tmp_path, update)
    earlier = {path.name: (path / "trainer_state.json").stat().st_mtime_ns // 1000 for path in tmp_path.iterdir()}
    assert newest_of(tmp_path, earlier) is None
    # The program has saved over one of them; an interrupted save is there, too.
    (tmp_path / "checkpoint-5" / "trainer_state.json").unlink()
    save(tmp_path, 7, "model.safetensors")
    found = newest_of(tmp_path, earlier)
    assert found is not None
    assert (found.updates, found.complete) == (None, False)
    (tmp_path / "checkpoint-5" / "trainer_state.json").write_text('{"global_step": 5}')
    found = newest_of(tmp_path, earlier)
    assert found is not None
    assert found.updates == 5
    # The one from which the program has resumed by itself counts.
    found = newest_of(tmp_path, earlier, 500)
    assert found is not None
    assert found.updates == 500


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("model.safetensors", "optimizer.pt"), "trainer_state.json is missing: the save was interrupted"),
        (("model.safetensors", "trainer_state.json"), "it has no state of the optimizer (save_only_model)"),
    ],
)
def test_what_training_cannot_continue_from_says_why(tmp_path: Path, names: tuple[str, ...], words: str) -> None:
    save(tmp_path, 5, *names)
    found = newest_of(tmp_path)
    assert found is not None
    assert not found.complete
    assert words in (found.problem or "")


def test_the_kept_one_survives_the_programs_own_and_an_older_one_goes(tmp_path: Path) -> None:
    run, output = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    first = newest_of(save(output, 5).parent)
    assert first is not None
    kept = keep(first, run)
    assert kept.path == str(run / KEPT / "checkpoint-5")
    assert keep(kept, run) == kept
    shutil.rmtree(first.path)
    grip = Grip(output_dir=str(output))
    found = newest_for(run, grip)
    assert found is not None
    assert (found.path, found.updates, found.complete) == (kept.path, 5, True)
    save(output, 7, "model.safetensors")
    # An interrupted save is newer, but not complete.
    assert newest_for(run, grip) == found
    later = newest_of(save(output, 9).parent)
    assert later is not None
    keep(later, run)
    assert [path.name for path in (run / KEPT).iterdir()] == ["checkpoint-9"]


def test_a_checkpoint_that_the_program_saves_over_is_copied(tmp_path: Path) -> None:
    (run := tmp_path / "run").mkdir()
    folder = save(tmp_path / "out", 1)
    (folder / "trainer_state.json").write_text('{"global_step": 40}')
    found = newest_of(folder.parent)
    assert found is not None
    kept = keep(found, run)
    with (folder / "optimizer.pt").open("r+") as file:
        file.write("half")
    assert (Path(kept.path) / "optimizer.pt").read_text() == "optimizer.pt"
    # Its number, written last, is still the same.
    again = newest_for(run, Grip(output_dir=str(folder.parent)))
    assert again is not None
    assert (again.path, again.updates) == (kept.path, 40)


def test_a_checkpoint_that_is_deleted_meanwhile_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run := tmp_path / "run").mkdir()
    found = newest_of(save(tmp_path / "out", 5).parent)
    assert found is not None
    shutil.rmtree(found.path)
    with pytest.raises(RunFolderError, match="checkpoint-5: cannot be kept in"):
        keep(found, run)

    def without_state(source: str, target: str) -> None:
        if not source.endswith("trainer_state.json"):
            shutil.copy2(source, target)

    again = newest_of(save(tmp_path / "out", 6).parent)
    assert again is not None
    monkeypatch.setattr(program_checkpoints, "link_or_copy", without_state)
    with pytest.raises(RunFolderError, match=r"cannot be kept in .*: it was removed meanwhile"):
        keep(again, run)
    assert list((run / KEPT).iterdir()) == []
