"""Settings of several trainings, with the same names."""

from dataclasses import dataclass
from os.path import abspath, dirname

PROJECT_ROOT: str = abspath(dirname(__file__))


@dataclass
class OtherConfig:
    max_seq_len: int = 320
    gradient_accumulation_steps: int = 1


# batch_size_per_gpu = 1
@dataclass
class TrainConfig:
    batch_size_per_gpu: int = 16  # of one process
    gradient_accumulation_steps: int = 8
    max_seq_len: int = 256
    train_state_dir: str = PROJECT_ROOT + "/model_save/train_latest_state"
