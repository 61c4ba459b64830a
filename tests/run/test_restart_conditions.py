"""When a pending restart may begin. Each test sets the clock and the machine's readings."""

from __future__ import annotations

from memtop.supervisor.monitor.values import GpuProcess, GpuSample, MachineSnapshot
from memtop.supervisor.recovery.values import Forecast
from memtop.supervisor.run.pending_restart import (
    DISK_SECONDS,
    NOTICE_SECONDS,
    VRAM_SECONDS,
    WATCHED_NOTICE_SECONDS,
    PendingRestart,
    Waiting,
)
from memtop.supervisor.wire import Change

GIB = 1 << 30


def card(used: int, *processes: GpuProcess) -> MachineSnapshot:
    gpu = GpuSample(
        index=0, uuid="GPU-0", used_bytes=used, total_bytes=20 * GIB, free_bytes=20 * GIB - used, processes=processes
    )
    other = GpuSample(index=1, uuid="GPU-1", used_bytes=19 * GIB, total_bytes=20 * GIB, free_bytes=GIB)
    return MachineSnapshot(time=1.0, gpus=(gpu, other))


BEGAN = 100.0


def pending(forecast: Forecast | None = None, notice: float = NOTICE_SECONDS) -> PendingRestart:
    waiting = Waiting(change=Change(reason="smaller"), gpus_before={"GPU-0": GIB}, forecast=forecast)
    return PendingRestart(waiting=waiting, began=BEGAN, begins=BEGAN, notice_seconds=notice)


def look(restart: PendingRestart, after: float, machine: MachineSnapshot | None = None) -> tuple[str, str | None]:
    """The verdict so many seconds later, and the problem that is named."""
    restart, verdict = restart.look(BEGAN + after, machine, None, "/runs/a")
    return verdict, restart.problem


def test_where_a_dashboard_shows_it_there_is_time_to_read() -> None:
    restart = pending(notice=WATCHED_NOTICE_SECONDS)
    assert look(restart, NOTICE_SECONDS) == ("wait", None)
    assert look(restart, WATCHED_NOTICE_SECONDS) == ("go", None)


def test_it_begins_once_it_could_be_called_off_and_the_memory_is_free() -> None:
    assert look(pending(), 0.0, card(GIB)) == ("wait", None)
    assert look(pending(), NOTICE_SECONDS, card(15 * GIB))[0] == "wait"
    assert look(pending(), NOTICE_SECONDS, card(GIB + 1000)) == ("go", None)


def test_processes_that_hold_the_memory_are_named_and_the_run_starts() -> None:
    holder = GpuProcess(pid=4242, name="python", used_bytes=3 * GIB)
    gone = GpuProcess(pid=1, name="ghost", used_bytes=GIB, gone=True)
    problem = "GPU 0 has 4.0 GiB more taken than before the run, held by python (pid 4242, 3.0 GiB)"
    assert look(pending(), VRAM_SECONDS, card(5 * GIB, holder, gone)) == ("go", problem)


def test_a_gpu_that_another_program_fills_ends_in_a_question() -> None:
    restart = pending(Forecast(peak_bytes=12 * GIB, basis="line"))
    verdict, problem = look(restart, VRAM_SECONDS, card(10 * GIB))
    assert verdict == "ask"
    assert problem is not None
    assert "expected to need 12.0 GiB" in problem


def test_space_on_the_disk_is_waited_for() -> None:
    restart = PendingRestart(waiting=Waiting(change=Change(), disk_bytes=10 * GIB), began=BEGAN, begins=BEGAN)
    full = "/runs/a: 1.0 GiB free, 10.0 GiB needed; free some space"
    for after, free, verdict, problem in (
        (NOTICE_SECONDS, None, "wait", None),
        (NOTICE_SECONDS, GIB, "wait", full),
        (NOTICE_SECONDS, "/runs/a: its free space cannot be read: EIO", "wait", "/runs/a: its free space cannot be read: EIO"),
        (NOTICE_SECONDS, 11 * GIB, "go", None),
        (DISK_SECONDS, GIB, "ask", full),
    ):
        looked, found = restart.look(BEGAN + after, None, free, "/runs/a")
        assert (found, looked.problem) == (verdict, problem)
