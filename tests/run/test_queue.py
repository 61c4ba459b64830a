"""Runs that wait for others (`--after`, `--queue`), and the command at the very end (`--then`)."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from memtop.cli.common import run_line
from memtop.supervisor.errors import RefusedError
from memtop.supervisor.monitor.processes.proc import identify
from memtop.supervisor.monitor.values import GpuProcess, GpuSample, MachineSnapshot
from memtop.supervisor.run.afterwards import Afterwards
from memtop.supervisor.run.effects import GiveUp, Launch
from memtop.supervisor.run.events import CommandEnded, LaunchRefused, Queue, SupervisorStarted
from memtop.supervisor.run.model import Model
from memtop.supervisor.run.queue import ahead, begin_next, spec_like
from memtop.supervisor.run.record.folder import RunFolder, RunLock, StateFile, create_run, write_json
from memtop.supervisor.run.runs import row_of, run_folders, table, with_turns
from memtop.supervisor.run.view import needs_supervisor, read_state
from memtop.supervisor.wire import Change, Outcome, Phase, RunState
from tests.conftest import Runs
from tests.nvml_double.double import Script, nvml_library  # noqa: F401 (a fixture)
from tests.run.brain import RUN, SETTINGS, Brain, restart, spec, stop

MACHINE = MachineSnapshot(time=1.0)
GIB = 1 << 30


# --- the rules ------------------------------------------------------------------------------------


def waiting(why: str = "waits for b to end (training)") -> Brain:
    brain = Brain(Model(run=replace(RUN, waits=True), settings=SETTINGS, supervisor_pid=7))
    brain.tell(SupervisorStarted())
    brain.tick(queue=Queue(waits_for=why))
    assert (brain.model.phase, brain.model.reason, brain.asked(Launch)) == (Phase.QUEUED, why, [])
    return brain


def test_a_run_waits_and_says_for_what_once() -> None:
    brain = waiting()
    brain.tick()
    brain.tick(queue=Queue(waits_for="waits for b to end (training)"))
    brain.tick(queue=Queue(waits_for="waits behind c"))
    assert brain.messages("queued") == ["waits for b to end (training)", "waits behind c"]


def test_it_starts_once_when_its_turn_has_come() -> None:
    brain = waiting()
    brain.tick(queue=Queue(waits_for=None))
    brain.tick(queue=Queue(waits_for=None))
    (launch,) = brain.asked(Launch)
    assert (launch.number, launch.reason) == (1, "start")


def test_a_run_that_cannot_be_started_then_has_failed() -> None:
    brain = waiting()
    brain.tick(queue=Queue(waits_for=None))
    brain.tell(LaunchRefused(number=1, why="python is gone"))
    assert (brain.model.phase, brain.model.reason) == (Phase.FAILED, "python is gone")
    assert brain.asked(GiveUp) == [], "its supervisor stays to tell it"


def test_stopping_a_waiting_run_starts_nothing() -> None:
    brain = waiting()
    stop(brain)
    assert (brain.model.phase, brain.answers()[-1].outcome) == (Phase.STOPPED, Outcome.DONE)
    brain.tick(queue=Queue(waits_for=None))
    assert brain.asked(Launch) == []


def test_a_restart_begins_at_once() -> None:
    brain = waiting()
    restart(brain, Change(assignments={"batch": "4", "accumulation": "8"}))
    (launch,) = brain.asked(Launch)
    assert launch.settings is not None
    assert launch.settings.batch == 4


def test_a_new_supervisor_waits_again() -> None:
    brain = Brain(Model(run=replace(RUN, waits=True), settings=SETTINGS, supervisor_pid=8))
    brain.tell(
        SupervisorStarted(state=StateFile(run=RunState(name="a", folder="/a", state=Phase.QUEUED, created=1.0), socket=""))
    )
    assert brain.model.phase is Phase.QUEUED


# --- what is ahead --------------------------------------------------------------------------------


def run_in(runs_dir: Path, name: str, phase: Phase, *, lives: bool, created: float = 1.0, gpus: str = "") -> RunFolder:
    """A run whose supervisor is this process, or is gone."""
    own = spec(name, created)
    assert own.settings is not None
    device = "cuda" if gpus else "cpu"
    own = replace(own, settings=replace(own.settings, gpus=gpus, device=device), queue=phase is Phase.QUEUED)
    folder = create_run(runs_dir, own, fresh=False)
    me = identify(os.getpid())
    assert me is not None
    run = RunState(
        name=name,
        folder=str(folder.path),
        state=phase,
        created=created,
        supervisor_pid=me.pid,
        attempt=int(phase is not Phase.QUEUED),
    )
    ticks = me.started_ticks if lives else me.started_ticks + 1
    write_json(folder.state_path, StateFile(run=run, socket="none", supervisor_started_ticks=ticks))
    if lives:
        # Held until this process ends, as by a supervisor.
        lock = RunLock(folder)
        assert lock.acquire()
        LOCKS.append(lock)
    return folder


LOCKS: list[RunLock] = []


@pytest.mark.parametrize(
    ("phase", "lives", "words"),
    [
        (Phase.TRAINING, True, "waits for b to end (training)"),
        (Phase.RESTARTING, True, "waits for b to end (restarting)"),
        (Phase.QUEUED, True, "waits for b to end (queued)"),
        (Phase.FINISHED, True, None),
        (Phase.FAILED, False, None),
        (Phase.TRAINING, False, None),
    ],
)
def test_after_a_run_means_after_its_end_whatever_it_is(tmp_path: Path, phase: Phase, lives: bool, words: str | None) -> None:
    other = run_in(tmp_path, "b", phase, lives=lives)
    mine = create_run(tmp_path, replace(spec("a"), after=str(other.path)), fresh=False)
    assert ahead(mine, mine.spec(), MACHINE) == words


def test_a_run_that_was_deleted_is_over(tmp_path: Path) -> None:
    mine = create_run(tmp_path, replace(spec("a"), after=str(tmp_path / "gone")), fresh=False)
    assert ahead(mine, mine.spec(), MACHINE) is None


def test_the_queue_is_in_the_order_of_creation(tmp_path: Path) -> None:
    first, second = (run_in(tmp_path, name, Phase.QUEUED, lives=True, created=n) for n, name in enumerate("xy"))
    assert ahead(second, second.spec(), MACHINE) == "waits behind x"
    assert ahead(first, first.spec(), MACHINE) is None


def test_a_waiting_run_is_put_before_all_others(tmp_path: Path) -> None:
    runs = [run_in(tmp_path, name, Phase.QUEUED, lives=True, created=n) for n, name in enumerate("xyz")]
    _, y, z = runs
    assert begin_next(z) == "z is the next of the waiting runs"
    assert [ahead(one, one.spec(), MACHINE) for one in runs] == ["waits behind z", "waits behind x", None]
    begin_next(y)
    begin_next(y)
    assert [ahead(one, one.spec(), MACHINE) for one in runs] == ["waits behind y", None, "waits behind y"]


def test_the_list_of_runs_shows_whose_turn_it_is(tmp_path: Path) -> None:
    for n, name in enumerate("xyz"):
        run_in(tmp_path, name, Phase.QUEUED, lives=True, created=n)
    run_in(tmp_path, "t", Phase.TRAINING, lives=True)
    after = run_in(tmp_path, "w", Phase.QUEUED, lives=True)
    write_json(after.spec_path, replace(after.spec(), queue=False, after=str(tmp_path / "x")))
    begin_next(RunFolder(tmp_path / "z"))
    rows = with_turns(map(row_of, run_folders(tmp_path)))
    assert {row.name: row.turn for row in rows} == {"x": 2, "y": 3, "z": 1, "t": None, "w": None}
    states = {line.split()[0]: line[6:].split("  ")[0] for line in table(rows, 0.0)}
    assert states == {"name": "state", "x": "queued 2", "y": "queued 3", "z": "queued 1", "t": "training", "w": "queued"}


def test_only_runs_on_the_same_gpus_take_a_turn(tmp_path: Path) -> None:
    """A number and a uuid may be one GPU; a run on the CPU waits for all."""
    places = {"x": "0", "y": "1", "z": "0,1", "u": "GPU-1", "c": "", "v": "2"}
    for n, (name, gpus) in enumerate(places.items()):
        run_in(tmp_path, name, Phase.QUEUED, lives=True, created=n, gpus=gpus)
    rows = with_turns(map(row_of, run_folders(tmp_path)))
    assert {row.name: row.turn for row in rows} == {"x": 1, "y": 1, "z": 3, "u": 4, "c": 5, "v": 2}


def test_only_a_run_that_waits_for_its_turn_can_be_the_next(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="does not wait: it is training"):
        begin_next(run_in(tmp_path, "a", Phase.TRAINING, lives=True))
    other = run_in(tmp_path, "b", Phase.QUEUED, lives=True)
    write_json(other.spec_path, replace(other.spec(), queue=False, after="/a"))
    with pytest.raises(RefusedError, match="waits for one run, not for its turn: memtop restart b begins it"):
        begin_next(other)


def test_a_run_like_another_takes_its_work_and_not_its_history(tmp_path: Path) -> None:
    own = spec("a")
    old = create_run(tmp_path, replace(own, then="poweroff", choice="the free GPU", after="/x", on_oom="ask"), fresh=False)
    like = spec_like(old, "b", own.settings, None)
    assert (like.name, like.queue, like.after, like.then, like.choice, like.on_oom) == (
        "b",
        True,
        None,
        "poweroff",
        None,
        "ask",
    )
    like = spec_like(old, "b", own.settings, tmp_path / "a")
    assert (like.queue, like.after, like.cwd) == (False, str(tmp_path / "a"), own.cwd)
    assert create_run(tmp_path, like, fresh=False).id != old.id


def test_on_the_cpu_every_living_run_is_waited_for(tmp_path: Path) -> None:
    run_in(tmp_path, "b", Phase.TRAINING, lives=True)
    run_in(tmp_path, "over", Phase.FINISHED, lives=True)
    mine = run_in(tmp_path, "a", Phase.QUEUED, lives=True)
    assert ahead(mine, mine.spec(), MACHINE) == "waits for b to end (training)"


def card(index: int, *used: int) -> GpuSample:
    return GpuSample(
        index=index, processes=tuple(GpuProcess(pid=n, name="python", used_bytes=b) for n, b in enumerate(used, 7))
    )


def test_only_runs_and_programs_on_the_same_gpus_are_waited_for(tmp_path: Path) -> None:
    run_in(tmp_path, "b", Phase.TRAINING, lives=True, gpus="0")
    mine = run_in(tmp_path, "a", Phase.QUEUED, lives=True, gpus="1")
    free = MachineSnapshot(time=1.0, gpus=(card(0, 9 * GIB), card(1, 100 << 20)))
    assert ahead(mine, mine.spec(), free) is None, "a desktop's context is no training"
    busy = MachineSnapshot(time=1.0, gpus=(card(0), card(1, 100 << 20, 2 * GIB)))
    assert ahead(mine, mine.spec(), busy) == "waits for GPU 1: python (pid 8) uses 2.0 GiB"
    both = run_in(tmp_path, "c", Phase.QUEUED, lives=True, created=0.0, gpus="0,1")
    assert ahead(both, both.spec(), free) == "waits for b to end (training)"


def test_a_waiting_run_whose_supervisor_is_gone_says_so_and_wants_one(tmp_path: Path) -> None:
    folder = run_in(tmp_path, "a", Phase.QUEUED, lives=False)
    state = read_state(folder)
    assert (state.state, state.supervisor_pid) == (Phase.QUEUED, None)
    assert "memtop watch a starts a new one" in (state.reason or "")
    assert needs_supervisor(folder)
    assert "attempt" not in run_line(state), "it has had none"


# --- the command at the end -----------------------------------------------------------------------


def ended(
    afterwards: Afterwards, monkeypatch: pytest.MonkeyPatch, attempt: int = 1, phase: Phase = Phase.FAILED
) -> CommandEnded | None:
    """What is said after the end of an attempt; None if nothing was started."""
    assert afterwards.tick(attempt, phase, over=True) is None, "a person may restart it"
    later = time.monotonic() + 60
    monkeypatch.setattr("memtop.supervisor.run.afterwards.time.monotonic", lambda: later)
    found = afterwards.tick(attempt, phase, over=True)
    while found is None and afterwards.busy:
        time.sleep(0.01)
        found = afterwards.tick(attempt, phase, over=True)
    monkeypatch.undo()
    return found


def test_the_command_runs_once_for_each_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = create_run(tmp_path, spec("a"), fresh=False)
    command = 'echo "$MEMTOP_STATE $MEMTOP_RUN" >> out; echo done'
    one = Afterwards(folder, command, str(tmp_path))
    found = ended(one, monkeypatch)
    assert found is not None
    assert found.words == f"--then: {command}: has finished"
    assert ended(one, monkeypatch) is None
    assert ended(Afterwards(folder, command, str(tmp_path)), monkeypatch) is None, "another supervisor knows of it"
    assert ended(one, monkeypatch, attempt=2, phase=Phase.FINISHED) is not None, "the run has gone on"
    assert (tmp_path / "out").read_text() == f"failed {folder.path}\nfinished {folder.path}\n"
    assert (folder.path / "then.log").read_text() == "done\ndone\n"


def test_a_command_that_fails_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = create_run(tmp_path, spec("a"), fresh=False)
    found = ended(Afterwards(folder, "exit 3", str(tmp_path)), monkeypatch)
    assert found is not None
    assert found.words == "--then: exit 3: has failed with exit status 3, see then.log"
    gone = ended(Afterwards(folder, "true", str(tmp_path / "gone")), monkeypatch, attempt=2)
    assert gone is not None
    assert gone.words == "--then: cannot be started: No such file or directory"


def test_a_command_that_cannot_be_claimed_is_not_tried_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = create_run(tmp_path, spec("a"), fresh=False)

    def full(path: Path, value: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    afterwards = Afterwards(folder, "true", str(tmp_path))
    monkeypatch.setattr("memtop.supervisor.run.afterwards.write_json", full)
    assert afterwards.tick(1, Phase.FAILED, over=True) is None
    later = time.monotonic() + 60
    monkeypatch.setattr("memtop.supervisor.run.afterwards.time.monotonic", lambda: later)
    found = [afterwards.tick(1, Phase.FAILED, over=True) for _ in range(3)]
    assert [event and event.words for event in found] == ["--then: cannot be started: No space left on device", None, None]
    assert not afterwards.busy, "the supervisor need not stay for it"


# --- whole ----------------------------------------------------------------------------------------


def test_the_next_run_begins_after_one_that_failed_whoever_was_killed(runs: Runs) -> None:
    go, trace = runs.root / "go", runs.root / "trace"
    first = f"while [ ! -e {go} ]; do sleep 0.1; done; echo first >> {trace}; exit 3"
    runs.memtop("train", "--name", "first", "--detach", "--", "sh", "-c", first)
    second = ("train", "--name", "second", "--detach", "--after", "first", "--then", f"echo then >> {trace}")
    runs.memtop(*second, "--", "sh", "-c", f"echo second >> {trace}")
    document = runs.wait("second", lambda d: d["reason"] is not None and "waits for first" in d["reason"])
    assert (document["state"], document["attempts"], document["then"]) == ("queued", [], second[-1])
    shown = runs.memtop("show", "second").stdout
    assert f"  then        {second[-1]}\n" in shown
    assert "  order  " not in shown, "it waits for one run, not for its turn"
    # Its supervisor is killed while it waits: the end of the first run brings it back.
    os.kill(document["supervisor_pid"], signal.SIGKILL)
    go.touch()
    runs.wait("first", lambda d: d["state"] == "failed")
    runs.wait("second", lambda d: d["state"] == "finished")
    folder = RunFolder(Path(runs.path) / "second")
    while not (folder.path / "then.log").exists() or "then" not in trace.read_text():
        time.sleep(0.1)
    assert trace.read_text() == "first\nsecond\nthen\n"


def test_a_run_waits_until_a_busy_gpu_is_free_and_then_begins(runs: Runs, tmp_path: Path, nvml_library: Path) -> None:  # noqa: F811
    """The driver is scripted: another program holds its only GPU, and ends."""
    script = Script(tmp_path / "nvml-script").gpu(0, total=20 * GIB, used=3 * GIB, uuid="GPU-0")
    script.process(0, pid=os.getpid(), used=3 * GIB).write()
    runs.environment |= script.env(nvml_library)
    runs.memtop("train", "--name", "a", "--detach", "--queue", "--", "sh", "-c", "echo ran > ran")
    waits = runs.wait("a", lambda d: d["reason"] is not None and "waits for GPU 0" in d["reason"])
    assert (waits["state"], waits["attempts"]) == ("queued", [])
    assert f"(pid {os.getpid()}) uses 3.0 GiB" in waits["reason"]
    assert not (runs.root / "ran").exists()
    script.clear().gpu(0, total=20 * GIB, used=0, uuid="GPU-0").write()
    runs.wait("a", lambda d: d["state"] == "finished")
    assert (runs.root / "ran").read_text() == "ran\n"


def test_the_list_of_runs_brings_a_waiting_run_back(runs: Runs) -> None:
    """Its supervisor is killed, and no other lives that would notice it."""
    runs.memtop("train", "--name", "first", "--detach", "--", "sh", "-c", "sleep 600")
    theirs = {**runs.environment, "COLOUR": "blue"}
    runs.memtop("train", "--name", "second", "--detach", "--queue", "--", "sh", "-c", "echo $COLOUR > ran", env=theirs)
    waits = runs.wait("second", lambda d: d["state"] == "queued" and "waits for first" in d["reason"])
    first = runs.wait("first", lambda d: d["trainer_pid"] is not None)
    for pid in (waits["supervisor_pid"], first["supervisor_pid"], first["trainer_pid"]):
        os.kill(pid, signal.SIGKILL)
    runs.wait("first", lambda d: not d["alive"] and d["supervisor_pid"] is None)
    assert "memtop watch second starts a new one" in runs.memtop("show", "second").stdout
    listed = runs.memtop("runs")
    assert "memtop: second had lost its supervisor; a new one has started" in listed.stderr
    assert "first had lost" not in listed.stderr
    runs.wait("second", lambda d: d["state"] == "finished")
    assert (runs.root / "ran").read_text() == "blue\n", "it has the environment of its start"
    assert runs.memtop("runs").stderr == "", "there is nothing to bring back any more"


def test_a_waiting_run_is_stopped(runs: Runs) -> None:
    runs.memtop("train", "--name", "first", "--detach", "--", "sh", "-c", "sleep 600")
    runs.memtop("train", "--name", "second", "--detach", "--queue", "--", "sh", "-c", "echo no > no")
    waits = runs.wait("second", lambda d: d["state"] == "queued" and "first" in d["reason"])
    assert "  queued 1  " in runs.memtop("runs").stdout
    assert [one["turn"] for one in json.loads(runs.memtop("runs", "--json").stdout)] == [None, 1]
    assert "  order       second\n" in runs.memtop("show", "second").stdout
    runs.wait("first", lambda d: d["alive"])
    for more in ((), ("second",)):
        once = runs.memtop("watch", *more, "--once").stdout.splitlines()
        (line,) = [one for one in once if one.startswith("second ")]
        assert line.split()[:6] == ["second", "queued", "waits", "for", "first", "to"]
        assert any(one.startswith("first ") for one in once) is not bool(more)
    listed = json.loads(runs.memtop("watch", "--once", "--json").stdout)["runs"]
    assert [(one["name"], one["state"]) for one in listed] == [("first", listed[0]["state"]), ("second", "queued")]
    assert listed[1]["reason"].startswith("waits for first to end")
    in_chinese = runs.memtop("watch", "--once", "--lang", "zh").stdout
    assert any(one.split()[:2] == ["second", "排队中"] for one in in_chinese.splitlines())
    assert "waits" not in in_chinese
    assert runs.show("second")["supervisor_pid"] == waits["supervisor_pid"], "looking starts nothing"
    runs.memtop("train", "--name", "third", "--detach", "--after", "second", "--", "true")
    runs.wait("third", lambda d: d["state"] == "queued" and "second" in d["reason"])
    (line,) = [one for one in runs.memtop("watch", "--once").stdout.splitlines() if one.startswith("third ")]
    assert line.split(maxsplit=2) == ["third", "queued", "waits for second to end (queued)"]
    runs.memtop("stop", "third")
    assert "stopped before it began" in runs.memtop("stop", "second").stdout
    assert runs.show("second")["state"] == "stopped"
    runs.memtop("stop", "first")
    assert not (runs.root / "no").exists()
