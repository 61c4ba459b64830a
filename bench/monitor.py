"""The cost of watching, compared with nvitop on the same scripted driver in the same run.

    python -m bench.monitor [--nvitop COMMAND] [--seconds N] [--rounds N] [--only NAME ...]

    load        CPU and memory of nvitop, `memtop watch` and the sampler alone, at 1, 8 and 16 GPUs
                with 8 processes each
    fast        the same at four samples a second
    calls       calls into the driver per second and GPU, by function
    once        `watch --once` and `nvitop -1`
    slow        key press to screen while each driver call takes 0.5, 5 and 20 ms
    busy        key press to screen while a training uses every core, and the time from a closed
                terminal to the end of the dashboard
    day         memory over a simulated day of samples

nvitop (1.7 or newer) is not a dependency: install it anywhere and pass its command. Without it,
that column is absent.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import pty
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.common import report, spread, user_environment
from memtop.supervisor.units import GIB
from tests.nvml_double.double import Script, build

PROCESSES_PER_GPU = 8
SIZE = (160, 50)
_WARM_UP_SECONDS = 4.0
# A program that only samples, as the supervisor does during a run.
_SAMPLER = """
import signal, sys, time
from memtop.supervisor.monitor.sampler import Sampler
signal.signal(signal.SIGINT, lambda *_: sys.exit())
sampler, interval = Sampler(), float(sys.argv[1])
while True:
    started = time.monotonic()
    sampler.sample()
    time.sleep(max(0.0, interval - (time.monotonic() - started)))
"""


class Screen:
    """A program on a terminal. Its output is discarded, but a benchmark can wait for a text."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], *, leave: str | None = "q") -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", SIZE[1], SIZE[0], 0, 0))
        kept = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**kept, "TERM": "xterm-256color"},
            start_new_session=True,
        )
        os.close(slave)
        self._leave = leave
        self.bytes = 0
        self._seen = b""
        self._arrived = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def key_to_screen_seconds(self, key: str, wanted: bytes) -> float:
        """From a key press until this text is drawn."""
        with self._arrived:
            self._seen = b""
            started = time.perf_counter()
            self.press(key)
            if not self._arrived.wait_for(lambda: wanted in self._seen, 60):
                raise RuntimeError(f"{wanted!r} was not drawn within 60 s of {key!r}")
            return time.perf_counter() - started

    def press(self, key: str) -> None:
        os.write(self._master, key.encode())

    def hang_up(self) -> float:
        """Close the terminal. The seconds until the program has ended."""
        started = time.perf_counter()
        os.close(self._master)
        self.process.wait(60)
        return time.perf_counter() - started

    def close(self) -> None:
        """Quit with the program's key or with SIGINT, so that it exits normally and writes its
        driver calls."""
        if self._leave is None:
            self.process.send_signal(signal.SIGINT)
        else:
            self.press(self._leave)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(10)
        os.close(self._master)

    def _read(self) -> None:
        while True:
            try:
                if not select.select([self._master], [], [], 0.2)[0]:
                    if self.process.poll() is not None:
                        return
                    continue
                block = os.read(self._master, 65536)
            except OSError:
                return  # the program has closed its side
            with self._arrived:
                self.bytes += len(block)
                self._seen = (self._seen + block)[-200_000:]
                self._arrived.notify_all()


