"""A program that says it ran out of memory and then says nothing more; the clock is the test's."""

from __future__ import annotations

from pathlib import Path

from memtop.supervisor.run.stall import FIRST_SECONDS, SECONDS, StallWatch


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def say(log: Path, text: str) -> None:
    with log.open("a") as file:
        file.write(text + "\n")


def test_silence_after_such_words_is_a_stall(tmp_path: Path) -> None:
    clock, log = Clock(), tmp_path / "output.log"
    watch = StallWatch(log, clock)
    assert watch.look(1, 0.5) is None
    say(log, "RuntimeError: unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")
    assert watch.look(1, 0.5) is None
    clock.now += SECONDS + 1
    found = watch.look(1, 0.5)
    assert found is not None
    assert found.startswith("RuntimeError: unable to allocate shared memory")


def test_who_goes_on_has_got_over_it(tmp_path: Path) -> None:
    clock, log = Clock(), tmp_path / "output.log"
    watch = StallWatch(log, clock)
    say(log, "CUDA out of memory, halving the batch")
    assert watch.look(1, 0.5) is None
    clock.now += 5
    assert watch.look(2, 0.5) is None
    clock.now += 10 * SECONDS
    assert watch.look(2, 0.5) is None


def test_silence_without_such_words_is_none_of_our_business(tmp_path: Path) -> None:
    clock, log = Clock(), tmp_path / "output.log"
    watch = StallWatch(log, clock)
    say(log, "compiling")
    assert watch.look(1, 0.5) is None
    clock.now += 10 * FIRST_SECONDS
    assert watch.look(1, 0.5) is None


def test_a_program_that_never_reports_or_goes_on_talking_is_left_alone(tmp_path: Path) -> None:
    clock, log = Clock(), tmp_path / "output.log"
    watch = StallWatch(log, clock)
    say(log, "No space left on device: the cache is not written")
    assert watch.look(0, None) is None
    clock.now += 10 * FIRST_SECONDS
    assert watch.look(0, None) is None
    other = StallWatch(tmp_path / "other.log", clock)
    say(tmp_path / "other.log", "out of memory")
    for _ in range(20):
        assert other.look(3, 0.5) is None
        clock.now += SECONDS / 2
        say(tmp_path / "other.log", "still compiling")


def test_slow_programs_and_first_updates_are_given_their_time(tmp_path: Path) -> None:
    clock, log = Clock(), tmp_path / "output.log"
    say(log, "out of memory")
    old = StallWatch(log, clock)
    clock.now += 10 * SECONDS
    assert old.look(1, None) is None, "what an earlier supervisor has seen is not news"
    watch = StallWatch(tmp_path / "new.log", clock)
    say(tmp_path / "new.log", "MemoryError")
    assert watch.look(1, 40.0) is None
    clock.now += 4 * 40
    assert watch.look(1, 40.0) is None
    clock.now += 2 * 40
    assert watch.look(1, 40.0) == "MemoryError"
