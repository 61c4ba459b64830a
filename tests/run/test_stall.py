"""A program that reports lack of memory and then nothing more. The test sets the clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from memtop.presets import load_presets, load_recipes, resolve
from memtop.presets.schema import Sampling
from memtop.supervisor.run.post_mortem.examine import ASIDE_SECONDS, FIRST_SECONDS, MOST_SECONDS, SECONDS, StallWatch
from memtop.supervisor.run.progress import Progress
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.run.sensors import Sensors
from tests.run.brain import STEP, training
from tests.run.reported import reported


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def say(log: Path, text: str) -> None:
    with log.open("a") as file:
        file.write(text + "\n")


def look(watch: StallWatch, heard: int, update_seconds: float | None, **more: Any) -> str | None:
    watch.read()
    return watch.look(heard, update_seconds, **more)


def test_silence_after_such_words_is_a_stall(tmp_path: Path) -> None:
    clock, log = Clock(), tmp_path / "output.log"
    watch = StallWatch(log, clock)
    assert look(watch, 1, 0.5) is None
    say(log, "RuntimeError: unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")
    assert look(watch, 1, 0.5) is None
    clock.now += SECONDS + 1
    found = look(watch, 1, 0.5)
    assert found is not None
    assert found.startswith("RuntimeError: unable to allocate shared memory")


def test_a_rank_that_continues_has_survived_the_message(tmp_path: Path) -> None:
    clock, log = Clock(), tmp_path / "output.log"
    watch = StallWatch(log, clock)
    say(log, "CUDA out of memory, halving the batch")
    assert look(watch, 1, 0.5) is None
    clock.now += 5
    assert look(watch, 2, 0.5) is None
    clock.now += 10 * SECONDS
    assert look(watch, 2, 0.5) is None


def test_a_report_from_before_the_message_that_is_read_after_it_is_no_sign_of_life(tmp_path: Path) -> None:
    clock, log, brain = Clock(), tmp_path / "output.log", training()
    sensors = Sensors(RunFolder(tmp_path), lambda: brain.model, clock)
    sensors._stall = StallWatch(log, clock)
    unread = [{**STEP, "update": 8}]

    def read_reports() -> None:
        while unread:
            brain.report(unread.pop())

    assert sensors.stood_still(read_reports) is None
    assert unread, "reports are read when it is their turn"
    say(log, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB.")
    assert sensors.stood_still(read_reports) is None
    assert not unread
    clock.now += ASIDE_SECONDS + 1
    found = sensors.stood_still(read_reports)
    assert found is not None
    assert "CUDA out of memory" in found.words


def test_silence_without_such_words_is_none_of_our_business(tmp_path: Path) -> None:
    clock, log = Clock(), tmp_path / "output.log"
    watch = StallWatch(log, clock)
    say(log, "compiling")
    assert look(watch, 1, 0.5) is None
    clock.now += 10 * FIRST_SECONDS
    assert look(watch, 1, 0.5) is None


def test_a_program_that_never_reports_or_goes_on_talking_is_left_alone(tmp_path: Path) -> None:
    clock, log = Clock(), tmp_path / "output.log"
    watch = StallWatch(log, clock)
    say(log, "No space left on device: the cache is not written")
    assert look(watch, 0, None) is None
    clock.now += 10 * FIRST_SECONDS
    assert look(watch, 0, None) is None
    other = StallWatch(tmp_path / "other.log", clock)
    say(tmp_path / "other.log", "out of memory")
    for _ in range(20):
        assert look(other, 3, 0.5) is None
        clock.now += SECONDS / 2
        say(tmp_path / "other.log", "still compiling")


def test_slow_programs_and_first_updates_are_given_their_time(tmp_path: Path) -> None:
    clock, log = Clock(), tmp_path / "output.log"
    watch = StallWatch(log, clock)
    say(log, "MemoryError")
    assert look(watch, 1, 40.0) is None
    clock.now += 4 * 40
    assert look(watch, 1, 40.0) is None
    clock.now += 2 * 40
    assert look(watch, 1, 40.0) == "MemoryError"


def test_words_that_an_earlier_supervisor_has_seen_count_from_the_takeover_on(tmp_path: Path) -> None:
    clock, log = Clock(), tmp_path / "output.log"
    say(log, "RuntimeError: unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")
    say(log, "x" * 1000)
    clock.now += 10 * SECONDS
    watch = StallWatch(log, clock)
    assert look(watch, 7, 0.5) is None
    clock.now += SECONDS + 1
    found = look(watch, 7, 0.5)
    assert found is not None
    assert found.startswith("RuntimeError: unable to allocate")
    got_over_it = StallWatch(log, clock)
    assert look(got_over_it, 7, 0.5) is None
    clock.now += 1
    assert look(got_over_it, 8, 0.5) is None
    clock.now += 10 * SECONDS
    assert look(got_over_it, 8, 0.5) is None


def test_work_outside_updates_gets_more_time(tmp_path: Path) -> None:
    clock, log = Clock(), tmp_path / "output.log"
    watch = StallWatch(log, clock)
    say(log, "No space left on device: the cache is not written")
    assert look(watch, 1, 0.5, aside=True) is None
    clock.now += ASIDE_SECONDS - 1
    assert look(watch, 1, 0.5, aside=True) is None
    clock.now += 2
    assert look(watch, 1, 0.5, aside=True) is not None, "but not for ever"
    # It has been silent for so long before, and went on.
    assert look(watch, 1, 0.5, longest_pause=ASIDE_SECONDS) is None
    clock.now += 2 * ASIDE_SECONDS
    assert look(watch, 1, 0.5, longest_pause=ASIDE_SECONDS) is not None
    assert look(watch, 1, 0.5, longest_pause=1e9) is None
    clock.now += MOST_SECONDS
    assert look(watch, 1, 0.5, longest_pause=1e9) is not None


def test_when_our_own_trainer_is_at_something_else(tmp_path: Path) -> None:
    settings = replace(resolve(load_recipes()["first-run"], preset=load_presets()["standard"]), eval_every=4, save_every=6)
    progress = Progress()
    assert not progress.is_aside(settings)

    def hear(kind: str, time: float, **values: object) -> bool:
        nonlocal progress
        progress = progress.after(0, reported({"type": kind, "clock": time, **values}))
        return progress.is_aside(settings)

    assert not hear("plan", 0.0, total_updates=13)
    assert [hear("step", 100.0 + update, update=update) for update in range(1, 5)] == [False, False, False, True]
    assert not hear("evaluation", 124.0, update=4)
    assert not hear("step", 125.0, update=5)
    assert hear("step", 126.0, update=6)
    assert not hear("checkpoint", 127.0, updates=6)
    settings = replace(settings, sample=Sampling(prompts="p", every=7))
    assert hear("step", 127.5, update=7)
    assert not hear("sample", 127.7, update=7)
    assert hear("step", 128.0, update=13), "the last state"
    # Loading may take any time: only pauses after the first update count.
    assert progress.longest_pause == 20.0


def test_the_longest_pause_of_a_program_that_writes_no_clock() -> None:
    def pause(*reports: dict[str, float]) -> float:
        progress = Progress()
        for update, values in enumerate(reports):
            progress = progress.after(0, reported({"type": "step", "update": update, **values}))
        return progress.longest_pause

    assert pause({"time": 1e9}, {"time": 1e9 + 30.0}, {"time": 1e9 + 31.0}) == 30.0
    # The wall clock may be set; the monotonic clock is used if both reports have it.
    assert pause({"time": 1e9, "clock": 5.0}, {"time": 2e9, "clock": 7.0}) == 2.0
    assert pause({"time": 1e9, "clock": 5.0}, {"time": 1e9 + 3.0}, {"time": 1e9 + 7.0, "clock": 9.0}) == 4.0
    assert pause({}, {}) == 0.0
