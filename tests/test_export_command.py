"""`memtop export` on the command line: the folder on stdout, everything else on stderr in one line
each."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.conftest import Runs
from tests.recovery.injected import TINY
from tests.train.recipes import pairs, write_llama, write_rows


def test_a_run_is_exported_once_into_a_folder(runs: Runs) -> None:
    runs.memtop("train", "--headless", "--name", "a", "--max-updates", "2", "--set", "device=cpu", *TINY)
    out = runs.root / "model"
    done = runs.memtop("export", "a", "model")
    assert done.stdout == f"{out}\n"
    assert done.stderr.startswith("memtop: exported update 2 (train_latest_state): the model, in fp32, ")
    assert done.stderr.count("\n") == 1
    assert {"config.json", "model.safetensors", "tokenizer_bytes.json"} <= {path.name for path in out.iterdir()}
    again = runs.memtop("export", "a", "model", status=2)
    assert (again.stdout, again.stderr) == (
        "",
        f"memtop: DIR {out}: exists already and is not empty; give another folder\n",
    )
    both = runs.memtop("export", "a", "other", "--adapter", "--merge", status=2)
    assert both.stderr == "memtop: --adapter and --merge: give one of them\n"


def test_an_adapter_is_exported_alone_or_merged(runs: Runs, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "pairs.jsonl", pairs())
    base = write_llama(tmp_path / "llama")
    given = {"data.train": data, "model.path": base, "device": "cpu", "lora.r": 4, "seq_len": 64}
    settings = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
    runs.memtop("train", "sft-lora", "--headless", "--name", "b", "--max-updates", "1", *settings)
    adapter = Path(runs.memtop("export", "b", "adapter", "--adapter").stdout.strip())
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    merged = Path(runs.memtop("export", "b", "merged").stdout.strip())
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in merged.iterdir()}


def test_a_run_of_an_external_command_cannot_be_exported(runs: Runs) -> None:
    runs.memtop("train", "--headless", "--name", "own", "--", sys.executable, "-c", "pass")
    assert runs.memtop("export", "own", "model", status=2).stderr == (
        "memtop: RUN own: is your own program: memtop does not know how it saves its model\n"
    )
    runs.memtop("train", "--headless", "--name", "broken", "--set", "trackers=nobody", status=2)
    assert "train_latest_state: no state was saved yet; `memtop checkpoint` saves one" in (
        runs.memtop("export", "broken", "model", status=2).stderr
    )
    assert not (runs.root / "model").exists()
