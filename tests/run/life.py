"""Random events in a simulated run: the program, disk, clients and supervisor of a `World` act at
random."""

from __future__ import annotations

import random

from msgspec.structs import replace

from memtop.supervisor.diagnosis.values import Kind
from memtop.supervisor.monitor.values import HostSample, MachineSnapshot
from memtop.supervisor.recovery.configuration import configuration_key as key_of
from memtop.supervisor.run import events as on
from memtop.supervisor.run import reports as said
from memtop.supervisor.run.model import Cause, Model
from memtop.supervisor.run.rules.attempts import launch
from memtop.supervisor.wire import Change, CheckpointNow, Edit, FreeCache, Restart, Stop, Try
from tests.run.world import GIB, LAST_UPDATE, Program, World


class Life(World):
    """`act(name, number)` lets one thing happen; `number` chooses its details."""

    # --- what may happen --------------------------------------------------------------------------

    def act(self, name: str, number: int) -> None:
        """Let one thing happen; `number` chooses its details."""
        self.happened[name] += 1
        getattr(self, f"act_{name}")(number)
        if self.model is not None:
            self.check()

    def act_start(self, number: int) -> None:
        if self.model is None:
            self.start(Change(reason=self._token("c")) if number % 4 == 0 and self.ledger.rows else None)

    def act_kill(self, number: int) -> None:
        if self.model is not None and self.kill_after is None:
            self.kill_after = number % 12

    def act_time(self, number: int) -> None:
        self.time += (0.2, 0.2, 1.0, 5.0, 70.0)[number % 5]
        if number % 3 == 0:
            self.shift += self.random.choice((-3600.0, -1.0, 1.0, 3600.0))
        self.tick()

    def act_result(self, number: int) -> None:
        """Something that has begun ends, and may be reported twice."""
        if self.model is None or not self.later:
            return
        self.later.rotate(-(number % len(self.later)))
        event = self.later.popleft()
        if isinstance(event, on.LeftoversCleared):
            event = replace(event, states=self.states())
        self.handle(event)
        if number % 7 == 0 and self.model is not None:
            self.handle(event)

    def act_sample(self, number: int) -> None:
        if self.model is not None:
            host = HostSample(total_bytes=64 * GIB, available_bytes=32 * GIB, used_bytes=32 * GIB)
            machine = MachineSnapshot(time=self.wall, host=host)
            self.handle(on.Sampled(machine=machine, rss_bytes={5: GIB}, keep=number % 3 == 0))

    def act_disk(self, number: int) -> None:
        self.disk_full = self.ledger.full = number % 3 == 0

    # --- the program ------------------------------------------------------------------------------

    def _report(self, report: said.Report) -> None:
        self.time += 0.01
        assert self.program is not None
        self.program.journal.append(replace(report, time=self.wall, clock=self.time))

    def _running(self) -> Program | None:
        return self.program if self.program is not None and self.program.alive else None

    def act_train(self, number: int) -> None:
        program = self._running()
        if program is None:
            return
        if not program.loaded:
            program.loaded = True
            offers = ("stop", "checkpoint", "change")
            self._report(
                said.Hello(pid=1, offers=() if self.external and not self.trainer else offers[: 2 + (not self.external)])
            )
            if self.trainer:
                self._report(said.TrainerFound(output_dir="/out", **{"batch": 8, "accumulation": 1, **program.knobs}))
            if self.trainer or not self.external:
                self._report(said.Plan(updates=program.update, total_updates=LAST_UPDATE, resumed=program.update > 0))
            if program.update < program.resumes_after:
                self.began_again = True
                self._report(said.End(outcome="failed", message="it did not resume"))
                self._end(1)
                return
        for _ in range(1 + number % 5):
            if program.update < LAST_UPDATE and not program.asked_to_stop:
                program.update += 1
                self.began_again = False
                batch = program.settings.batch if program.settings is not None else program.knobs.get("batch")
                self._report(said.Step(update=program.update, samples_seen=32 * program.update, step_seconds=0.5, batch=batch))
        if program.asked_to_stop:
            self._save()
            self._report(said.End(outcome="stopped"))
            self._end(0)
        elif program.update >= LAST_UPDATE:
            self._save()
            self._report(said.End(outcome="finished"))
            self._end(0)

    def _save(self) -> bool:
        program = self.program
        if program is None or (self.external and not self.trainer):
            return False
        if self.disk_full:
            self._report(said.SaveFailed(update=program.update, message="no space"))
            return False
        if program.update not in self.kept:
            self.kept = sorted({*self.kept, program.update})[-2:]
        self._report(said.Saved(updates=program.update, seconds=0.1, size_bytes=GIB))
        return True

    def act_save(self, number: int) -> None:
        program = self._running()
        if program is not None and program.loaded:
            self._save()

    def act_connect(self, number: int) -> None:
        program = self._running()
        if program is None or self.model is None or self.model.number != program.number or not program.loaded:
            return
        program.connected = number % 4 != 0
        self.handle(on.AgentConnected(0) if program.connected else on.AgentGone(0))

    def act_shrink(self, number: int) -> None:
        """The trainer redoes an update that ran out of memory in smaller pieces."""
        program = self._running()
        if program is None or not program.loaded or program.settings is None or program.settings.batch % 2:
            return
        before = program.settings
        after = replace(before, batch=before.batch // 2, accumulation=before.accumulation * 2)
        self._report(said.Oom(update=program.update + 1, message="no memory", error="E", survived=True, batch=before.batch))
        changes = {"batch": after.batch, "accumulation": after.accumulation}
        self._report(said.SettingsChanged(update=program.update + 1, changes=changes, reason="allocation failure"))
        program.settings = after
        self.failed.add(key_of(before))

    def act_die(self, number: int) -> None:
        program = self._running()
        if program is None:
            return
        kinds = (Kind.GPU_OOM, Kind.HOST_OOM_KILLED, Kind.GPU_OOM_FRAGMENTED, Kind.DISK_FULL, Kind.NOT_MEMORY)
        program.cause = kinds[number % len(kinds)]
        program.leftovers = number % 3 == 0
        if program.cause is Kind.GPU_OOM:
            self._report(said.Oom(update=program.update + 1, message="no memory", error="E", survived=False))
        if number % 2 and program.cause is not Kind.HOST_OOM_KILLED:
            self._report(said.End(outcome="failed", message="it died"))
        self._end(None if number % 11 == 0 else 1)

    def _end(self, status: int | None) -> None:
        program = self.program
        assert program is not None
        program.alive, program.connected = False, False
        program.status, program.ended = status, self.wall

    # --- clients ----------------------------------------------------------------------------------

    def _token(self, letter: str) -> str:
        self.requests += 1
        return f"{letter}{self.requests}"

    def _request(self, request: on.Command) -> None:
        if self.model is not None:
            self.handle(on.Requested(client=1, request=request, states=self.states()))

    def act_stop(self, number: int) -> None:
        self.requests += 1
        self.stops.add(-self.requests)
        self._request(Stop(id=-self.requests))

    def act_restart(self, number: int) -> None:
        reason = self._token("r")
        change = Change(reason=reason)
        if self.trainer and number % 3 == 1:
            batch = (1, 2, 4, 8)[number % 4]
            change = Change(reason=reason, assignments={"batch": str(batch), "accumulation": str(8 // batch)})
        elif not self.external and number % 3 == 1:
            change = Change(reason=reason, assignments={"batch": str((1, 2, 4, 8)[number % 4])})
        elif number % 3 == 2 and self.kept:
            change = Change(reason=reason, state_before=self.kept[number % len(self.kept)])
        self._request(Restart(id=self.requests, change=change))

    def act_ask(self, number: int) -> None:
        self.requests += 1
        request: on.Command = FreeCache(id=-self.requests) if number % 2 else CheckpointNow(id=-self.requests)
        self._request(request)

    def act_edit(self, number: int) -> None:
        self.requests += 1
        request = (Edit, Try)[number % 2]
        self._request(request(id=-self.requests, change=Change(assignments={"batch": str((1, 2, 4)[number % 3])})))

    # --- the end ----------------------------------------------------------------------------------

    def settle(self) -> None:
        """A stop always ends: whatever the program does, the run is over after a while, and stays
        as it is."""
        self.kill_after, self.disk_full, self.ledger.full = None, False, False
        for _ in range(3):
            if self.model is None:
                self.start()
        if self.model is None:
            return  # it refuses to begin
        self.act_stop(0)
        for count in range(400):
            if count > 2 and self.model.phase.final and not self.later and self.model.launching is None:
                break
            self.time += 30.0
            self.tick()
            while self.later:
                self.act_result(1)
        assert self.model.phase.final, f"the stop does not end: {self.model.phase}"
        assert self.program is None or not self.program.alive, "the program outlives the stop"
        self.check_promises()


ACTIONS = tuple(name.removeprefix("act_") for name in vars(Life) if name.startswith("act_"))


WEIGHTS = {
    "time": 8,
    "train": 6,
    "result": 8,
    "connect": 2,
    "save": 2,
    "start": 5,
    "restart": 2,
    "stop": 0.4,
    "disk": 0.5,
    "die": 2,
}
"""How often things happen, compared with 1 for the others."""


def drive(seed: int, events: int) -> Life:
    """A run to which so many random things happen, up to its end."""
    chance = random.Random(seed)
    world = Life(seed, external=seed % 4 == 3, trainer=seed % 8 == 7, on_oom=("auto", "auto", "auto", "ask", "stop")[seed % 5])
    weights = [WEIGHTS.get(name, 1) for name in ACTIONS]
    world.act_start(1)
    for name in chance.choices(ACTIONS, weights, k=events):
        world.act(name, chance.randrange(5040))
    world.settle()
    return world


def launch_pending(model: Model) -> Model:
    """Begin the restart that waits for the program's end without waiting for it."""
    assert model.pending is not None
    return launch(model, model.pending, Cause.PENDING)
