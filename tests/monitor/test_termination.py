"""Ending real processes, and refusing to end those that must live."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import threading
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from memtop.supervisor.monitor.nvml.reader import NvmlReader
from memtop.supervisor.monitor.processes.proc import Owners, ProcessId
from memtop.supervisor.monitor.processes.signals import Kernel
from memtop.supervisor.monitor.termination import Ended, EndReport, end_and_measure, end_processes
from memtop.supervisor.monitor.values import GpuSample, MachineSnapshot
from tests.monitor.conftest import GIB, Start, ended, known
from tests.nvml_double.double import Script

PATIENT = (120.0, 120.0, 120.0)
"""Seconds that suffice on a slow machine; a test that passes never waits as long."""
SHORT = (0.2, 0.2, 120.0)
NAME = Path("/proc/self/comm").read_text().strip()
"""The kernel's name of this interpreter."""
IGNORE = "signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN)"


def seen(reader: NvmlReader) -> MachineSnapshot:
    """A snapshot to choose processes from."""
    return MachineSnapshot(time=0.0, gpus=reader.read().gpus)


def test_a_polite_process_ends_on_the_first_signal(start: Start) -> None:
    process = start("signal.signal(signal.SIGINT, lambda *_: sys.exit(7))")
    (result,) = end_processes([known(process.pid)], waits=PATIENT)
    assert (result.outcome, result.signal) == ("ended", "SIGINT")
    assert process.wait() == 7


def test_a_process_that_ignores_sigint_gets_sigterm(start: Start) -> None:
    process = start("signal.signal(signal.SIGINT, signal.SIG_IGN)")
    (result,) = end_processes([known(process.pid)], waits=(0.2, 20.0, 20.0))
    assert (result.outcome, result.signal) == ("ended", "SIGTERM")
    assert process.wait() == -signal.SIGTERM


def test_a_process_that_ignores_both_gets_sigkill_and_the_others_do_not(start: Start) -> None:
    stubborn, polite = start(IGNORE), start()
    results = end_processes([known(stubborn.pid), known(polite.pid)], waits=SHORT)
    assert [row.identity.pid for row in results] == [stubborn.pid, polite.pid], "in the order of choice"
    assert [row.outcome for row in results] == ["ended", "ended"]
    assert results[0].signal == "SIGKILL"
    assert stubborn.wait() == -signal.SIGKILL


def test_a_number_that_was_used_again_is_refused(start: Start) -> None:
    process = start()
    other = ProcessId(process.pid, known(process.pid).started_ticks - 1)
    (result,) = end_processes([other], waits=PATIENT)
    assert result.outcome == "refused"
    assert result.signal is None
    assert "was reused" in result.reason
    assert process.poll() is None


def test_a_process_that_is_gone(start: Start) -> None:
    (result,) = end_processes([ended(start)], waits=PATIENT)
    assert result.outcome == "gone"


@pytest.mark.parametrize("pid", [1, os.getpid(), os.getppid()], ids=["first", "self", "parent"])
def test_the_system_and_memtop_itself_are_refused(pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    # Recorded, not sent: if the refusal fails, this test must not end the machine's first process.
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda descriptor, number: sent.append(number))
    (result,) = end_processes([known(pid)], waits=(0.0, 0.0, 0.0))
    assert result.outcome == "refused"
    assert sent == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start another user's process")
def test_another_users_process_is_refused_even_to_root(start: Start) -> None:
    process = start(user=65534)
    (result,) = end_processes([known(process.pid)], waits=PATIENT)
    assert result.outcome == "refused"
    assert "only your own" in result.reason
    assert process.poll() is None


