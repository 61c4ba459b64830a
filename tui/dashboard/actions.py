"""What each action does, from the key press to the answer.

Imported at the first action, not at start-up.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from memtop.presets import Settings, apply_preset, presets_for
from memtop.supervisor import wire
from memtop.supervisor.language import Verbatim
from memtop.supervisor.monitor.values import why_incomplete
from memtop.supervisor.program import known
from memtop.supervisor.recovery.configuration import failed_settings
from memtop.supervisor.recovery.forecast import forecaster_of
from memtop.supervisor.recovery.values import Forecast, Remedy
from memtop.supervisor.wire import Change
from memtop.tui.processes.kill import KillDialog, end_chosen
from memtop.tui.screen import ConfirmDialog, Dashboard
from memtop.tui.store import Store, candidates


async def free(dashboard: Dashboard, key: str) -> None:
    await dashboard.ask_supervisor(lambda number: wire.FreeCache(id=number))


async def checkpoint(dashboard: Dashboard, key: str) -> None:
    await dashboard.ask_supervisor(lambda number: wire.CheckpointNow(id=number))


async def stop(dashboard: Dashboard, key: str) -> None:
    run = dashboard.store.run
    assert run is not None
    lines = _stop_words(run) if dashboard.store.proposal is None else _call_off_words(run)
    if await dashboard.app.push_screen_wait(ConfirmDialog("Stop the run", lines, confirm="Stop the run")):
        dashboard.dialog_closed()
        await dashboard.ask_supervisor(lambda number: wire.Stop(id=number))


def _stop_words(run: wire.RunState) -> list[str]:
    if not run.saves_when_stopped:
        return [
            f"Stop {run.name}?",
            "",
            "memtop sends SIGINT to the program, and SIGTERM and SIGKILL if it does not end.",
            f"What it saves is up to the program. memtop restart {run.name} starts it again.",
        ]
    return [
        f"Stop {run.name}?",
        "",
        "The update in progress is finished and saved, then the program ends.",
        f"memtop restart {run.name} {'resumes it' if run.resumes else 'starts it again'}.",
    ]


def _call_off_words(run: wire.RunState) -> list[str]:
    return [
        f"Cancel the restart of {run.name}?",
        "",
        "The announced restart is cancelled: the run stays failed.",
        f"memtop restart {run.name} {'resumes it' if run.resumes else 'starts it again'}.",
    ]


async def restart(dashboard: Dashboard, key: str) -> None:
    from memtop.tui.restart import RestartDialog

    run = dashboard.store.run
    assert run is not None
    if run.settings is None:
        change = await _restart_unknown_program(dashboard, run)
        if change is not None:
            await _send_restart(dashboard, change)
        return
    presets = tuple(presets_for(run.settings.recipe))
    request = await dashboard.app.push_screen_wait(RestartDialog(dashboard, run, run.settings, presets))
    if request is None:
        return
    if request.live:
        dashboard.dialog_closed()
        await dashboard.ask_supervisor(lambda number: wire.Edit(id=number, change=request.change))
    else:
        await _send_restart(dashboard, request.change)


async def _restart_unknown_program(dashboard: Dashboard, run: wire.RunState) -> Change | None:
    from memtop.tui.restart_own import OwnProgramDialog, grip_of, where_own_resumes

    grip = grip_of(run)
    if grip is not None:
        return await dashboard.app.push_screen_wait(OwnProgramDialog(dashboard, run, grip))
    where = where_own_resumes(run)
    words = f"It {where}. Its settings are not known, so none can be changed here."
    if run.alive and run.state is wire.Phase.STARTING and not run.warnings:
        words = f"It {where}. Its settings are not known yet, because the program is still loading."
    if run.program is not None and known(run.program.knobs):
        words = (
            f"It {where}. memtop sees its settings but does not know how to set them; a profile says it: see docs/profiles.md."
        )
    lines = [
        f"Restart {run.name} with the same command?",
        "",
        Verbatim(" ".join(run.command)),
        words,
    ]
    answer = await dashboard.app.push_screen_wait(ConfirmDialog("Restart", lines, confirm="Restart"))
    return Change() if answer else None


async def preset(dashboard: Dashboard, key: str) -> None:
    from memtop.tui.presets import PresetDialog
    from memtop.tui.remedies import earlier_runs

    run = dashboard.store.run
    assert run is not None
    assert run.settings is not None
    presets = presets_for(run.settings.recipe)
    if key and key not in {str(p.key) for p in presets.values()}:
        listed = ", ".join(f"{p.key} {n}" for n, p in presets.items() if p.key is not None)
        dashboard.say(f"no preset of the recipe {run.settings.recipe} has key {key}: there are {listed}")
        return
    failed, store = failed_settings(dashboard.store.configurations), dashboard.store

    async def foresee_with_earlier_runs() -> Callable[[Settings], Forecast | str]:
        learned = await earlier_runs(store)
        return forecaster_of(run, store.configurations, store.gpus, store.host, learned).predicted

    dialog = PresetDialog(run, run.settings, presets, key, failed, foresee_with_earlier_runs)
    name = await dashboard.app.push_screen_wait(dialog)
    if name is None:
        return
    if apply_preset(run.settings, presets[name], failed) == run.settings:
        dashboard.say(f"the run already uses preset {name}")
        return
    await _send_restart(dashboard, Change(preset=name))


async def _send_restart(dashboard: Dashboard, change: Change) -> None:
    dashboard.dialog_closed()
    await dashboard.ask_supervisor(lambda number: wire.Restart(id=number, change=change))


async def kill(dashboard: Dashboard, key: str) -> None:
    store = dashboard.store
    if store.machine is not None and not store.machine.gpus and not candidates(store):
        dashboard.say(f"no process holds GPU memory: {store.machine.gpu_note or 'no GPU'}")
        return
    missing = why_incomplete(store.machine) if store.machine is not None else []
    chosen = await dashboard.app.push_screen_wait(KillDialog(candidates(store), store.now, missing))
    if chosen:
        await end_chosen(dashboard, store, chosen, dashboard, dashboard.dialog_closed)


async def processes(dashboard: Dashboard, key: str) -> None:
    from memtop.tui.processes.screen import ProcessesScreen

    await dashboard.app.push_screen_wait(ProcessesScreen(dashboard))


async def gpu(dashboard: Dashboard, key: str) -> None:
    from memtop.tui.machine.screen import MachineScreen

    await dashboard.app.push_screen_wait(MachineScreen(dashboard, dashboard.store.selected_gpu))


async def host(dashboard: Dashboard, key: str) -> None:
    from memtop.tui.machine.screen import MachineScreen

    await dashboard.app.push_screen_wait(MachineScreen(dashboard, len(dashboard.store.gpus)))


async def history(dashboard: Dashboard, key: str) -> None:
    from memtop.tui.history.screen import HistoryScreen

    await dashboard.app.push_screen_wait(HistoryScreen(dashboard))


async def metrics(dashboard: Dashboard, key: str) -> None:
    from memtop.tui.metrics.screen import MetricsScreen

    await dashboard.app.push_screen_wait(MetricsScreen(dashboard))


async def runs(dashboard: Dashboard, key: str) -> None:
    from memtop.tui.runs import RunsScreen

    if dashboard.runs_dir is None:
        dashboard.say("a replay shows one run: `memtop` lists all of them")
        return
    await dashboard.app.push_screen_wait(RunsScreen(dashboard, dashboard.runs_dir))


async def panel(dashboard: Dashboard, key: str) -> None:
    from memtop.tui.dashboard.one_panel import PanelScreen

    await dashboard.app.push_screen_wait(PanelScreen(dashboard))


async def recovery(dashboard: Dashboard, key: str) -> None:
    """The recovery card, or the question about a spike. Without a key it has opened by itself."""
    run = dashboard.store.run
    if dashboard.store.proposal is None and run is not None and run.spike is not None:
        await _spike(dashboard, by_itself=not key)
        return
    from memtop.supervisor.recovery.configuration import change_for
    from memtop.tui.recovery import OomCard

    by_itself = not key
    while True:
        remedy = await dashboard.app.push_screen_wait(OomCard(dashboard, by_itself=by_itself))
        if remedy is None:
            return
        if not remedy.needs_consent:
            break
        agreed = await dashboard.app.push_screen_wait(_consent(remedy))
        if agreed:
            break
        by_itself = False
    await _send_restart(dashboard, change_for(remedy, reason=_reason(dashboard.store)))


async def _spike(dashboard: Dashboard, *, by_itself: bool) -> None:
    from memtop.tui.spike import SpikeDialog

    answer = await dashboard.app.push_screen_wait(SpikeDialog(dashboard, by_itself=by_itself))
    run = dashboard.store.run
    spike = run.spike if run is not None else None
    if answer is None or spike is None:
        return
    if answer == "back" and (back := spike.back) is not None:
        await _send_restart(dashboard, back)
        return
    dashboard.dialog_closed()
    if answer == "stop":
        await dashboard.ask_supervisor(lambda number: wire.Stop(id=number))
    else:
        await dashboard.ask_supervisor(lambda number: wire.AcceptSpike(id=number))


def _consent(remedy: Remedy) -> ConfirmDialog:
    changed = ", ".join(f"{name}={value}" for name, value in remedy.assignments.items()) or f"preset {remedy.preset}"
    lines = [remedy.title, "", *([remedy.why] if remedy.why else []), f"It sets {changed}."]
    if not remedy.keeps_math:
        lines.append("This changes training: the model learns something else from here on.")
    return ConfirmDialog("This needs your consent", lines, confirm="Restart with it")


def _reason(store: Store) -> str:
    """The reason of this restart, for the run's history."""
    if store.run is None or store.proposal is None:
        return ""
    done = store.run.updates
    return store.proposal.diagnosis.name_at(None if done is None else done + 1)


