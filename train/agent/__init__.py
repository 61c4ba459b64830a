"""memtop's agent: a guest inside any training process. Standard library only, Python 3.8 and newer.

Loaded as `memtop_agent` by `site/sitecustomize.py`. Reports go to `$MEMTOP_ATTEMPT_DIR/rank-R.jsonl`; commands come over
`$MEMTOP_SOCKET`. A program that has never heard of memtop is followed through torch's optimizer hook; one that has (the
built-in trainer) calls `report` itself and offers more commands.

The agent never imports torch, never blocks a step, and is silent on failure.

Commands are {"type": "command", "id": n, "name": "change", "values": {...}}; `values` is left out where there are none. The
built-in trainer carries out `checkpoint`, `stop` and, on its first rank, `change` (batch, accumulation, eval_batch,
gradient_checkpointing, workers), and answers when it has.

Reports, one JSON object a line, each with `type`, `time` (seconds since the epoch) and `seq`:

* `hello`: {rank, program_rank, local_rank, world_size, pid, python, offers}, the first one of each process. `rank` is the
  number of the journal. It is another one than `program_rank`, the rank by torch.distributed or the launcher, where a living
  process of the same rank writes that journal already: then the first free one from `world_size` on. `local_rank` may be null.
* `offers`: {offers}, where the program offers more after its first report.
* `step`: {update, samples_seen, epoch, loss, learning_rate, gradient_norm, tokens, sample_digest, dropped, batch,
  accumulation, data_wait_seconds, forward_seconds, backward_seconds, optimizer_seconds, step_seconds} and what
  `memory.readings` finds: {allocated_bytes, reserved_bytes, peak_bytes, peak_reserved_bytes, allocation_retries (since the
  process began), rss_bytes, anonymous_bytes}. Of a program that knows nothing of memtop: {update, learning_rate (null where
  a GPU would have to be waited for to know it), step_seconds, data_wait_seconds (inside torch's data loaders), dropped,
  device_uuid} and the readings. Device bytes are those of the device on which this process holds most.
* `oom`: {update, phase, error, message, survived, batch, accumulation, allocated_bytes, reserved_bytes, free_bytes,
  total_bytes, rss_bytes, device_uuid}: an allocation failed, and this is what was held then. `phase` is forward | backward |
  optimizer | evaluation | data | load | save | unknown; `error` the error's class, `message` its words; `survived` is true
  where the trainer does the work again in smaller pieces, false where the failure ends the process, and null where it has ended
  one of its threads: what that means only the program knows. Written at once, in a program of any kind.
* `settings`: {update, changes: {field: value}, reason, total_updates}: from this update on the trainer runs with these values.
  `reason` is "allocation failure" | "pressure" | "asked" | "grown back"; `total_updates` what the run comes to with them.
* `pressure`: {update, allocation_retries}: in two updates running the allocator found room only after it had freed its cache.
* `save_failed`: {update, message, waiting}: there was no room for the state of this update. `waiting` is true at the end of
  training, where the trainer stays until there is some, or until it is stopped.
* `plan`, `phase`, `memory`, `evaluation`, `checkpoint`, `warning`, `end`: see `train/run.py` and `train/trainer.py`.
"""

from __future__ import annotations

import collections
import os
import sys
import threading
from typing import Any

from . import failures, memory
from .hooks import StepWatch
from .journal import Journal, find_place, launcher_variables
from .link import Link

OFFERS_OF_ITS_OWN = ("free_cache",)


def _number(name: str) -> int:
    try:
        return int(os.environ.get(name, ""))
    except ValueError:
        return 0


