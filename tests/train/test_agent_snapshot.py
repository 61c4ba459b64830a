"""What the agent keeps of a GPU's memory when an allocation fails. torch.cuda is scripted: it says
that the CPU tensors of the program lie in the allocator's blocks."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

from memtop.supervisor.diagnosis.snapshot import Snapshot, read_snapshot
from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from tests.forking import run as run_forked
from tests.train.test_agent import reports
from tests.train.test_processes import environment

CUDA = """
import torch
from torch import nn
MIB = 1 << 20
MESSAGE = 'CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 19 GiB of which 1 MiB is free.'
blocks, taken = [], []
def place(tensor):
    # Every tensor has a block of 1 MiB at its address.
    blocks.append({"address": tensor.untyped_storage().data_ptr(), "size": MIB, "requested_size": MIB,
                   "state": "active_allocated", "frames": []})
import memtop_agent.snapshot as agent
agent.address_of = lambda tensor: tensor.untyped_storage().data_ptr() or None
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
    def forward(self, x):
        return x + self.down(self.up(x).relu())
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 32, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.zeros(4))
    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
model = nn.ModuleDict({"module": Model()})
optimizer = torch.optim.AdamW(model.parameters())
model["module"](torch.arange(4)).sum().backward()
optimizer.step()
for p in model.parameters():
    place(p), place(p.grad)
    for name in ("exp_avg", "exp_avg_sq"):
        place(optimizer.state[p][name])
place(model["module"].positions)
kept = torch.zeros(5)
place(kept)
def memory_snapshot(**named):
    taken.append(named)
    return [{"device": 0, "address": 0, "total_size": MIB * len(blocks), "stream": 0, "blocks": blocks}]
scripted = {
    "is_initialized": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "mem_get_info": lambda device: (MIB, 20 << 30),
    "memory_stats_as_nested_dict": lambda device: {},
    "memory_snapshot": memory_snapshot,
}
for name, function in scripted.items():
    setattr(torch.cuda, name, function)