class Machine:
    """Scripted GPUs with real processes."""

    def __init__(self, folder: Path, gpus: int) -> None:
        self.gpus = gpus
        self._script = Script(folder / "script")
        self._processes = [subprocess.Popen(["sleep", "3600"]) for _ in range(gpus * PROCESSES_PER_GPU)]
        self.counts = folder / "counts"
        self.environment = {
            **user_environment(),
            **self._script.env(build(folder)),
            "NVML_DOUBLE_COUNTS": str(self.counts),
            "MEMTOP_RUNS_DIR": str(folder / "runs"),
        }
        self.write()

    def write(self, delay_ms: float = 0.0) -> None:
        script = self._script.clear()
        for gpu in range(self.gpus):
            uuid = f"GPU-{gpu:08d}-0000-0000-0000-000000000000"
            fields = {"total": 24 * GIB, "used": 12 * GIB, "reserved": GIB // 2, "util": 90, "temp": 60}
            script.gpu(gpu, name="NVIDIA_RTX_A4500", uuid=uuid, **fields)
            for process in range(PROCESSES_PER_GPU):
                script.process(gpu, pid=self._processes[gpu * PROCESSES_PER_GPU + process].pid, used=GIB)
        if delay_ms:
            script.delay(delay_ms)
        script.write()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def machine(gpus: int) -> Iterator[Machine]:
    with tempfile.TemporaryDirectory(prefix="memtop-") as name:
        made = Machine(Path(name), gpus)
        try:
            yield made
        finally:
            made.close()


Program = Callable[[Machine, float], Screen]


def memtop_watch(made: Machine, interval: float) -> Screen:
    command = [sys.executable, "-m", "memtop", "watch", "--interval", str(interval)]
    return Screen(command, made.environment)


def sampler_alone(made: Machine, interval: float) -> Screen:
    return Screen([sys.executable, "-c", _SAMPLER, str(interval)], made.environment, leave=None)


def nvitop(command: str) -> Program:
    def start(made: Machine, interval: float) -> Screen:
        # Its default is one second for the devices and two for the processes.
        rate = [] if interval == 1.0 else ["--interval", str(interval)]
        return Screen([command, *rate], made.environment)

    return start


def used(screen: Screen, seconds: float) -> dict[str, float]:
    """Steady state: CPU as a fraction of one core, memory in bytes, output in bytes per second."""
    time.sleep(_WARM_UP_SECONDS)
    process = psutil.Process(screen.process.pid)
    before, written, started = sum(process.cpu_times()[:2]), screen.bytes, time.monotonic()
    time.sleep(seconds)
    passed = time.monotonic() - started
    memory = process.memory_full_info()
    return {
        "cpu_fraction": (sum(process.cpu_times()[:2]) - before) / passed,
        "rss_bytes": memory.rss,
        "uss_bytes": memory.uss,
        "terminal_bytes_per_second": (screen.bytes - written) / passed,
    }


def side_by_side(
    programs: dict[str, Program], made: Machine, *, interval: float, seconds: float, rounds: int
) -> dict[str, Any]:
    """Several rounds of all programs in turns; medians, and ratios within a round."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, start in programs.items():
            screen = start(made, interval)
            rows[name].append(used(screen, seconds))
            screen.close()
    found: dict[str, Any] = {
        name: {field: spread([row[field] for row in measured]) for field in measured[0]} for name, measured in rows.items()
    }
    if "nvitop" in rows:
        for name in rows.keys() - {"nvitop"}:
            pairs = list(zip(rows[name], rows["nvitop"], strict=True))
            found[name]["over_nvitop"] = {
                field: spread([mine[field] / theirs[field] for mine, theirs in pairs])
                for field in ("cpu_fraction", "rss_bytes")
            }
    return found


def load(programs: dict[str, Program], options: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for gpus in (1, 8, 16):
        with machine(gpus) as made:
            found[f"{gpus}_gpus"] = side_by_side(programs, made, interval=1.0, seconds=options.seconds, rounds=options.rounds)
    return found


def fast(programs: dict[str, Program], options: argparse.Namespace) -> dict[str, Any]:
    with machine(8) as made:
        return side_by_side(programs, made, interval=0.25, seconds=options.seconds, rounds=options.rounds)


def calls(programs: dict[str, Program], options: argparse.Namespace) -> dict[str, Any]:
    """Calls per second and GPU in steady state: the difference of a long and a short
    measurement."""
    gpus, lengths = 8, (8.0, 8.0 + options.seconds)
    found: dict[str, Any] = {}
    with machine(gpus) as made:
        for name, start in programs.items():
            counted = []
            for length in lengths:
                made.counts.unlink(missing_ok=True)
                screen = start(made, 1.0)
                time.sleep(length)
                screen.close()
                counted.append(json.loads(made.counts.read_text()))
            functions = {
                function: (counted[1][function] - counted[0].get(function, 0)) / (lengths[1] - lengths[0]) / gpus
                for function in counted[1]
            }
            found[name] = {
                "per_second_and_gpu": round(sum(functions.values()), 2),
                "by_function": {function: round(rate, 2) for function, rate in sorted(functions.items()) if rate > 0.005},
            }
    return found


def once(options: argparse.Namespace) -> dict[str, Any]:
    commands = {"memtop": [sys.executable, "-m", "memtop", "watch", "--once"]}
    if options.nvitop:
        commands["nvitop"] = [options.nvitop, "-1"]
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    with machine(8) as made:
        for _ in range(max(7, options.rounds)):
            for name, command in commands.items():
                started = time.perf_counter()
                subprocess.run(command, env=made.environment, check=True, stdout=subprocess.DEVNULL)
                seconds[name].append(time.perf_counter() - started)
    return {name: spread(values) for name, values in seconds.items()}


def slow(options: argparse.Namespace) -> dict[str, Any]:
    """The time from a key press to its effect, with slow drivers."""
    found: dict[str, Any] = {}
    for delay in (0.0, 0.5, 5.0, 20.0):
        with machine(8) as made:
            made.write(delay)
            screen = memtop_watch(made, 1.0)
            time.sleep(_WARM_UP_SECONDS + delay / 4)
            shown = []
            for _ in range(20):
                shown.append(screen.key_to_screen_seconds("?", b"Keys"))
                screen.press("\x1b")
                time.sleep(0.6)
            screen.close()
        found[f"{delay:g}_ms_per_call"] = spread(shown)
    return {"unit": "seconds from key press to the help screen", **found}


def busy(options: argparse.Namespace) -> dict[str, Any]:
    """How long a key takes to have its effect while a training uses every core, and how long the
    dashboard takes to end when its terminal is closed."""
    memtop, cores = [sys.executable, "-m", "memtop"], os.cpu_count() or 1
    length = ("--batch", "32", "--accum", "1", "--max-updates", "1000000", "--save-every", "1000000")
    with tempfile.TemporaryDirectory() as runs_dir:
        threads = {"OMP_NUM_THREADS": str(cores), "HF_HUB_OFFLINE": "1"}
        environment = {**user_environment(), **threads, "MEMTOP_RUNS_DIR": runs_dir}
        quiet = {"env": environment, "check": True, "stdout": subprocess.DEVNULL}
        subprocess.run([*memtop, "train", "--detach", "--name", "a", *length], **quiet)
        try:
            while not (_document(memtop, environment)["updates"] or 0) > 3:
                time.sleep(1)
            screen = Screen([*memtop, "watch", "a"], environment)
            time.sleep(_WARM_UP_SECONDS)
            psutil.cpu_percent()
            shown = []
            for _ in range(30):
                shown.append(screen.key_to_screen_seconds("?", b"Keys"))
                screen.press("\x1b")
                time.sleep(0.7)
            used_fraction = psutil.cpu_percent() / 100
            closed = screen.hang_up()
        finally:
            subprocess.run([*memtop, "stop", "a"], **quiet)
            while _document(memtop, environment)["supervisor_pid"] is not None:
                time.sleep(0.5)
    return {"key_seconds": spread(shown), "used_fraction_of_all_cores": used_fraction, "end_after_hang_up_seconds": closed}


def _document(memtop: Sequence[str], environment: dict[str, str]) -> dict[str, Any]:
    shown = subprocess.run([*memtop, "show", "a", "--json"], env=environment, check=True, capture_output=True, text=True)
    return dict(json.loads(shown.stdout))


def day() -> dict[str, Any]:
    """A day of samples at full speed through sampler, dashboard and history; resident bytes
    meanwhile."""
    with machine(2) as made:
        program = [sys.executable, "-m", "bench.monitor", "--simulate-day"]
        done = subprocess.run(program, env=made.environment, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def simulate_day() -> None:
    from memtop.supervisor.monitor.history import History
    from memtop.supervisor.monitor.nvml.reader import NvmlReader
    from memtop.supervisor.monitor.sampler import Sampler
    from memtop.tui.processes.trails import Trails
    from memtop.tui.store import Store, fold

    now = [0.0]
    sampler = Sampler(nvml=NvmlReader(monotonic=lambda: now[0]), clock=lambda: 1e9 + now[0], monotonic=lambda: now[0])
    store, history, trails, process, resident = Store(), History(), Trails(), psutil.Process(), {}
    for second in range(86_401):
        now[0] = float(second)
        snapshot = sampler.sample()
        store = fold(store, snapshot)
        history.append(snapshot)
        trails.take(snapshot)
        if second % 14_400 == 0:
            resident[f"hour_{second // 3600}"] = process.memory_info().rss
    first, last = resident["hour_4"], resident["hour_24"]
    print(json.dumps({"resident_bytes": resident, "growth_from_hour_4_bytes": last - first}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvitop", default=shutil.which("nvitop"), help="nvitop's command")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=["load", "fast", "calls", "once", "slow", "busy", "day"])
    parser.add_argument("--simulate-day", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.simulate_day:
        simulate_day()
        return
    programs: dict[str, Program] = {} if not options.nvitop else {"nvitop": nvitop(options.nvitop)}
    programs |= {"sampler": sampler_alone, "dashboard": memtop_watch}
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "load": lambda: load(programs, options),
        "fast": lambda: fast(programs, options),
        "calls": lambda: calls(programs, options),
        "once": lambda: once(options),
        "slow": lambda: slow(options),
        "busy": lambda: busy(options),
        "day": day,
    }
    results: dict[str, Any] = {"nvitop": _version(options.nvitop), "processes_per_gpu": PROCESSES_PER_GPU}
    report("monitor", results | {name: parts[name]() for name in options.only})


def _version(command: str | None) -> str | None:
    if command is None:
        return None
    return subprocess.run([command, "--version"], check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
