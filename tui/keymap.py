"""Every action in one table: it feeds the key bindings, the action bar and the help screen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from memtop.supervisor.wire import Phase, RunState
from memtop.tui.restart_plan import nothing_left_with
from memtop.tui.store import ConnectionState, Store, candidates, holders
from memtop.tui.words import lack_of_memory


@dataclass(frozen=True)
class Action:
    """One action of the dashboard."""

    id: str
    keys: tuple[str, ...]
    """In Textual's spelling; the first one is shown."""
    shown_key: str
    label: str
    short: str
    """The label on a narrow terminal."""
    description: str
    group: str
    """Actions of "run" and "machine" change something and are not offered in a read-only dashboard.
    """
    gives_way: bool = False
    """The action has a button only if there is room and it can be used now."""


ACTIONS = (
    Action(
        "free",
        ("f",),
        "f",
        "Free cache",
        "Free",
        "Give back memory that the training processes hold but do not use, at the next update",
        "run",
    ),
    Action(
        "kill",
        ("k",),
        "k",
        "Kill strays",
        "Kill",
        "Choose processes that hold GPU memory and end them; only yours can be chosen",
        "machine",
    ),
    Action(
        "restart",
        ("r",),
        "r",
        "Restart…",
        "Restart",
        "What if: the peak with another batch, accumulation, seq_len or preset, at once; then save and resume with them",
        "run",
    ),
    Action(
        "preset",
        tuple("1234567890"),
        "1-0",
        "Preset",
        "Preset",
        "Compare the presets for this run; Enter restarts from train_latest_state with the chosen one's memory strategy",
        "run",
    ),
    Action("checkpoint", ("c",), "c", "Checkpoint", "Save", "Write train_latest_state at the next update", "run"),
    Action(
        "stop",
        ("s",),
        "s",
        "Stop…",
        "Stop",
        "End the run; the built-in trainer first finishes its update and saves",
        "run",
    ),
    Action(
        "undo",
        ("U",),
        "U",
        "Undo",
        "Undo",
        "Restart with the previous configuration; asks first (u lists all of them)",
        "run",
        gives_way=True,
    ),
    Action(
        "processes",
        ("o",),
        "o",
        "Processes",
        "Procs",
        "All GPU processes by job, as a tree or flat: sort, filter, find, end; Enter opens one",
        "screen",
    ),
    Action(
        "gpu",
        ("g", "enter"),
        "g",
        "GPU details",
        "GPU",
        "Every value that the driver reports for the selected GPU, or why it is unknown (also Enter)",
        "screen",
    ),
    Action("host", ("m",), "m", "Host details", "Host", "Host memory, swap, pressure and limits in full", "screen"),
    Action(
        "history",
        ("h", "H"),
        "h",
        "History",
        "History",
        "Curves of memory, use, power and loss over time, with a cursor",
        "screen",
    ),
    Action(
        "metrics",
        ("v",),
        "v",
        "Metrics",
        "Metrics",
        "Loss, learning rate, speed and peak memory as curves; other runs of the folder can be laid over them",
        "screen",
        gives_way=True,
    ),
    Action(
        "runs",
        ("a",),
        "a",
        "All runs",
        "Runs",
        "All runs of the folder and all that live on this machine: open, resume, compare, report",
        "screen",
        gives_way=True,
    ),
    Action(
        "panel",
        ("z",),
        "z",
        "One panel",
        "Panel",
        "One panel on the whole screen, e.g. the loss; z goes to the next one",
        "screen",
        gives_way=True,
    ),
    Action(
        "recovery",
        ("w",),
        "w",
        "Recovery",
        "Recovery",
        "After running out of memory: what happened, and remedies; after a spike of the loss: go back, go on or stop",
        "screen",
    ),
    Action(
        "configurations",
        ("u",),
        "u",
        "Roll back…",
        "Roll back",
        "All configurations of the run with reason, measured peak and speed; Enter returns to one",
        "screen",
    ),
    Action(
        "speed",
        ("b",),
        "b",
        "Speed",
        "Speed",
        "What limits the run's speed, and how to raise it; Enter tries a proposal and keeps it only if it helps",
        "screen",
    ),
    Action(
        "samples",
        ("t",),
        "t",
        "Samples",
        "Samples",
        "What the model writes for the prompts (sample.prompts): the newest first, or each prompt over the updates",
        "screen",
        gives_way=True,
    ),
    Action(
        "whole_log",
        ("L",),
        "L",
        "Whole log",
        "Log",
        "The log of all attempts with times: search in all, copy by OSC 52, jump from attempt to attempt",
        "screen",
        gives_way=True,
    ),
    Action("detach", ("d", "q"), "d", "Detach", "Detach", "Close the dashboard; the run continues (also q)", "session"),
    Action("help", ("question_mark",), "?", "Help", "Help", "All keys, and what the marks mean", "session"),
    Action(
        "palette",
        ("ctrl+p",),
        "Ctrl+P",
        "Commands",
        "Commands",
        "Find an action, a screen or a theme by typing; Enter does it",
        "view",
    ),
    Action("follow", ("l",), "l", "Log: follow", "Follow", "Follow the end of the log, or stop following", "view"),
    Action("search", ("slash",), "/", "Log: search", "Search", "Find text in the log; n and N find more, Esc leaves", "view"),
    Action("next_match", ("n",), "n", "Log: next match", "Next", "The next older line that matches", "view"),
    Action("previous_match", ("N",), "N", "Log: previous match", "Previous", "The next newer line that matches", "view"),
    Action(
        "events",
        ("e",),
        "e",
        "Log or events",
        "Events",
        "On a small terminal: show events instead of the log, and back",
        "view",
    ),
    Action("log_up", ("pageup",), "PgUp", "Log: back", "Back", "A page back in the log; it stops following", "view"),
    Action("log_down", ("pagedown",), "PgDn", "Log: forward", "Forward", "A page forward in the log", "view"),
    Action("gpu_up", ("up",), "↑", "GPU above", "Up", "Select the GPU above, if all GPUs share one panel", "view"),
    Action("gpu_down", ("down",), "↓", "GPU below", "Down", "Select the GPU below", "view"),
    Action("replay_pause", ("space",), "Space", "Pause", "Pause", "Pause the replay, or continue", "replay"),
    Action("replay_slower", ("less_than_sign",), "<", "Slower", "Slower", "Half the speed, down to 1x", "replay"),
    Action("replay_faster", ("greater_than_sign",), ">", "Faster", "Faster", "Twice the speed, up to 3600x", "replay"),
    Action("replay_back", ("left",), "←", "Minute back", "Back", "One minute back", "replay"),
    Action("replay_forward", ("right",), "→", "Minute on", "On", "One minute forward", "replay"),
    Action("replay_start", ("home",), "Home", "To its start", "Start", "To the run's beginning", "replay"),
    Action("replay_end", ("end",), "End", "To its end", "End", "To the run's end", "replay"),
)
BY_ID = {action.id: action for action in ACTIONS}
BAR = tuple(action for action in ACTIONS if action.group not in ("view", "replay"))
"""The actions with a button. Screens and actions that give way have one only if there is room."""
_OF_A_RUN = ("recovery", "configurations", "speed", "samples", "whole_log")


