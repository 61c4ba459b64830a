"""Training programs for `bench.agent_cost`, which starts them under the agent:
`python agent_programs.py STYLE LAYERS ROUNDS`.

They do not use memtop. Without layers an update computes almost nothing. A round has three blocks
of updates: with the agent's hooks, without them, and without them once more, in changing order. At
the end the program prints the seconds per update of all blocks, as JSON: {"with": [...],
"without": [...], "control": [...]}.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import time
from typing import Any

import torch
import torch.utils.data.dataloader

WARM = 8
LAYERS = int(sys.argv[2])
BLOCK = 4 if LAYERS else 40
"""Updates in a block."""
ENDLESS = 10**6
ORDERS = (("with", "without", "control"), ("control", "with", "without"), ("without", "control", "with"))


class Guest:
    """The agent in this process: each of its hooks, and what the program has without it."""

    def __init__(self) -> None:
        self._agent: Any = sys.modules["memtop_agent"]
        self._places: list[tuple[Any, str, Any, Any]] = []
        optimizers: Any = importlib.import_module("torch.optim.optimizer")
        hooks = optimizers._global_optimizer_post_hooks
        if not hooks:
            raise SystemExit("the agent has no hook in torch's optimizers")
        self._places.append((optimizers, "_global_optimizer_post_hooks", hooks, {}))
        self.wrapped(torch.utils.data.dataloader._BaseDataLoaderIter, "__next__")

    def wrapped(self, holder: Any, name: str) -> None:
        """The agent has wrapped this method."""
        method = getattr(holder, name)
        self._places.append((holder, name, method, method.__wrapped__))

    def callbacks(self, holder: Any) -> None:
        """The agent has added its own to this holder's callbacks."""
        own = [one for one in holder.callbacks if not type(one).__name__.startswith("Memtop")]
        if len(own) == len(holder.callbacks):
            raise SystemExit("the agent has added no callback")
        self._places.append((holder, "callbacks", holder.callbacks, own))

    def turn(self, *, on: bool) -> None:
        for holder, name, present, absent in self._places:
            setattr(holder, name, present if on else absent)

    def flush(self) -> None:
        """Do the work that the agent's thread would do later."""
        self._agent.flush()


class Blocks:
    """Divides the updates into blocks. `after_update` belongs to the end of each update."""

    def __init__(self, rounds: int) -> None:
        self.guest = Guest()
        self._arms = [arm for number in range(rounds) for arm in ORDERS[number % len(ORDERS)]]
        self._seconds: dict[str, list[float]] = {arm: [] for arm in ORDERS[0]}
        self._done = -WARM
        self._started = 0.0

    def after_update(self) -> None:
        self._done += 1
        if self._done < 0 or self._done % BLOCK:
            return
        block = self._done // BLOCK
        if block:
            arm = self._arms[block - 1]
            if arm == "with":
                self.guest.flush()
            self._seconds[arm].append((time.perf_counter() - self._started) / BLOCK)
        if block == len(self._arms):
            if os.environ.get("RANK", "0") == "0":
                print(json.dumps(self._seconds), flush=True)
            os._exit(0)
        self.guest.turn(on=self._arms[block] == "with")
        self._started = time.perf_counter()


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        row = (torch.arange(64 if LAYERS else 4) * (at % 7 + 1)) % 512
        return {"input_ids": row, "labels": row}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = 128 if LAYERS else 4
        self.embed = torch.nn.Embedding(512, width)
        layers = (torch.nn.TransformerEncoderLayer(width, 4, 512, dropout=0.0, batch_first=True) for _ in range(LAYERS))
        self.layers = torch.nn.Sequential(*layers)
        self.head = torch.nn.Linear(width, 512)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.layers(self.embed(input_ids)))
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def parts() -> tuple[Any, Any, Any]:
    """Model, optimizer and loader."""
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4), torch.utils.data.DataLoader(Rows(), batch_size=4)


def plain(blocks: Blocks) -> None:
    model, optimizer, loader = parts()
    for batch in loader:
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        blocks.after_update()


def accelerate(blocks: Blocks) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    blocks.guest.wrapped(Accelerator, "backward")
    model, optimizer, loader = accelerator.prepare(*parts())
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        blocks.after_update()


def trainer(blocks: Blocks) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Counting(TrainerCallback):
        def on_step_end(self, *others: Any, **named: Any) -> None:
            blocks.after_update()

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
    training = Trainer(model=Model(), args=arguments, train_dataset=Rows(), callbacks=[Counting()])
    blocks.guest.callbacks(training.callback_handler)
    training.train()


def lightning(blocks: Blocks) -> None:
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

    class Counting(pytorch.Callback):  # type: ignore[misc]
        def on_train_start(self, training: Any, *others: Any) -> None:
            blocks.guest.callbacks(training)

        def on_train_batch_start(self, *others: Any) -> None:
            blocks.after_update()

    options = {"enable_progress_bar": False, "enable_checkpointing": False, "logger": False}
    loader = torch.utils.data.DataLoader(Rows(), batch_size=4)
    pytorch.Trainer(max_steps=ENDLESS, accelerator="cpu", callbacks=[Counting()], **options).fit(Module(), loader)


STYLES = {"plain": plain, "accelerate": accelerate, "trainer": trainer, "torchrun": trainer, "lightning": lightning}

if __name__ == "__main__":
    STYLES[sys.argv[1]](Blocks(int(sys.argv[3])))
