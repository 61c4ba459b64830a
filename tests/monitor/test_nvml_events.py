"""The driver's events, and GPUs that are lost and return."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pynvml
import pytest

from memtop.supervisor.monitor.nvml.errors import xid_words
from memtop.supervisor.monitor.nvml.events import AGAIN_SECONDS
from memtop.supervisor.monitor.nvml.reader import NvmlReader
from memtop.supervisor.monitor.values import GpuSample
from tests.monitor.conftest import GIB, Clock, eventually, one
from tests.nvml_double.double import Script


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("memtop-nvml")]


def troubled(reader: NvmlReader, count: int = 1) -> GpuSample:
    """The sample of the only GPU, once it has this many troubles."""
    return eventually(lambda: one(reader), lambda gpu: len(gpu.troubles) == count)


@pytest.mark.parametrize(
    ("code", "of_program", "word"),
    [
        *((13, True, "invalid access"), (31, True, "page fault"), (43, True, "stopped"), (45, True, "discarded")),
        *((48, False, "double-bit"), (63, False, "spare"), (64, False, "replaced"), (74, False, "NVLink")),
        *((79, False, "fallen off the bus"), (94, False, "contained"), (95, False, "uncontained")),
        *((119, False, "firmware"), (120, False, "firmware"), (777, False, "dmesg")),
    ],
)
def test_xids_in_plain_words(driver: Script, reader: NvmlReader, code: int, of_program: bool, word: str) -> None:
    driver.gpu(0, total=GIB).write()
    one(reader)
    driver.event(0, 0x8, code).write()
    (trouble,) = troubled(reader).troubles
    assert (trouble.kind, trouble.code, trouble.fault_of_program) == ("xid", code, of_program)
    assert trouble.message == xid_words(code)
    assert word in trouble.message
    assert trouble.time <= time.time()


@pytest.mark.parametrize(
    ("kind", "name", "word"),
    [
        *((0x2, "ecc", "double-bit"), (0x200, "ecc", "corrected"), (0x400, "ecc", "out of use")),
        *((0x800, "ecc", "replaced"), (0x1000, "ecc", "bad"), (0x2000, "ecc", "spread")),
        *((0x4000, "recovery", "cannot be used"), (0x8000, "recovery", "nvidia-smi -q")),
    ],
)
def test_other_events(driver: Script, reader: NvmlReader, kind: int, name: str, word: str) -> None:
    driver.gpu(0, total=GIB).write()
    one(reader)
    driver.event(0, kind).write()
    (trouble,) = troubled(reader).troubles
    assert (trouble.kind, trouble.code) == (name, None)
    assert word in trouble.message


def test_a_recovery_action_is_read_when_it_is_announced(driver: Script, reader: NvmlReader) -> None:
    driver.gpu(0, total=GIB).field(0, 230, 0).write()
    assert one(reader).details.recovery_action is None
    driver.clear().gpu(0, total=GIB).field(0, 230, 2).event(0, 0x8000).write()
    gpu = troubled(reader)
    assert gpu.troubles[0].message == "reboot the machine"
    assert gpu.details.recovery_action == "reboot the machine"
    driver.clear().gpu(0, total=GIB).field(0, 230, 0).event(0, 0x8000).write()
    gpu = troubled(reader, 2)
    assert "needs no recovery" in gpu.troubles[1].message


def test_the_newest_eight_of_the_right_gpu(driver: Script, reader: NvmlReader) -> None:
    driver.gpu(0, total=GIB).gpu(1, total=GIB).write()
    reader.read()
    for code in range(100, 110):
        driver.event(1, 0x8, code)
    driver.write()
    well, sick = eventually(
        lambda: reader.read().gpus, lambda gpus: bool(gpus[1].troubles) and gpus[1].troubles[-1].code == 109
    )
    assert [trouble.code for trouble in sick.troubles] == list(range(102, 110))
    assert well.troubles == ()


def test_events_from_before_are_not_seen(driver: Script, reader: NvmlReader) -> None:
    driver.gpu(0, total=GIB).event(0, 0x8, 79).write()
    one(reader)
    driver.event(0, 0x8, 13).write()
    (trouble,) = troubled(reader).troubles
    assert trouble.code == 13


@pytest.mark.parametrize("how", ["no events", "not supported", "no event sets"])
def test_a_gpu_without_events_is_not_ill(driver: Script, reader: NvmlReader, how: str, clock: Clock) -> None:
    driver.gpu(0, total=GIB, events=0 if how == "no events" else 0xFFFF)
    if how == "not supported":
        driver.fail("nvmlDeviceRegisterEvents", 0, 3)
    if how == "no event sets":
        driver.missing("nvmlEventSetCreate")
    driver.write()
    before = driver.calls("nvmlEventSetCreate")
    for _ in range(5):
        gpu = one(reader)
        clock.pass_(1.0)
    assert (gpu.error, gpu.troubles, gpu.total_bytes) == (None, (), GIB)
    assert names() == []
    assert driver.calls("nvmlEventSetCreate") - before == 1, "tried once"


def test_the_thread_ends_with_close(driver: Script, reader: NvmlReader) -> None:
    driver.gpu(0, total=GIB).write()
    before = driver.calls("nvmlEventSetFree")
    one(reader)
    assert names() == ["memtop-nvml-events"]
    reader.close()
    assert names() == []
    assert driver.calls("nvmlEventSetFree") - before == 1


@pytest.mark.parametrize("code", [1, 9, 999])
def test_an_unloaded_driver_ends_only_the_event_thread(driver: Script, reader: NvmlReader, clock: Clock, code: int) -> None:
    driver.gpu(0, total=GIB).write()
    one(reader)
    driver.fail("nvmlEventSetWait_v2", -1, code).write()
    eventually(names, lambda running: running == [])
    before = driver.calls("nvmlEventSetCreate")
    for _ in range(3):
        assert one(reader).error is None
    assert driver.calls("nvmlEventSetCreate") == before, "not tried again at every read"
    clock.pass_(AGAIN_SECONDS)
    driver.clear().gpu(0, total=GIB).write()
    one(reader)
    driver.event(0, 0x8, 31).write()
    assert troubled(reader).troubles[0].code == 31


def test_one_lost_gpu_does_not_end_the_events_of_the_others(
    driver: Script, reader: NvmlReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memtop.supervisor.monitor.nvml.events.LOST_SECONDS", 0.01)
    driver.gpu(0, total=GIB).write()
    one(reader)
    driver.fail("nvmlEventSetWait_v2", -1, 15).write()
    before = driver.calls("nvmlEventSetWait_v2")
    eventually(lambda: driver.calls("nvmlEventSetWait_v2"), lambda calls: calls > before + 3)
    driver.clear().gpu(0, total=GIB).event(0, 0x8, 31).write()
    assert troubled(reader).troubles[0].code == 31


def test_a_gpu_that_is_lost_and_returns(driver: Script, reader: NvmlReader, clock: Clock) -> None:
    driver.gpu(0, total=GIB).write()
    assert one(reader).troubles == ()
    driver.clear().gpu(0, total=GIB, error=15).write()
    for _ in range(3):
        clock.pass_(1.0)
        lost = one(reader)
    assert [(trouble.kind, trouble.message) for trouble in lost.troubles] == [("lost", lost.error)], "reported once"
    driver.clear().gpu(0, total=GIB).write()
    clock.pass_(12.0)
    assert [trouble.kind for trouble in one(reader).troubles] == ["lost", "returned"]


def test_a_gpu_that_is_no_longer_listed_and_returns(driver: Script, reader: NvmlReader, clock: Clock) -> None:
    driver.gpu(0, total=GIB, uuid="GPU-a").gpu(1, total=GIB, uuid="GPU-b").write()
    reader.read()
    driver.clear().gpu(0, total=GIB, uuid="GPU-a").write()
    clock.pass_(10.0)
    well, missing = reader.read().gpus
    assert well.troubles == ()
    assert [trouble.kind for trouble in missing.troubles] == ["lost"]
    driver.gpu(1, total=GIB, uuid="GPU-b").write()
    clock.pass_(10.0)
    kept, back = reader.read().gpus
    assert kept.troubles == ()
    assert [trouble.kind for trouble in back.troubles] == ["lost", "returned"]


def test_a_gpu_whose_uuid_is_known_late_keeps_its_troubles(driver: Script, reader: NvmlReader, clock: Clock) -> None:
    driver.gpu(0, total=GIB).fail("nvmlDeviceGetUUID", 0, 10).write()
    one(reader)
    driver.clear().gpu(0, total=GIB, error=15).write()
    clock.pass_(1.0)
    assert [trouble.kind for trouble in one(reader).troubles] == ["lost"]
    driver.clear().gpu(0, total=GIB).gpu(1, total=GIB).write()
    clock.pass_(30.0)
    for _ in range(2):
        first, second = reader.read().gpus
        assert first.uuid is not None
        assert ([trouble.kind for trouble in first.troubles], second.troubles) == (["lost", "returned"], ())
        clock.pass_(30.0)


def test_a_driver_that_is_reloaded_is_a_loss_and_a_return(driver: Script, reader: NvmlReader, clock: Clock) -> None:
    driver.gpu(0, total=GIB).write()
    one(reader)
    driver.clear().init_error(9).gpu(0, total=GIB, error=1).write()
    for _ in range(4):
        clock.pass_(1.0)
        reading = reader.read()
    assert reading.gpus == ()
    driver.clear().gpu(0, total=GIB).write()
    clock.pass_(10.0)
    assert [trouble.kind for trouble in one(reader).troubles] == ["lost", "returned"]
    driver.event(0, 0x8, 43).write()
    gpu = troubled(reader, 3)
    assert gpu.troubles[-1].code == 43, "the events come again"


def test_a_gpu_that_never_could_be_read_was_not_lost(driver: Script, reader: NvmlReader, clock: Clock) -> None:
    driver.gpu(0, total=GIB, error=16).write()
    one(reader)
    clock.pass_(3.0)
    assert one(reader).troubles == ()


def test_the_threads_do_not_keep_a_program_from_ending(nvml_library: Path, tmp_path: Path) -> None:
    """Not even without `close`, while a call into the driver blocks for an hour."""
    script = Script(tmp_path / "script").gpu(0, total=GIB).delay(3_600_000, "nvmlEventSetWait_v2")
    script.delay(3_600_000, "nvmlDeviceGetPcieThroughput").write()
    program = (
        "from memtop.supervisor.monitor.nvml.reader import NvmlReader; import threading\n"
        "reader = NvmlReader(); reader.read(); reader.want_pcie()\n"
        "print(sum(t.name.startswith('memtop-nvml') for t in threading.enumerate()))"
    )
    environment = {**os.environ, **script.env(nvml_library)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "2\n"


def test_an_event_belongs_to_the_gpu_that_had_the_index_when_it_arrived(
    driver: Script, reader: NvmlReader, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event arrives after the reader has taken the events, and before it notices that the GPUs
    have changed places."""
    driver.gpu(0, total=GIB, uuid="GPU-a").gpu(1, total=GIB, uuid="GPU-b").write()
    reader.read()
    count = pynvml.nvmlDeviceGetCount

    def arrive() -> int:
        monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", count)
        driver.event(0, 0x8, 79).write()
        waits = driver.calls("nvmlEventSetWait_v2")
        eventually(lambda: driver.calls("nvmlEventSetWait_v2"), lambda calls: calls > waits + 2)
        driver.clear().gpu(0, total=GIB, uuid="GPU-b").gpu(1, total=GIB, uuid="GPU-a").write()
        return int(count())

    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", arrive)
    clock.pass_(11.0)
    reader.read()
    clock.pass_(1.0)
    troubles = [(gpu.uuid, [trouble.code for trouble in gpu.troubles]) for gpu in reader.read().gpus]
    assert troubles == [("GPU-b", []), ("GPU-a", [79])]
