"""A small stand-in for Lightning's Trainer, for machines without Lightning.

It calls the hooks of callbacks in the order of `lightning` 2.6, has the public attributes that
memtop's agent reads, and saves with `torch.save`. `tests/train/test_agent_lightning.py` runs every
test with it, and with Lightning itself where that is installed. `install` writes it as the package
`lightning`; this file becomes its module `lightning.pytorch.trainer.trainer`.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


class Callback:
    """Calls of hooks that a callback does not have do nothing."""


class ModelCheckpoint(Callback):
    """Saves after so many updates, or after each epoch."""

    def __init__(self, every_n_train_steps: int = 0) -> None:
        self.dirpath: str | None = None
        self.every = every_n_train_steps

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if self.every and trainer.global_step % self.every == 0 and trainer.global_step > trainer.step_before:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        if not self.every:
            self._save(trainer)

    def _save(self, trainer: Any) -> None:
        trainer.save_checkpoint(f"{self.dirpath}/epoch={trainer.current_epoch}-step={trainer.global_step}.ckpt")


class LightningModule(torch.nn.Module):
    automatic_optimization = True

    def log(self, name: str, value: Any) -> None:
        self.logged = {name: value.detach()}


class Trainer:
    def __init__(self, max_epochs: int = 1, max_steps: int = -1, accumulate_grad_batches: int = 1, **given: Any) -> None:
        self.max_epochs, self.max_steps, self.accumulate_grad_batches = max_epochs, max_steps, accumulate_grad_batches
        self.default_root_dir = str(Path.cwd())
        self.callbacks = [*given.get("callbacks", ())]
        self.checkpoint_callback = next((one for one in self.callbacks if isinstance(one, ModelCheckpoint)), None)
        self.global_step = self.step_before = self.current_epoch = 0
        self.world_size = self.num_nodes = 1
        self.strategy = SimpleNamespace(root_device=torch.device("cpu"))
        self.distributed_sampler_kwargs = {"num_replicas": 1, "rank": 0}
        self.loggers: list[Any] = []
        self.log_every_n_steps = 50
        self.is_global_zero, self.sanity_checking, self.should_stop = True, False, False
        self.callback_metrics: dict[str, Any] = {}

    @property
    def estimated_stepping_batches(self) -> float:
        of_epochs = math.ceil(self.num_training_batches / self.accumulate_grad_batches) * self.max_epochs
        return of_epochs if self.max_steps < 0 else min(self.max_steps, of_epochs)

    def fit(self, model: Any, train_dataloaders: Any = None, val_dataloaders: Any = None, *, ckpt_path: Any = None) -> None:
        self.should_stop, self.lightning_module, self.train_dataloader = False, model, train_dataloaders
        self.num_training_batches = len(train_dataloaders)
        self.optimizers = [model.configure_optimizers()]
        if self.checkpoint_callback is not None:
            self.checkpoint_callback.dirpath = f"{self.default_root_dir}/checkpoints"
        if ckpt_path is not None:
            self._load(torch.load(ckpt_path))
        self._call("on_train_start")
        while self.current_epoch < self.max_epochs and not self._is_done():
            self._epoch(val_dataloaders)
            self.current_epoch += 1
        self._call("on_train_end")

    def save_checkpoint(self, filepath: Any, weights_only: bool | None = None, storage_options: Any = None) -> None:
        Path(filepath).parent.mkdir(parents=True, exist_ok=True)
        states = [self.lightning_module.state_dict(), self.optimizers[0].state_dict()]
        torch.save({"states": states, "global_step": self.global_step, "epoch": self.current_epoch}, filepath)

    def _load(self, found: dict[str, Any]) -> None:
        self.global_step, self.current_epoch = found["global_step"], found["epoch"]
        self.lightning_module.load_state_dict(found["states"][0])
        self.optimizers[0].load_state_dict(found["states"][1])

    def _epoch(self, validation: Any) -> None:
        optimizer = self.optimizers[0]
        for index, batch in enumerate(self.train_dataloader):
            self._call("on_train_batch_start", batch, index)
            self.step_before = self.global_step
            loss = self.lightning_module.training_step(batch, index) / self.accumulate_grad_batches
            if index % self.accumulate_grad_batches == 0:
                optimizer.zero_grad()
            loss.backward()
            if (index + 1) % self.accumulate_grad_batches == 0 or index + 1 == self.num_training_batches:
                optimizer.step()
                self.global_step += 1
            self._call("on_train_batch_end", {"loss": loss.detach()}, batch, index)
            if self._is_done():
                break
        if validation is not None:
            self._call("on_validation_start")
            for index, batch in enumerate(validation):
                self.lightning_module.validation_step(batch, index)
            self.callback_metrics = self.lightning_module.logged
            self._call("on_validation_end")
        self._call("on_train_epoch_end")

    def _is_done(self) -> bool:
        return self.should_stop or self.global_step == self.max_steps

    def _call(self, hook: str, *given: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook, lambda *_: None)(self, self.lightning_module, *given)


def install(folder: Path) -> None:
    """Write the package into this folder."""
    pytorch = folder / "lightning" / "pytorch"
    (pytorch / "trainer").mkdir(parents=True)
    (folder / "lightning" / "__init__.py").write_text('__version__ = "double"\n')
    (pytorch / "trainer" / "__init__.py").write_text("")
    names = "Callback, LightningModule, ModelCheckpoint, Trainer"
    (pytorch / "__init__.py").write_text(f"from .trainer.trainer import {names}\nfrom . import callbacks\n")
    (pytorch / "callbacks.py").write_text("from .trainer.trainer import Callback, ModelCheckpoint\n")
    shutil.copy(__file__, pytorch / "trainer" / "trainer.py")