"""
FAIL = "raise torch.OutOfMemoryError(MESSAGE)\n"


def ends(folder: Path, code: str) -> tuple[str, str]:
    """What a program with the agent prints, and what it says to stderr."""
    done = run_forked([sys.executable, "-c", code], env=environment(folder), capture_output=True, text=True, timeout=240)
    return done.stdout, done.stderr


def read(folder: Path) -> tuple[Snapshot, Diagnosis]:
    return read_snapshot([(folder / "rank-0-memory.pickle").read_bytes()])


def test_the_layers_are_named_without_history(tmp_path: Path) -> None:
    _, said = ends(tmp_path, CUDA + FAIL)
    assert said.splitlines()[-1].startswith("torch.OutOfMemoryError: CUDA out of memory."), said
    snapshot, diagnosis = read(tmp_path)
    memory = snapshot.devices[0]
    # 3 layers of 2 weights and 2 biases; the embedding, tied to the head; a buffer; another.
    assert memory.allocated_bytes == (3 * 4 * 4 + 4 + 2) << 20
    named = {(one.module, one.what): one.held_bytes >> 20 for one in memory.holders}
    assert named[("layers.*.up", "optimizer state")] == named[("layers.*.down", "optimizer state")] == 3 * 2 * 2
    assert list(named.values())[2:] == [3 * 2] * 3, "weights and gradients of the layers"
    shown = sum(one.held_bytes for one in memory.holders)
    assert shown + memory.other_holders_bytes + memory.unknown_bytes == memory.allocated_bytes
    assert memory.unknown_bytes == 0, "the rest is what no module and no optimizer holds"
    assert snapshot.unknown_reason is not None
    assert "_record_memory_history" in snapshot.unknown_reason
    layer = next(one for one in memory.holders if one.module == "layers.*.up")
    assert layer.source == "<string>", "the line of the layer's own forward, not of torch's Linear"
    assert layer.function == "Block.forward"
    assert (diagnosis.kind, diagnosis.requested_bytes, diagnosis.source) == (Kind.GPU_OOM, 2 << 20, "record")
    assert diagnosis.allocated_bytes == memory.allocated_bytes


SEARCH = "names = agent._Names(torch, float('inf')); names.search(); found = names.found()\n"


def test_all_holders_are_found(tmp_path: Path) -> None:
    code = CUDA + SEARCH + "print(found['complete'], sorted({(module, what) for module, what, *_ in found['holders']}))"
    modules = ("embed", "layers.*.down", "layers.*.up")
    wanted = [(module, what) for module in modules for what in ("gradients", "optimizer state", "weights")]
    assert ends(tmp_path, code) == (f"True {sorted([*wanted, ('Model', 'buffers')])}\n", ""), "the tied head has none"


def test_the_file_is_for_this_user_and_the_failure_was_reported_before(tmp_path: Path) -> None:
    ends(tmp_path, CUDA + FAIL)
    assert stat.S_IMODE((tmp_path / "rank-0-memory.pickle").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.glob("*memory*")] == ["rank-0-memory.pickle"], "nothing half-written stays"
    assert [report["type"] for report in reports(tmp_path)][:3] == ["hello", "step", "oom"]


def test_a_failure_of_host_memory_takes_no_snapshot(tmp_path: Path) -> None:
    ends(tmp_path, CUDA + "raise MemoryError\n")
    assert not (tmp_path / "rank-0-memory.pickle").exists()
    assert reports(tmp_path)[-1]["type"] == "oom"


def test_a_failure_that_the_program_survives_takes_no_snapshot(tmp_path: Path) -> None:
    code = "import memtop_agent as a\na.oom(torch.OutOfMemoryError(MESSAGE), survived=True, update=1)\nprint(taken)"
    assert ends(tmp_path, CUDA + code) == ("[]\n", "")
    assert not (tmp_path / "rank-0-memory.pickle").exists()


def test_without_cuda_there_is_nothing_to_keep(tmp_path: Path) -> None:
    _, said = ends(tmp_path, "import torch\nraise torch.OutOfMemoryError('CUDA out of memory')\n")
    assert "OutOfMemoryError" in said
    assert [report["type"] for report in reports(tmp_path)] == ["hello", "oom"]


def test_an_allocator_without_snapshots_is_named_and_the_program_ends_as_it_would(tmp_path: Path) -> None:
    broken = "def no(**named): raise RuntimeError('not supported by this allocator')\ntorch.cuda.memory_snapshot = no\n"
    _, said = ends(tmp_path, CUDA + broken + FAIL)
    assert said.splitlines()[-1].startswith("torch.OutOfMemoryError")
    warning = reports(tmp_path)[-1]
    assert warning["type"] == "warning"
    assert "not supported by this allocator" in warning["message"]


def test_names_of_any_kind_can_be_read(tmp_path: Path) -> None:
    """A file whose name is no text, and a long one."""
    odd = "Block.forward.__code__ = Block.forward.__code__.replace(co_filename='/m/\\udcff' + 'x' * 2000)\n"
    ends(tmp_path, CUDA + odd + FAIL)
    layer = next(one for one in read(tmp_path)[0].devices[0].holders if one.module == "layers.*.up")
    assert layer.source is not None
    assert layer.source.startswith("/m/?xx")
    assert len(layer.source) == 1000


def test_a_file_that_grows_too_large_is_not_kept(tmp_path: Path) -> None:
    ends(tmp_path, CUDA + "agent.LARGEST_BYTES = 1000\n" + FAIL)
    assert list(tmp_path.glob("*memory*")) == []
    assert "more than 0 MiB" in reports(tmp_path)[-1]["message"]


def test_a_search_that_takes_too_long_leaves_the_rest_unknown(tmp_path: Path) -> None:
    ends(tmp_path, CUDA + "agent.SEARCH_SECONDS = -1\n" + FAIL)
    memory = read(tmp_path)[0].devices[0]
    assert memory.unknown_bytes == memory.allocated_bytes > 0
    assert memory.holders == ()


def test_an_older_torch_has_no_argument_for_the_history(tmp_path: Path) -> None:
    old = "torch.cuda.memory_snapshot = lambda: memory_snapshot()\n"
    ends(tmp_path, CUDA + old + FAIL)
    assert read(tmp_path)[0].devices[0].allocated_bytes > 0


def test_one_piece_of_memory_for_several_modules_is_of_what_they_share(tmp_path: Path) -> None:
    """As DeepSpeed and DDP do it with gradients."""
    flat = """
flat, start = torch.zeros(4096), 0
for p in model["module"].layers.parameters():
    p.grad = flat[start : start + p.numel()].view_as(p)
    start += p.numel()
place(flat)
"""
    code = CUDA + flat + SEARCH + "print(found['holders'][dict(found['tensors'])[flat.data_ptr()]][:2])"
    assert ends(tmp_path, code) == ("('layers.*', 'gradients')\n", "")