def offered(action: Action, store: Store) -> bool:
    """Whether the action exists at all in this dashboard."""
    if why_read_only(action, store) is not None:
        return False
    if action.group == "replay":
        return store.replaying
    has_run = store.run is not None and not store.run.observed
    if action.id == "metrics":
        return store.run is not None
    return has_run or (action.group != "run" and action.id not in _OF_A_RUN)


def why_read_only(action: Action, store: Store) -> str | None:
    """Why the action changes nothing in a read-only dashboard; None if that is no reason."""
    if not store.read_only or action.group not in ("run", "machine"):
        return None
    return "a replay is read-only" if store.replaying else no_changes(store)


def no_changes(store: Store) -> str | None:
    """Why the run cannot be changed from here; None if it can. A run that is over can be
    resumed.
    """
    if store.read_only:
        return "read-only: nothing can be changed from here"
    if store.link not in (ConnectionState.CONNECTED, ConnectionState.ENDED):
        return store.link_reason or "no supervisor is connected"
    return None


def obstacle(action: Action, store: Store) -> str | None:
    """Why an offered action cannot be done now; None if it can."""
    run = store.run
    if run is None:
        return None
    if action.id in _OF_A_RUN:
        return _nothing_to_show(action, run, store)
    if action.group != "run":
        return None
    takes_up_again = action.id in ("restart", "preset", "undo") and store.link is ConnectionState.ENDED
    if store.link is not ConnectionState.CONNECTED and not takes_up_again:
        return store.link_reason or "no supervisor is connected"
    if (never := foreign(action, run)) is not None:
        return never
    if action.id == "undo" and len(store.configurations) < 2:
        return "the run has had only one configuration"
    if action.id in ("restart", "preset", "undo"):
        settings = store.configurations[-2].settings if action.id == "undo" else run.settings
        return restart_in_progress(store) or nothing_left_with(run, settings)
    if run.state.final:
        return f"the run is {run.word}"
    if action.id in ("free", "checkpoint") and run.state is not Phase.TRAINING:
        return f"the run is not training yet; its state is {run.state.value}"
    return None


