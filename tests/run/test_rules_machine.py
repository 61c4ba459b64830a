"""The rules of a run under random events, with the supervisor killed after any effect; see
`tests/run/life.py`."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from memtop.supervisor.run.effects import Launch
from memtop.supervisor.run.model import Cause
from tests.run import world as world_module
from tests.run.life import ACTIONS, Life, drive, launch_pending


class RunMachine(RuleBasedStateMachine):
    """Each rule lets one thing happen to a simulated run; `World` checks the invariants after every
    effect."""

    @initialize(
        seed=st.integers(0, 1000),
        program=st.sampled_from(("ours", "ours", "external", "trainer")),
        on_oom=st.sampled_from(("auto", "ask", "stop")),
    )
    def begin(self, seed: int, program: str, on_oom: str) -> None:
        self.world = Life(seed, external=program != "ours", trainer=program == "trainer", on_oom=on_oom)
        self.world.act_start(1)

    @rule(action=st.sampled_from(ACTIONS), number=st.integers(0, 5039))
    def happen(self, action: str, number: int) -> None:
        self.world.act(action, number)

    @rule(number=st.integers(0, 5039))
    def train(self, number: int) -> None:
        self.world.act("train", number)
        self.world.act("time", number)

    @rule(number=st.integers(0, 5039))
    def finish_what_was_begun(self, number: int) -> None:
        self.world.act("result", number)

    @rule(effects=st.integers(1, 6), action=st.sampled_from(("time", "restart", "stop", "result", "train")))
    def kill_in_the_middle(self, effects: int, action: str) -> None:
        """The supervisor is killed after so many effects of what happens next; then another one
        takes over."""
        self.world.kill_after = effects if self.world.model is not None else None
        self.world.act(action, effects)
        self.world.act("time", 0)
        self.world.kill_after = None
        self.world.act("start", 1)

    @invariant()
    def what_holds_always(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle()


def test_the_rules_hold_whatever_happens_and_wherever_the_supervisor_is_killed() -> None:
    wanted = settings(max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(RunMachine, settings=wanted)


def broken(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Put one fault into the rules."""
    plain: Any = world_module.step

    def step(model: Any, event: Any, now: Any) -> Any:
        after, effects = plain(model, event, now)
        match fault:
            case "the ladder never climbs" if after.ladder is not None:
                after = world_module.replace(after, ladder=world_module.replace(after.ladder, deadline=float("inf")))
            case "a dead configuration is tried again" if after.launching is not None and after.launching.cause is Cause.DEATH:
                same = tuple(
                    world_module.replace(one, settings=model.settings) if isinstance(one, Launch) else one for one in effects
                )
                effects = same
            case "a checkpoint is believed in" if after.grip is not None and after.states.program is None:
                states = world_module.replace(after.states, program=world_module.checkpoint(1))
                after = world_module.replace(after, states=states)
            case "the next attempt begins too soon" if after.pending is not None and after.launching is None:
                after = launch_pending(after)
                after, effects = world_module.replace(after, effects=()), (*effects, *after.effects)
        return after, effects

    monkeypatch.setattr(world_module, "step", step)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("the ladder never climbs", "the stop does not end"),
        ("a dead configuration is tried again", "is tried again by itself"),
        ("a checkpoint is believed in", "a program without a checkpoint is started again by itself"),
        ("the next attempt begins too soon", "two programs at once|cannot become"),
    ],
)
def test_a_fault_in_the_rules_is_found(monkeypatch: pytest.MonkeyPatch, fault: str, words: str) -> None:
    broken(monkeypatch, fault)
    with pytest.raises(AssertionError, match=words):
        # Every eighth run has a program that is built on Hugging Face's Trainer.
        many_runs(range(7, 4000, 8) if "checkpoint" in fault else range(300))


def many_runs(seeds: range) -> None:
    for seed in seeds:
        drive(seed, events=80)
