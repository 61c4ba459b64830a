"""Where the output of rank 0 is, if torchrun redirects it into files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from memtop.supervisor.run.output.rank_log import rank_log
from tests.conftest import Runs

# What torchrun does with the output of its ranks, without torch.
TORCHRUN = """
import os, pathlib, sys, time
folder = pathlib.Path(os.environ["PET_LOG_DIR"], "none_x", "attempt_0", "0")
folder.mkdir(parents=True)
with (folder / "stdout.log").open("w") as log:
    for step in range(1, 10**6):
        print(f"step {step}/1000000 loss {1 / step}", file=log, flush=True)
        time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("torchrun --redirects 3 a.py", "/attempt/logs/*/attempt_*/0/stdout.log"),
        ("nice -n 5 /bin/torchrun -r=2 a.py", "/attempt/logs/*/attempt_*/0/stderr.log"),
        ("python -m torch.distributed.run -r 0:1,1:0 --log-dir=out a.py", "/work/out/*/attempt_*/0/stdout.log"),
        ("python -m torch.distributed.run --redirects 1 --log_dir /[l] a.py", "/[[]l]/*/attempt_*/0/stdout.log"),
        ("torchrun -r 1:3 a.py", None),
        ("torchrun -r 0 a.py", None),
        ("torchrun --tee 3 a.py", None),
        ("python a.py -r 3", None),
        ("torchrun a.py -r", None),
    ],
)
def test_the_file_of_rank_0(command: str, expected: str | None) -> None:
    assert rank_log(command.split(), "/work", Path("/attempt/logs")) == expected


def test_what_rank_0_writes_to_its_file_is_read(runs: Runs) -> None:
    folder = Path(runs.root, "torch.distributed.run")
    folder.mkdir()
    (folder / "__main__.py").write_text(TORCHRUN)
    runs.memtop("train", "--detach", "--name", "a", "--", sys.executable, "torch.distributed.run", "--redirects", "3")
    document = runs.wait("a", lambda document: document["updates"] and document["updates"] > 2)
    log = runs.path / "a/attempts/0001/torchelastic/none_x/attempt_0/0/stdout.log"
    assert document["total_updates"] == 1000000
    assert document["program"]["why"].startswith(f"updates, total, loss: read from {log}, by lines like")
    runs.memtop("stop", "a")