class Agent:
    """One per process. `start` is called at the first report or offer, so that launchers and loader workers stay silent."""

    def __init__(self) -> None:
        # All that the environment says is read here: later it is the program's own, to change as it likes.
        self._folder = os.environ.get("MEMTOP_ATTEMPT_DIR")
        self._socket = os.environ.get("MEMTOP_SOCKET")
        self._launcher = launcher_variables()
        self.attempt = _number("MEMTOP_ATTEMPT")
        self._pid = os.getpid()
        self._beginning = threading.RLock()
        self._journal: Journal | None = None
        self._link: Link | None = None
        self._offers = list(OFFERS_OF_ITS_OWN)
        self._own_program = False
        # Filled by the link's thread, emptied by the program's: every access is one step that cannot be torn apart.
        self._commands: collections.deque[tuple[int, str, dict[str, Any]]] = collections.deque()
        self._watch = StepWatch(self)

    def wait_for_torch(self) -> None:
        """Follow the optimizers of whatever program this is, once it has imported torch."""
        self._watch.install()

    def watch_failures(self) -> None:
        """Report it when the program, whatever it is, ends for lack of memory."""
        failures.watch(self)

    @property
    def update(self) -> int | None:
        """The update that a program that knows nothing of memtop is in; None before its first step, and for one that knows."""
        return None if self._own_program else self._watch.present

    def adopt(self) -> None:
        """Called by a process that trains. A forked one (a notebook's ranks, a fork server's) speaks for itself then, unless
        its parent has spoken: the journal and its threads would be the parent's."""
        if os.getpid() != self._pid and self._journal is None:
            self._pid, self._beginning = os.getpid(), threading.RLock()
            util: Any = sys.modules.get("multiprocessing.util")
            if util is not None:
                # Such a child ends without atexit.
                util.Finalize(None, self.flush, exitpriority=0)

    def start(self) -> bool:
        """Open the journal and the link; False in a forked child, which must not speak for its parent."""
        if self._folder is None or os.getpid() != self._pid:
            return False
        if self._journal is None:
            # A step and a thread that runs out of memory may both be the first to speak; so may a signal's handler.
            with self._beginning:
                if self._journal is None:
                    self._greet(self._folder)
        assert self._journal is not None
        self._journal.start()
        if self._link is not None:
            self._link.start()
        return True

    def _greet(self, folder: str) -> None:
        # Not before there is something to tell: by then a process group is formed, and the rank known.
        place = find_place(self._launcher)
        journal = Journal(folder, place.rank, place.world_size)
        # It may be that it can be opened only later, under another number; then the file's name is right, not the greeting.
        journal.claim()
        number = journal.number
        journal.put(
            {
                "type": "hello",
                "rank": number,
                "program_rank": place.rank,
                "local_rank": place.local_rank,
                "world_size": place.world_size,
                "pid": self._pid,
                "python": sys.version.split()[0],
                "offers": list(self._offers),
            }
        )
        greeting = {"type": "agent", "attempt": self.attempt, "rank": number, "pid": self._pid}
        self._link = Link(self._socket, greeting, self._receive)
        self._journal = journal

    def offer(self, *names: str) -> None:
        """The program itself can carry out these commands (checkpoint, stop); it must call `take_commands`. From now on
        it reports its steps itself."""
        greeted = self._journal is not None
        self._offers.extend(names)
        self._own_program = True
        self._watch.remove()
        if self.start() and greeted and self._journal is not None:
            # The greeting is written already, without them.
            self._journal.put({"type": "offers", "offers": list(self._offers)})

    def readings(self) -> dict[str, int | None]:
        """The memory of this process; the peak is since the last call where the program offers commands."""
        return memory.readings(reset_peak=self._own_program)

    def report(self, kind: str, **values: Any) -> None:
        """Append one report to the journal; never blocks, never raises."""
        if self.start() and self._journal is not None:
            self._journal.put(dict(values, type=kind))

    def oom(self, error: BaseException, **values: Any) -> None:
        """Report, once for each error and written at once, that memory ran out. What is held is read now: call it before
        anything is freed. Keeps nothing of the error."""
        if failures.first_told(error):
            told = failures.describe(error)
            self.report("oom", **dict(told, **memory.at_failure(failures.device_named(told["message"]))), **values)
            self.flush()

    def flush(self) -> None:
        """Write out all reports so far before anything else happens."""
        if self._journal is not None:
            self._journal.flush()

    @property
    def dropped(self) -> int:
        """Reports that were lost because the journal could not be written fast enough, or at all."""
        return 0 if self._journal is None else self._journal.dropped

    def take_commands(self) -> list[tuple[int, str, dict[str, Any]]]:
        """At a step boundary: carry out what the agent can do itself; hand over the rest as [(id, name, values)]."""
        others: list[tuple[int, str, dict[str, Any]]] = []
        if not self._commands or os.getpid() != self._pid:
            return others
        while self._commands:
            number, name, values = self._commands.popleft()
            if name == "free_cache":
                result = memory.free_cache()
                self.answer(number, True, "cache freed", result)
            else:
                others.append((number, name, values))
        return others

    def answer(self, number: int, ok: bool, message: str, result: dict[str, Any] | None = None) -> None:
        """Answer a command that `take_commands` handed over."""
        if self._link is not None and os.getpid() == self._pid:
            self._link.send({"type": "answer", "id": number, "ok": ok, "message": message, "result": result or {}})

    def _receive(self, message: dict[str, Any]) -> None:
        # Runs in the link's thread: only noted here, carried out at the next step boundary.
        if message.get("type") != "command":
            return
        number, name, values = int(message.get("id", 0)), str(message.get("name")), message.get("values")
        if name in self._offers:
            self._commands.append((number, name, values if isinstance(values, dict) else {}))
        else:
            self.answer(number, False, "this program does not offer %r: it has never heard of memtop" % (name,))


_agent = Agent()
wait_for_torch = _agent.wait_for_torch
watch_failures = _agent.watch_failures
offer = _agent.offer
report = _agent.report
oom = _agent.oom
flush = _agent.flush
take_commands = _agent.take_commands
answer = _agent.answer
readings = _agent.readings


def dropped() -> int:
    """Reports lost so far."""
    return _agent.dropped
