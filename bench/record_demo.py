"""Records the run that `memtop watch --demo` plays: tui/demo/recording.jsonl.gz.

The run is a real `memtop train` run of a small model on this machine's CPU, in a memory group of
the kernel with a real limit. The two GPUs are scripted: the driver is the double of the tests,
which reports the run's processes as if they used the GPUs. The recording holds every message that
the supervisor sends to a dashboard, with its time, and the lines of the log.

python -m bench.record_demo    (needs gcc, torch and the right to make memory cgroups; takes about 8
minutes)
"""

from __future__ import annotations

import asyncio
import gzip
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

import memtop
from memtop.presets import edit_settings, load_presets, load_recipes
from memtop.presets.edits import resolve
from memtop.supervisor import wire
from memtop.supervisor.recovery.configuration import change_for
from memtop.supervisor.run.client import AsyncRunClient
from memtop.supervisor.run.record.folder import RunFolder, RunSpec, create_run
from memtop.tui.replay import LogRow, Recorded
from tests.groups import MemoryGroup, memory_group
from tests.nvml_double import double

ROOT = Path(__file__).resolve().parents[1]
GIB = 1 << 30
PLACE = Path("/tmp/demo")
OUTPUT = ROOT / "tui" / "demo" / "recording.jsonl.gz"
MODEL = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 6}
CARD = 20 * GIB
UPDATES = 105
_STATE_SECONDS = 0.9


