"""`memtop adopt`: a training that memtop did not start becomes a run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from memtop.cli.adopt import _origin
from memtop.supervisor.errors import RefusedError
from memtop.supervisor.monitor.processes.proc import identify, is_alive
from memtop.supervisor.observed.adoption import adoption_of
from memtop.supervisor.wire import Checkpoint
from tests.conftest import Runs
from tests.test_observed import wait_for
from tests.train.test_agent_accelerate import OWN_FOLDER as LOOP

# It counts its starts, and trains until its input ends or SIGINT comes.
PLAIN = """
import os, pathlib, sys, time
with open("starts", "a") as file:
    print(os.environ.get("COLOUR"), file=file)
for step in range(1, 10**6):
    print(f"step {step}/1000000 loss {1 / step}", flush=True)
    time.sleep(0.05)
"""
DEAF = "import signal\nsignal.signal(signal.SIGINT, lambda *_: print('no', flush=True))\n"
TRAINER = str(Path(__file__).parent / "run/trainer_program.py")


class Strangers:
    """Programs that memtop does not start."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack

    def start(self, text: str, *arguments: str, **variables: str) -> int:
        (self.folder / "train.py").write_text(text)
        return self.run("train.py", *arguments, **variables)

    def run(self, *arguments: str, **variables: str) -> int:
        with (self.folder / "out.log").open("w") as log:
            program = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **variables},
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )
        self._stack.callback(self._end, program)
        wait_for(lambda: "loss" in self.output or program.poll() is not None)
        # Its parent here does not collect it: for memtop it has ended all the same.
        return program.pid

    def _end(self, program: subprocess.Popen[bytes]) -> None:
        if program.poll() is None:
            program.kill()
        program.wait()

    @property
    def output(self) -> str:
        return (self.folder / "out.log").read_text()

    @property
    def starts(self) -> list[str]:
        return (self.folder / "starts").read_text().split()


@pytest.fixture
def strangers(tmp_path: Path) -> Iterator[Strangers]:
    folder = tmp_path / "theirs"
    folder.mkdir()
    with ExitStack() as stack:
        yield Strangers(folder, stack)


def alive(pid: int) -> bool:
    found = identify(pid)
    return found is not None and is_alive(found)


def test_a_program_that_cannot_resume_is_not_ended(strangers: Strangers, runs: Runs) -> None:
    pid = strangers.start(PLAIN)
    wait_for(lambda: strangers.output.count("loss") > 2)
    error = runs.memtop("adopt", str(pid), "--yes", status=1).stderr
    assert f"memtop: PID {pid}: it has saved no complete checkpoint since its start" in error
    assert error.endswith("--from-zero starts it again from its beginning\n")
    assert alive(pid)
    assert not runs.path.exists()


def test_from_zero_it_becomes_a_run_with_its_command_folder_and_environment(strangers: Strangers, runs: Runs) -> None:
    pid = strangers.start(PLAIN, "--words", "a b", COLOUR="blue", SECRET_TOKEN="1234")
    wait_for(lambda: strangers.output.count("loss") > 2)
    unasked = runs.memtop("adopt", str(pid), "--from-zero", "--detach", status=2).stderr
    assert "there is no terminal to ask on: give --yes" in unasked
    assert alive(pid)
    done = runs.memtop("adopt", str(pid), "--from-zero", "--yes", "--detach")
    assert done.stdout == "train\n"
    assert not alive(pid)
    assert "KeyboardInterrupt" in strangers.output
    for line in (
        f"  ends      pid {pid}, with SIGINT",
        f"  command   {sys.executable} train.py --words 'a b'",
        f"  folder    {strangers.folder}",
        "SECRET_TOKEN",
        "  from      zero: everything that it has trained is done again (",
    ):
        assert line in done.stderr
    assert "1234" not in done.stderr
    document = runs.wait("train", lambda document: (document["updates"] or 0) > 2)
    assert document["command"] == [sys.executable, "train.py", "--words", "a b"]
    assert strangers.starts == ["blue", "blue"]
    runs.memtop("stop", "train")


def test_a_program_that_does_not_end_stays_and_nothing_is_started(strangers: Strangers, runs: Runs) -> None:
    pid = strangers.start(DEAF + PLAIN)
    wait_for(lambda: strangers.output.count("loss") > 2)
    error = runs.memtop("adopt", str(pid), "--from-zero", "--yes", "--wait", "0.5", status=1).stderr
    assert f"memtop: pid {pid}: has not ended in 0.5 s; nothing was started" in error
    assert alive(pid)
    assert not runs.path.exists()


