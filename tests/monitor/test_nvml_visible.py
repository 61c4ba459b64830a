"""The index that CUDA gives each GPU under CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import pytest

from memtop.supervisor.monitor.nvml.environment import CudaDevice, visible_indices
from memtop.supervisor.monitor.nvml.reader import NvmlReader
from tests.monitor.conftest import Clock
from tests.nvml_double.double import Script

SAME = tuple(CudaDevice(index, f"GPU-{index}{index}a", "A100", False) for index in range(4))
MIXED = (*SAME[:3], CudaDevice(3, "GPU-33a", "T4", False))
CUT = (CudaDevice(0, "GPU-00a", "A100", True, ("MIG-x1", "MIG-y2")), *SAME[1:])
ORDERED = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize(
    ("text", "gpus", "expected"),
    [
        ("0,1,2,3", SAME, {0: 0, 1: 1, 2: 2, 3: 3}),
        ("2,0", SAME, {2: 0, 0: 1}),
        (" 3 , 1", SAME, {3: 0, 1: 1}),
        ("1,9,2", SAME, {1: 0}),
        ("1,-1,2", SAME, {1: 0}),
        ("", SAME, {}),
        ("-1", SAME, {}),
        ("none", SAME, {}),
        ("²", SAME, {}),
        ("9" * 5000, SAME, {}),
        ("1," + "9" * 5000, SAME, {1: 0}),
        ("GPU-22,GPU-00a", SAME, {2: 0, 0: 1}),
        ("GPU-", SAME, {}),
        ("GPU-22,1", SAME, {2: 0}),
        ("1,GPU-22", SAME, {1: 0}),
        ("GPU-33a", MIXED, {3: 0}),
        ("MIG-y", CUT, {0: 0}),
        ("MIG-y2,MIG-x1", CUT, {0: 0}),
        ("MIG-GPU-00a/1/0", CUT, {0: 0}),
        ("MIG-GPU-zz/1/0", CUT, {}),
        ("GPU-11,MIG-x", CUT, {1: 0, 0: 1}),
    ],
)
def test_as_cuda_counts(text: str, gpus: tuple[CudaDevice, ...], expected: dict[int, int]) -> None:
    assert visible_indices({"CUDA_VISIBLE_DEVICES": text}, gpus) == expected


def test_without_the_variable() -> None:
    assert visible_indices(ORDERED, SAME) == {}


def test_numbers_of_different_models_are_not_guessed() -> None:
    answer = visible_indices({"CUDA_VISIBLE_DEVICES": "0,1"}, MIXED)
    assert isinstance(answer, str)
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in answer
    assert visible_indices({"CUDA_VISIBLE_DEVICES": "0,3"} | ORDERED, MIXED) == {0: 0, 3: 1}


def test_models_that_are_not_known_are_not_the_same() -> None:
    nameless = [CudaDevice(index, None, None, False) for index in range(2)]
    assert isinstance(visible_indices({"CUDA_VISIBLE_DEVICES": "0"}, nameless), str)


@pytest.mark.parametrize("order", [{}, ORDERED])
def test_numbers_with_mig_are_not_guessed(order: dict[str, str]) -> None:
    assert isinstance(visible_indices({"CUDA_VISIBLE_DEVICES": "1"} | order, CUT), str)


@pytest.mark.parametrize("text", ["1,1", "GPU-22,GPU-22a"])
def test_one_gpu_twice(text: str) -> None:
    answer = visible_indices({"CUDA_VISIBLE_DEVICES": text}, SAME)
    assert isinstance(answer, str)
    assert "twice" in answer


def test_in_the_samples(driver: Script, clock: Clock) -> None:
    for index in range(3):
        driver.gpu(index, total=1, name="A100")
    driver.write()
    reader = NvmlReader(monotonic=clock, environment={"CUDA_VISIBLE_DEVICES": "2,0"})
    assert [gpu.visible_index for gpu in reader.read().gpus] == [1, None, 0]
    clock.pass_(1.0)
    assert [gpu.visible_index for gpu in reader.read().gpus] == [1, None, 0]
    driver.clear()
    for index, name in enumerate(("A100", "A100", "T4")):
        driver.gpu(index, total=1, name=name, uuid=f"GPU-new{index}")
    driver.write()
    clock.pass_(10.0)
    first = reader.read().gpus[0]
    assert first.visible_index is None
    assert "different GPU models" in first.unknown["visible_index"]
    reader.close()