def test_the_kernels_refusal_is_reported(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    process = start()
    monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    (result,) = end_processes([known(process.pid)], waits=PATIENT)
    assert result.outcome == "refused"
    assert "Operation not permitted" in result.reason


def test_a_process_that_survives_everything_is_reported(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start()
    sent: list[int] = []
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda descriptor, number: sent.append(number))
    (result,) = end_processes([known(process.pid)], waits=(0.0, 0.0, 0.0))
    assert (result.outcome, result.signal) == ("survived", "SIGKILL")
    assert sent == [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]


def test_a_process_that_frees_its_memory_gets_no_further_signal(start: Start) -> None:
    """It frees its memory on the first signal and gets no second one."""
    process = start(IGNORE)
    answers = iter([True, False])
    (result,) = end_processes([known(process.pid)], waits=(0.0, 0.0, 0.0), still_holds=lambda identity: next(answers))
    assert (result.outcome, result.signal) == ("released", "SIGINT")
    assert process.poll() is None


def test_chosen_twice_is_ended_once(start: Start) -> None:
    identity = known(start().pid)
    assert len(end_processes([identity, identity], waits=PATIENT)) == 1


Memory = dict[int, tuple[int, dict[str, int | None]]]
"""For each GPU: GiB in use, and the GiB of each process; None if the driver does not report
them."""


@pytest.mark.parametrize(
    ("before", "after", "returned", "text"),
    [
        pytest.param(
            {0: (20, {"a": 4, "b": 4}), 1: (3, {})}, {0: (12, {}), 1: (9, {})}, 8, "2 processes ended, 8.0 GiB returned",
            id="only the GPUs of the ended processes count",
        ),
        pytest.param(
            {0: (10, {"a": 4})}, {0: (16, {})},
            None, "1 process ended, memory returned not known: other processes allocated more memory in the meantime; "
            "GPU 0: 16.0 GiB still held by no listed process", id="another process took the memory",
        ),
        pytest.param(
            {0: (8, {"a": 4, "other": 3})}, {0: (8, {"other": 3})},
            0, "1 process ended, 0 B returned; GPU 0: 3.0 GiB still held by pid {other} ({user}, {name})",
            id="who holds the rest",
        ),
        pytest.param(
            {0: (8, {"a": 4, "other": 3})}, {0: (4, {"other": 3})}, 4, "1 process ended, 4.0 GiB returned",
            id="others are not mentioned when the memory came back",
        ),
        pytest.param(
            {0: (16, {"a": 4, "other": 8}), 1: (6, {"a": 2, "other": 4})}, {0: (7, {"other": 3}), 1: (7, {"other": 7})},
            6, "1 process ended, 6.0 GiB returned", id="another process freed 5 GiB on GPU 0 and took 3 GiB on GPU 1",
        ),
        pytest.param(
            {0: (16, {"a": 4, "other": None})}, {0: (2, {"other": None})},
            None,
            "1 process ended, memory returned not known: the driver does not report the memory of other processes on GPU 0",
            id="the driver reports no memory of others",
        ),
    ],
)  # fmt: skip
def test_the_memory_that_was_returned(
    start: Start, driver: Script, reader: NvmlReader, before: Memory, after: Memory, returned: int | None, text: str
) -> None:
    names = sorted({name for _, rows in before.values() for name in rows})
    pids = {name: start().pid for name in names}

    def write(memory: Memory) -> None:
        driver.clear()
        for index, (used, rows) in memory.items():
            driver.gpu(index, total=24 * GIB, used=used * GIB)
            for name, size in rows.items():
                driver.process(index, pid=pids[name], used=None if size is None else size * GIB)
        driver.write()

    write(before)
    chosen = [known(pids[name]) for name in names if name != "other"]
    # The driver lists ended processes for a moment.
    report = end_and_measure(chosen, seen(reader), waits=PATIENT, settle_seconds=60.0, sleep=lambda seconds: write(after))
    assert report.returned_bytes == (None if returned is None else returned * GIB)
    user = pwd.getpwuid(os.getuid()).pw_name
    assert report.text == text.format(other=pids.get("other"), user=user, name=NAME)


def test_a_chosen_process_without_gpu_memory_is_left_alone(start: Start, driver: Script, reader: NvmlReader) -> None:
    process = start()
    driver.gpu(0, total=24 * GIB, used=10 * GIB).write()
    report = end_and_measure([known(process.pid)], seen(reader), waits=PATIENT, sleep=lambda seconds: None)
    assert report.processes[0].outcome == "released"
    assert process.poll() is None
    assert report.text.startswith("no process ended; ")


def test_text_names_those_that_were_not_ended() -> None:
    identity = ProcessId(7, 1)
    rows = (
        Ended(identity=identity, outcome="ended", signal="SIGINT", reason="process 7 ended on SIGINT"),
        Ended(identity=identity, outcome="refused", reason="process 8: the kernel refused SIGINT: no"),
    )
    report = EndReport(processes=rows, returned_bytes=int(3.9 * GIB))
    assert report.text == "1 process ended, 3.9 GiB returned; process 8: the kernel refused SIGINT: no"


LAST_PID = Path("/proc/sys/kernel/ns_last_pid")


def take_number(pid: int, start: Start) -> subprocess.Popen[str]:
    """A new process with this free pid. The kernel assigns the pid after the last one written
    here."""
    for _ in range(200):
        LAST_PID.write_text(str(pid - 1))
        process = start()
        if process.pid == pid:
            return process
        process.kill()
        process.wait()
    pytest.skip("other programs start processes too quickly to get a number of choice")


@pytest.mark.skipif(not os.access(LAST_PID, os.W_OK) or os.getuid() != 0, reason="only root can choose a process number")
def test_a_pid_that_was_really_reused_is_refused(start: Start) -> None:
    chosen = ended(start)
    bystander = take_number(chosen.pid, start)
    (result,) = end_processes([chosen], waits=PATIENT)
    assert result.outcome == "refused"
    assert "was reused" in result.reason
    assert bystander.poll() is None


class Between(Kernel):
    """The real kernel, with something that happens just before the signal."""

    def __init__(self, happens: Callable[[], object]) -> None:
        self._happens = happens

    def owners(self, pid: int) -> Owners | None:
        found = super().owners(pid)
        self._happens()
        return found


def test_a_process_that_ends_just_before_the_signal(start: Start) -> None:
    process = start()

    def end() -> None:
        process.kill()
        process.wait()

    (result,) = end_processes([known(process.pid)], waits=PATIENT, kernel=Between(end))
    assert (result.outcome, result.signal) == ("gone", None)


@pytest.mark.skipif(not os.access(LAST_PID, os.W_OK) or os.getuid() != 0, reason="only root can choose a process number")
def test_a_pid_that_is_reused_just_before_the_signal(start: Start) -> None:
    process = start()
    bystanders: list[subprocess.Popen[str]] = []

    def replace() -> None:
        if not bystanders:
            process.kill()
            process.wait()
            bystanders.append(take_number(process.pid, start))

    (result,) = end_processes([known(process.pid)], waits=PATIENT, kernel=Between(replace))
    assert (result.outcome, result.signal) == ("gone", None)
    assert bystanders[0].poll() is None


@pytest.mark.parametrize("signals_before", [0, 1])
def test_a_pid_that_another_user_has_now_belongs_to_an_ended_process(signals_before: int, start: Start) -> None:
    """The owner is read by pid, which another process may have by then."""
    process = start(IGNORE)

    class OthersNumber(Kernel):
        looks = 0

        def owners(self, pid: int) -> Owners | None:
            self.looks += 1
            # The owner is read when the process is opened, then before every signal.
            if self.looks <= 1 + signals_before:
                return super().owners(pid)
            process.kill()
            process.wait()
            return Owners(65534, 65534)

    (result,) = end_processes([known(process.pid)], waits=(0.0, 0.0, 0.0), kernel=OthersNumber())
    assert (result.outcome, result.signal) == (("ended", "SIGINT") if signals_before else ("gone", None))
    assert "belongs to" not in result.reason


@pytest.mark.skipif(os.getuid() != 0, reason="only root can change a process's user")
def test_a_process_that_changes_its_user_gets_no_second_signal(start: Start) -> None:
    become = "def other(*_):\n os.setuid(65534)\n os.write(1, b'changed\\n')\nsignal.signal(signal.SIGINT, other)"
    process = start(become)

    class AfterChange(Kernel):
        def wait(self, descriptors: Collection[int], seconds: float) -> set[int]:
            assert process.stdout is not None
            assert process.stdout.readline() == "changed\n"
            return set()

    (result,) = end_processes([known(process.pid)], waits=(0.0, 0.0, 0.0), kernel=AfterChange())
    assert (result.outcome, result.signal) == ("refused", "SIGINT")
    assert "only your own" in result.reason
    assert process.poll() is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act with another user's rights")
def test_a_process_with_another_effective_user_is_refused(start: Start) -> None:
    process = start("os.seteuid(65534)")
    (result,) = end_processes([known(process.pid)], waits=PATIENT)
    assert result.outcome == "refused"
    assert "acts with the rights of" in result.reason
    assert process.poll() is None


def test_memory_that_stays_under_an_ended_process(start: Start, driver: Script, reader: NvmlReader) -> None:
    process = start()
    driver.gpu(0, total=24 * GIB, used=8 * GIB).process(0, pid=process.pid, used=4 * GIB).write()
    report = end_and_measure([known(process.pid)], seen(reader), waits=PATIENT, settle_seconds=0.1, sleep=lambda seconds: None)
    assert report.returned_bytes == 0
    (holder,) = report.holders
    assert holder.ended
    assert f"GPU 0: 4.0 GiB still held by pid {process.pid}, which has ended: end the processes that share" in report.text


def test_a_driver_that_does_not_answer_holds_up_no_signal(start: Start, driver: Script, reader: NvmlReader) -> None:
    """The driver never returns, and the process lives until it gets SIGTERM."""
    process = start("signal.signal(signal.SIGINT, signal.SIG_IGN)")
    driver.gpu(0, total=24 * GIB, used=9 * GIB).process(0, pid=process.pid, used=4 * GIB).write()
    machine = seen(reader)
    release = threading.Event()

    class Hung:
        def __init__(self, gpus: object) -> None:
            pass

        def read(self) -> tuple[GpuSample, ...]:
            release.wait()
            return ()

        def close(self) -> None:
            pass

    try:
        report = end_and_measure(
            [known(process.pid)], machine, waits=(0.2, 20.0, 20.0), patience=0.1, settle_seconds=0.1, reader=Hung
        )
    finally:
        release.set()
    assert process.wait() == -signal.SIGTERM
    assert report.text == "1 process ended, memory returned not known: the driver did not answer in time"


def test_a_slow_driver_reads_only_the_processes_gpus_and_once_per_round(
    start: Start, driver: Script, reader: NvmlReader
) -> None:
    several = [start() for _ in range(4)]
    for index in range(4):
        driver.gpu(index, total=24 * GIB, used=20 * GIB)
    for process in several:
        driver.process(2, pid=process.pid, used=4 * GIB)
    driver.write()
    machine = seen(reader)
    lists, sensors = (f"nvmlDeviceGet{name}" for name in ("ComputeRunningProcesses_v3", "PowerUsage"))
    before = driver.calls(lists), driver.calls(sensors)

    def later(seconds: float) -> None:
        driver.clear().gpu(2, total=24 * GIB, used=4 * GIB).write()

    # Longer than a reading stays valid, so that a reading for each process would show.
    driver.delay(700, lists).write()
    report = end_and_measure(
        [known(process.pid) for process in several], machine, waits=PATIENT, patience=30.0, settle_seconds=60.0, sleep=later
    )
    assert all(result.outcome == "ended" for result in report.processes)
    assert driver.calls(sensors) == before[1]
    # Before the signals, and until the ended ones are off the list.
    assert driver.calls(lists) - before[0] <= 3