def restart_in_progress(store: Store) -> str | None:
    """Whether the run restarts already, in words. The user may replace a restart that memtop has
    announced but not started."""
    run = store.run
    under_way = run is not None and (run.state is Phase.STOPPING or (run.state is Phase.RESTARTING and store.proposal is None))
    return "a restart is already in progress" if under_way else None


def has_button(action: Action, store: Store) -> bool:
    """Whether there is ever anything to do for the action in this run, as far as it has gone."""
    run = store.run
    if run is None or action.group != "run":
        return offered(action, store)
    is_over = run.state.final and action.id in ("free", "checkpoint", "stop")
    return offered(action, store) and not is_over and foreign(action, run) is None


def is_idle(action: Action, store: Store) -> bool:
    """Whether the button is dimmed: the action cannot be done now, or its screen would only say why
    there is nothing to do."""
    if action.id == "kill":
        return not any(one.process.choosable for one in candidates(store))
    return obstacle(action, store) is not None


def foreign(action: Action, run: RunState) -> str | None:
    """Why this program can never do the action; None if it can. Only the user's programs have such
    limits.
    """
    if run.settings is not None:
        return None
    if action.id == "preset":
        return "presets change a recipe; this is your own program"
    if action.id == "checkpoint" and "checkpoint" not in (run.offers or ()):
        return "this program cannot save on request"
    return None


def _nothing_to_show(action: Action, run: RunState, store: Store) -> str | None:
    if action.id == "recovery":
        if store.proposal is not None or run.spike is not None:
            return None
        lack = lack_of_memory(store.configurations, starting=run.state is Phase.STARTING)
        if lack is not None:
            return lack[0]
        if run.state is Phase.FAILED and run.reason:
            return f"memory has not run out; the run ended otherwise: {run.reason}; memtop show {run.name} says more"
        return "the run has not run out of memory, and its loss has had no spike"
    if action.id == "configurations":
        return None if store.configurations else "no configuration of this run is known here"
    if action.id == "whole_log":
        return None if Path(run.folder).is_dir() else f"the run's folder is not on this machine: {run.folder}"
    if action.id == "samples":
        return None if any(event.kind == "sample" for event in store.events) else _no_samples(run)
    if run.advice is None and run.trial is None:
        if run.state.final:
            return "what limited the speed is not known: the run ended before it was computed"
        return "what limits the speed is not known yet: it is computed from measured updates"
    return None


def _no_samples(run: RunState) -> str:
    settings = run.settings
    if settings is None:
        return "samples need a built-in recipe: memtop does not know how this program's model is used"
    if not settings.sample.every:
        return "no samples are written: restart with --set sample.prompts=FILE --set sample.every=N"
    return f"no samples are written yet: they come every {settings.sample.every} updates"


def stray_count(store: Store) -> int:
    """How many processes were left behind by runs that are over."""
    return sum(holder.process.stray for holder in holders(store.machine))


def label_of(action: Action, store: Store, *, narrow: bool) -> str:
    """The text of the button."""
    if action.id == "detach" and (store.run is None or store.replaying or store.run.state.final or store.run.observed):
        return "Quit"
    words = action.short if narrow else action.label
    if action.id == "kill":
        strays = stray_count(store)
        return f"{words} ({strays})" if strays else words
    return words


def key_of(action: Action, preset_keys: tuple[int, ...]) -> str:
    """The key on the button; for presets the range of digits in use."""
    if action.id == "preset" and preset_keys:
        # In keyboard order: 0 comes after 9.
        return f"{preset_keys[0]}-{preset_keys[-1]}" if len(preset_keys) > 1 else str(preset_keys[0])
    return action.shown_key
