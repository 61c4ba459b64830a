"""Host memory read from written trees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memtop.supervisor.monitor.host import HostReader
from memtop.supervisor.monitor.values import Band, HostSample, band_of
from tests.monitor.conftest import GIB, Clock, Tree

KIB = 1024
MEMINFO = "MemTotal: 16777216 kB\nMemFree: 100 kB\nMemAvailable: 4194304 kB\nSwapTotal: 8388608 kB\nSwapFree: 6291456 kB\n"
NO_SWAP = MEMINFO.replace("8388608", "0").replace("6291456", "0")
STAT = "cpu  100 0 100 700 100 0 0 0 0 0\ncpu0 1 1 1 1\n"
PSI = "some avg10=12.50 avg60=1.00 avg300=0.00 total=1\nfull avg10=1.00 avg60=0.00 avg300=0.00 total=1\n"
HOST = {
    "proc/meminfo": MEMINFO,
    "proc/vmstat": "nr_free_pages 5\npswpin 100\npswpout 200\n",
    "proc/stat": STAT,
    "proc/pressure/memory": PSI,
    "proc/self/cgroup": "0::/\n",
}


def no_affinity() -> int:
    raise OSError(38, "Function not implemented")


def read(root: Path) -> HostSample:
    roots = {"proc_root": root / "proc", "cgroup_root": root / "cgroup", "shm_root": root / "shm"}
    return HostReader(**roots, affinity=(lambda: 8) if (root / "proc").exists() else no_affinity).read()


def test_ram_swap_and_pressure(tree: Tree) -> None:
    host = read(tree(HOST))
    assert (host.total_bytes, host.available_bytes, host.used_bytes) == (16 * GIB, 4 * GIB, 12 * GIB)
    assert host.used_fraction == 0.75
    assert band_of(host.used_fraction) is Band.SAFE
    assert (host.swap_total_bytes, host.swap_used_bytes, host.swap_fraction) == (8 * GIB, 2 * GIB, 0.25)
    assert band_of(host.swap_fraction) is Band.SAFE
    assert host.pressure_fraction == 0.125
    assert host.limit_bytes is None


def test_rates_are_unknown_at_first_and_then_measured(tree: Tree, clock: Clock) -> None:
    root = tree(HOST)
    reader = HostReader(proc_root=root / "proc", cgroup_root=root / "cgroup", monotonic=clock)
    first = reader.read()
    assert first.swap_in_bytes_per_second is first.swap_out_bytes_per_second is first.cpu_fraction is None
    assert first.unknown["swap_in_bytes_per_second"] == "a rate needs two samples"
    clock.pass_(2.0)
    tree({"proc/vmstat": "pswpin 110\npswpout 240\n", "proc/stat": "cpu  130 0 120 740 110 0 0 0 0 0\n"})
    second = reader.read()
    page = os.sysconf("SC_PAGE_SIZE")
    assert (second.swap_in_bytes_per_second, second.swap_out_bytes_per_second) == (5 * page, 20 * page)
    assert second.cpu_fraction == 0.5
    assert "cpu_fraction" not in second.unknown


def test_a_counter_that_decreases_gives_no_rate(tree: Tree, clock: Clock) -> None:
    root = tree(HOST)
    reader = HostReader(proc_root=root / "proc", cgroup_root=root / "cgroup", monotonic=clock)
    reader.read()
    clock.pass_(1.0)
    tree({"proc/vmstat": "pswpin 0\npswpout 240\n"})
    host = reader.read()
    assert host.swap_in_bytes_per_second is None
    assert "backwards" in host.unknown["swap_in_bytes_per_second"]


def test_no_swap_is_not_zero_percent(tree: Tree) -> None:
    host = read(tree(HOST | {"proc/meminfo": NO_SWAP}))
    assert (host.swap_total_bytes, host.swap_used_bytes, host.swap_fraction) == (0, 0, None)
    assert band_of(host.swap_fraction) is Band.UNKNOWN
    assert host.unknown["swap_fraction"] == "the machine has no swap"


def test_without_psi(tree: Tree) -> None:
    host = read(tree({name: text for name, text in HOST.items() if "pressure" not in name}))
    assert host.pressure_fraction is None
    assert "PSI" in host.unknown["pressure_fraction"]


@pytest.mark.parametrize("text", ["", "full avg10=1\n", "some avg60=1\n", "some avg10=x\n"])
def test_psi_in_an_unknown_form(tree: Tree, text: str) -> None:
    host = read(tree(HOST | {"proc/pressure/memory": text}))
    assert host.pressure_fraction is None
    assert "unknown format" in host.unknown["pressure_fraction"]


def test_nothing_to_read_is_unknown_everywhere_and_never_zero(tmp_path: Path) -> None:
    host = read(tmp_path)
    for field in HostSample.__struct_fields__:
        if field not in ("unknown", "band", "swap_band"):
            assert getattr(host, field) is None
            assert host.unknown[field]
    assert band_of(host.used_fraction) is band_of(host.swap_fraction) is Band.UNKNOWN


def test_old_kernel_without_available_memory(tree: Tree) -> None:
    host = read(tree(HOST | {"proc/meminfo": "MemTotal: 1024 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n"}))
    assert host.total_bytes == 1024 * KIB
    assert host.used_bytes is None
    assert "available" in host.unknown["used_bytes"]


def group(version: int, path: str, limit: str, usage: int, cache: int = 0) -> dict[str, str]:
    """The files of one cgroup."""
    if version == 2:
        folder, names, key = f"cgroup{path}", ("memory.max", "memory.current"), "inactive_file"
    else:
        folder, names, key = f"cgroup/memory{path}", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_inactive_file"
    stat = f"anon 1\n{key} {cache}\nactive_file 7\n"
    return {f"{folder}/{names[0]}": f"{limit}\n", f"{folder}/{names[1]}": f"{usage}\n", f"{folder}/memory.stat": stat}


SELF = {2: "0::/job/step\n", 1: "5:cpu:/\n4:memory:/job/step\n"}
NO_LIMIT = {2: "max", 1: str(2**63 - 4096)}


@pytest.mark.parametrize("version", [1, 2])
def test_the_cgroups_limit_is_what_counts(tree: Tree, version: int) -> None:
    files = group(version, "/job", NO_LIMIT[version], 9 * GIB) | group(version, "/job/step", str(8 * GIB), 7 * GIB, GIB)
    host = read(tree(HOST | {"proc/self/cgroup": SELF[version]} | files))
    assert (host.limit_bytes, host.used_bytes, host.used_fraction) == (8 * GIB, 6 * GIB, 0.75)
    assert host.available_bytes == 2 * GIB
    assert host.total_bytes == 16 * GIB
    assert "limit_bytes" not in host.unknown


def test_a_machine_that_has_less_left_than_the_limit_allows(tree: Tree) -> None:
    files = group(2, "/job/step", str(12 * GIB), GIB)
    host = read(tree(HOST | {"proc/self/cgroup": SELF[2]} | files))
    assert host.available_bytes == 4 * GIB


@pytest.mark.parametrize("version", [1, 2])
def test_a_limit_further_up_that_leaves_less_room_wins(tree: Tree, version: int) -> None:
    outer = group(version, "/job", str(10 * GIB), 9 * GIB + 512 * 1024**2)
    inner = group(version, "/job/step", str(8 * GIB), 2 * GIB)
    host = read(tree(HOST | {"proc/self/cgroup": SELF[version]} | outer | inner))
    assert host.limit_bytes == 10 * GIB
    assert band_of(host.used_fraction) is Band.DANGER


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("limit", ["no limit", str(16 * GIB), str(64 * GIB)])
def test_a_limit_at_or_above_the_machine_is_none(tree: Tree, version: int, limit: str) -> None:
    limit = NO_LIMIT[version] if limit == "no limit" else limit
    host = read(tree(HOST | {"proc/self/cgroup": SELF[version]} | group(version, "/job/step", limit, GIB)))
    assert host.limit_bytes is None
    assert host.used_bytes == 12 * GIB
    assert "no cgroup limit" in host.unknown["limit_bytes"]


def test_in_a_container_the_mount_point_is_our_group(tree: Tree) -> None:
    own = {"proc/self/cgroup": "4:memory:/docker/0123456789\n"}
    host = read(tree(HOST | own | group(1, "", str(4 * GIB), GIB)))
    assert host.limit_bytes == 4 * GIB


def test_version_2_mounted_next_to_version_1(tree: Tree) -> None:
    own = {"proc/self/cgroup": "4:memory:/job\n0::/job\n", "cgroup/unified/job/cgroup.procs": ""}
    host = read(tree(HOST | own | group(1, "/job", str(4 * GIB), GIB)))
    assert host.limit_bytes == 4 * GIB


def test_an_unreadable_limit_is_reported(tree: Tree) -> None:
    host = read(tree(HOST | {"proc/self/cgroup": SELF[2]} | group(2, "/job/step", "rubbish", GIB)))
    assert host.limit_bytes is None
    assert "cannot read the memory limit" in host.unknown["limit_bytes"]
    assert host.used_bytes == 12 * GIB


def test_a_limit_without_statistics_is_reported(tree: Tree) -> None:
    files = group(2, "/job/step", str(8 * GIB), GIB)
    del files["cgroup/job/step/memory.stat"]
    host = read(tree(HOST | {"proc/self/cgroup": SELF[2]} | files))
    assert "memory.stat" in host.unknown["limit_bytes"]


def test_this_machine() -> None:
    host = HostReader().read()
    assert host.total_bytes is not None
    assert host.used_fraction is not None
    assert 0 < host.used_fraction < 1


def test_the_pressure_of_the_limiting_group_and_not_of_the_machine(tree: Tree) -> None:
    own = PSI.replace("12.50", "80.00").replace("full avg10=1.00", "full avg10=60.00")
    files = group(2, "/job", str(8 * GIB), 7 * GIB) | {"cgroup/job/memory.pressure": own, "cgroup/job/step/x": ""}
    host = read(tree(HOST | {"proc/self/cgroup": SELF[2]} | files))
    assert host.limit_path is not None
    assert host.limit_path.endswith("/job")
    assert (host.pressure_fraction, host.pressure_full_fraction) == (0.8, 0.6)


@pytest.mark.parametrize("version", [1, 2])
def test_the_pressure_of_the_machine_where_the_group_measures_none(tree: Tree, version: int) -> None:
    host = read(tree(HOST | {"proc/self/cgroup": SELF[version]} | group(version, "/job/step", str(8 * GIB), GIB)))
    assert host.limit_bytes == 8 * GIB
    assert (host.pressure_fraction, host.pressure_full_fraction) == (0.125, 0.01)


def test_a_pressure_file_of_the_group_in_no_known_form(tree: Tree) -> None:
    files = group(2, "/job/step", str(8 * GIB), GIB) | {"cgroup/job/step/memory.pressure": "what\n"}
    host = read(tree(HOST | {"proc/self/cgroup": SELF[2]} | files))
    assert host.pressure_fraction is host.pressure_full_fraction is None
    assert "job/step/memory.pressure has an unknown format" in host.unknown["pressure_fraction"]