async def configurations(dashboard: Dashboard, key: str) -> None:
    from memtop.tui.configurations import ConfigurationsScreen

    page = ConfigurationsScreen(dashboard)
    await dashboard.app.push_screen_wait(page)
    if page.chosen is not None:
        await _send_restart(dashboard, page.chosen)


async def undo(dashboard: Dashboard, key: str) -> None:
    from memtop.tui.configurations import consequences, present_of, rollback, undone
    from memtop.tui.restart_own import why_not_back

    store = dashboard.store
    row = undone(store.configurations)
    assert row is not None
    now = present_of(store.configurations)
    if store.run is not None and (problem := why_not_back(store.run, row, now)) is not None:
        dashboard.say(problem)
        return
    change = rollback(row, store.configurations, with_state=False)
    assert isinstance(change, Change)
    lines = consequences(row, store, with_state=False)
    if await dashboard.app.push_screen_wait(ConfirmDialog("Roll back", lines, confirm="Roll back")):
        await _send_restart(dashboard, change)


async def speed(dashboard: Dashboard, key: str) -> None:
    from memtop.supervisor.recovery.configuration import change_for
    from memtop.tui.speed import SpeedScreen

    page = SpeedScreen(dashboard)
    await dashboard.app.push_screen_wait(page)
    if page.chosen is not None:
        dashboard.dialog_closed()
        change = change_for(page.chosen)
        await dashboard.ask_supervisor(lambda number: wire.Try(id=number, change=change))


async def whole_log(dashboard: Dashboard, key: str) -> None:
    from memtop.tui.whole_log import WholeLogScreen

    run = dashboard.store.run
    assert run is not None
    await dashboard.app.push_screen_wait(WholeLogScreen(dashboard, Path(run.folder)))


async def samples(dashboard: Dashboard, key: str) -> None:
    from memtop.tui.samples import SamplesScreen

    await dashboard.app.push_screen_wait(SamplesScreen(dashboard))


async def show_help(dashboard: Dashboard, key: str) -> None:
    from memtop.tui.help import HelpDialog

    await dashboard.app.push_screen_wait(HelpDialog(dashboard.store))


FLOWS: dict[str, Callable[[Dashboard, str], Awaitable[None]]] = {
    "free": free,
    "checkpoint": checkpoint,
    "stop": stop,
    "restart": restart,
    "preset": preset,
    "kill": kill,
    "processes": processes,
    "gpu": gpu,
    "host": host,
    "history": history,
    "metrics": metrics,
    "panel": panel,
    "runs": runs,
    "recovery": recovery,
    "configurations": configurations,
    "undo": undo,
    "speed": speed,
    "samples": samples,
    "whole_log": whole_log,
    "help": show_help,
}
