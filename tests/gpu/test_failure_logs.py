"""Programs that really run out of memory on the GPU, and what `memtop diagnose` says about their
logs."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import Runs

_LARGE = "shape = [1 << 20, 1 << 26]"
PROGRAMS = {
    "one allocation": f"import torch\n{_LARGE}\ntorch.empty(shape, device=DEVICE)",
    "backward": (
        "import torch\nweight = torch.ones(64, device=DEVICE, requires_grad=True)\n"
        f"{_LARGE}\nout = weight.sum()\nout.register_hook(lambda gradient: torch.empty(shape, device=DEVICE))\nout.backward()"
    ),
    "many small allocations": (
        "import torch\nkept = []\n"
        "if DEVICE == 'cpu':\n    torch.empty(1 << 46)\n"
        "while True:\n    kept.append(torch.ones(64 << 20, device=DEVICE))"
    ),
    "a limit of its own": (
        "import torch\nif DEVICE == 'cuda':\n    torch.cuda.set_per_process_memory_fraction(0.05)\n"
        "torch.empty(torch.cuda.mem_get_info()[1] // 10 if DEVICE == 'cuda' else 1 << 46, device=DEVICE)"
    ),
    "transformers": (
        "import torch, transformers\n"
        "config = transformers.LlamaConfig(vocab_size=260, hidden_size=64, intermediate_size=128, num_hidden_layers=1,"
        " num_attention_heads=2)\n"
        "model = transformers.LlamaForCausalLM(config).to(DEVICE)\n"
        "model.lm_head.register_forward_hook(lambda *_: torch.empty(1 << 46, device=DEVICE))\n"
        "model(torch.zeros(1, 8, dtype=torch.long, device=DEVICE))"
    ),
}


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_a_real_failure_is_recognised(runs: Runs, device: str, name: str, record_property: Any) -> None:
    program = f"DEVICE = {device!r}\n{PROGRAMS[name]}\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    log = runs.root / "log"
    log.write_text(done.stdout + done.stderr)
    found = json.loads(runs.memtop("diagnose", str(log), "--exit-code", "1", "--json").stdout)
    record_property("log", done.stderr[-2000:])
    record_property("diagnosis", {key: value for key, value in found.items() if key != "remedies"})
    assert found["kind"].startswith("gpu_oom" if device == "cuda" else "host_oom_alloc")
    if device == "cuda":
        assert found["requested_bytes"] is not None
        assert found["total_bytes"] is not None
