"""Kinds of host memory, shared memory and all cgroup limits, read from trees of files and from this
machine."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from memtop.supervisor.monitor.cgroup import CgroupMemory, read_cgroup_memory
from memtop.supervisor.monitor.host import SLOW_SECONDS, HostReader
from memtop.supervisor.monitor.values import Band, HostSample, band_of
from tests.monitor.conftest import GIB, MIB, Clock, Tree
from tests.monitor.test_host import HOST, MEMINFO, SELF, group, read

KINDS = (
    "Buffers: 1024 kB\nCached: 8192 kB\nSwapCached: 7 kB\nMlocked: 16 kB\nDirty: 20 kB\nWriteback: 4 kB\nShmem: 2048 kB\n"
    "ShmemHugePages: 99 kB\nHugePages_Total: 3\nHugePages_Free: 1\nHugepagesize: 2048 kB\nHugetlb: 6144 kB\n"
)


def test_kinds_of_memory(tree: Tree) -> None:
    host = read(tree(HOST | {"proc/meminfo": MEMINFO + KINDS}))
    # The kernel counts shared memory as cached, but cannot free it.
    assert (host.cached_bytes, host.shared_bytes) == (7 * MIB, 2 * MIB)
    assert (host.dirty_bytes, host.locked_bytes) == (24 * 1024, 16 * 1024)
    assert (host.huge_pages_total_bytes, host.huge_pages_free_bytes) == (6 * MIB, 2 * MIB)


def test_free_huge_pages_of_several_sizes_are_unknown(tree: Tree) -> None:
    host = read(tree(HOST | {"proc/meminfo": MEMINFO + KINDS.replace("6144", "1054720")}))
    assert host.huge_pages_total_bytes == 1030 * MIB
    assert host.huge_pages_free_bytes is None
    assert "several sizes" in host.unknown["huge_pages_free_bytes"]


def test_a_kernel_that_does_not_report_the_kinds(tree: Tree) -> None:
    host = read(tree(HOST))
    for field in ("cached_bytes", "dirty_bytes", "shared_bytes", "locked_bytes", "huge_pages_total_bytes"):
        assert getattr(host, field) is None
        assert host.unknown[field]


def test_full_pressure_load_and_uptime(tree: Tree) -> None:
    host = read(tree(HOST | {"proc/loadavg": "1.50 0.75 0.25 2/400 9\n", "proc/uptime": "3600.5 7000.0\n"}))
    assert host.pressure_full_fraction == 0.01
    assert host.load_average == (1.5, 0.75, 0.25)
    assert host.uptime_seconds == 3600.5


def test_slow_values_are_updated_between_their_readings(tree: Tree, clock: Clock) -> None:
    root = tree(HOST | {"proc/loadavg": "1.0 1.0 1.0 2/400 9\n", "proc/uptime": "100.0 1.0\n"} | group(2, "/", "max", 0))
    roots = {"proc_root": root / "proc", "cgroup_root": root / "cgroup", "shm_root": root}
    reader = HostReader(**roots, monotonic=clock)
    reader.read()
    tree({"proc/loadavg": "2.0 1.0 1.0 2/400 9\n", "proc/self/cgroup": SELF[2]} | group(2, "/job/step", str(8 * GIB), GIB))
    clock.pass_(SLOW_SECONDS / 2)
    assert reader.read().uptime_seconds == 100.0 + SLOW_SECONDS / 2
    clock.pass_(SLOW_SECONDS / 2)
    host = reader.read()
    assert host.load_average == (2.0, 1.0, 1.0)
    assert host.limit_bytes == 8 * GIB


def test_rates_continue_after_the_counters_were_reset(tree: Tree, clock: Clock) -> None:
    root = tree(HOST)
    reader = HostReader(proc_root=root / "proc", cgroup_root=root / "cgroup", monotonic=clock)
    reader.read()
    for pages, rate in ((0, None), (30, 30 * os.sysconf("SC_PAGE_SIZE"))):
        clock.pass_(1.0)
        tree({"proc/vmstat": f"pswpin {pages}\npswpout 0\n"})
        assert reader.read().swap_in_bytes_per_second == rate


def test_shared_memory_of_this_machine() -> None:
    host, expected = HostReader().read(), os.statvfs("/dev/shm")
    assert host.shm_total_bytes == expected.f_blocks * expected.f_frsize
    assert host.shm_fraction is not None
    assert 0 <= host.shm_fraction <= 1


# --- what the cgroup limits -----------------------------------------------------------------------


def limited(version: int, **files: str) -> dict[str, str]:
    """The group /job/step with 8 GiB and more files, which are named with `__` for the dot."""
    folder = "cgroup/job/step" if version == 2 else "cgroup/memory/job/step"
    more = {f"{folder}/{name.replace('__', '.')}": f"{text}\n" for name, text in files.items()}
    return HOST | {"proc/self/cgroup": SELF[version]} | group(version, "/job/step", str(8 * GIB), 4 * GIB) | more


def test_the_kinds_are_the_groups_where_its_limit_counts(tree: Tree) -> None:
    stat = "anon 5\nfile 300\nshmem 100\nfile_dirty 7\nfile_writeback 2\ninactive_file 50\nactive_file 150"
    host = read(tree(limited(2, memory__stat=stat)))
    assert host.limit_path == str(tree({}) / "cgroup/job/step")
    assert (host.cached_bytes, host.shared_bytes, host.dirty_bytes) == (200, 100, 9)
    assert host.used_bytes == 4 * GIB - 50


@pytest.mark.parametrize(("own", "above", "lowest"), [("6442450944", "max", 6 * GIB), (str(7 * GIB), str(5 * GIB), 5 * GIB)])
def test_the_lowest_throttle_counts(tree: Tree, own: str, above: str, lowest: int) -> None:
    files = limited(2, memory__high=own) | {"cgroup/job/memory.high": above}
    assert read(tree(files)).limit_throttle_bytes == lowest


def test_swap_of_a_limited_group(tree: Tree) -> None:
    host = read(tree(limited(2, memory__swap__max=str(GIB), memory__swap__current=str(GIB - MIB))))
    assert (host.limit_swap_bytes, host.swap_total_bytes, host.swap_used_bytes) == (GIB, GIB, GIB - MIB)
    # The machine's swap is a quarter full; the group's is not.
    assert band_of(host.swap_fraction) is Band.DANGER


def test_a_group_that_may_not_swap(tree: Tree) -> None:
    host = read(tree(limited(2, memory__swap__max="0", memory__swap__current="0")))
    assert (host.limit_swap_bytes, host.swap_total_bytes, host.swap_fraction) == (0, 0, None)
    assert host.unknown["swap_fraction"] == "the cgroup allows no swap"


def test_a_swap_limit_above_the_machines_swap(tree: Tree) -> None:
    host = read(tree(limited(2, memory__swap__max=str(64 * GIB), memory__swap__current="0")))
    assert host.limit_swap_bytes is None
    assert (host.swap_total_bytes, host.swap_fraction) == (8 * GIB, 0.25)


def test_version_1_limits_memory_and_swap_together(tree: Tree) -> None:
    stat = f"total_inactive_file 0\ntotal_swap {512 * MIB}"
    host = read(tree(limited(1, memory__memsw__limit_in_bytes=str(10 * GIB), memory__stat=stat)))
    assert (host.limit_swap_bytes, host.swap_used_bytes, host.swap_fraction) == (2 * GIB, 512 * MIB, 0.25)


@pytest.mark.parametrize("version", [1, 2])
def test_kills_of_the_kernel(tree: Tree, version: int) -> None:
    name = "memory__events" if version == 2 else "memory__oom_control"
    host = read(tree(limited(version, **{name: "oom 9\noom_kill 3"})))
    assert host.oom_kills == 3


def test_kills_are_those_of_the_group_with_the_limit(tree: Tree) -> None:
    files = HOST | {"proc/self/cgroup": SELF[2]} | group(2, "/job", str(8 * GIB), GIB) | group(2, "/job/step", "max", GIB)
    files |= {"cgroup/job/memory.events": "oom_kill 5\n", "cgroup/job/step/memory.events": "oom_kill 1\n"}
    assert read(tree(files)).oom_kills == 5


def test_kills_that_the_kernel_does_not_count(tree: Tree) -> None:
    host = read(tree(HOST))
    assert host.oom_kills is None
    assert "does not count OOM kills" in host.unknown["oom_kills"]


CPU_FILES = {
    2: ({"proc/self/cgroup": SELF[2]}, "cgroup/job/step/cpu.max", "{quota} 100000"),
    1: ({"proc/self/cgroup": "5:cpu,cpuacct:/job\n"}, "cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "{quota}"),
}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("quota", "cores"), [("250000", 3), ("50000", 1), ("6400000", 8), ("none", 8)])
def test_cores_that_the_group_allows(tree: Tree, version: int, quota: str, cores: int) -> None:
    own, name, form = CPU_FILES[version]
    text = form.format(quota={1: "-1", 2: "max"}[version] if quota == "none" else quota)
    files = {name: text, "cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n"}
    assert read(tree(HOST | own | files)).cpu_count == cores


# --- where the groups are -------------------------------------------------------------------------


def mounted(root: Path, point: str, shown: str, kind: str = "cgroup2", options: str = "rw") -> str:
    return f"35 31 0:29 {shown} {root / point} rw,relatime shared:9 - {kind} cgroup {options}\n"


@pytest.mark.parametrize(
    ("shown", "own", "below", "limit"),
    [
        # What is below the host's path belongs to another container, which was started inside this
        # one.
        pytest.param("/docker/outer", "/docker/outer", "/docker/outer", 8 * GIB, id="a container's own part"),
        pytest.param("/docker/outer", "/docker/outer/job", "/job", 2 * GIB, id="below the container's group"),
        pytest.param("/docker/outer", "/../other", "/other", 8 * GIB, id="a path above what is mounted"),
        pytest.param("/docker/outer", "/elsewhere", "/other", 8 * GIB, id="a path next to what is mounted"),
        pytest.param("/", "/", "/other", 8 * GIB, id="a cgroup namespace"),
    ],
)
def test_the_group_in_a_container(tree: Tree, tmp_path: Path, shown: str, own: str, below: str, limit: int) -> None:
    """8 GiB at the mount point, 2 GiB in a group below it."""
    files = {"proc/self/cgroup": f"0::{own}\n", "proc/self/mountinfo": mounted(tmp_path, "cgroup", shown)}
    host = read(tree(HOST | files | group(2, "", str(8 * GIB), GIB) | group(2, below, str(2 * GIB), GIB)))
    assert host.limit_bytes == limit


def test_a_hybrid_machine(tree: Tree, tmp_path: Path) -> None:
    mounts = mounted(tmp_path, "cgroup/unified", "/") + mounted(tmp_path, "cgroup/memory", "/", "cgroup", "rw,memory")
    files = {
        "proc/self/cgroup": "4:memory:/job\n0::/job\n",
        "proc/self/mountinfo": mounts,
        "cgroup/unified/job/cgroup.procs": "",
    }
    assert read(tree(HOST | files | group(1, "/job", str(8 * GIB), GIB))).limit_bytes == 8 * GIB


def test_unknown_machine_memory_and_no_limit_of_version_1(tree: Tree, tmp_path: Path) -> None:
    tree({"proc/self/cgroup": SELF[1]} | group(1, "/job/step", str(2**63 - 4096), GIB))
    assert read_cgroup_memory(tmp_path / "proc", tmp_path / "cgroup", None) is None


# --- a real group ---------------------------------------------------------------------------------


@pytest.fixture
def real_group() -> Iterator[tuple[Path, str]]:
    """A memory cgroup of this machine with a limit of 256 MiB, and the name of its file with the
    limit."""
    name = f"memtop-test-{uuid.uuid4().hex[:8]}"
    for root, limit in ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max")):
        folder = root / name
        try:
            folder.mkdir()
        except OSError:
            continue
        if (folder / limit).exists():
            (folder / limit).write_text(str(256 * MIB))
            yield folder, limit
            folder.rmdir()
            return
        folder.rmdir()
    pytest.skip("this user may not create a memory cgroup on this machine")


def test_the_kernels_own_group(real_group: tuple[Path, str]) -> None:
    folder, _ = real_group
    code = (
        f"open({str(folder / 'cgroup.procs')!r}, 'w').write('0')\n"
        "import msgspec\nfrom memtop.supervisor.monitor.host import HostReader\n"
        "kept = bytearray(b'x') * (64 << 20)\n"
        "print(msgspec.json.encode(HostReader().read()).decode())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    host = msgspec.json.decode(done.stdout, type=HostSample)
    assert (host.limit_bytes, host.limit_path) == (256 * MIB, str(folder))
    assert host.used_bytes >= 64 * MIB
    assert host.oom_kills == 0
    assert host.cached_bytes is not None


def test_the_trainers_reading_is_the_same(tree: Tree, tmp_path: Path) -> None:
    tree(limited(2))
    found = read_cgroup_memory(tmp_path / "proc", tmp_path / "cgroup", 16 * GIB)
    assert isinstance(found, CgroupMemory)
    assert (found.limit_bytes, found.used_bytes) == (8 * GIB, 4 * GIB)
