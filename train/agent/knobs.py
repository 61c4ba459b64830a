"""Gives a program built on Hugging Face's Trainer other settings, and lets it resume.

memtop restarts such a program with the same command. The changes are in the environment variable
MEMTOP_TRAINER, a JSON object:

* `output_dir`: the folder into which the Trainer saves. Other Trainers of the program are not
  changed.
* `made_in`: if the program changed that folder after it made the arguments object: the folder
  before, and which of the objects made with it this is, from 1; null otherwise.
* `knobs`: new values by memtop's names, see `FIELDS`.
* `resume`: the checkpoint to resume from, memtop's own copy; null if there is none.
* `update`: the update that this checkpoint was saved after. If the program begins to train before
  it, `frameworks.py` ends it: nobody has asked for a training from zero.

The values are set before the arguments object computes others from them. The checkpoint is passed
to the first `train()`, whether or not the program passes one itself.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import json
import os
import re
import sys
import weakref
from types import ModuleType
from typing import Any, Callable, Iterator

from .hooks import when_imported
from .journal import worker_restarts
from .position import corrected

VARIABLE = "MEMTOP_TRAINER"
STATE = "trainer_state.json"
FIELDS = {
    "batch": ("per_device_train_batch_size",),
    "accumulation": ("gradient_accumulation_steps",),
    "seq_len": ("max_length", "max_seq_length"),
    "eval_batch": ("per_device_eval_batch_size",),
    "gradient_checkpointing": ("gradient_checkpointing", "activation_checkpointing"),
    "optimizer": ("optim",),
    "max_updates": ("max_steps",),
}
"""By memtop's name: the fields of the arguments object. Those that it does not have are left
out."""
# A date or a time in a folder's name, which is another one at each start.
_DATE = re.compile(r"\d[\d_:T.-]{6,}\d")


class Knobs:
    """The changes of this start, for the Trainer that saves into `output_dir`.

    `report` is called when a Trainer begins.
    """

    def __init__(self, wanted: dict[str, Any], report: Callable[..., None]) -> None:
        self._output_dir = _place(wanted.get("output_dir", os.devnull))
        self._values = {name: value for name, value in wanted.get("knobs", {}).items() if name in FIELDS}
        self._resume: str | None = wanted.get("resume")
        self._made_in: list[Any] | None = wanted.get("made_in")
        self._made = Made()
        self._report = report

    def install(self) -> None:
        """Change the classes of transformers now, or when the program imports them."""
        when_imported("transformers.training_args", self._change_arguments)
        when_imported("transformers.trainer", self._change_trainer)

    def _change_arguments(self, module: ModuleType) -> None:
        with _told("its settings could not be changed"):
            arguments: Any = module.TrainingArguments
            arguments.__post_init__ = self._setting(arguments.__post_init__)

    def _change_trainer(self, module: ModuleType) -> None:
        with _told("it could not be resumed"):
            trainer: Any = module.Trainer
            trainer.train = self._resuming(trainer.train)

    def _setting(self, post_init: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(post_init)
        def set_first(arguments: Any, *others: Any, **named: Any) -> Any:
            with _told("its settings could not be changed"):
                self._made.add(arguments)
                self._set(arguments)
            return post_init(arguments, *others, **named)

        return set_first

    def _set(self, arguments: Any) -> None:
        if not (self._is_meant(arguments) or self._becomes_meant(arguments)):
            return
        for name, value in self._values.items():
            for field in FIELDS[name]:
                if hasattr(arguments, field):
                    setattr(arguments, field, value)
        if "batch" in self._values and getattr(arguments, "per_gpu_train_batch_size", None):
            # The old name takes precedence.
            arguments.per_gpu_train_batch_size = None

    def _is_meant(self, arguments: Any) -> bool:
        folder = getattr(arguments, "output_dir", None)
        return folder is not None and _place(folder) == self._output_dir

    def _becomes_meant(self, arguments: Any) -> bool:
        """Whether the program is about to change the folder of these arguments to the one that is
        meant."""
        found = self._made.of(arguments)
        if self._made_in is None or found is None:
            return False
        folder, number = self._made_in
        return (_place(found[0]), found[1]) == (_place(folder), number)

    def _resuming(self, train: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(train)
        def resume(trainer: Any, *given: Any, **named: Any) -> Any:
            checkpoint = None
            with _told("it could not be resumed"):
                checkpoint = self._checkpoint_for(trainer)
            with _told("its settings are not known"):
                self._report("trainer", **_described(trainer.args), made_in=self._made.before(trainer.args))
            if checkpoint is not None:
                # A path that the program gives was right at its first start; the run is further
                # now.
                named.pop("model_path", None)
                given = (checkpoint, *given[1:]) if given else given
                named = named if given else dict(named, resume_from_checkpoint=checkpoint)
                searches = getattr(trainer.args, "auto_find_batch_size", False)
                keeps = contextlib.nullcontext() if searches and "batch" not in self._values else batch_of(trainer.args)
                with corrected(trainer, _told), keeps:
                    return train(trainer, *given, **named)
            return train(trainer, *given, **named)

        return resume

    def _checkpoint_for(self, trainer: Any) -> str | None:
        """The checkpoint that this `train()` resumes from; None after the first."""
        checkpoint = self._resume
        if checkpoint is None:
            return None
        # A subclass may choose a folder below that of its arguments.
        folder = trainer.args.output_dir
        if not self._is_meant(trainer.args):
            folder = trainer._get_output_dir(None)
            if _place(folder) != self._output_dir:
                return None
        self._resume = None
        if worker_restarts().get("restarts"):
            with _told("its newest checkpoint is not known"):
                checkpoint = saved_since(checkpoint, folder)
        return checkpoint


class Made:
    """The folders with which the program made its arguments objects. It may change them later."""

    def __init__(self) -> None:
        self._known: list[tuple[weakref.ref[Any], str, int]] = []

    def add(self, arguments: Any) -> None:
        """The folder is None where transformers is to choose one."""
        if self.of(arguments) is None:
            folder = os.path.realpath(os.path.expanduser(getattr(arguments, "output_dir", None) or ""))
            number = 1 + sum(_place(other) == _place(folder) for _, other, _ in self._known)
            self._known.append((weakref.ref(arguments), folder, number))

    def of(self, arguments: Any) -> tuple[str, int] | None:
        """The folder, and which of the objects made with it this is; None if that was not seen."""
        return next(((folder, number) for made, folder, number in self._known if made() is arguments), None)

    def before(self, arguments: Any) -> tuple[str, int] | None:
        """The same; None also if these arguments still have their folder."""
        found = self.of(arguments)
        return None if found is None or _place(found[0]) == _place(arguments.output_dir) else found


def saved_since(checkpoint: str, folder: str) -> str:
    """The newest complete checkpoint that the Trainer has saved since memtop's copy, else the copy.

    For workers that torchrun has started again: the ones before them have trained on.
    """
    newest, (update, saved) = checkpoint, _position(checkpoint)
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if not re.match(r"checkpoint-\d+$", name):
            continue
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # not complete
            other, its_time = _position(path)
            resumes = any(one.startswith(("optimizer", "global_step")) for one in os.listdir(path))
            if resumes and other > update and its_time >= saved:
                newest, update = path, other
    return newest


def _position(checkpoint: str) -> tuple[int, float]:
    """The update of a checkpoint, and when it was complete."""
    path = os.path.join(checkpoint, STATE)
    with open(path, encoding="utf-8") as file:
        return int(json.load(file)["global_step"]), os.stat(path).st_mtime


@contextlib.contextmanager
def batch_of(arguments: Any) -> Iterator[None]:
    """Let a Trainer that resumes take its batch from the arguments.

    transformers before 5.1, and later versions that search the batch, take it from the checkpoint,
    which may have been saved with another one.
    """
    kind: Any = getattr(sys.modules.get("transformers.trainer"), "TrainerState", None)
    load = getattr(kind, "load_from_json", None)
    if load is None:
        yield
        return

    def load_from_json(path: Any) -> Any:
        state = load(path)
        with _told("the batch of its checkpoint could not be replaced"):
            if state.train_batch_size is not None:
                state.train_batch_size = arguments.train_batch_size
        return state

    kind.load_from_json = staticmethod(load_from_json)
    try:
        yield
    finally:
        kind.load_from_json = load


def _described(arguments: Any) -> dict[str, Any]:
    """What the Trainer is about to use."""
    found = {
        name: next((getattr(arguments, field, None) for field in FIELDS[name] if hasattr(arguments, field)), None)
        for name in ("batch", "accumulation", "seq_len")
    }
    devices = max(1, getattr(arguments, "n_gpu", 1)) * getattr(arguments, "world_size", 1)
    schedule = getattr(arguments, "lr_scheduler_type", None)
    return dict(
        found,
        output_dir=os.path.realpath(os.path.expanduser(arguments.output_dir)),
        processes=devices,
        peak_rate=arguments.learning_rate,
        schedule=getattr(schedule, "value", schedule),
        warmup=getattr(arguments, "warmup_steps", 0) or getattr(arguments, "warmup_ratio", 0) or 0,
        fixed_length=arguments.max_steps > 0,
        earlier=_checkpoints(arguments.output_dir),
        saves_on_sigterm=getattr(arguments, "enable_jit_checkpoint", None),
    )


def _checkpoints(folder: str) -> dict[str, int]:
    """The checkpoints in this folder, and when they were saved, in microseconds since the epoch."""
    found = {}
    for path in glob.glob(os.path.join(glob.escape(os.path.expanduser(folder)), "checkpoint-*", STATE)):
        with contextlib.suppress(OSError):
            found[os.path.basename(os.path.dirname(path))] = os.stat(path).st_mtime_ns // 1000
    return found


def install(report: Callable[..., None]) -> int | None:
    """Apply the changes of this start to the program, and report its Trainer.

    Returns the update that it must resume after; None if it may begin from zero.
    """
    wanted: dict[str, Any] = {}
    with _told("its settings could not be changed"):
        wanted = json.loads(os.environ.get(VARIABLE) or "{}")
    with _told("its settings could not be changed"):
        Knobs(wanted, report).install()
    update = wanted.get("update")
    return update if isinstance(update, int) else None


def _place(folder: Any) -> str:
    """The folder's path, with one word for whatever looks like a date."""
    return _DATE.sub("date", os.path.realpath(os.path.expanduser(os.fspath(folder))))


@contextlib.contextmanager
def _told(words: str) -> Iterator[None]:
    """The program runs on, whatever goes wrong here; memtop finds out that nothing has changed."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the program must run, whatever goes wrong here
        sys.stderr.write("memtop: %s: %r\n" % (words, error))
