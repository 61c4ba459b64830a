"""Training programs for `bench.agent_cost`, which starts them: `python agent_programs.py STYLE
UPDATES`.

They do not use memtop. After some updates a program prints "ready". Then it waits for a line, does
that many updates, prints how long they took, and waits again.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import time
from typing import Any

import torch

WARM = 8
ENDLESS = 10**6


class Gate:
    """Lets the updates run in blocks. `after_update` belongs to the end of each."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._done = -WARM
        self._started = 0.0

    def after_update(self) -> None:
        self._done += 1
        if self._done < 0 or self._done % self._size:
            return
        now = time.perf_counter()
        print("ready" if self._done == 0 else f"block {now - self._started}", flush=True)
        if not sys.stdin.readline():
            os._exit(0)
        self._started = time.perf_counter()


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        row = (torch.arange(64) * (at % 7 + 1)) % 512
        return {"input_ids": row, "labels": row}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(512, 128)
        layer = torch.nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 4)
        self.head = torch.nn.Linear(128, 512)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.layers(self.embed(input_ids)))
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def parts() -> tuple[Any, Any, Any]:
    """Model, optimizer and loader."""
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4), torch.utils.data.DataLoader(Rows(), batch_size=4)


def plain(gate: Gate) -> None:
    model, optimizer, loader = parts()
    for batch in loader:
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        gate.after_update()


def accelerate(gate: Gate) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*parts())
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        gate.after_update()


def trainer(gate: Gate) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Gated(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if args.process_index == 0:
                gate.after_update()

    arguments = TrainingArguments(
        output_dir=os.environ["OUTPUT"],
        max_steps=ENDLESS,
        per_device_train_batch_size=4,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_steps=10,
    )
    Trainer(model=Model(), args=arguments, train_dataset=Rows(), callbacks=[Gated()]).train()


def lightning(gate: Gate) -> None:
    name = "lightning.pytorch" if importlib.util.find_spec("lightning") else "pytorch_lightning"
    pytorch: Any = importlib.import_module(name)

    class Module(pytorch.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    class Gated(pytorch.Callback):  # type: ignore[misc]
        def on_train_batch_start(self, *others: Any) -> None:
            gate.after_update()

    options = {"enable_progress_bar": False, "enable_checkpointing": False, "logger": False}
    loader = torch.utils.data.DataLoader(Rows(), batch_size=4)
    pytorch.Trainer(max_steps=ENDLESS, accelerator="cpu", callbacks=[Gated()], **options).fit(Module(), loader)


STYLES = {"plain": plain, "accelerate": accelerate, "trainer": trainer, "torchrun": trainer, "lightning": lightning}

if __name__ == "__main__":
    STYLES[sys.argv[1]](Gate(int(sys.argv[2])))
