"""What each action does from key press to answer. Imported at the first action, not at start-up."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from memtop.presets import apply_preset, presets_for
from memtop.supervisor import units, wire
from memtop.supervisor.monitor.snapshots import why_incomplete
from memtop.supervisor.recovery.applying import ran_out
from memtop.supervisor.recovery.values import Remedy
from memtop.supervisor.wire import Change
from memtop.tui.dialog import ConfirmDialog
from memtop.tui.processes.kill import KillDialog, describe
from memtop.tui.store import Holder, Store, holders

if TYPE_CHECKING:
    from memtop.tui.app import DashboardApp
    from memtop.tui.dashboard.screen import DashboardScreen


async def free(screen: DashboardScreen, key: str) -> None:
    await screen.ask_supervisor(lambda number: wire.FreeCache(id=number))


async def checkpoint(screen: DashboardScreen, key: str) -> None:
    await screen.ask_supervisor(lambda number: wire.CheckpointNow(id=number))


async def stop(screen: DashboardScreen, key: str) -> None:
    run = screen.store.run
    assert run is not None
    lines = _stop_words(run) if screen.store.proposal is None else _call_off_words(run)
    if await screen.app.push_screen_wait(ConfirmDialog("Stop the run", lines, confirm="Stop the run")):
        screen.dialog_closed()
        await screen.ask_supervisor(lambda number: wire.Stop(id=number))


def _stop_words(run: wire.RunState) -> list[str]:
    return [
        f"Stop {run.name}?",
        "",
        f"The present update (now {units.count(run.updates)} of {units.count(run.total_updates)}) is finished and saved,",
        f"then the program ends. memtop restart {run.name} takes it up again.",
    ]


def _call_off_words(run: wire.RunState) -> list[str]:
    return [
        f"Leave {run.name} as it is?",
        "",
        "The restart that was announced is called off: the run stays as it died.",
        f"memtop restart {run.name} takes it up again.",
    ]


async def restart(screen: DashboardScreen, key: str) -> None:
    from memtop.tui.restart import RestartDialog

    run = screen.store.run
    assert run is not None
    if run.settings is None:
        change = await _restart_unknown_program(screen, run)
        if change is not None:
            await _send_restart(screen, change)
        return
    presets = tuple(presets_for(run.settings.recipe))
    asked = await screen.app.push_screen_wait(RestartDialog(screen, run, run.settings, presets))
    if asked is None:
        return
    if asked.live:
        screen.dialog_closed()
        await screen.ask_supervisor(lambda number: wire.Edit(id=number, change=asked.change))
    else:
        await _send_restart(screen, asked.change)


async def _restart_unknown_program(screen: DashboardScreen, run: wire.RunState) -> Change | None:
    lines = [
        f"Restart {run.name} with the same command?",
        "",
        " ".join(run.command),
        "Its settings are not known, so there is nothing to edit here.",
    ]
    answer = await screen.app.push_screen_wait(ConfirmDialog("Restart", lines, confirm="Restart"))
    return Change() if answer else None


async def preset(screen: DashboardScreen, key: str) -> None:
    from memtop.tui.presets import PresetDialog

    run = screen.store.run
    assert run is not None
    assert run.settings is not None
    presets = presets_for(run.settings.recipe)
    if key and key not in {str(p.key) for p in presets.values()}:
        listed = ", ".join(f"{p.key} {n}" for n, p in presets.items() if p.key is not None)
        screen.say(f"no preset of the recipe {run.settings.recipe} has key {key}: there are {listed}", "bad")
        return
    failed = ran_out(screen.store.configurations)
    name = await screen.app.push_screen_wait(PresetDialog(run, run.settings, presets, key, failed))
    if name is None:
        return
    if apply_preset(run.settings, presets[name], failed) == run.settings:
        screen.say(f"{name} is the preset that the run has now")
        return
    await _send_restart(screen, Change(preset=name))


async def _send_restart(screen: DashboardScreen, change: Change) -> None:
    screen.dialog_closed()
    await screen.ask_supervisor(lambda number: wire.Restart(id=number, change=change))


async def kill(screen: DashboardScreen, key: str) -> None:
    store = screen.store
    missing = why_incomplete(store.machine) if store.machine is not None else []
    chosen = await screen.app.push_screen_wait(KillDialog(candidates(store), store.now, missing))
    if chosen:
        await end_chosen(screen.dashboard_app, store, chosen, screen, screen.dialog_closed)


class Speaker(Protocol):
    """A screen that tells what an action came to."""

    def say(self, text: str, kind: str = "note") -> None: ...


def begin_ending(
    app: DashboardApp, store: Store, chosen: Sequence[Holder], speaker: Speaker, answered: Callable[[bool], None]
) -> bool:
    """Ask and end in a worker of the application: it goes on, and its report is told, when the screen is left. False
    where an ending is already under way."""
    if app.ending:
        speaker.say("processes are being ended already: their report comes first", "bad")
        return False
    app.run_worker(
        end_chosen(app, store, chosen, speaker, lambda: answered(True), lambda: answered(False)), group="ending", exclusive=True
    )
    return True


async def end_chosen(
    app: DashboardApp,
    store: Store,
    chosen: Sequence[Holder],
    speaker: Speaker,
    answered: Callable[[], None],
    refused: Callable[[], None] = lambda: None,
) -> None:
    """Name each chosen process and what its end would cost, ask, end them, say what came of it.

    `answered` is called once the dialog is closed with yes, while the ending may still take its time; `refused` where it
    was closed with no.
    """
    one = len(chosen) == 1
    lines = [
        f"End {'this process' if one else f'these {len(chosen)} processes'}?",
        "",
        *(line for holder in chosen for line in _named(holder, store.now)),
        "",
        *consequences(chosen, store),
    ]
    label = "End it" if one else f"End {len(chosen)}"
    if not await app.push_screen_wait(ConfirmDialog("End processes", lines, confirm=label)):
        refused()
        return
    answered()
    machine = app.dashboard.store.machine
    assert machine is not None
    app.ending = True
    try:
        speaker.say("ending: interrupt first, kill last, up to 20 s", "busy")
        told = await app.hands.end_processes([holder.process for holder in chosen], machine)
    finally:
        app.ending = False
    # Who has left the screen gets the report where they are.
    still_open: Sequence[object] = app.screen_stack
    teller: Speaker = speaker if speaker in still_open else app.dashboard
    teller.say(told.text, "good" if told.good else "failed")


def _named(holder: Holder, now: float | None) -> tuple[str, str]:
    """Who it is, and below it the whole command: two runs may differ in its last word only."""
    process = holder.process
    gpus = f"on GPU {', '.join(map(str, holder.gpu_indices))}: "
    return (
        describe(holder, now, command_width=0).rstrip(),
        f"{'':>10}{gpus}{process.command or process.name or units.UNKNOWN}",
    )


def consequences(chosen: Sequence[Holder], store: Store) -> list[str]:
    """What is lost and what is won if these processes end."""
    known = [holder.used_bytes for holder in chosen if holder.used_bytes is not None]
    freed = units.size(sum(known)) if known else "an unknown amount"
    lines = [f"{'Its' if len(chosen) == 1 else 'Their'} GPU memory is freed ({freed}); what has not been saved is lost."]
    for name in dict.fromkeys(holder.process.run for holder in chosen if not holder.process.stray):
        if name is not None:
            lines.append(_loss_of_run(name, store.run))
    return lines


def _loss_of_run(name: str, run: wire.RunState | None) -> str:
    if run is None or run.name != name:
        return f"Run {name} would lose what it did since its newest checkpoint (memtop show {name} tells)."
    saved = run.checkpoint.updates if run.checkpoint is not None and run.checkpoint.complete else None
    if run.updates is None:
        return f"Run {name} would end; how far it is, is not known."
    if saved is None:
        return f"Run {name} would lose all of its {units.count(run.updates)} updates: it has no checkpoint yet."
    lost = max(0, run.updates - saved)
    return f"Run {name} would lose {units.count(lost)} updates, back to update {units.count(saved)}. Stop saves first."


def candidates(store: Store) -> tuple[Holder, ...]:
    """All GPU processes but those of the run on this screen, which has Stop for that."""
    own = store.run.name if store.run is not None and store.run.alive else None
    return tuple(h for h in holders(store.machine) if own is None or h.process.run != own or h.process.stray)


async def processes(screen: DashboardScreen, key: str) -> None:
    from memtop.tui.processes.screen import ProcessesScreen

    await screen.app.push_screen_wait(ProcessesScreen(screen))


async def gpu(screen: DashboardScreen, key: str) -> None:
    from memtop.tui.machine.screen import MachineScreen

    await screen.app.push_screen_wait(MachineScreen(screen, screen.store.selected_gpu))


async def host(screen: DashboardScreen, key: str) -> None:
    from memtop.tui.machine.screen import MachineScreen

    await screen.app.push_screen_wait(MachineScreen(screen, len(screen.store.gpus)))


async def history(screen: DashboardScreen, key: str) -> None:
    from memtop.tui.history import HistoryScreen

    await screen.app.push_screen_wait(HistoryScreen(screen))


async def way_out(screen: DashboardScreen, key: str) -> None:
    """The card of a death of memory. Without a key it opened by itself."""
    from memtop.supervisor.recovery.applying import change_for
    from memtop.tui.recovery import OomCard

    by_itself = not key
    while True:
        remedy = await screen.app.push_screen_wait(OomCard(screen, by_itself=by_itself))
        if remedy is None:
            return
        if not remedy.needs_consent:
            break
        agreed = await screen.app.push_screen_wait(_consent(remedy))
        if agreed:
            break
        by_itself = False
    await _send_restart(screen, change_for(remedy, reason=_reason(screen.store)))


def _consent(remedy: Remedy) -> ConfirmDialog:
    changed = ", ".join(f"{name}={value}" for name, value in remedy.assignments.items()) or f"preset {remedy.preset}"
    lines = [remedy.title, "", *([remedy.why] if remedy.why else []), f"It sets {changed}."]
    if not remedy.keeps_math:
        lines.append("This is other mathematics: what is learnt from here on is not what it would have been.")
    return ConfirmDialog("This needs your consent", lines, confirm="Restart with it")


def _reason(store: Store) -> str:
    """What goes to the run's memory as the cause of this restart."""
    if store.run is None or store.proposal is None:
        return ""
    return f"{store.proposal.diagnosis.kind.value} at update {units.count(store.run.updates)}"