@pytest.mark.parametrize(("name", "says"), [("a b", "begin with a letter or a digit"), ("latest", "choose another name")])
def test_a_run_that_cannot_be_created_is_refused_before_the_program_is_ended(
    name: str, says: str, strangers: Strangers, runs: Runs
) -> None:
    pid = strangers.start(PLAIN)
    wait_for(lambda: strangers.output.count("loss") > 2)
    error = runs.memtop("adopt", str(pid), "--from-zero", "--yes", "--detach", "--name", name, status=2).stderr
    assert says in error
    assert alive(pid)
    assert not [*runs.path.glob("*"), *runs.path.glob(".adopt*")]


def test_a_program_that_ignores_sigint_gets_sigterm(strangers: Strangers) -> None:
    pid = strangers.start("import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n" + PLAIN)
    wait_for(lambda: strangers.output.count("loss") > 2)
    adoption, _ = adoption_of(pid)
    assert adoption.signal_number == signal.SIGTERM
    assert adoption.notes[0].startswith("it ignores SIGINT")


def test_a_program_in_another_job_is_refused(strangers: Strangers) -> None:
    pid = strangers.start(PLAIN, SLURM_JOB_ID="7")
    wait_for(lambda: strangers.output.count("loss") > 2)
    with pytest.raises(RefusedError, match="runs in a Slurm job; start memtop inside that job"):
        adoption_of(pid)


@pytest.mark.long  # imports transformers three times; the next test adopts a program with a profile
@pytest.mark.parametrize(("words", "place"), [(("waits",), "out"), (("waits", "saves-below"), "out/exp1")])
def test_a_training_of_hugging_faces_trainer_resumes(
    words: tuple[str, ...], place: str, strangers: Strangers, runs: Runs
) -> None:
    pid = strangers.run(TRAINER, *words, MEMTOP_ATTEMPT="1", HF_HUB_OFFLINE="1")
    wait_for(lambda: (strangers.folder / "updates.jsonl").exists() and len(updates(strangers)) == 17)
    shown = runs.memtop("adopt", str(pid), "--yes", "--detach")
    assert f"  from      update 16: {strangers.folder}/{place}/checkpoint-16" in shown.stderr
    (strangers.folder / "go").touch()
    document = runs.wait("trainer_program", lambda document: document["state"] == "finished")
    assert document["attempts"][0]["start_updates"] == 16
    rows = updates(strangers)
    assert [update for update, _, _ in rows] == [*range(1, 18), *range(17, 49)]
    samples = [sample for _, _, seen in rows[:16] + rows[17:] for sample in seen]
    assert all(sorted(samples[epoch : epoch + 46]) == list(range(46)) for epoch in range(0, 184, 46))
    assert document["program"]["resumes"]
    (event,) = runs.events("trainer_program", "resume")
    assert event.message.startswith("attempt 1 is to resume at update 16")


def test_a_program_with_a_profile_resumes(strangers: Strangers, runs: Runs) -> None:
    shutil.copytree(Path(__file__).parent / "run/programs/globals", strangers.folder, dirs_exist_ok=True)
    pid = strangers.run("train.py", "small.py", MEMTOP_ATTEMPT="1")
    wait_for(lambda: "iter 10:" in strangers.output)
    shown = runs.memtop("adopt", str(pid), "--yes", "--detach").stderr
    assert f"  from      update 8: {strangers.folder}/out/ckpt.pt; 2 updates are done again" in shown
    assert "  note      profile nanogpt: " in shown
    written = strangers.folder / "updates.txt"
    # The program waits again at 10.
    runs.wait("train", lambda document: written.read_text().count("10 ") == 2)
    assert [int(line.split()[0]) for line in written.read_text().splitlines()] == [*range(11), 8, 9, 10]
    environment = json.loads((runs.path / "train/attempts/0001/command.json").read_text())
    assert environment["argv"][1:] == ["train.py", "small.py", "--init_from=resume"]
    document = runs.show("train")
    assert (document["program"]["profile"], document["attempts"][0]["start_updates"]) == ("nanogpt", 8)
    runs.memtop("stop", "train")


