"""Host memory of a run by role, read from real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memtop.supervisor.monitor.processes.proc import ProcessId, identify
from memtop.supervisor.run.processes.host_memory import (
    EVERY_SECONDS,
    MemoryReading,
    RunMemory,
    process_memory,
    role_memory,
    roles,
)
from memtop.supervisor.run_memory import HostMemory, RoleMemory, host_memory, together
from tests.monitor.conftest import Clock

MIB = 1024**2
SHARED = 32
# A rank with 24 MiB of its own that shares 32 MiB with two loader workers, all of which touch all
# of it.
FAMILY = f"""
import mmap, os, sys, time
own = bytearray(b"x") * (24 << 20)
batches = mmap.mmap(-1, {SHARED} << 20)
children = []
for _ in range(2):
    ready, notify = os.pipe()
    child = os.fork()
    if not child:
        for page in range(0, {SHARED} << 20, 4096):
            batches[page] = 1
        os.write(notify, b"1")
        while True: time.sleep(60)
    os.read(ready, 1)
    children.append(child)
for page in range(0, {SHARED} << 20, 4096):
    batches[page] = 1
print(os.getpid(), *children, flush=True)
while True: time.sleep(60)
"""
Family = list[int]


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Callable[..., Family]]:
    """Starts the rank and its workers behind these words (a launcher); their pids, the rank
    first."""
    started: list[subprocess.Popen[str]] = []
    pids: Family = []

    def start(*launcher: str) -> Family:
        script = tmp_path / "train.py"
        script.write_text(FAMILY)
        process = subprocess.Popen([*launcher, sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        pids.extend(map(int, process.stdout.readline().split()))
        return [*([process.pid] if launcher else []), *pids]

    yield start
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def identities(pids: Family) -> list[ProcessId]:
    found = [identify(pid) for pid in pids]
    return [process for process in found if process is not None]


def by_role(memory: MemoryReading) -> dict[str, RoleMemory]:
    return {part.role: part for part in memory.roles}


def test_shared_batches_are_counted_once(family: Callable[..., Family]) -> None:
    pids = family()
    memory = by_role(role_memory(identities(pids), {pids[0]}))
    assert {role: part.processes for role, part in memory.items()} == {"rank": 1, "loader worker": 2}
    shared = sum(part.shm_bytes or 0 for part in memory.values())
    # Each of the three maps all of it; together they take it once.
    assert abs(shared - SHARED * MIB) < MIB
    for part in memory.values():
        assert part.pss_bytes is not None
        assert part.uss_bytes is not None
        assert part.shm_bytes is not None
        assert part.pss_bytes >= part.uss_bytes + part.shm_bytes > 0
    workers = memory["loader worker"]
    assert abs((workers.shm_bytes or 0) - SHARED * MIB * 2 / 3) < MIB


def test_the_program_is_the_rank_until_the_agent_reports(family: Callable[..., Family]) -> None:
    rank, *workers = family()
    assert roles([rank, *workers], ()) == {rank: "rank"} | dict.fromkeys(workers, "loader worker")


def test_the_parents_of_a_rank_are_its_launchers(tmp_path: Path, family: Callable[..., Family]) -> None:
    torchrun = tmp_path / "torchrun"
    torchrun.write_text("import subprocess, sys\nsubprocess.run(sys.argv[1:])\n")
    launcher, rank, *workers = family(sys.executable, str(torchrun))
    expected = {launcher: "launcher", rank: "rank"} | dict.fromkeys(workers, "loader worker")
    assert roles([launcher, rank, *workers], {rank}) == expected
    # The agent has not reported yet: the launcher is known by its name.
    assert roles([launcher, rank, *workers], ()) == expected
    # A process of the run that has nothing to do with any rank.
    assert roles([launcher, rank], {launcher})[rank] == "loader worker"
    assert roles([rank, workers[0]], {workers[0]})[rank] == "launcher"


def test_a_second_program_next_to_the_rank_has_the_role_other(family: Callable[..., Family]) -> None:
    rank, *workers = family()
    assert roles([*workers, rank], {workers[0]})[workers[1]] == "other"


def test_a_process_that_is_gone_is_left_out(family: Callable[..., Family]) -> None:
    rank, first, second = family()
    known = identities([rank, first, second])
    os.kill(first, signal.SIGKILL)
    while process_state(first) not in ("Z", None):
        pass
    # Its parent never collects it: a zombie, whose memory is given back.
    with pytest.raises(ProcessLookupError):
        process_memory(first)
    assert by_role(role_memory(known, {rank}))["loader worker"].processes == 1
    used_again = [ProcessId(rank, 1)]
    assert role_memory(used_again, {rank}) == MemoryReading()


def process_state(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return None


def test_a_process_that_may_not_be_read_makes_its_role_unknown(tmp_path: Path) -> None:
    # The kernel shows the files of another user's process, but refuses to open this one.
    for pid in (7, 8):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (python) S 1 " + "0 " * 17 + "99 0\n")
        (tmp_path / str(pid) / "cmdline").write_text("python\0train.py\0")
    (tmp_path / "8" / "smaps_rollup").write_text("Pss: 4 kB\nPrivate_Dirty: 1 kB\nPss_Shmem: 2 kB\nSwapPss: 1 kB\n")
    parts = by_role(role_memory([ProcessId(7, 99), ProcessId(8, 99)], {7, 8}, tmp_path))
    assert parts["rank"] == RoleMemory(role="rank", processes=2)
    alone = by_role(role_memory([ProcessId(8, 99)], {8}, tmp_path))["rank"]
    assert (alone.pss_bytes, alone.uss_bytes, alone.shm_bytes, alone.swap_bytes) == (4096, 1024, 2048, 1024)


def test_it_is_read_with_every_sample_and_forgotten_with_the_processes() -> None:
    clock, me = Clock(), identify(os.getpid())
    assert me is not None
    memory = RunMemory(clock)
    memory.update([me], {me.pid})
    first = memory.newest
    assert [part.role for part in first.roles] == ["rank"]
    clock.pass_(EVERY_SECONDS / 2)
    memory.update([me], {me.pid})
    assert memory.newest is first
    clock.pass_(EVERY_SECONDS / 2)
    memory.update([me], {me.pid})
    assert memory.newest is not first
    memory.update([], ())
    assert memory.newest == MemoryReading()


def test_processes_that_take_the_kernel_long_are_read_more_rarely() -> None:
    me = identify(os.getpid())
    assert me is not None
    moments = iter([0.0, 2.0, 100.0, 200.0, 200.0])
    memory = RunMemory(lambda: next(moments))
    memory.update([me], ())
    first = memory.newest
    memory.update([me], ())
    assert memory.newest is first
    memory.update([me], ())
    assert memory.newest is not first


GROWS = """
import sys
print("ready", flush=True)
held = bytearray()
for line in sys.stdin:
    held = bytearray(b"x") * (int(line) << 20)
    print("done", flush=True)
