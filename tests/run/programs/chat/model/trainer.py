"""Begins its epoch again when it resumes, and asks on Ctrl-C whether to save."""

import json
import os
import pathlib
import signal
import sys
import time
import zipfile

FILES = ("model.bin", "optimizer.bin", "scheduler.bin", "random_states_0.pkl")


class ChatTrainer:
    def __init__(self, config):
        self.config = config
        signal.signal(signal.SIGINT, self.interrupted)

    def interrupted(self, *_):
        print("you pressed ctrl+c, do you want to save checkpoint? Yes (y) or No (n)", flush=True)
        if input().lower() in ("y", "yes"):
            self.save()
        sys.exit(0)

    def save(self):
        folder = pathlib.Path(self.config.train_state_dir)
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            with zipfile.ZipFile(folder / name, "w") as file:
                file.writestr("archive/data.pkl", b"")

    def train(self, is_keep_training=False):
        config = self.config
        used = [config.batch_size_per_gpu, config.gradient_accumulation_steps, is_keep_training, config.train_state_dir]
        with open("used.jsonl", "a") as file:
            file.write(json.dumps(used) + "\n")
        if is_keep_training and not all(os.path.exists(f"{config.train_state_dir}/{name}") for name in FILES):
            sys.exit("there is no state")
        first = os.environ["MEMTOP_ATTEMPT"] == "1"
        os.makedirs("logs", exist_ok=True)
        for step in range(1, 41):
            with open("logs/chat_trainer-20260101.log", "a") as log:
                log.write(
                    f"[2026-01-01 00:00:00.000] [INFO]: training loss: epoch:0, step:{step}, loss:{5 / step}, device:cpu\n"
                )
            if step == 4:
                self.save()
            time.sleep(600 if first and step == 10 else 0.01)
