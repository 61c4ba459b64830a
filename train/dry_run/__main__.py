"""Answers how much memory trainings take: one JSON line on stdout for each one on stdin.

    python -m memtop.train.dry_run [FOLDER]

A request is {"settings": ..., "generation": 80, "capacity": BYTES or null}: the settings of a run,
the GPU's compute capability without its point, and the bytes that torch can reserve there. The
answer is {"foresight": ...} (see `run.Foresight`), or {"problem": TEXT, "of_model": ...} if it
cannot be foreseen; of_model says whether the settings may be right (see `UnknownModelError`).
Answers are kept in FOLDER: the same question is answered without loading torch. With
"only_check": true the model is built and not run; the answer is then {} or {"problem": ...}.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib.metadata
import os
import select
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec

from memtop import presets
from memtop.presets import Settings
from memtop.presets.fields import memory_shape
from memtop.presets.parameters import stored_config
from memtop.presets.schema import Positive

_LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "deepspeed", "accelerate")
_MOST_ANSWERS = 2000


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    settings: Settings
    generation: Positive
    capacity: Positive | None = None
    only_check: bool = False


def main() -> int:
    threading.Thread(target=_end_with_the_reader, args=(sys.stdout.fileno(),), daemon=True).start()
    kept = _Kept(Path(sys.argv[1])) if len(sys.argv) > 1 else None
    # transformers loads DeepSpeed, which would look for a GPU and warn that there is none.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for line in sys.stdin.buffer:
        request = msgspec.json.decode(line, type=Request)
        answer = None if kept is None or request.only_check else kept.find(request)
        if answer is None:
            with contextlib.redirect_stdout(sys.stderr):
                found = _foreseen(request)
            answer = msgspec.json.encode(found)
            if kept is not None and "foresight" in found:
                kept.keep(request, answer)
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()
    return 0


def _end_with_the_reader(answers: int) -> None:
    """End this process when the process that asks for the answers ends."""
    poller = select.poll()
    # With an empty mask, poll only reports that the other end of the pipe is closed.
    poller.register(answers, 0)
    if any(event & (select.POLLERR | select.POLLHUP) for _, event in poller.poll()):
        os._exit(1)


def _foreseen(request: Request) -> dict[str, Any]:
    from transformers.utils import logging as transformers_logging

    from memtop.train import BadInputError, UnknownModelError
    from memtop.train.dry_run.build import check, training_of
    from memtop.train.dry_run.run import foresee, needing_most

    transformers_logging.set_verbosity_error()
    # Collections need not look at what the imports have made.
    gc.freeze()
    try:
        training = training_of(
            request.settings,
            generation=request.generation,
            capacity=request.capacity,
        )
        if request.only_check:
            check(training)
            return {}
        return {"foresight": msgspec.to_builtins(foresee(needing_most(training)))}
    except BadInputError as error:
        return {"problem": str(error), "of_model": isinstance(error, UnknownModelError)}


class _Kept:
    """Answers in files, named by all that decides them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        versions = [f"{name} {_version(name)}" for name in _LIBRARIES]
        train, own = Path(__file__).resolve().parents[1], Path(presets.__file__).resolve().parent
        sources = [path.read_bytes() for folder in (train, own) for path in sorted(folder.rglob("*.py"))]
        self._code = hashlib.blake2b(b"\0".join([*map(str.encode, versions), *sources])).hexdigest()

    def find(self, request: Request) -> bytes | None:
        try:
            return self._file(request).read_bytes()
        except OSError:
            return None  # it was not asked before

    def keep(self, request: Request, answer: bytes) -> None:
        file = self._file(request)
        part = file.with_name(f"{file.name}.{os.getpid()}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            part.write_bytes(answer)
            part.replace(file)
            for old in sorted(self._folder.iterdir(), key=lambda path: path.stat().st_mtime)[:-_MOST_ANSWERS]:
                old.unlink(missing_ok=True)
        except OSError as error:
            # The next time it is computed again.
            print(f"memtop: {self._folder}: an answer cannot be kept: {error.strerror}", file=sys.stderr)

    def _file(self, request: Request) -> Path:
        settings = request.settings
        shape = {
            **memory_shape(settings, "peak", "host"),
            "task": settings.task,
            "world_size": settings.world_size,
            "ddp": settings.ddp,
            "config": stored_config(settings) or settings.model,
            "from_path": "path" in settings.model,
            "generation": request.generation,
            "capacity": request.capacity,
            "code": self._code,
        }
        return self._folder / hashlib.blake2b(msgspec.json.encode(shape, order="deterministic"), digest_size=16).hexdigest()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
