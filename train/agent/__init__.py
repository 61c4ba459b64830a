"""memtop's agent: a guest in any training process. Standard library only, Python 3.8 and newer.

`site/sitecustomize.py` loads it under the name `memtop_agent`. Reports go to
`$MEMTOP_ATTEMPT_DIR/rank-R.jsonl`; commands come over `$MEMTOP_SOCKET`. In a program that does not
use memtop, the agent follows torch's optimizer hook (`hooks.py`), or the Trainer of Hugging Face
(`trainers.py`) or Lightning (`lightning.py`) by a callback; it asks accelerate for the settings of
a loop (`accelerators.py`). The built-in trainer calls `report` itself and offers more commands. The
agent never imports torch, never blocks a step, and its own failures are silent.

Commands are {"type": "command", "id": n, "name": "change", "values": {...}}, without `values` if
there are none. The built-in trainer executes `checkpoint`, `stop` and, on its first rank, `change`
(batch, accumulation, eval_batch, gradient_checkpointing, workers), and answers afterwards. The
Trainers of Hugging Face and Lightning execute `checkpoint` and `stop` (which saves first), and
answer after the save.

Reports are JSON objects, one a line, each with `type`, `time` (seconds since the epoch), `clock`
(seconds of the monotonic clock) and `seq`:

* `hello`: {rank, program_rank, local_rank, world_size, restarts, max_restarts (how often torchrun
  has started the workers again, and how often it may; only under torchrun), pid, python, offers}
  and what `surroundings.py` reads: {executable, system, cpus, memory_bytes, packages: {name:
  version} (of those that the program has imported), cuda (for which torch is built), variables:
  {name: value}}, the first report of a process. `rank` is the journal's number. It equals
  `program_rank`, the rank by torch.distributed or the launcher, unless a living process already
  writes that journal; then it is the first free number from `world_size` on. `local_rank` may be
  null.
* `offers`: {offers}, if the program offers more commands after its first report.
* `step`: {update, samples_seen, epoch, loss, learning_rate, gradient_norm, tokens, padding_fraction
  (of the tokens that the model computes), skipped (true if a gradient is not finite: the weights
  did not change), sample_digest, dropped, batch, accumulation, data_wait_seconds, forward_seconds,
  backward_seconds, optimizer_seconds, step_seconds} and the values of `memory.readings`:
  {allocated_bytes, reserved_bytes, peak_bytes, peak_reserved_bytes, allocation_retries (since the
  process began), rss_bytes, anonymous_bytes}; in some updates on a GPU also {forward_peak_bytes,
  backward_peak_bytes, optimizer_peak_bytes}: what was allocated at the most in that phase. From a
  program that does not use memtop: {update,
  learning_rate (null if reading it would wait for a GPU), step_seconds, data_wait_seconds (inside
  torch's data loaders), batch (of the loader that was used last), dropped, device_uuid} and the
  readings. Device bytes are those of the device on which this process reserves most. From Hugging
  Face's Trainer these, `epoch`, `batch`, `accumulation`, `samples_seen` (null if the data has no
  length), `tokens` (if the Trainer counts them), and in the updates that the Trainer logs the mean
  `loss` since its last log and `gradient_norm`. `logged` is false in the others. An update may be
  reported once more, with its loss. From Lightning the same without `gradient_norm` and `tokens`;
  the loss is the mean of this process's micro-batches, if that needs no waiting for a GPU. A loop
  with accelerate adds `batch`, `accumulation`, `samples_seen` and, on the CPU, `loss`.
* `oom`: {update, phase, error, message, survived, batch, accumulation, allocated_bytes,
  reserved_bytes, free_bytes, total_bytes, rss_bytes, device_uuid}: an allocation failed, with the
  memory at that moment. `phase` is forward | backward | optimizer | evaluation | data | load | save
  | unknown; `error` is the error's class, `message` its text. `survived` is true if the trainer
  repeats the work in smaller pieces, false if the failure ends the process, and null if it ended
  one of the program's threads, which may or may not end the program. Written at once, in programs
  of any kind. If it was a GPU's memory and did not survive, `rank-R-memory.pickle` follows
  (`snapshot.py`).
* `settings`: {update, changes: {field: value}, reason, total_updates}: the trainer uses these
  values from this update on. `reason` is "allocation failure" | "pressure" | "asked" | "grown
  back" | "batch search"; `total_updates` is the run's new number of updates.
* `batch_search`: {message, batch, accumulation, rank_splits: [[batch, accumulation]] (of each rank,
  if they differ), tried: [{batch, share (of the fullest rank's memory, 0-1, null if it ran out),
  own_share (of this rank's)}], samples_per_second (of this rank), remembered, forecast_batch,
  forecast_share, total_bytes}: the batch to start with, from each rank, before the first update.
* `pressure`: {update, allocation_retries}: in two consecutive updates the allocator had to free its
  cache.
* `save_failed`: {update, message, waiting}: the disk was too full for the state of this update.
  `waiting` is true at the end of training if the trainer waits for disk space or a stop.
* `checkpoint`: {updates, samples_seen, path, size_bytes, seconds (from the end of the update until
  the state is on the disk), pause_seconds (how long training stops for it)}. `path` is the folder
  or file, from Hugging Face's or Lightning's Trainer.
* `trainer`: {output_dir (an absolute path), batch (of one device), accumulation, seq_len (null if
  its arguments have no such field), processes (devices that train together), peak_rate, schedule
  (of the learning rate), warmup (updates, or a share of all if below 1), fixed_length (its length
  is given in updates), earlier (the checkpoints in output_dir, by name: when they were saved, in
  microseconds since the epoch), saves_on_sigterm (enable_jit_checkpoint; null before
  transformers 5)}: a program begins to
  train with Hugging Face's Trainer.
* `loop`: {framework (library and version), effective_batch, resumed, knobs (as in `plan`)}: what a
  program's own loop tells accelerate, before the first update and when it changes.
* `plan`: {updates (that the training begins after), total_updates, samples_seen, target_samples,
  resumed, trained_parameters, device_uuid}. From these Trainers also {framework (library
  and version), effective_batch, knobs: {batch | accumulation | seq_len | eval_batch |
  gradient_checkpointing | optimizer: {value, name, source}}}. Trainings one after another in one
  process have one count of updates; each begins with a plan.
* `sample`: {update, prompts, texts (of the first prompts), tokens, max_new_tokens, seconds,
  peak_bytes, peak_reserved_bytes, problem (why texts are missing)}: what the model has written.
* `spike`: {update, first_update, begin, end (positions in the order of the samples), samples,
  sample_ids (the first 10,000), sample_digest, loss, usual_loss, state_update (of the newest state
  from before first_update, or null), action (ask | back | stop), problem, message}: the loss has
  jumped and stayed high.
* `phase`, `memory`, `evaluation`, `warning`, `end`: see `train/run.py` and
  `train/trainer.py`. A loop with accelerate reports the phase save while `save_state` works.
"""

