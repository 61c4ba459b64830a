"""Settings on trial never stay in place unless the trial has proven them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from memtop.supervisor.diagnosis.values import Kind
from memtop.supervisor.errors import MemtopError, UsageError
from memtop.supervisor.run import trial
from memtop.supervisor.run.trial import RECONNECT_SECONDS, UPDATES, WARM_UP
from memtop.supervisor.run.trial_state import (
    PutBack,
    Record,
    ReplaceRestart,
    TrialStage,
)
from memtop.supervisor.wire import Change, Phase
from tests.run.trial_world import BEFORE, LIVE, World

HAPPENINGS: dict[str, Callable[[World, int], None]] = {
    "begin": World.begin,
    "go on": lambda world, value: world.go_on(1 + 4 * value),
    "train": lambda world, value: world.train(1 + value),
    "read": World.read,
    "answer": World.answer,
    "tick": lambda world, value: world.tick(2.0 * value),
    "edit": World.edit,
    "restart": World.restart_by_person,
    "stop": World.stop,
    "call off": World.call_off,
    "survive": World.survive,
    "run out": World.run_out,
    "crash": World.crash,
    "finish": World.finish,
    "begin waiting": World.begin_waiting,
    "disconnect": World.disconnect,
    "connect": World.connect,
    "at the end": World.reach_the_end,
    "refuse": World.refuse,
    "replace": World.replace_supervisor,
}
# What makes a trial go on comes more often than what disturbs it.
NAMES = [*("begin", "go on", "go on", "go on", "train", "read", "answer") * 2, *HAPPENINGS]


@settings(max_examples=300, deadline=None)
@given(
    begun=st.none() | st.tuples(st.integers(0, 7), st.integers(18, 24)),
    happens=st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 7)), max_size=30),
    saves=st.booleans(),
    auto=st.booleans(),
)
def test_unproven_settings_never_stay(
    begun: tuple[int, int] | None, happens: list[tuple[str, int]], saves: bool, auto: bool
) -> None:
    """A trial is kept, or the run has the settings before it; every other start is from proven
    settings, too."""
    world = World(saves=saves, auto=auto)
    if begun is not None:
        world.begin(begun[0])
        world.go_on(begun[1])
    for name, value in happens:
        HAPPENINGS[name](world, value)
        if world.facts.phase is Phase.STARTING:
            world.train()
    world.settle()
    assert world.facts.phase.final
    assert world.facts.settings is not None
    world.check(world.facts.settings)
    if world.trial is not None:
        assert not world.trial.running
        assert not world.trial.unproven


# --- one thing at a time --------------------------------------------------------------------------


def outcome(world: World) -> tuple[str, str | None]:
    assert world.trial is not None
    assert not world.trial.running
    return world.trial.trial.state, world.trial.trial.reason


def on_trial(**world: bool) -> World:
    """A run with settings on trial in place, some updates after the change."""
    found = World(**world)
    found.begin(live=True)
    found.go_on(UPDATES + 8)
    assert found.trial is not None
    assert found.trial.stage is TrialStage.MEASURING_AFTER
    assert found.facts.settings is not None
    assert found.facts.settings.workers == found.tried
    return found


def names(actions: list[object]) -> list[str]:
    return [type(action).__name__ for action in actions]


def test_a_faster_change_is_kept() -> None:
    world = World()
    world.begin(live=True)
    world.go_on(2 * UPDATES + 10)
    assert outcome(world)[0] == "kept"
    # It saved before the change, and recorded the change before it asked for it.
    assert names(world.asked) == ["Record", "AskSave", "Record", "AskChange", "Record"]
    trial = world.trial and world.trial.trial
    assert trial is not None
    assert (trial.before["updates"], trial.after["updates"]) == (UPDATES, UPDATES)
    assert (trial.before["samples_per_second"], trial.after["samples_per_second"]) == (16, 32)


def test_updates_right_after_the_change_are_not_measured() -> None:
    world = World()
    world.begin(live=True)
    while world.trial is not None and world.trial.stage is not TrialStage.MEASURING_AFTER:
        world.go_on(1)
    assert world.trial is not None
    assert world.trial.since == world.update + WARM_UP


def test_a_change_that_is_not_faster_is_undone() -> None:
    world = World()
    world.begin(7, live=True)
    world.go_on(2 * UPDATES + 10)
    assert outcome(world) == ("undone", "samples/s 16.0 -> 16.0 (+0.0 %), not more than the 1.0 % that chance explains")
    assert world.program == world.facts.settings == BEFORE
    assert names(world.asked)[-2:] == ["AskChange", "Record"]


def test_a_change_that_needs_a_restart_is_tried_by_one() -> None:
    world = World()
    world.begin(live=False)
    while world.facts.attempt == 1:
        world.go_on(1)
    assert world.facts.settings is not None
    assert (world.facts.settings.save_total_limit, world.base().save_total_limit) == (100, 2)
    world.go_on(UPDATES + 10)
    assert outcome(world)[0] == "kept"
    world.begin(7, live=False)
    world.go_on(2 * UPDATES + 20)
    assert outcome(world)[0] == "undone"
    assert world.facts.settings.save_total_limit == 100
    assert names(world.asked)[-2:] == ["RequestRestart", "Record"]


def test_where_the_state_cannot_be_saved_first_nothing_is_changed() -> None:
    world = World()
    world.begin(live=True)
    while not world.answers:
        world.train()
        world.read()
    world.answer(refused=7)
    assert outcome(world) == ("refused", "the state could not be saved before the change: it cannot")
    assert world.program == BEFORE


def test_a_program_that_refuses_the_change_gets_the_previous_settings() -> None:
    world = World(saves=False)
    world.begin(live=True)
    while not world.answers:
        world.train()
        world.read()
    world.answer(refused=7)
    world.go_on()
    assert outcome(world) == ("undone", "it cannot")
    assert world.program == BEFORE


@pytest.mark.parametrize(
    ("happens", "state", "reason"),
    [
        (World.survive, "undone", "memory ran out at update"),
        (World.reach_the_end, "undone", "the run is at its last update"),
        (World.stop, "undone", "the run is stopping; whatever starts next starts from the settings before"),
        (World.restart_by_person, "undone", "the run is restarting; whatever starts next starts from the settings before"),
        (World.crash, "undone", "the program died: it crashed; not undone at once: the program died, and not of memory"),
        (World.finish, "undone", "the run is finished; whatever starts next starts from the settings before"),
        (World.edit, "undone", "the settings were changed meanwhile"),
    ],
)
def test_a_disturbance_ends_a_trial(happens: Callable[[World], None], state: str, reason: str) -> None:
    world = on_trial()
    happens(world)
    world.go_on(3)
    if happens is World.reach_the_end:
        # memtop sends no command and does not restart: what could not be saved yet is only in the
        # program's memory.
        assert world.trial is not None
        assert world.trial.stage is TrialStage.WAITING_FOR_END
        assert (world.facts.phase, names(world.asked)[-1]) == (Phase.TRAINING, "AskChange")
        world.finish()
        world.tick()
    found = outcome(world)
    assert found[0] == state
    assert str(found[1]).startswith(reason)
    assert world.facts.settings is not None
    assert world.facts.settings.workers == BEFORE.workers
    if happens is World.edit:
        assert world.facts.settings.eval_batch == 5


@pytest.mark.parametrize("happens", [World.stop, World.restart_by_person, World.crash, World.finish, World.edit])
def test_a_disturbance_before_the_change_ends_a_trial_without_it(happens: Callable[[World], None]) -> None:
    world = World()
    world.begin(live=True)
    world.go_on(3)
    happens(world)
    world.go_on(2)
    assert outcome(world)[0] == "refused"
    assert names(world.asked) == ["Record", "Record"]


def test_a_restart_by_a_person_starts_from_the_settings_before() -> None:
    world = on_trial()
    world.restart_by_person(4)
    world.go_on(2)
    assert world.facts.attempt == 2
    assert world.facts.settings == replace(BEFORE, eval_batch=14)


@pytest.mark.parametrize("auto", [True, False])
def test_a_program_that_dies_of_memory_starts_again_with_the_settings_before(auto: bool) -> None:
    world = on_trial(auto=auto)
    undo = world.trial.undo if world.trial is not None else None
    world.run_out()
    world.tick()
    if auto:
        # The restart still waits, so that it can be cancelled and the memory becomes free.
        assert (world.waiting, world.facts.attempt, world.asked[-1]) == (undo, 1, ReplaceRestart(undo or Change()))
        world.begin_waiting()
    assert world.facts.attempt == 2
    world.go_on(3)
    assert outcome(world)[0] == "undone"
    assert str(outcome(world)[1]).startswith("memory ran out at update")
    assert world.facts.settings == BEFORE


def test_a_full_disk_is_no_reason_to_restart() -> None:
    world = on_trial(auto=False)
    world.die(Kind.DISK_FULL)
    world.tick()
    assert "the disk is full" in str(outcome(world)[1])
    assert world.facts.attempt == 1


def test_two_errors_keep_the_first_reason() -> None:
    world = on_trial()
    world.survive()
    world.survive()
    world.go_on(3)
    assert str(outcome(world)[1]).startswith("memory ran out")


# --- taking over ----------------------------------------------------------------------------------


def test_an_unfinished_trial_of_a_dead_supervisor_is_undone() -> None:
    world = on_trial()
    world.replace_supervisor()
    world.tick()
    assert world.trial is not None
    assert world.trial.stage is TrialStage.TAKEN_OVER  # until the agent is connected again
    world.connect()
    world.go_on(3)
    assert outcome(world) == ("undone", "its supervisor ended in the middle of it")
    assert world.program == world.facts.settings == BEFORE


def test_without_an_agent_the_undoing_restarts_the_run() -> None:
    world = on_trial()
    world.replace_supervisor()
    world.tick(RECONNECT_SECONDS - 1)
    assert world.facts.phase is Phase.TRAINING
    world.tick(2)
    assert world.pending == (world.trial.undo if world.trial is not None else None)
    world.go_on(3)
    assert (outcome(world)[0], world.facts.attempt) == ("undone", 2)
    assert world.facts.settings == BEFORE


def test_a_trial_that_had_changed_nothing_is_over() -> None:
    world = World()
    world.begin()
    world.replace_supervisor()
    assert outcome(world) == ("refused", "its supervisor ended in the middle of it")


@pytest.mark.parametrize("decides", [World.stop, World.restart_by_person])
def test_a_persons_decision_is_not_overridden(decides: Callable[[World], None]) -> None:
    world = on_trial()
    decides(world)
    pending, phase = world.pending, world.facts.phase
    actions = len(world.asked)
    world.replace_supervisor()
    world.tick()
    world.tick(2 * RECONNECT_SECONDS)
    assert (world.pending, world.facts.phase, len(world.asked)) == (pending, phase, actions)
    assert world.base() == BEFORE
    world.train()
    world.tick()
    assert outcome(world)[0] == "undone"
    assert world.facts.settings is not None
    assert world.facts.settings.workers == BEFORE.workers


def test_a_restart_that_the_trial_itself_has_requested_is_still_its_own() -> None:
    world = World()
    world.begin(live=False)
    while world.pending is None:
        world.train()
        world.answer()
        world.read()
    world.replace_supervisor()
    world.train()  # the program stops, and the attempt with the change begins
    assert world.facts.settings is not None
    assert world.facts.settings.save_total_limit == 100
    world.go_on(6)
    assert outcome(world)[0] == "undone"
    assert world.facts.settings == BEFORE


# --- errors in memtop -----------------------------------------------------------------------------


def broken(*_: object) -> Any:
    raise ZeroDivisionError("oops")


def test_an_error_in_memtop_ends_the_trial_and_undoes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "verdict", broken)
    world = World()
    world.begin(live=True)
    world.go_on(2 * UPDATES + 10)
    assert outcome(world) == ("failed", "an error in memtop: ZeroDivisionError: oops")
    assert world.facts.settings == BEFORE


def test_an_error_while_it_is_undone_is_recorded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = on_trial()
    monkeypatch.setattr("memtop.supervisor.run.trial_state.live_values", broken)
    world.survive()
    world.go_on(2)
    assert isinstance(world.asked[-1], Record)
    assert "not undone at once: an error in memtop: ZeroDivisionError: oops" in world.asked[-1].message
    world.stop()
    world.go_on(2)
    assert outcome(world)[0] == "failed"
    assert isinstance(world.asked[-2], PutBack)
    assert world.facts.settings == BEFORE


# --- requests -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "error", "words"),
    [
        ({"settings": None}, UsageError, "external command"),
        ({"phase": Phase.STOPPED}, MemtopError, "is not training: it is stopped"),
        ({"phase": Phase.FAILED, "ended_by": 9}, MemtopError, "is not training: it is killed"),
        ({"at_the_end": True}, MemtopError, "nothing can be tried any more: the run is at its last update"),
    ],
)
def test_when_nothing_can_be_tried(facts: dict[str, Any], error: type[MemtopError], words: str) -> None:
    with pytest.raises(error, match=words):
        trial.check_request("a", replace(World().facts, **facts), None)


def test_only_one_trial_at_a_time() -> None:
    world = on_trial()
    with pytest.raises(MemtopError, match="a trial is under way: "):
        trial.check_request("a", world.facts, world.trial)


def test_a_change_that_changes_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing changes"):
        trial.begin(Change(assignments={"batch": "4"}), BEFORE, World().facts, 1.0)


def test_a_refused_trial_is_over_at_once_and_recorded() -> None:
    state, actions = trial.begin(LIVE, replace(BEFORE, workers=1), World().facts, 1.0, refused="too large")
    assert (state.running, state.trial.state, state.trial.reason, names(list(actions))) == (
        False,
        "refused",
        "too large",
        ["Record"],
    )