async def configurations(screen: DashboardScreen, key: str) -> None:
    from memtop.tui.configurations import ConfigurationsScreen

    page = ConfigurationsScreen(screen)
    await screen.app.push_screen_wait(page)
    if page.chosen is not None:
        await _send_restart(screen, page.chosen)


async def undo(screen: DashboardScreen, key: str) -> None:
    from memtop.tui.rollback import consequences, rollback, undone

    store = screen.store
    row = undone(store.configurations)
    assert row is not None
    change = rollback(row, store.configurations, with_state=False)
    assert isinstance(change, Change)
    lines = consequences(row, store, with_state=False)
    if await screen.app.push_screen_wait(ConfirmDialog("Roll back", lines, confirm="Roll back")):
        await _send_restart(screen, change)


async def faster(screen: DashboardScreen, key: str) -> None:
    from memtop.supervisor.recovery.applying import change_for
    from memtop.tui.speed import FasterScreen

    page = FasterScreen(screen)
    await screen.app.push_screen_wait(page)
    if page.chosen is not None:
        screen.dialog_closed()
        change = change_for(page.chosen)
        await screen.ask_supervisor(lambda number: wire.Try(id=number, change=change))


async def show_help(screen: DashboardScreen, key: str) -> None:
    from memtop.tui.help import HelpDialog

    await screen.app.push_screen_wait(HelpDialog(screen.store))


FLOWS: dict[str, Callable[[DashboardScreen, str], Awaitable[None]]] = {
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
    "way_out": way_out,
    "configurations": configurations,
    "undo": undo,
    "faster": faster,
    "help": show_help,
}
