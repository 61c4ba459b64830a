"""`memtop export` and `memtop sample` on the command line: the result on stdout, everything else on
stderr in one line each."""

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
    unsaid = runs.memtop("sample", "a", status=2)
    assert (unsaid.stdout, unsaid.stderr) == (
        "",
        "memtop: PROMPT: not given, and run a has no prompts in its settings: give one, or "
        "`memtop restart a --set sample.prompts=FILE --set sample.every=N`\n",
    )
    both = runs.memtop("export", "a", "other", "--adapter", "--merge", status=2)
    assert both.stderr == "memtop: --adapter and --merge: give one of them\n"


def test_a_saved_state_writes_what_the_training_wrote_after_its_update(runs: Runs) -> None:
    (runs.root / "prompts.txt").write_text("def f(\nclass A", encoding="utf-8")
    given = {"device": "cpu", "sample.prompts": "prompts.txt", "sample.every": 1, "sample.max_new_tokens": 12}
    settings = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
    runs.memtop("train", "--headless", "--name", "a", "--max-updates", "2", *settings, *TINY)
    shown = json.loads(runs.memtop("show", "a", "--samples", "--json").stdout)
    assert [(row["update"], row["attempt"], row["prompts"]) for row in shown["samples"]] == [
        (1, 1, ["def f(", "class A"]),
        (2, 1, ["def f(", "class A"]),
    ]
    text = shown["samples"][-1]["texts"][0]
    lines = runs.memtop("show", "a", "--samples").stdout.splitlines()
    assert [line for line in lines if line.startswith("update ")] == ["update 1", "update 2"]
    done = runs.memtop("sample", "a", "def f(", "--max-new-tokens", "12")
    assert done.stderr == "memtop: computes on the CPU: so does the run\nmemtop: update 2 (train_latest_state)\n"
    assert done.stdout.split() == text.split()
    every = runs.memtop("sample", "a", "--max-new-tokens", "12")
    shown_again = [line.removeprefix("  ") for line in lines[lines.index("update 2") + 1 :]]
    assert [line.lstrip() for line in every.stdout.splitlines()] == [line.lstrip() for line in shown_again]
    assert [line for line in every.stdout.splitlines() if not line.startswith("  ")] == ["def f(", "class A"]
    assert every.stderr == done.stderr
    (runs.root / "prompts.txt").unlink()
    gone = runs.memtop("sample", "a", status=2)
    assert gone.stderr.splitlines()[1].startswith(f"memtop: sample.prompts {runs.root / 'prompts.txt'}: cannot be read: ")
    assert (gone.stdout, gone.stderr.count("\n")) == ("", 2)
    refused = runs.memtop("train", "--name", "b", "--set", "sample.prompts=none.txt", "--set", "sample.every=1", status=2)
    assert refused.stderr.startswith("memtop: sample.prompts none.txt: no such file; looked for ")


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
    runs.memtop("train", "--headless", "--name", "broken", "--set", "model.config.pad_token_id=999999", status=2)
    for command in (("export", "broken", "model"), ("sample", "broken", "prompt")):
        assert "train_latest_state: no state was saved yet; `memtop checkpoint` saves one" in (
            runs.memtop(*command, status=2).stderr
        )
    assert not (runs.root / "model").exists()
