"""What a run shows of its program's output: each value for which the agent has none."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from memtop.supervisor.program import Program
from memtop.supervisor.run.output.values import Seen
from memtop.supervisor.wire import RunState

_FILLED = ("total_updates", "loss", "learning_rate", "epoch", "step_seconds", "tokens_per_second")
_MORE = 2
_WORDS = {"total_updates": "total", "learning_rate": "learning rate", "step_seconds": "seconds of a step"}
_WORDS["tokens_per_second"] = "tokens per second"


def with_output(
    state: RunState, seen: Seen | None, now: float, *, counted: bool, pace: float | None = None, by_hooks: bool
) -> RunState:
    """The state with what the output adds to it. `counted`: the agent counts the updates, of which
    the newest took `pace` seconds each; `by_hooks`: the program's framework reports them, with the
    loss.
    """
    if seen is None or state.attempt != seen.attempt:
        return state
    own = not by_hooks and (not counted or seen.agrees is False)
    changes: dict[str, Any] = {"updates": seen.update} if own else {}
    taken = ["updates"] if own else []
    for name in _FILLED:
        value = getattr(seen, name)
        if value is not None and (getattr(state, name) is None or (own and name in ("total_updates", "epoch"))):
            if name == "total_updates" and counted and seen.agrees is None:
                continue  # it is not known yet what the program counts
            changes[name] = value
            taken.append(_WORDS.get(name, name))
    if "loss" in changes:
        changes["best_loss"] = min((loss for loss in (state.best_loss, seen.best_loss) if loss is not None), default=None)
    total, updates = changes.get("total_updates", state.total_updates), changes.get("updates", state.updates)
    if total is not None and updates is not None and updates > total and "total_updates" in changes:
        # A loop may do one step more than it names.
        total = changes["total_updates"] = updates if updates - total <= _MORE else None
    seconds = changes.get("step_seconds", state.step_seconds)
    if not own and pace is not None:
        seconds = pace
    if state.alive and state.eta_seconds is None and total and updates is not None and seconds:
        since = max(0.0, now - seen.time) if own else 0.0
        changes["eta_seconds"] = max(0.0, (total - updates) * seconds - since)
    if state.samples_per_second is None and state.effective_batch and seconds:
        changes["samples_per_second"] = state.effective_batch / seconds
    if seen.log is not None and state.alive:
        changes["log_path"] = seen.log
    if not taken:
        return replace(state, **changes)
    if not by_hooks:
        known = state.program or Program()
        why = _why(seen, taken, counted=counted)
        by_profile = known.grip == "profile"
        changes["program"] = replace(
            known, grip="profile" if by_profile else "output", why=f"{known.why}; {why}" if by_profile else why
        )
    return replace(state, **changes)


def _why(seen: Seen, taken: list[str], *, counted: bool) -> str:
    """`loss, total read from the output, by lines like ...`."""
    where = "the output" if seen.log is None else seen.log
    text = f"{', '.join(taken)}: read from {where}, by lines like `{seen.example}`"
    if seen.steps_per_update > 1 and (not counted or seen.agrees is False):
        text += f" ({seen.steps_per_update} steps there are one update)"
    if not counted:
        return text
    if seen.agrees is False:
        return f"{text}; memtop's agent has counted other updates, since the program started"
    if seen.steps_per_update > 1:
        return f"{text} ({seen.steps_per_update} steps there are one update); updates: counted by memtop's agent"
    return f"{text}; updates: counted by memtop's agent"