@pytest.mark.parametrize(("reached", "words"), [(9, "1 update is done again"), (10, "2 updates are done again")])
def test_what_is_done_again_is_counted(reached: int, words: str) -> None:
    saved = Checkpoint(path="/c", updates=8, size_bytes=1, complete=True)
    assert _origin(saved, reached) == f"update 8: /c; {words}, unless it saves when it ends"


def updates(strangers: Strangers) -> list[Any]:
    return [json.loads(line) for line in (strangers.folder / "updates.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("of", "says"),
    [
        ("nobody", "no such process"),
        ("none", "no training that memtop can see"),
    ],
)
def test_what_cannot_be_adopted(of: str, says: str, strangers: Strangers, runs: Runs) -> None:
    pid = 1 << 22 if of == "nobody" else strangers.start("import time\nprint('no loss', flush=True)\ntime.sleep(600)")
    error = runs.memtop("adopt", str(pid), "--yes", status=2).stderr
    assert error.startswith(f"memtop: PID {pid}: {says}")


def test_a_run_of_memtop_is_not_adopted(runs: Runs) -> None:
    Path(runs.root, "train.py").write_text(PLAIN)
    runs.memtop("train", "--detach", "--name", "a", "--", sys.executable, "train.py")
    document: dict[str, Any] = runs.wait("a", lambda document: document["updates"])
    error = runs.memtop("adopt", str(document["trainer_pid"]), "--yes", status=2).stderr
    assert "belongs to memtop's run a" in error


def test_states_in_a_folder_below_that_of_the_command_are_found(strangers: Strangers, runs: Runs) -> None:
    # It saves into OUT/exp1; a link leads out of OUT, to a later state.
    option = 'parser.add_argument("--output_dir")\nresumed'
    text = LOOP.replace("\nresumed", "\n" + option, 1).replace('f"states/', 'f"{parser.parse_args().output_dir}/exp1/')
    (strangers.folder / "out").mkdir()
    (strangers.folder / "out/link").symlink_to(runs.root)
    pid = strangers.start(text, "--output_dir", "out")
    wait_for(lambda: "step 25/" in strangers.output)
    shutil.copytree(strangers.folder / "out/exp1/step_20", runs.root / "step_30")
    shown = runs.memtop("adopt", str(pid), "--yes", "--detach").stderr
    assert f"  from      update 20: {strangers.folder}/out/exp1/step_20; " in shown
    document = runs.wait("train", lambda document: document["state"] == "finished")
    assert (document["updates"], document["attempts"][0]["start_updates"], document["program"]["resumes"]) == (100, 20, True)


def test_folders_of_several_trainings_are_not_told_apart(strangers: Strangers, runs: Runs) -> None:
    option = 'parser.add_argument("--output_dir")\nresumed'
    text = LOOP.replace("\nresumed", "\n" + option, 1).replace('f"states/', 'f"{parser.parse_args().output_dir}/exp1/')
    pid = strangers.start(text, "--output_dir", "out")
    wait_for(lambda: "step 25/" in strangers.output)
    shutil.copytree(strangers.folder / "out/exp1/step_20", strangers.folder / "out/exp2/step_90")
    refused = runs.memtop("adopt", str(pid), "--yes", "--detach", status=1).stderr
    assert f"there are checkpoints in several folders: {strangers.folder}/out/exp1, " in refused
    assert alive(pid)


def test_it_waits_for_a_save_that_goes_on(strangers: Strangers, runs: Runs) -> None:
    slow = """part = pathlib.Path(_[-1], "part")
    while done == 20 and not pathlib.Path("go").exists():
        part.write_text("more")
        time.sleep(0.05)"""
    text = LOOP.replace('pathlib.Path("saving").touch()', slow).replace('save_state(f"states', 'save_state(f"out')
    text = text.replace("\nresumed", '\nparser.add_argument("--output_dir")\nresumed', 1)
    pid = strangers.start(text, "--output_dir", "out")
    wait_for((strangers.folder / "out/step_20/part").exists)
    with runs.start("adopt", str(pid), "--yes", "--detach", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as adopting:
        told = next(line for line in adopting.stderr if "is saving" in line)
        assert told.endswith(f"the program is saving {strangers.folder}/out/step_20: SIGINT follows when it has saved\n")
        assert alive(pid)
        (strangers.folder / "go").touch()
        adopting.communicate()
    document = runs.wait("train", lambda document: document["state"] == "finished")
    assert document["attempts"][0]["start_updates"] == 20