from __future__ import annotations

import collections
import functools
import importlib
import os
import sys
import threading
import time
from types import ModuleType
from typing import Any, Sequence

from . import failures, knobs, memory, sources
from .hooks import StepWatch, when_imported
from .journal import JournalWriter, Link, find_rank, launcher_variables, worker_restarts
from .surroundings import surroundings

AGENT_COMMANDS = ("free_cache",)
_FOLLOWED = {
    "transformers.trainer": "trainers",
    "lightning.pytorch.trainer.trainer": "lightning",
    "pytorch_lightning.trainer.trainer": "lightning",
    "accelerate.accelerator": "accelerators",
}
"""A framework's module, and the file here that follows it."""


def _number(name: str) -> int:
    try:
        return int(os.environ.get(name, ""))
    except ValueError:
        return 0


def _surroundings() -> dict[str, Any]:
    try:
        return surroundings()
    except Exception:  # noqa: BLE001 - a program may have put anything in the place of a module
        return {}


class Agent:
    """One per process.

    The first report or offer calls `start`, so launchers and loader workers stay silent.
    """

    def __init__(self) -> None:
        # The environment is read now, because the program may change it later.
        self._folder = os.environ.get("MEMTOP_ATTEMPT_DIR")
        self._socket = os.environ.get("MEMTOP_SOCKET")
        self._launcher = launcher_variables()
        self.attempt = _number("MEMTOP_ATTEMPT")
        self.resumes_after: int | None = None
        """The update after which a program built on transformers' Trainer must resume."""
        self._pid = os.getpid()
        self._beginning = threading.RLock()
        self._journal: JournalWriter | None = None
        self._link: Link | None = None
        self._offers = list(AGENT_COMMANDS)
        self._reports_steps = False
        # The link's thread appends, the program's thread pops; both operations of a deque are
        # atomic.
        self._commands: collections.deque[tuple[int, str, dict[str, Any]]] = collections.deque()
        self._watch = StepWatch(self, max(0, _number("MEMTOP_START_UPDATE")))
        self._trainings: Any = None

    def wait_for_torch(self) -> None:
        """Follow the program's optimizers, and its framework, once it has imported them."""
        self._watch.install()
        for name, file in _FOLLOWED.items():
            when_imported(name, functools.partial(self._follow, file))

    def _follow(self, file: str, module: ModuleType) -> None:
        try:
            # Only programs that need them load these files.
            from .frameworks import Trainings

            self._trainings = self._trainings or Trainings(self, self._watch)
            importlib.import_module("." + file, __name__).follow(module, self._trainings)
        except Exception as error:  # noqa: BLE001 - the program's import must succeed, whatever goes wrong here
            self.report("warning", message="no reports by the trainer in %s: %r" % (module.__name__, error))

    @property
    def folder(self) -> str | None:
        """The attempt's folder."""
        return self._folder

    @property
    def reports_steps(self) -> bool:
        """Whether the program itself reports its steps."""
        return self._reports_steps

    def change_program(self) -> None:
        """Give the program its new settings; let one built on transformers' Trainer resume."""
        self.resumes_after = knobs.install(self.report)
        sources.install()

    def watch_failures(self) -> None:
        """Report an allocation failure that ends the program or one of its threads."""

        def on_failure(error: BaseException, phase: str, survived: bool | None) -> None:
            self.oom(error, update=self.update, phase=phase, survived=survived, batch=None, accumulation=None)

        failures.watch(on_failure)

    @property
    def update(self) -> int | None:
        """The update in progress, by the optimizer hook; None if it has not seen a step."""
        return None if self._reports_steps else self._watch.present

    def adopt(self) -> None:
        """Let a forked process that trains (a notebook's ranks, a fork server's) report for itself.

        Not if its parent has reported: the journal and its threads belong to the parent then.
        """
        if os.getpid() != self._pid and self._journal is None:
            self._pid, self._beginning = os.getpid(), threading.RLock()
            util: Any = sys.modules.get("multiprocessing.util")
            if util is not None:
                # Such a process ends without atexit.
                util.Finalize(None, self.flush, exitpriority=0)

    def start(self) -> bool:
        """Open journal and link; False in a forked child, which must not report for its parent."""
        if self._folder is None or os.getpid() != self._pid:
            return False
        if self._journal is None:
            # A step, a thread that runs out of memory and a signal handler may all be the first to
            # report.
            with self._beginning:
                if self._journal is None:
                    self._greet(self._folder)
        assert self._journal is not None
        self._journal.start()
        if self._link is not None:
            self._link.start()
        return True

    def _greet(self, folder: str) -> None:
        # Only at the first report: by then the process group exists and the rank is known.
        place = find_rank(self._launcher)
        journal = JournalWriter(folder, place.rank, place.world_size)
        # If the file can only be opened later, it may get another number; then the file's name is
        # right.
        journal.claim()
        number = journal.number
        journal.put(
            {
                "type": "hello",
                "rank": number,
                "program_rank": place.rank,
                "local_rank": place.local_rank,
                "world_size": place.world_size,
                **worker_restarts(),
                "pid": self._pid,
                "python": sys.version.split()[0],
                "offers": list(self._offers),
                **_surroundings(),
            }
        )
        greeting = {"type": "agent", "attempt": self.attempt, "rank": number, "pid": self._pid}
        self._link = Link(self._socket, folder, greeting, self._receive)
        self._journal = journal

    def offer(self, *names: str) -> None:
        """Offer commands that the program executes itself; it must call `take_commands`.

        From now on the program reports its steps itself.
        """
        self._reports_steps = True
        self._watch.remove()
        self.offer_for_now([*self._offers[len(AGENT_COMMANDS) :], *names])

    def offer_for_now(self, names: Sequence[str]) -> None:
        """Offer exactly these commands besides the agent's own, until the next call.

        A command that was received before is not withdrawn; `take_commands` returns it.
        """
        offers = [*AGENT_COMMANDS, *names]
        if offers == self._offers:
            return
        greeted, self._offers = self._journal is not None, offers
        if self.start() and greeted and self._journal is not None:
            # The hello report was written without them.
            self._journal.put({"type": "offers", "offers": list(offers)})

    def readings(self) -> dict[str, int | None]:
        """The memory of this process.

        If the program reports its steps, the peak is since the last call.
        """
        return memory.readings(reset_peak=self._reports_steps)

    def report(self, kind: str, **values: Any) -> None:
        """Append one report to the journal; never blocks, never raises."""
        if self.start() and self._journal is not None:
            self._journal.put(dict(values, type=kind))

    def oom(self, error: BaseException, **values: Any) -> None:
        """Report an allocation failure, once per error, and write it at once.

        The error is not kept.

        Call it before any memory is freed: it reads what is held now.
        """
        if failures.first_reported(error):
            described = failures.describe(error)
            held = memory.at_failure(failures.device_named(described["message"]))
            self.report("oom", **dict(described, **held), **values)
            self.flush()
            # Afterwards: other ranks may end this process meanwhile.
            keeps = values.get("survived") is not True and not failures.is_of_host(error)
            if keeps and self._journal is not None and self._folder is not None:
                self._keep_snapshot(self._folder, self._journal.number, dict(described, **held, **values))

    def _keep_snapshot(self, folder: str, number: int, report: dict[str, Any]) -> None:
        # Only a failure loads this file.
        from . import snapshot

        record = dict(report, rank=number, time=time.time())
        problem = snapshot.keep(snapshot.path_of(folder, number), record)
        if problem is not None:
            self.report("warning", message="no snapshot of the GPU's memory is kept: %s" % problem)
            self.flush()

    def flush(self) -> None:
        """Write all reports so far."""
        if self._journal is not None:
            self._journal.flush()

    @property
    def dropped(self) -> int:
        """The number of reports lost because the journal could not be written, or not in time."""
        return 0 if self._journal is None else self._journal.dropped

    def take_commands(self) -> list[tuple[int, str, dict[str, Any]]]:
        """Execute the agent's own commands; return the others as [(id, name, values)].

        Call between two steps.
        """
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
        """Answer a command that `take_commands` returned."""
        if self._link is not None and os.getpid() == self._pid:
            self._link.send({"type": "answer", "id": number, "ok": ok, "message": message, "result": result or {}})

    def _receive(self, message: dict[str, Any]) -> None:
        # Called in the link's thread, so a command is only queued here and executed between two
        # steps.
        if message.get("type") != "command":
            return
        number, name, values = int(message.get("id", 0)), str(message.get("name")), message.get("values")
        if name in self._offers:
            self._commands.append((number, name, values if isinstance(values, dict) else {}))
        else:
            self.answer(number, False, "this program does not offer %r now" % (name,))


_agent = Agent()
wait_for_torch = _agent.wait_for_torch
watch_failures = _agent.watch_failures
change_program = _agent.change_program
offer = _agent.offer
report = _agent.report
oom = _agent.oom
flush = _agent.flush
take_commands = _agent.take_commands
answer = _agent.answer
readings = _agent.readings


def dropped() -> int:
    """The number of lost reports so far."""
    return _agent.dropped
