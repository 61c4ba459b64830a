"""`memtop watch` as a source for other programs: JSON lines, CSV, Prometheus; real processes,
scripted driver, real scrapes."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from memtop.cli import http_server
from memtop.cli.http_server import MOST_CONNECTIONS, HttpServer, is_loopback, parse_address
from memtop.cli.prometheus import Endpoint
from memtop.cli.streams import CSV_COLUMNS, CSV_RUN_COLUMNS
from memtop.supervisor.errors import UsageError
from memtop.supervisor.monitor.values import (
    GpuDetails,
    GpuProcess,
    GpuSample,
    GpuTrouble,
    HostSample,
    Job,
    MachineSnapshot,
    MigInstance,
)
from memtop.supervisor.monitor.vram import RankMemory
from memtop.supervisor.run.record.folder import RunFolder, StateFile, write_json
from memtop.supervisor.run_memory import RoleMemory
from memtop.supervisor.units import GIB
from memtop.supervisor.wire import Phase, RunState
from tests.conftest import Runs
from tests.nvml_double.double import Script, nvml_library  # noqa: F401 (a fixture)
from tests.run.brain import spec


@pytest.fixture
def two_gpus(runs: Runs, tmp_path: Path, nvml_library: Path) -> Runs:  # noqa: F811
    script = Script(tmp_path / "script").gpu(0, total=20 * GIB, used=5 * GIB, uuid="GPU-a", name="A4500", util=50, temp=40)
    script.gpu(1, total=20 * GIB, used=0, uuid="GPU-b", name="A4500", error=15).write()
    runs.environment |= script.env(nvml_library)
    return runs


@pytest.fixture
def over(runs: Runs) -> RunFolder:
    """The folder of a finished run."""
    from memtop.supervisor.run.record.folder import create_run

    folder = create_run(runs.path, spec("tiny"), fresh=False)
    state = RunState(name="tiny", folder=str(folder.path), state=Phase.FINISHED, created=1.0, attempt=1, updates=60, loss=1.25)
    write_json(folder.state_path, StateFile(run=state, socket=str(runs.root / "none"), supervisor_started_ticks=None))
    return folder


def started(runs: Runs, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "memtop", "watch", *arguments],
        cwd=runs.root,
        env=runs.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# --- JSON -----------------------------------------------------------------------------------------


def test_one_document_per_line_and_a_clean_exit_on_sigint(two_gpus: Runs, over: RunFolder) -> None:
    process = started(two_gpus, "tiny", "--json", "--follow", "--interval", "0.2")
    assert process.stdout is not None
    # Read while the command runs: it flushes every line.
    documents = [json.loads(process.stdout.readline()) for _ in range(3)]
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (130, "")
    documents += [json.loads(line) for line in rest.splitlines()]
    assert [gpu["used_bytes"] for gpu in documents[0]["gpus"]] == [5 * GIB, None]
    times = [document["time"] for document in documents]
    assert times == sorted(set(times))
    for document in documents:
        assert (document["run"]["loss"], document["run"]["state"]) == (1.25, "finished")
        assert [run["name"] for run in document["runs"]] == ["tiny"]


def test_a_closed_pipe_ends_the_stream_silently(two_gpus: Runs) -> None:
    process = started(two_gpus, "--json", "--follow", "--interval", "0.2")
    assert process.stdout is not None
    assert process.stderr is not None
    json.loads(process.stdout.readline())
    process.stdout.close()
    assert process.wait(timeout=120) == 0
    assert process.stderr.read() == ""
    process.stderr.close()


def test_count_ends_the_stream(two_gpus: Runs) -> None:
    done = two_gpus.memtop("watch", "--json", "--follow", "--count", "2", "--interval", "0.2")
    documents = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(documents) == 2
    assert documents[0]["runs"] == []
    assert "run" not in documents[0]


def test_show_prints_the_measurements(runs: Runs, over: RunFolder) -> None:
    file = over.state()
    assert file is not None
    ranks = (RankMemory(rank=0, pid=1, connected=False, device_uuid="GPU-a", peak_bytes=3 * GIB),)
    memory = (RoleMemory(role="rank", processes=1, pss_bytes=GIB),)
    measured: dict[str, Any] = {"ranks": ranks, "run_memory": memory, "run_rss_bytes": GIB, "gpu_base_bytes": {"GPU-a": 7}}
    write_json(over.state_path, msgspec.structs.replace(file, run=msgspec.structs.replace(file.run, **measured)))
    document = runs.show("tiny")
    assert document["ranks"][0]["peak_bytes"] == 3 * GIB
    assert document["gpu_base_bytes"] == {"GPU-a": 7}
    # A finished run uses no memory, although its last value is known.
    assert (document["run_rss_bytes"], document["run_memory"]) == (None, None)
    text = runs.memtop("show", "tiny").stdout
    assert "GPU memory  rank 0: 3.0 GiB peak in its newest update, outside the allocator at least 7 B on its GPU" in text
    assert "processes" not in text


# --- CSV ------------------------------------------------------------------------------------------


def test_csv_has_one_header_and_a_row_per_gpu_and_sample(two_gpus: Runs, over: RunFolder) -> None:
    done = two_gpus.memtop("watch", "tiny", "--csv", "--follow", "--count", "3", "--interval", "0.2")
    rows = list(csv.reader(io.StringIO(done.stdout)))
    assert tuple(rows[0]) == (*CSV_COLUMNS, *CSV_RUN_COLUMNS)
    table = [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    assert [row["gpu"] for row in table] == ["0", "1"] * 3
    assert len({row["time"] for row in table}) == 3
    first, lost = table[:2]
    assert (first["gpu_uuid"], int(first["gpu_used_bytes"]), float(first["gpu_utilization_fraction"])) == (
        "GPU-a",
        5 * GIB,
        0.5,
    )
    # The values of the lost GPU are unknown, not 0.
    assert (lost["gpu_used_bytes"], lost["gpu_utilization_fraction"], lost["gpu_band"]) == ("", "", "unknown")
    assert int(lost["host_total_bytes"]) > 0
    assert (first["run_state"], first["run_loss"], first["run_samples_per_second"]) == ("finished", "1.25", "")


def test_csv_without_gpus_has_the_host(runs: Runs) -> None:
    runs.environment["NVML_DOUBLE_SCRIPT"] = ""
    table = list(csv.DictReader(io.StringIO(runs.memtop("watch", "--csv").stdout)))
    if table[0]["gpu"]:
        pytest.skip("this machine has GPUs")
    assert len(table) == 1
    assert int(table[0]["host_used_bytes"]) > 0
    assert "run_loss" not in table[0]


# --- Prometheus -----------------------------------------------------------------------------------


def free_port() -> int:
    with closing(socket.socket()) as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def scrape(port: int) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=120) as answer:
        text = answer.read().decode()
    found: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = frozenset(sample.labels.items())
            # The server would drop labels that repeat.
            assert labels not in found.setdefault(sample.name, {})
            found[sample.name][labels] = sample.value
    return found


@pytest.fixture
def endpoint() -> Iterator[tuple[Endpoint, int]]:
    port = free_port()
    one = Endpoint("127.0.0.1", port)
    yield one, port
    one.close()


CARD = {"gpu": "0", "uuid": "GPU-a", "name": "A4500"}


def card(**labels: str) -> frozenset[tuple[str, str]]:
    return frozenset({**CARD, **labels}.items())


def machine(time: float, *xids: tuple[float, int], **fields: Any) -> MachineSnapshot:
    troubles = tuple(GpuTrouble(time=t, kind="xid", code=code, message="m") for t, code in xids)
    details = GpuDetails(throttle_reasons=("power cap", "hot"), energy_joules=12.5)
    gpu = GpuSample(index=0, uuid="GPU-a", name="A4500", used_bytes=7, troubles=troubles, details=details)
    jobs = tuple(Job(key=f"pid {n}", name="train.py", user="ada", leader_pid=n, used_bytes=n) for n in (3, 4))
    return MachineSnapshot(time=time, gpus=(gpu,), jobs=jobs, host=HostSample(used_bytes=11, **fields))


def test_a_scrape_has_the_newest_sample_without_unknown_values(endpoint: tuple[Endpoint, int]) -> None:
    serving, port = endpoint
    assert scrape(port) == {}
    serving.update(machine(100.0), None)
    serving.update(machine(101.0, swap_used_bytes=0), None)
    found = scrape(port)
    assert "memtop_gpu_age_seconds" not in found
    nothing: frozenset[tuple[str, str]] = frozenset()
    assert found["memtop_sample_time_seconds"] == {nothing: 101}
    assert found["memtop_gpu_memory_used_bytes"] == {card(): 7}
    assert found["memtop_gpu_throttled"] == {card(reason="power cap"): 1, card(reason="hot"): 1}
    assert found["memtop_gpu_energy_joules_total"] == {card(): 12.5}
    assert found["memtop_job_memory_used_bytes"] == {frozenset({("job", "train.py"), ("user", "ada")}): 7}
    assert found["memtop_host_memory_used_bytes"] == {nothing: 11}
    assert found["memtop_host_swap_used_bytes"] == {nothing: 0}
    for unknown in ("memtop_gpu_temperature_celsius", "memtop_host_swap_total_bytes", "memtop_run_loss"):
        assert unknown not in found


def test_rows_with_equal_labels_are_summed_or_unknown(endpoint: tuple[Endpoint, int]) -> None:
    """A server drops the whole scrape if labels repeat."""
    serving, port = endpoint
    # One process on two MIG instances, another with unknown memory on one of them.
    on_mig = [GpuProcess(pid=5, name="py", used_bytes=n, mig_instance=n) for n in (1, 2)]
    on_mig += [GpuProcess(pid=6, name="py", used_bytes=n, mig_instance=n or 1) for n in (None, 2)]
    mig = (MigInstance(position=1, uuid="MIG-1", name="1g.10gb", used_bytes=0), MigInstance(position=2, uuid="MIG-2"))
    gpu = GpuSample(index=0, uuid="GPU-a", name="A100", processes=tuple(on_mig), mig=mig)
    jobs = [Job(key=f"{n}", name="a.py", user="ada", leader_pid=n, used_bytes=n or None, host_rss_bytes=n) for n in (0, 4)]
    serving.update(MachineSnapshot(time=1.0, gpus=(gpu,), jobs=tuple(jobs), gpu_age_seconds=7.5), None)
    found = scrape(port)
    ((labels, value),) = found["memtop_process_memory_used_bytes"].items()
    assert (dict(labels)["pid"], value) == ("5", 3)
    ((labels, value),) = found["memtop_mig_memory_used_bytes"].items()
    assert (dict(labels), value) == ({"gpu": "0", "mig": "1", "uuid": "MIG-1", "name": "1g.10gb"}, 0)
    assert "memtop_job_memory_used_bytes" not in found
    assert list(found["memtop_job_resident_memory_bytes"].values()) == [4]
    assert list(found["memtop_gpu_age_seconds"].values()) == [7.5]


def test_all_xids_are_counted_although_a_sample_has_only_the_newest(endpoint: tuple[Endpoint, int]) -> None:
    serving, port = endpoint
    serving.update(machine(1.0, (0.1, 31), (0.2, 31)), None)
    serving.update(machine(2.0, (0.2, 31), (1.5, 79)), None)
    serving.update(machine(3.0, (1.5, 79), (2.5, 31)), None)
    assert scrape(port)["memtop_gpu_xid_errors_total"] == {card(code="31"): 3, card(code="79"): 1}


def test_a_scrape_has_the_run_with_its_peak(endpoint: tuple[Endpoint, int]) -> None:
    serving, port = endpoint
    ranks = (RankMemory(rank=0, pid=1, connected=True, peak_bytes=99), RankMemory(rank=1, pid=2, connected=True))
    run = RunState(name="tiny", folder="f", state=Phase.TRAINING, created=1.0, loss=0.0, updates=3, ranks=ranks)
    serving.update(None, run)
    found = scrape(port)
    labels = frozenset({("run", "tiny")})
    assert (found["memtop_run_loss"], found["memtop_run_update"]) == ({labels: 0}, {labels: 3})
    assert found["memtop_run_peak_memory_bytes"] == {labels | {("rank", "0")}: 99}
    assert found["memtop_run_state"] == {labels | {("state", "training")}: 1}
    assert "memtop_run_samples_per_second" not in found


def connected(port: int, sent: bytes) -> socket.socket:
    one = socket.create_connection(("127.0.0.1", port), timeout=120)
    one.sendall(sent)
    return one


def is_closed(one: socket.socket) -> bool:
    """Whether the server closes the connection. Waits for that."""
    try:
        return one.recv(1) == b""
    except ConnectionResetError:
        return True


def test_idle_and_slow_clients_are_dropped_for_new_ones(endpoint: tuple[Endpoint, int]) -> None:
    serving, port = endpoint
    serving.update(machine(1.0), None)
    with ExitStack() as clients:
        many = [clients.enter_context(connected(port, b"GET /metr" * (n % 2))) for n in range(3 * MOST_CONNECTIONS)]
        assert "memtop_gpu_up" in scrape(port)
        # The last place of the limit is free again after the scrape.
        assert all(is_closed(one) for one in many[: 2 * MOST_CONNECTIONS + 1])


def test_clients_leave_files_for_the_stream_under_a_low_limit(two_gpus: Runs) -> None:
    """More clients than this process may open files: it goes on, and answers the newest."""
    most, port = 16, free_port()
    arguments = ("watch", "--json", "--follow", "--interval", "0.2", "--prometheus", str(port))
    words = ["sh", "-c", f'ulimit -n {most}; exec "$@"', "sh", sys.executable, "-m", "memtop", *arguments]
    with (
        subprocess.Popen(
            words, cwd=two_gpus.root, env=two_gpus.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process,
        ExitStack() as clients,
    ):
        assert process.stdout is not None
        process.stdout.readline()
        for number in range(3 * most):
            clients.enter_context(connected(port, b"GET /metr" * (number % 2)))
        assert "memtop_gpu_up" in scrape(port)
        # Samples that begin while the clients are there.
        sampled = [json.loads(process.stdout.readline()) for _ in range(4)]
        assert all(sample["host"]["total_bytes"] for sample in sampled)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Too many open files" not in said


def test_no_connection_lives_long(endpoint: tuple[Endpoint, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "LONGEST_SECONDS", 0.0)
    for sent in (b"", b"GET /metrics HTTP/1.0\r\nX: "):
        with connected(endpoint[1], sent) as one:
            assert is_closed(one)


def test_without_a_list_of_its_open_files_it_serves(endpoint: tuple[Endpoint, int], monkeypatch: pytest.MonkeyPatch) -> None:
    serving, port = endpoint
    serving.update(machine(1.0), None)

    def listdir(path: str, problem: int) -> list[str]:
        raise OSError(problem, os.strerror(problem), path)

    monkeypatch.setattr(http_server.os, "listdir", partial(listdir, problem=errno.ENOENT))
    assert "memtop_gpu_up" in scrape(port)
    for problem in (errno.EMFILE, errno.ENFILE):
        monkeypatch.setattr(http_server.os, "listdir", partial(listdir, problem=problem))
        with connected(port, b"GET /metrics HTTP/1.0\r\n\r\n") as one:
            assert is_closed(one)


def test_a_client_is_refused_while_no_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "CLOSING_SECONDS", 0.01)
    asked, answer = threading.Semaphore(0), threading.Event()

    def application(environment: Any, start: Any) -> list[bytes]:
        asked.release()
        assert answer.wait(120)
        start("200 OK", [])
        return [b"done"]

    with ExitStack() as stack:
        server = stack.enter_context(closing(HttpServer("127.0.0.1", 0, application)))
        stack.callback(answer.set)
        request = b"GET / HTTP/1.0\r\n\r\n"
        for _ in range(MOST_CONNECTIONS):
            stack.enter_context(connected(server.server_port, request))
            assert asked.acquire(timeout=120)
        # The second is refused too: a client that waits does not keep the next one from it.
        for _ in range(2):
            assert is_closed(stack.enter_context(connected(server.server_port, request)))
        answer.set()
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/", timeout=120) as found:
            assert found.read() == b"done"


def test_a_run_whose_folder_has_an_invalid_name_is_served(endpoint: tuple[Endpoint, int]) -> None:
    serving, port = endpoint
    serving.update(None, RunState(name="bad\udcff\n", folder="f", state=Phase.TRAINING, created=1.0, updates=3))
    assert scrape(port)["memtop_run_update"] == {frozenset({("run", "bad\ufffd\n")}): 3}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_without_a_terminal_it_serves_until_a_signal(two_gpus: Runs, over: RunFolder, number: signal.Signals) -> None:
    port = free_port()
    process = started(two_gpus, "tiny", "--prometheus", str(port), "--interval", "0.2")
    assert process.stderr is not None
    assert f"http://127.0.0.1:{port}/metrics" in process.stderr.readline()
    found: dict[str, Any] = {}
    while "memtop_gpu_up" not in found:
        assert process.poll() is None
        found = scrape(port)
    assert sorted(found["memtop_gpu_up"].values()) == [0, 1]
    assert list(found["memtop_gpu_memory_used_bytes"].values()) == [5 * GIB]
    assert list(found["memtop_run_loss"].values()) == [1.25]
    process.send_signal(number)
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, output, errors) == (130 if number == signal.SIGINT else 0, "", "")


def test_a_port_in_use_is_one_line_and_exit_status_2(runs: Runs) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = runs.memtop("watch", "--prometheus", str(port), status=2)
    assert done.stderr.startswith(f"memtop: --prometheus 127.0.0.1:{port}: cannot listen there: Address already in use")
    assert done.stderr.count("\n") == 1


def test_serving_on_another_host_prints_one_warning(two_gpus: Runs) -> None:
    port = free_port()
    arguments = ("--prometheus", f"0.0.0.0:{port}", "--json", "--follow", "--count", "1")
    done = two_gpus.memtop("watch", *arguments)
    assert f"--prometheus 0.0.0.0:{port}: anyone who can reach 0.0.0.0 can read" in done.stderr
    assert len(done.stdout.splitlines()) == 1


def test_addresses() -> None:
    assert parse_address("--prometheus", "9400") == ("127.0.0.1", 9400)
    assert parse_address("--prometheus", "[::1]:9400") == ("::1", 9400)
    assert [is_loopback(host) for host in ("localhost", "127.0.0.2", "::1", "0.0.0.0", "10.0.0.1")] == [True] * 3 + [False] * 2
    for wrong in ("", "x", "1.2.3.4:", "0", "65536", "-1", "a:b", "٣"):
        with pytest.raises(UsageError, match="give \\[HOST:\\]PORT"):
            parse_address("--prometheus", wrong)