class Drivers:
    """The scripted driver: two cards whose memory follows the real processes of the run."""

    def __init__(self, folder: Path) -> None:
        self.library = double.build(folder)
        self._script = double.Script(folder / "nvml-script")
        self.others: list[int] = []
        """Processes of other programs, one on GPU 1 each."""

    def environment(self) -> dict[str, str]:
        return {**os.environ, **self._script.env(self.library)}

    def write(self, run: wire.RunState | None, tick: int) -> None:
        """What the driver reports now: each rank's resident memory, scaled to a card of 20 GiB."""
        self._script.clear()
        ranks = run.ranks if run is not None and run.state is wire.Phase.TRAINING else ()
        for index in range(2):
            rank = next((rank for rank in ranks if rank.rank == index), None)
            held = 0 if rank is None else min(int((rank.rss_bytes or 0) * 15), CARD - 2 * GIB)
            others = (2 + number) * GIB // 2 if (number := len(self.others)) and index else 0
            busy = 88 + (tick * 7 + index * 3) % 11 if held else 0
            watts = 205_000 + (tick * 37 + index * 11) % 19 * 1000 if held else 22_000
            card = {"total": CARD, "used": held + others + GIB // 4, "util": busy, "memory_util": busy // 2}
            heat = {"temp": 58 + (tick // 9 + index * 3) % 6 if held else 41, "power": watts, "limit": 230_000}
            self._script.gpu(index, name="NVIDIA RTX A4500", uuid=f"GPU-{'5f1c9b07'[index * 4 :][:4]}-demo", **card, **heat)
            if rank is not None and held:
                self._script.process(index, pid=rank.pid, used=held, sm=busy)
            for pid in self.others if index else ():
                self._script.process(index, pid=pid, used=others // len(self.others))
        self._script.write()


class Recorder:
    """Writes each message with its time, and the new lines of the log."""

    def __init__(self, folder: RunFolder, drivers: Drivers) -> None:
        self._folder, self._drivers = folder, drivers
        self.rows: list[Recorded] = []
        self.run: wire.RunState | None = None
        self._log: Path | None = None
        self._read = 0

    async def listen(self) -> None:
        """Record until the run has finished."""
        client = await self._connected()
        await client.send(wire.Subscribe(id=1))
        kept: tuple[float, wire.RunState | None] = (0.0, None)
        while self.run is None or self.run.state is not wire.Phase.FINISHED:
            message = await client.receive()
            assert message is not None, "the supervisor has closed the connection"
            now = time.time()
            if isinstance(message, wire.StateUpdate):
                before, self.run = kept[1], message.run
                if before is not None and before.state is message.run.state and now - kept[0] < _STATE_SECONDS:
                    continue
                kept = (now, message.run)
                self._drivers.write(message.run, len(self.rows))
                self._read_log(now, message.run.log_path)
                message = msgspec.structs.replace(message, run=msgspec.structs.replace(message.run, log_path=None))
            if not isinstance(message, wire.Answer | wire.HistoryRows):
                self.rows.append(Recorded(now, message))
        await client.close()

    async def _connected(self) -> AsyncRunClient:
        while True:
            with suppress(memtop.supervisor.errors.MemtopError, OSError):
                return await AsyncRunClient.connect(self._folder.path)
            await asyncio.sleep(0.2)

    def _read_log(self, now: float, path: str | None) -> None:
        if path is None:
            return
        if self._log != Path(path):
            self._log, self._read = Path(path), 0
        with suppress(FileNotFoundError):
            lines = self._log.read_text(errors="replace").splitlines()
            if lines[self._read :]:
                self.rows.append(Recorded(now, LogRow(rows=tuple(lines[self._read :]))))
            self._read = len(lines)

    async def until(self, holds: Callable[[wire.RunState], bool], seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while self.run is None or not holds(self.run):
            assert self.run is None or self.run.state is not wire.Phase.FINISHED, "the run has finished too early"
            assert time.monotonic() < deadline, f"not reached: {self.run}"
            await asyncio.sleep(0.2)


async def play(folder: RunFolder, recorder: Recorder, group: MemoryGroup) -> None:
    """What happens to the run, one step after the other."""

    async def send(make: Callable[[int], wire.Request]) -> None:
        client = await AsyncRunClient.connect(folder.path)
        await client.send(make(7))
        while (message := await client.receive()) is not None:
            if isinstance(message, wire.Answer) and message.outcome is not wire.Outcome.ACCEPTED:
                print(message.outcome.value, message.message, file=sys.stderr)
                break
        await client.close()

    await recorder.until(lambda run: (run.updates or 0) >= 20)
    await send(lambda n: wire.Edit(id=n, change=wire.Change(assignments={"batch": "16", "accumulation": "2"})))
    await recorder.until(lambda run: (run.updates or 0) >= 32)
    await send(lambda n: wire.Try(id=n, change=wire.Change(assignments={"gradient_checkpointing": "true"})))
    await recorder.until(lambda run: (run.updates or 0) >= 40 and run.trial is not None and run.trial.state[0] != "m")
    # Enough for these settings, too little for twice the batch.
    group.limit(resident(group) + (60 << 20))
    await send(lambda n: wire.Restart(id=n, change=wire.Change(assignments={"batch": "32", "accumulation": "1"})))
    await recorder.until(lambda run: run.state is wire.Phase.FAILED and run.proposal is not None)
    await asyncio.sleep(30)
    proposal = recorder.run.proposal if recorder.run is not None else None
    assert proposal is not None
    print(proposal.diagnosis.summary, [remedy.title for remedy in proposal.remedies], file=sys.stderr)
    change = change_for(proposal.remedies[0], reason=proposal.diagnosis.kind.value)
    await send(lambda n: wire.Restart(id=n, change=change))


def resident(group: MemoryGroup) -> int:
    """The bytes of a memory group that the kernel cannot drop: without the page cache."""
    rows = dict(line.split() for line in (group.path / "memory.stat").read_text().splitlines())
    return int(rows["total_rss"] if "total_rss" in rows else rows["anon"])


@contextmanager
def other_programs(drivers: Drivers) -> Iterator[None]:
    """A notebook of the user, and a process that a finished run left behind."""
    code = "import time; time.sleep(3600)"
    finished = PLACE / "runs" / "old-run"
    words = ("train", "first-run", "--max-updates", "1", "--name", "old-run", "--headless")
    subprocess.run([sys.executable, "-m", "memtop", *words], cwd=PLACE, check=True, stdout=subprocess.DEVNULL)
    marked = {**os.environ, "MEMTOP_RUN": str(finished), "MEMTOP_ATTEMPT": "1"}
    programs = [
        subprocess.Popen([sys.executable, "-c", code, "notebook"]),
        subprocess.Popen([sys.executable, "-c", code, "loader"], env=marked),
    ]
    drivers.others = [program.pid for program in programs]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


async def record(group: MemoryGroup) -> list[Recorded]:
    recipe = load_recipes()["first-run"]
    settings = resolve(recipe, preset=load_presets()["standard"], world_size=2)
    numbers = {"batch": "8", "accumulation": "4", "seq_len": "128", "save_every": "20"}
    settings = edit_settings(settings, assignments=numbers)
    settings = msgspec.structs.replace(
        settings, target_samples=UPDATES * settings.effective_batch, model={"config": recipe.model["config"] | MODEL}
    )
    spec = RunSpec(
        name="tiny-llama",
        created=time.time(),
        settings=settings,
        cwd=str(PLACE),
        on_oom="ask",
        memtop_version=memtop.__version__,
    )
    folder = create_run(PLACE / "runs", spec, fresh=False)
    drivers = Drivers(PLACE)
    drivers.write(None, 0)
    with other_programs(drivers):
        command = group.inside(sys.executable, "-m", "memtop.supervisor", str(folder.path))
        supervisor = subprocess.Popen(command, cwd=PLACE, env=drivers.environment(), stdin=subprocess.DEVNULL)
        recorder = Recorder(folder, drivers)
        listening = asyncio.create_task(recorder.listen())
        await play(folder, recorder, group)
        await asyncio.wait_for(listening, 600)
        assert supervisor.wait(timeout=60) == 0
    return recorder.rows


def anonymous(text: str) -> str:
    """Without this machine's paths and user."""
    text = re.sub(r"/[\w/.-]*/\.venv/lib/python3\.\d+/site-packages", "site-packages", text)
    for path in (sys.executable, f"{ROOT}/.venv/bin/python"):
        text = text.replace(path, "python")
    text = text.replace(str(ROOT), "/home/ada/memtop").replace(str(PLACE), "/home/ada/work")
    return re.sub(r'"user":"[^"]*"', '"user":"ada"', text)


def main() -> None:
    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir()
    for group in memory_group():
        rows = asyncio.run(record(group))
    OUTPUT.parent.mkdir(exist_ok=True)
    with gzip.GzipFile(OUTPUT, "wb", mtime=0) as file:
        for row in rows:
            file.write(anonymous(msgspec.json.encode(row).decode()).encode() + b"\n")
    print(f"{OUTPUT}: {len(rows)} messages, {OUTPUT.stat().st_size // 1024} KiB", file=sys.stderr)


if __name__ == "__main__":
    main()
