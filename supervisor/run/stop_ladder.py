"""How a program is ended: a request, then SIGINT, SIGTERM and SIGKILL, with a wait after each."""

from __future__ import annotations

import math

import msgspec
from msgspec.structs import replace

from memtop.presets.program_profiles import StopRule
from memtop.supervisor.run.effects import SignalTarget

LEFTOVER_SECONDS, WORKING_LEFTOVER_SECONDS = 3.0, 40.0
"""Time for leftover processes of a program that ended by itself, after SIGTERM and SIGKILL each.
The second is for as long as one of them works: it may be saving."""
_TYPE_SECONDS = 2.0
"""Each rank may ask, and one may take the answers of others: so they are typed again and again."""
# A program that hangs is ended after this, no matter how long its saves and evaluations have taken.
MOST_ASIDE_SECONDS = 1800.0


class Waits(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds between each step of the ladder and the next."""

    graceful: float = 60.0
    """The program was asked to finish its update, save and exit."""
    interrupt: float = 15.0
    """SIGINT, for programs that memtop cannot ask to stop: many save on it."""
    terminate: float = 40.0
    """SIGTERM; longer than torchrun's own 30 s."""
    saving: float = 60.0
    """A signal on which the program saves, as its profile says: this long after its files have last
    changed."""
    kill: float = 30.0
    """SIGKILL; then it is sent again. The kernel needs a while to release much memory."""
    why: str = ""
    """Why the program gets more time than others, in words; empty if it does not."""

    def stretched(
        self,
        update_seconds: float,
        save_seconds: float = 0.0,
        silent_seconds: float = 0.0,
        *,
        forecast_seconds: float = 0.0,
        saves_on_sigterm: bool = False,
    ) -> Waits:
        """The waits for a program that may be in the middle of an update when it is asked, and
        saves afterwards. Its updates take `update_seconds`, or `forecast_seconds` if none is done
        yet; its newest save took `save_seconds`. `silent_seconds` is its longest time between two
        reports, for example an evaluation. Of the last two at most half an hour counts.

        `saves_on_sigterm`: it finishes its update and saves on that signal too, and is given the
        time for it.
        """
        reasons = {
            "an update takes it {:.0f} s": update_seconds,
            "an update is forecast to take it {:.0f} s": forecast_seconds,
            "its newest save took {:.0f} s": min(save_seconds, MOST_ASIDE_SECONDS),
            "it has been silent for up to {:.0f} s": min(silent_seconds, MOST_ASIDE_SECONDS),
        }
        why = max(reasons, key=lambda words: reasons[words])
        slowest = reasons[why]
        needed = self.graceful / 2 + 2 * slowest
        if needed <= self.graceful and not saves_on_sigterm:
            return self
        return replace(
            self,
            graceful=max(self.graceful, needed),
            terminate=max(self.terminate, needed) if saves_on_sigterm and slowest else self.terminate,
            why=why.format(slowest) if needed > self.graceful else "",
        )


class Rung(msgspec.Struct, frozen=True):
    """A signal and the seconds until the next one."""

    name: str
    target: SignalTarget
    seconds: float


class StopLadder(msgspec.Struct, frozen=True, kw_only=True):
    """The rungs that are left."""

    rungs: tuple[Rung, ...]
    deadline: float
    """When the next rung is due, on the monotonic clock."""
    waits: Waits
    continued: frozenset[int] | None = None
    """The program and ranks that memtop has continued since the last signal, each once. None before
    the first tick."""
    asking: bool = False
    """The program was asked and has not answered."""
    interrupted_until: float = 0.0
    again: bool = False
    """SIGKILL was sent again: the program has not ended after the first."""
    manner: StopRule | None = None
    """The program saves after the first signal; None if it does not."""
    ends: float = 0.0
    """While it saves, before or after the first signal: when it is ended nevertheless. 0: it is not
    waited for."""
    types_at: float | None = None
    """When the answer to its question is typed the next time; None before the first signal."""
    told: bool = False
    """That the first signal waits for a save."""

    def declined(self, now: float) -> StopLadder:
        """The program refused the request or is gone: the signals begin at once."""
        if not self.asking:
            return self
        return replace(self, asking=False, rungs=(_interrupt(self.waits), *self.rungs), deadline=now)

    def waits_for_save(self, now: float) -> bool:
        """The first signal is due, and may come later: many programs save over their only
        checkpoint, and a signal would leave it broken."""
        return self.types_at is None and self.deadline <= now < self.ends

    def next(self, now: float) -> tuple[StopLadder, Rung | None]:
        """The rung that is due now, or None. The last one is repeated until the program ends."""
        if now < self.deadline:
            return self, None
        if not self.rungs:
            return replace(self, again=True, deadline=now + self.waits.kill), _kill(self.waits)
        rung, *left = self.rungs
        until = now + rung.seconds
        interrupted = until if rung.name == "SIGINT" else self.interrupted_until
        # After the next signal it is too late to save.
        types_at = now if self.types_at is None else math.inf
        ladder = replace(self, asking=False, rungs=tuple(left), deadline=until, interrupted_until=interrupted)
        return replace(ladder, types_at=types_at), rung

    def typing(self, now: float) -> tuple[StopLadder, str | None]:
        """The answer to type now, if the program asks something before it saves."""
        if self.manner is None or self.manner.answer is None or self.types_at is None or now < self.types_at:
            return self, None
        return replace(self, types_at=now + _TYPE_SECONDS), self.manner.answer

    def saw_save(self, now: float, *, complete: bool) -> StopLadder:
        """The program has saved, or does so: it gets time for the rest."""
        if self.manner is None or now >= self.deadline:
            return self
        if complete:
            return replace(self, deadline=min(self.deadline, now + self.waits.interrupt))
        return replace(self, deadline=max(self.deadline, min(self.ends, now + self.waits.saving)))

    def patience(self, now: float) -> tuple[float, float]:
        """Seconds for leftover processes: its group without a signal, then all after SIGTERM."""
        return max(0.0, self.interrupted_until - now), self.waits.terminate


def begin(
    waits: Waits, now: float, *, asked: bool, manner: StopRule | None = None, on_sigterm: bool = False, unsaved: bool = False
) -> StopLadder:
    """The whole ladder. `asked`: a request to stop was sent; otherwise a signal comes first.

    `manner`: of a program with a profile. `on_sigterm`: the program saves on SIGTERM. `unsaved`: it
    must not save, so it does not get the signal on which it does.
    """
    rungs: tuple[Rung, ...] = (Rung("SIGTERM", SignalTarget.PROGRAM, waits.terminate), _kill(waits))
    if manner is not None:
        after = rungs[1:] if manner.signal == "SIGTERM" else rungs
        if unsaved and manner.saves:
            return StopLadder(rungs=after, deadline=now, waits=waits)
        ends = 0.0 if unsaved else now + MOST_ASIDE_SECONDS
        first = _first(manner, waits)
        saves = manner if manner.saves or manner.answer is not None else None
        return StopLadder(rungs=(first, *after), deadline=now, waits=waits, manner=saves, ends=ends)
    if asked:
        return StopLadder(rungs=rungs, deadline=now + waits.graceful, waits=waits, asking=True)
    if on_sigterm:
        return StopLadder(rungs=rungs[1:] if unsaved else rungs, deadline=now, waits=waits)
    return StopLadder(rungs=(_interrupt(waits), *rungs), deadline=now, waits=waits)


def _first(manner: StopRule, waits: Waits) -> Rung:
    target = SignalTarget.GROUP if manner.to == "group" else SignalTarget.PROGRAM
    return Rung(manner.signal, target, waits.saving if manner.saves else waits.interrupt)


def _kill(waits: Waits) -> Rung:
    return Rung("SIGKILL", SignalTarget.ALL, waits.kill)


def _interrupt(waits: Waits) -> Rung:
    # To the group, as Ctrl-C does: a shell waits for its script's program, which alone knows how to
    # save.
    return Rung("SIGINT", SignalTarget.GROUP, waits.interrupt)