"""


def test_a_short_peak_between_two_readings_is_seen() -> None:
    with subprocess.Popen([sys.executable, "-c", GROWS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdout.readline()

        def holds(mib: int) -> None:
            program.stdin.write(f"{mib}\n")
            program.stdin.flush()
            program.stdout.readline()

        process = identify(program.pid)
        assert process is not None
        # The reading takes two seconds, so the next one is due after 200.
        moments = iter([0.0, 2.0, 50.0, 100.0, 150.0, 300.0, 300.0])
        memory = RunMemory(lambda: next(moments))
        memory.update([process], {process.pid})
        first = memory.newest
        before = together(first.roles)
        assert before is not None
        sizes = []
        for mib in (200, 40):
            holds(mib)
            memory.update([process], {process.pid})
            sizes.append(together(memory.newest.roles))
            assert sum(memory.newest.pss_bytes.values()) == sizes[-1]
        memory.update([process], {process.pid})
        assert together(memory.newest.roles) == sizes[-1], "nothing has changed"
        memory.update([process], {process.pid})
        read = together(memory.newest.roles)
        assert read is not None
        assert [size - before for size in sizes if size] == pytest.approx([200 * MIB, 40 * MIB], abs=4 * MIB)
        assert read - before == pytest.approx(40 * MIB, abs=4 * MIB)
        program.stdin.close()


def test_processes_that_cannot_be_read_are_not_read_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memtop.supervisor.run.processes.host_memory.process_memory", lambda pid, proc_root: None)
    me = identify(os.getpid())
    assert me is not None
    moments = iter([0.0, 2.0, 100.0])
    memory = RunMemory(lambda: next(moments))
    memory.update([me], ())
    first = memory.newest
    assert [role.pss_bytes for role in first.roles] == [None]
    memory.update([me], ())
    assert memory.newest is first


def test_a_reading_of_the_attempt_before_does_not_count() -> None:
    me, parent = identify(os.getpid()), identify(os.getppid())
    assert me is not None
    assert parent is not None
    moments = iter([0.0, 2.0, 100.0, 102.0])
    memory = RunMemory(lambda: next(moments))
    memory.update([me], ())
    memory.update([parent], ())
    assert me.pid not in memory.newest.pss_bytes


def test_one_number_for_the_memory_of_a_run() -> None:
    roles = (
        RoleMemory(role="launcher", processes=1, pss_bytes=5 * MIB),
        RoleMemory(role="rank", processes=2, pss_bytes=495 * MIB),
    )
    assert together(roles) == 500 * MIB
    assert host_memory(together(roles), 900 * MIB) == HostMemory(500 * MIB, "PSS")
    assert host_memory(together(roles), 900 * MIB).words == "500 MiB RAM"
    # Of one process the kernel tells only the resident bytes.
    not_all = (*roles, RoleMemory(role="other", processes=1))
    assert together(not_all) is None
    assert host_memory(together(not_all), 900 * MIB).words == "900 MiB RSS"
    assert host_memory(together(()), None) == HostMemory()


def test_the_parts_of_the_ranks_are_of_the_same_reading(family: Callable[..., Family]) -> None:
    pids = family()
    reading = role_memory(identities(pids), {pids[0]})
    assert reading.pss_bytes.keys() == set(pids)
    assert sum(reading.pss_bytes.values()) == together(reading.roles)
