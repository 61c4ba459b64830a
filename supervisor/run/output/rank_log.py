"""Where torchrun writes the output of rank 0, if the command redirects it into files."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path

_LAUNCHERS = frozenset({"torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate"})
_STREAMS = {1: "stdout.log", 2: "stderr.log", 3: "stdout.log"}


def rank_log(command: Sequence[str], cwd: str, default: Path) -> str | None:
    """The path of the file, with `*`; None if the output of rank 0 is printed.

    `default`: the folder of the logs where the command names none.
    """
    start = next((at for at, word in enumerate(command) if Path(word).name in _LAUNCHERS), None)
    if start is None:
        return None
    words = command[start + 1 :]
    name = _STREAMS.get(_of_rank_0(_option(words, "-r", "--redirects")))
    if name is None:
        return None
    given = _option(words, "--log-dir", "--log_dir")
    folder = default if given is None else Path(cwd, given)
    return os.path.join(glob.escape(str(folder)), "*", "attempt_*", "0", name)  # noqa: PTH118 - of a pattern


def _option(words: Sequence[str], *names: str) -> str | None:
    """The value of the first of these options, as `--name value` or `--name=value`."""
    for at, word in enumerate(words):
        name, sign, value = word.partition("=")
        if name in names:
            return value if sign else next(iter(words[at + 1 :]), None)
    return None


def _of_rank_0(redirects: str | None) -> int:
    """`3` for all ranks, or `0:3,1:0` for each; 1 is stdout, 2 stderr, 3 both."""
    for part in (redirects or "").split(","):
        rank, sign, streams = part.rpartition(":")
        if (not sign or rank == "0") and streams.isdecimal():
            return int(streams)
    return 0
