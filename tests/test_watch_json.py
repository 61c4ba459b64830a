"""`memtop watch --once --json` with eight scripted GPUs: every field of the public contract,
through the real bindings."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memtop.supervisor.units import GIB
from tests.conftest import Runs, make_runs
from tests.nvml_double.double import Script, nvml_library  # noqa: F401 (a fixture)

GPU_FIELDS = {
    *("index", "uuid", "name", "total_bytes", "used_bytes", "free_bytes", "reserved_bytes", "used_fraction", "band"),
    *("utilization_fraction", "temperature_celsius", "power_watts", "power_limit_watts", "error", "processes"),
}
PROCESS_FIELDS = {"pid", "user", "name", "command", "used_bytes", "kind", "run", "stray", "reason"}
HOST_FIELDS = {
    *("total_bytes", "used_bytes", "available_bytes", "used_fraction", "band", "limit_bytes", "swap_total_bytes"),
    *("swap_used_bytes", "swap_fraction", "swap_band", "swap_in_bytes_per_second", "swap_out_bytes_per_second"),
    "pressure_fraction",
}


@pytest.fixture(scope="module")
def others_process() -> Iterator[int]:
    """A process of another user: of `nobody` if this user may start one, else process 1."""
    if os.getuid() != 0:
        yield 1
        return
    # `nobody` may not be allowed to read the folder of our interpreter.
    process = subprocess.Popen(["/bin/sleep", "600"], user=pwd.getpwnam("nobody").pw_uid, cwd="/")
    yield process.pid
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def own_process() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process.pid
    process.kill()
    process.wait()


def gpu_rows(script: Script) -> Script:
    for index in range(8):
        used = (2 + 2 * index) * GIB
        fields: dict[str, int | str] = {"total": 20 * GIB, "used": used, "reserved": GIB, "uuid": f"GPU-{index}"}
        if index == 6:
            fields["error"] = 15
        script.gpu(index, name="RTX-A4500", util=10 * index, temp=40 + index, power=100_000, limit=230_000, **fields)
    return script


@pytest.fixture(scope="module")
def machine(
    tmp_path_factory: pytest.TempPathFactory,
    nvml_library: Path,  # noqa: F811
    own_process: int,
    others_process: int,
) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("machine")
    script = gpu_rows(Script(folder / "script"))
    script.process(0, pid=own_process, used=GIB).process(0, pid=others_process, used=GIB // 2)
    script.process(1, pid=own_process, used=None).write()
    for runs in make_runs(folder):
        runs.environment |= script.env(nvml_library)
        yield runs


@pytest.fixture(scope="module")
def snapshot(machine: Runs) -> dict[str, Any]:
    return dict(json.loads(machine.memtop("watch", "--once", "--json").stdout))


def test_every_field_of_the_contract_is_there(snapshot: dict[str, Any]) -> None:
    assert {"time", "gpus", "host", "runs"} <= snapshot.keys()
    assert len(snapshot["gpus"]) == 8
    for gpu in snapshot["gpus"]:
        assert gpu.keys() >= GPU_FIELDS
    for process in snapshot["gpus"][0]["processes"]:
        assert process.keys() >= PROCESS_FIELDS
    assert snapshot["host"].keys() >= HOST_FIELDS
    assert snapshot["runs"] == []


def test_the_numbers_are_the_drivers(snapshot: dict[str, Any]) -> None:
    gpu = snapshot["gpus"][3]
    assert (gpu["index"], gpu["uuid"], gpu["name"], gpu["error"]) == (3, "GPU-3", "RTX-A4500", None)
    assert (gpu["total_bytes"], gpu["used_bytes"], gpu["reserved_bytes"]) == (20 * GIB, 8 * GIB, GIB)
    assert gpu["free_bytes"] == 11 * GIB
    assert gpu["used_fraction"] == pytest.approx(9 / 20)
    assert (gpu["utilization_fraction"], gpu["temperature_celsius"]) == (0.3, 43)
    assert (gpu["power_watts"], gpu["power_limit_watts"]) == (100, 230)


def test_bands_follow_what_can_still_be_allocated(snapshot: dict[str, Any]) -> None:
    bands = {gpu["index"]: gpu["band"] for gpu in snapshot["gpus"]}
    # 16 + 1 of 20 GiB taken on the last is 85 %; the seventh is lost.
    assert bands == {0: "safe", 1: "safe", 2: "safe", 3: "safe", 4: "safe", 5: "safe", 6: "unknown", 7: "edge"}


def test_a_lost_gpu_is_reported_as_lost_and_shows_no_zero(snapshot: dict[str, Any]) -> None:
    lost = snapshot["gpus"][6]
    assert "lost" in lost["error"].lower()
    for field in ("used_bytes", "free_bytes", "used_fraction", "utilization_fraction", "temperature_celsius", "power_watts"):
        assert lost[field] is None
    assert lost["processes"] == []


def test_processes_are_distinguished_by_user(snapshot: dict[str, Any], own_process: int, others_process: int) -> None:
    rows = {process["pid"]: process for process in snapshot["gpus"][0]["processes"]}
    own, other = rows[own_process], rows[others_process]
    assert own["user"] == pwd.getpwuid(os.getuid()).pw_name
    assert other["user"] not in (None, own["user"]) or os.getuid() != 0
    assert (own["used_bytes"], other["used_bytes"]) == (GIB, GIB // 2)
    assert (own["stray"], other["stray"]) == (False, False)
    assert own["choosable"]
    assert not other["choosable"]
    assert "time.sleep" in own["command"]
    assert snapshot["gpus"][1]["processes"][0]["used_bytes"] is None


def test_another_users_process_is_never_ended(machine: Runs, others_process: int) -> None:
    done = machine.memtop("strays", "--kill", str(others_process), status=1)
    assert f"--kill {others_process}: you cannot end it" in done.stderr
    assert Path(f"/proc/{others_process}").exists()


def test_an_own_process_is_ended_when_named(machine: Runs, snapshot: dict[str, Any], own_process: int) -> None:
    assert snapshot["gpus"], "read while the process lived"
    done = machine.memtop("strays", "--kill", str(own_process), status=None)
    assert "1 process ended" in done.stdout
    assert Path(f"/proc/{own_process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
