"""A program that takes its settings from config.py, and its arguments by name."""

import sys
from typing import TYPE_CHECKING

from config import TrainConfig
from model.trainer import ChatTrainer

if TYPE_CHECKING:
    import fire  # noqa: F401 - this copy of the program does without it

words = dict(word.removeprefix("--").split("=") for word in sys.argv[2:])
getattr(ChatTrainer(TrainConfig()), sys.argv[1])(**{name: value == "True" for name, value in words.items()})
