"""Other places that get the metrics: accelerate's trackers, named in the settings or handed over as objects."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker

from memtop.presets import Settings
from memtop.train.errors import BadInputError

# What a tracker needs, any one of them, and what to install for it.
_PACKAGES = {"tensorboard": (("tensorboard", "tensorboardX"), "tensorboard"), "wandb": (("wandb",), "wandb")}
_NUMBERS = ("loss", "learning_rate", "gradient_norm", "samples_seen", "epoch")


def tracking_options(settings: Settings, folder: Path, more: Sequence[GeneralTracker] = ()) -> dict[str, Any]:
    """Arguments for Accelerator, which keeps the trackers; they may write into `folder`. BadInputError if one is missing."""
    for name in settings.trackers:
        if name not in _PACKAGES:
            raise BadInputError(f"trackers {name}: unknown; there are {', '.join(_PACKAGES)}")
        modules, package = _PACKAGES[name]
        if not any(importlib.util.find_spec(module) for module in modules):
            raise BadInputError(f"trackers {name}: not installed: pip install {package}")
    wanted = [*settings.trackers, *more]
    return {"log_with": wanted, "project_dir": str(folder)} if wanted else {}


class Tracking:
    """Sends what the loop reports to the trackers of the accelerator; without any it does nothing. First rank only."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def start(self, settings: Settings, folder: Path) -> None:
        """Begin; BadInputError says why a tracker cannot (no account, no network, ...)."""
        if not self._accelerator.log_with:
            return
        name = Path(os.environ.get("MEMTOP_RUN", "")).name or settings.recipe
        place = {"wandb": {"dir": str(folder), "name": name}}
        try:
            self._accelerator.init_trackers("memtop", config=_flat(settings), init_kwargs=place)
        # They are programs of many authors, which open files and talk to servers.
        except Exception as error:  # noqa: BLE001
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            names = ", ".join(str(getattr(tracker, "name", tracker)) for tracker in self._accelerator.log_with)
            raise BadInputError(f"trackers {names.lower()}: cannot be started: {first}") from None

    def step(self, update: int, values: dict[str, Any]) -> None:
        """The numbers of one update; what is not known is left out."""
        known = {name: values[name] for name in _NUMBERS if values.get(name) is not None}
        self._accelerator.log(known, step=update)

    def evaluation(self, update: int, loss: float) -> None:
        """Mean loss in nats per token."""
        self._accelerator.log({"evaluation_loss": loss}, step=update)

    def end(self) -> None:
        """After a failure: have the trackers write what they hold, and leave the process group: others may wait in it."""
        if not self._accelerator.is_main_process:
            return
        for tracker in self._accelerator.trackers:
            tracker.finish()


def _flat(settings: Settings) -> dict[str, Any]:
    """Settings as dotted names and plain values, which every tracker can store."""
    found: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), inner)
        elif value is not None:
            found[prefix] = value if isinstance(value, bool | int | float | str) else ", ".join(map(str, value))

    walk("", msgspec.to_builtins(settings))
    return found
