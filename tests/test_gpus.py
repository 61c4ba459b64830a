"""`--gpus`: GPUs by index, and free GPUs; what `doctor` says about torch on them. With a scripted
driver."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from memtop.cli import doctor, gpus, run
from memtop.presets import load_presets, load_recipes, resolve
from memtop.presets.gpu_support import TorchBuild
from memtop.supervisor.errors import UsageError
from memtop.supervisor.monitor.sampler import Sampler
from memtop.supervisor.monitor.values import MachineSnapshot
from memtop.supervisor.run.record.folder import RunSpec, create_run
from memtop.supervisor.units import GIB
from tests.nvml_double.double import Script, driver, nvml_library

__all__ = ["driver", "nvml_library"]


@pytest.fixture
def four(driver: Script, monkeypatch: pytest.MonkeyPatch) -> Script:
    """GPU 0 has a compute process, 1 and 3 are free, 2 is lost."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return four_gpus(driver).write()


def four_gpus(driver: Script, **used: int) -> Script:
    for index in range(4):
        held = used.get(f"gpu{index}", 0 if index else 2 * GIB)
        driver.gpu(index, total=20 * GIB, used=held, reserved=GIB // 4, error=15 if index == 2 else 0)
    return driver.process(0, pid=os.getpid(), used=GIB)


def test_free_gpus_have_no_compute_process(four: Script) -> None:
    assert gpus.wanted(None) is None
    assert gpus.wanted("free:2") == ["1", "3"]
    four_gpus(four.clear(), gpu1=GIB // 8).process(1, pid=os.getpid(), used=GIB // 8, kind="graphics").write()
    assert gpus.wanted("free") == ["3"]
    assert gpus.wanted("free:2") == ["1", "3"]


def test_too_few_free_gpus_are_refused_with_the_processes_on_the_others(four: Script) -> None:
    with pytest.raises(UsageError) as refused:
        gpus.wanted("free:3")
    text = str(refused.value)
    assert text.startswith("--gpus free:3: 2 of 4 GPUs are free; GPU 0: process ")
    assert "computes on it" in text
    assert "GPU 2: the GPU is lost" in text
    four_gpus(four.clear(), gpu1=9 * GIB, gpu3=3 * GIB).write()
    with pytest.raises(UsageError, match=r"none of 4 GPUs is free; .*GPU 1: only 10\.8 GiB of 20\.0 GiB free"):
        gpus.wanted("free")


def test_only_gpus_visible_to_cuda_are_chosen(four: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    assert gpus.wanted("free") == ["3"]
    with pytest.raises(UsageError, match="1 of 2 GPUs is free"):
        gpus.wanted("free:2")


def test_gpus_hidden_from_cuda_are_not_candidates(four: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in range(4):
        four.gpu(index, uuid=f"GPU-{index}", total=20 * GIB, used=0)
    four.write()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")
    assert gpus.wanted("free") == ["1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UsageError, match=r"^--gpus free: CUDA_VISIBLE_DEVICES='' shows none of the GPUs 0, 1, 2, 3; change"):
        gpus.wanted("free")


def test_watched_gpus(four: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpus.watched(None) is None
    assert gpus.watched("2,00") == {0, 2}
    assert gpus.watched("visible") == {0, 1, 2, 3}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,0")
    assert gpus.watched(" visible ") == {0, 3}
    # The model of a lost GPU is not known: it may differ from the others.
    assert capsys.readouterr().err.startswith(
        "memtop: --gpus visible: taken as the driver's numbers: CUDA_VISIBLE_DEVICES contains"
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with pytest.raises(UsageError, match=r"^--gpus visible: CUDA_VISIBLE_DEVICES='-1' shows none of the GPUs 0, 1, 2, 3; "):
        gpus.watched("visible")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")
    with pytest.raises(UsageError, match=r"^--gpus visible: CUDA_VISIBLE_DEVICES names one GPU twice: .*; or give indices"):
        gpus.watched("visible")
    with pytest.raises(UsageError, match=r"^--gpus 1,4: this machine has no GPU 4; there are 0, 1, 2, 3$"):
        gpus.watched("1,4")
    four.clear().init_error(9).write()
    with pytest.raises(UsageError, match=r"^--gpus visible: no NVIDIA GPU: .*; leave --gpus out to watch the machine without"):
        gpus.watched("visible")


def test_named_gpus_must_exist(four: Script) -> None:
    assert gpus.wanted("1, 00") == ["1", "0"]
    with pytest.raises(UsageError, match=r"^--gpus 0,7: this machine has no GPU 7; there are 0, 1, 2, 3$"):
        gpus.wanted("0,7")


def test_without_a_driver_the_note_says_why(driver: Script) -> None:
    driver.init_error(9).write()
    for text in ("0", "free"):
        with pytest.raises(UsageError, match=rf"^--gpus {text}: no NVIDIA GPU: .*; leave --gpus out to train on the CPU$"):
            gpus.wanted(text)


@pytest.mark.parametrize("text", ["", "a", "-1", "0,0", "0,00", "0,,1", "\u0661", "99999", "all"])
def test_gpus_are_different_indices(text: str) -> None:
    with pytest.raises(UsageError, match="give different device indices like 0 or 0,1"):
        gpus.wanted(text)


@pytest.mark.parametrize("text", ["free:", "free:0", "free:x", "free:-1"])
def test_the_number_of_free_gpus_must_be_a_count(text: str) -> None:
    with pytest.raises(UsageError, match="give how many free GPUs, like free:2"):
        gpus.wanted(text)


def test_clients_of_an_mps_server_compute(four: Script) -> None:
    four.process(1, pid=os.getpid(), used=GIB // 8, kind="mps").write()
    assert gpus.wanted("free") == ["3"]
    with pytest.raises(UsageError, match=r"1 of 4 GPUs is free; .*GPU 1: process \d+ computes on it"):
        gpus.wanted("free:2")


@pytest.mark.parametrize("code", [3, 4, 999])
def test_a_gpu_without_a_process_list_is_not_free(four: Script, code: int) -> None:
    for version in (2, 3):
        four.fail(f"nvmlDeviceGetComputeRunningProcesses_v{version}", 1, code)
    four.write()
    assert gpus.wanted("free") == ["3"]
    with pytest.raises(UsageError, match=r"1 of 4 GPUs is free; .*GPU 1: who computes on it is not known: "):
        gpus.wanted("free:2")
    assert gpus.wanted("1") == ["1"], "whoever names it knows better"


PROHIBITED = {"compute_mode": 2}
EXCLUSIVE = {"compute_mode": 3}


@pytest.fixture
def modes(driver: Script, monkeypatch: pytest.MonkeyPatch) -> Script:
    """GPU 0 is prohibited, 1 is exclusive and in use, 2 is exclusive and free, 3 is fullest."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "build_of", lambda _: TorchBuild(version="2.13.0+cu126", cuda="12.6"))
    for index, (used, mode) in enumerate(((0, PROHIBITED), (GIB, EXCLUSIVE), (GIB + 1, EXCLUSIVE), (GIB + 2, {}))):
        driver.gpu(index, total=20 * GIB, used=used, uuid=f"GPU-{index}", **mode)
    return driver.process(1, pid=os.getpid(), used=GIB).write()


PASSED_OVER = {
    "0": "GPU 0: its compute mode is prohibited, so no program can use it; choose another GPU, or allow it as root: "
    "nvidia-smi -i 0 -c DEFAULT",
    "1": rf"GPU 1: its compute mode is exclusive process, and process {os.getpid()} computes on it .*; choose another GPU, or "
    rf"wait until process {os.getpid()} has ended",
}


def test_a_gpu_that_accepts_no_other_program_is_passed_over(modes: Script) -> None:
    assert gpus.choose_place(None, None).pinned == "GPU-2", "emptier ones accept none"
    assert gpus.wanted("free:2") == ["2", "3"]
    with pytest.raises(UsageError, match=r"2 of 4 GPUs are free; GPU 0: its compute mode is prohibited.*; GPU 1: its compute"):
        gpus.wanted("free:3")


@pytest.mark.parametrize("index", PASSED_OVER)
def test_a_chosen_gpu_that_accepts_no_other_program_is_refused(
    modes: Script, monkeypatch: pytest.MonkeyPatch, index: str
) -> None:
    for text in (index, f"3,{index}"):
        with pytest.raises(UsageError, match=rf"^--gpus {text}: {PASSED_OVER[index]}$"):
            gpus.wanted(text)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", index)
    with pytest.raises(UsageError, match=rf"^CUDA_VISIBLE_DEVICES={index}: {PASSED_OVER[index]}$"):
        gpus.choose_place(None, None)
    assert gpus.choose_place(None, "cpu") == gpus.Place()


def test_a_run_for_which_every_gpu_is_closed_does_not_begin(modes: Script) -> None:
    modes.clear().gpu(0, total=20 * GIB, used=0, **PROHIBITED).write()
    for device in ("auto", "cuda"):
        with pytest.raises(UsageError, match=rf"^device {device}: {PASSED_OVER['0']}$"):
            gpus.choose_place(None, device)


def test_a_restart_ends_its_own_processes_first(four: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Sampler.sample

    def of_run_a(sampler: Sampler) -> MachineSnapshot:
        machine = plain(sampler)
        own = [tuple(replace(process, run="a") for process in gpu.processes) for gpu in machine.gpus]
        return replace(machine, gpus=tuple(replace(gpu, processes=each) for gpu, each in zip(machine.gpus, own, strict=True)))

    monkeypatch.setattr(Sampler, "sample", of_run_a)
    four_gpus(four.clear(), gpu0=2 * GIB).gpu(0, total=20 * GIB, used=2 * GIB, **EXCLUSIVE).write()
    assert gpus.wanted("free:3", "a") == ["0", "1", "3"]
    assert gpus.wanted("0,1", "a") == ["0", "1"]
    for text in ("free:3", "0,1"):
        with pytest.raises(UsageError, match=r"GPU 0: its compute mode is exclusive process, and process \d+ computes on it"):
            gpus.wanted(text, "b")


def test_your_own_program_keeps_its_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = RunSpec(name="a", created=1.0, settings=None, command=("true",), cwd="/", memtop_version="0")
    create_run(tmp_path, own, fresh=False)
    assert run(["restart", "a", "--gpus", "1", "--runs-dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        "memtop: --gpus 1: this run's program is your own, and keeps its GPUs; a new run may have others: "
        "memtop train --gpus 1 -- COMMAND\n"
    )


def test_an_mps_server_shares_an_exclusive_gpu(modes: Script) -> None:
    modes.process(1, pid=os.getppid(), used=GIB, kind="mps").write()
    assert gpus.wanted("1") == ["1"]


def test_an_instance_of_an_exclusive_gpu_is_in_use_by_its_own_processes(modes: Script) -> None:
    modes.clear().gpu(0, total=20 * GIB, used=0, mig=1, **EXCLUSIVE)
    for position, used in ((0, 0), (1, GIB)):
        modes.mig(0, position, total=10 * GIB, used=used, uuid=f"MIG-{position}")
    modes.process(0, pid=os.getpid(), used=GIB, mig=0).write()
    assert gpus.choose_place(["0"], None).pinned == "MIG-1"


def test_doctor_names_gpus_that_accept_no_other_program(
    modes: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", "--json", "--runs-dir", str(tmp_path)]) == 0
    found = {one["check"]: one for one in json.loads(capsys.readouterr().out)}
    closed = found["gpu 0"]
    assert closed["ok"] is None
    assert closed["found"].endswith("20.0 GiB free; its compute mode is prohibited, so no program can use it")
    assert closed["advice"].endswith("nvidia-smi -i 0 -c DEFAULT")
    assert [found[f"gpu {index}"]["ok"] for index in (1, 2, 3)] == [None, True, True]


BUILDS = ", see https://pytorch.org/get-started/locally/"


def torch_checks(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[bool | None, str, str | None]]:
    """What `memtop doctor` finds about torch on each GPU."""
    assert run(["doctor", "--json", "--runs-dir", str(runs_dir)]) == 0
    found = json.loads(capsys.readouterr().out)
    return {one["check"]: (one["ok"], one["found"], one["advice"]) for one in found if one["check"].startswith("torch,")}


@pytest.mark.parametrize(
    ("build", "found", "advice"),
    [
        (
            TorchBuild(version="2.13.0+cpu", cuda=None),
            "torch 2.13.0+cpu is built for CPUs only and cannot use the GPU here (P100)",
            "install a build for CUDA",
        ),
        (
            TorchBuild(version="2.13.0+cu130", cuda="13.0"),
            "the NVIDIA driver 550.54.14 supports CUDA up to 12.4, and torch 2.13.0+cu130 needs CUDA 13",
            "install driver 580 or newer, or a torch build for CUDA 12",
        ),
        (
            TorchBuild(version="2.9.0+cu128", cuda="12.8"),
            "torch 2.9.0+cu128 has no kernels for the P100 (compute capability 6.0)",
            "install a torch build for CUDA 12.6",
        ),
    ],
    ids=lambda value: value.version if isinstance(value, TorchBuild) else "",
)
def test_the_doctor_says_why_torch_cannot_use_a_gpu(
    driver: Script,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    build: TorchBuild,
    found: str,
    advice: str,
) -> None:
    driver.gpu(0, total=16 * GIB, used=0, name="P100", major=6).write()
    monkeypatch.setattr(doctor, "build_of", lambda _: build)
    (check,) = torch_checks(tmp_path, capsys).values()
    assert check == (None, found, f"{advice}{BUILDS}")


def test_the_doctor_asks_torch_itself_for_its_kernels(
    driver: Script,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    driver.gpu(0, total=16 * GIB, used=0, name="A100", major=8).gpu(
        1, total=16 * GIB, used=0, name="H100", uuid="GPU-b"
    ).write()
    monkeypatch.setattr(doctor, "build_of", lambda _: TorchBuild(version="2.9.0a0+own", cuda="12.4"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("from torch import cuda\n")
    (package / "cuda.py").write_text("def get_arch_list():\n    return ['sm_80', 'sm_86']\n")
    checks = torch_checks(tmp_path, capsys)
    assert checks["torch, gpu 0"] == (True, "torch 2.9.0a0+own can compute on it", None)
    assert checks["torch, gpu 1"] == (
        None,
        "torch 2.9.0a0+own has no kernels for the H100 (compute capability 9.0; the build has 8.0, 8.6)",
        f"install a torch build that has them{BUILDS}",
    )
    # A torch that cannot be asked: nothing is known against it.
    (package / "cuda.py").write_text("raise ImportError('broken')\n")
    assert [ok for ok, _, _ in torch_checks(tmp_path, capsys).values()] == [True, True]


def read_by(**changed: object) -> gpus.ReadingPlace:
    """Where the model of a run with these settings writes."""
    base = resolve(load_recipes()["first-run"], preset=load_presets()["standard"])
    return gpus.place_to_read(replace(base, **changed))


def test_a_saved_model_writes_on_the_runs_first_gpu_if_it_has_room_there(four: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "build_of", lambda path: None)  # what torch is here does not matter
    busy = read_by(gpus="0,1")
    assert busy.visible is None
    assert busy.words.startswith("computes on the CPU: GPU 0: process ")
    assert read_by(gpus="3,1") == gpus.ReadingPlace(visible="GPU-00000003", words="computes on GPU 3")
    assert read_by(gpus="GPU-00000001").visible == "GPU-00000001"
    assert read_by(gpus="GPU-9").words == "computes on the CPU: this machine has no GPU GPU-9, the run's first"
    assert read_by(gpus="1", device="cpu").words == "computes on the CPU: so does the run"
    four_gpus(four.clear(), gpu1=int(19.4 * GIB)).write()
    full = read_by(gpus="1")
    assert (full.visible, full.words) == (
        None,
        "computes on the CPU: GPU 1: 358 MiB free, and the model needs about 517 MiB",
    )
    unknown = read_by(gpus="3", model={"config": {"model_type": "new"}})
    assert unknown.words == "computes on the CPU: GPU 3: how much memory the model needs is not known"


def test_a_gpu_that_is_named_for_writing_is_used(four: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "build_of", lambda path: None)
    settings = resolve(load_recipes()["first-run"], preset=load_presets()["standard"])
    assert gpus.place_to_read(settings, "0") == gpus.ReadingPlace(visible="GPU-00000000", words="computes on GPU 0")
    assert gpus.place_to_read(settings, "cpu") == gpus.ReadingPlace(visible=None, words="computes on the CPU")
    for given, why in (("7", "this machine has no GPU 7; there are 0, 1, 2, 3"), ("0,1", "give the index of a GPU, or cpu")):
        with pytest.raises(UsageError, match=f"^--gpu {given}: {why}$"):
            gpus.place_to_read(settings, given)
