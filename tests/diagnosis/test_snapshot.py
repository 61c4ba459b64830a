"""Snapshots of the GPU's memory: whatever version of torch has written them, each byte that is
allocated has one holder, and a damaged or hostile file is refused in one line."""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memtop.cli import run
from memtop.supervisor.diagnosis import pickled as pickled_files
from memtop.supervisor.diagnosis.pickled import Refused
from memtop.supervisor.diagnosis.snapshot import DeviceMemory, read_snapshot
from memtop.supervisor.diagnosis.stack_line import frame_of, line_of, short_path
from memtop.supervisor.diagnosis.values import Kind
from tests.conftest import Runs
from tests.diagnosis.snapshots import (
    ADAM,
    BACKWARD,
    FUSED,
    GIB,
    LOADED,
    LOOP,
    LOSS,
    MIB,
    MLP,
    RECOMPUTED,
    SITE,
    TORCH,
    VERSIONS,
    block,
    entry,
    pickled,
    segment,
    snapshot,
)
from tests.test_architecture import HEAVY, loaded_after

HELD = (
    (5 * GIB, LOSS),
    (3 * GIB, MLP),
    (2 * GIB, ADAM),
    (GIB, BACKWARD),
    (512 * MIB, RECOMPUTED),
    (256 * MIB, LOADED),
    (128 * MIB, FUSED),
    (64 * MIB, ()),
)
ALLOCATED = sum(size for size, _ in HELD)


def of_version(version: str = "2.13", *, traces: Any = None) -> dict[str, Any]:
    blocks = [block(size, stack, requested=size - 100) for size, stack in HELD]
    other = segment(block(2 * GIB, state="inactive"), block(MIB, state="active_pending_free"), block(3 * GIB, state="inactive"))
    failed = [entry("oom", GIB, LOSS, free=1), entry("alloc", 4, MLP), entry("oom", 6 * GIB, LOSS, free=GIB, version=version)]
    history = [[entry("alloc", 4, MLP, version=version), *failed, entry("alloc", 4, version=version)], []]
    return snapshot([segment(*blocks), other], history if traces is None else traces, version)


def total(memory: DeviceMemory) -> int:
    return sum(one.held_bytes for one in memory.holders) + memory.other_holders_bytes + memory.unknown_bytes


@pytest.mark.parametrize("version", VERSIONS)
def test_each_version_of_torch(version: str) -> None:
    found, diagnosis = read_snapshot([pickled(of_version(version), version)])
    (memory,) = found.devices
    assert total(memory) == memory.allocated_bytes == ALLOCATED
    assert memory.reserved_bytes == ALLOCATED + 5 * GIB + MIB
    assert (memory.inactive_bytes, memory.largest_free_block_bytes, memory.awaiting_free_bytes) == (5 * GIB, 3 * GIB, MIB)
    assert (memory.other_holders, memory.other_holders_bytes, memory.unknown_bytes) == (1, 256 * MIB, 64 * MIB)
    assert [(one.held_bytes, one.line, one.function, one.phase) for one in memory.holders] == [
        (5 * GIB, 36, "fixed_cross_entropy", "forward"),
        (3 * GIB + 128 * MIB, 176, "forward", "forward"),
        (2 * GIB, 180, "_init_group", "optimizer"),
        (GIB, None, "MmBackward0", "backward"),
        (512 * MIB, 176, "forward", "backward"),
    ]
    assert diagnosis.kind is Kind.GPU_OOM
    assert (diagnosis.requested_bytes, diagnosis.free_bytes, diagnosis.phase) == (6 * GIB, GIB, "forward"), "the newest failure"


@pytest.mark.parametrize("length", [1, 7, 301, 5000])
def test_the_file_may_come_in_pieces_of_any_length(length: int) -> None:
    data = pickled(of_version())
    pieces = (data[start : start + length] for start in range(0, len(data), length))
    assert read_snapshot(pieces) == read_snapshot([data])


def test_memory_in_pieces_that_would_suffice_together_is_fragmented() -> None:
    failed = [[entry("oom", 5 * GIB, free=MIB)]]
    assert read_snapshot([pickled(of_version(traces=failed))])[1].kind is Kind.GPU_OOM_FRAGMENTED


def test_a_snapshot_without_history_says_how_to_get_lines() -> None:
    found, diagnosis = read_snapshot([pickled(snapshot([segment(block(GIB), block(GIB, state="inactive"))]))])
    assert found.devices[0].unknown_bytes == found.devices[0].allocated_bytes == GIB
    assert found.devices[0].holders == ()
    assert found.unknown_reason is not None
    assert "torch.cuda.memory._record_memory_history" in found.unknown_reason
    assert (diagnosis.kind, diagnosis.reason) == (Kind.NOT_MEMORY, "no_evidence")


def test_where_everything_has_a_line_nothing_is_missing() -> None:
    found, _ = read_snapshot([pickled(snapshot([segment(block(GIB, MLP))]))])
    assert found.unknown_reason is None


def test_the_device_that_failed_comes_first() -> None:
    segments = [segment(block(9 * GIB, MLP)), segment(block(GIB, LOSS), device=1), segment(block(GIB, LOSS), device=1)]
    found, diagnosis = read_snapshot([pickled(snapshot(segments, [[], [entry("oom", MIB, free=1)]]))])
    assert [(one.device_index, one.allocated_bytes) for one in found.devices] == [(1, 2 * GIB), (0, 9 * GIB)]
    assert (diagnosis.device_index, diagnosis.allocated_bytes) == (1, 2 * GIB)


def test_a_list_of_segments_alone_is_a_snapshot_too() -> None:
    """As torch.cuda.memory_snapshot() returns it."""
    assert read_snapshot([pickle.dumps([segment(block(GIB, MLP))])])[0].devices[0].allocated_bytes == GIB


KEPT = {
    "record": {
        "rank": 0,
        "time": 1.0,
        "message": "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 19 GiB with 1 GiB free",
        "error": "torch.OutOfMemoryError",
        "phase": "forward",
        "total_bytes": 20 * GIB,
        "survived": False,
    },
    "holders": [["layers.*.mlp", "weights", "/m/model.py", 7, "MLP.forward"]],
    "tensors": [[0x7F0000000000, 0]],
    "complete": True,
}


def kept(**about: Any) -> bytes:
    segments = [segment(block(3 * GIB, MLP), block(GIB))]
    return pickled({"memtop": json.dumps({**KEPT, **about}), **snapshot(segments)})


def test_the_names_that_the_agent_found_come_before_lines() -> None:
    found, diagnosis = read_snapshot([kept()])
    layer, rest = found.devices[0].holders
    assert (layer.module, layer.what, layer.source, layer.held_bytes) == ("layers.*.mlp", "weights", "/m/model.py", 3 * GIB)
    assert (rest.module, rest.what, rest.held_bytes) == (None, "activations and temporary memory", GIB)
    assert (diagnosis.kind, diagnosis.requested_bytes, diagnosis.phase) == (Kind.GPU_OOM, 2 * GIB, "forward")
    assert diagnosis.source == "record"


@pytest.mark.parametrize("survived", [None, False])
def test_the_failure_of_a_thread_is_one_too(survived: bool | None) -> None:
    assert read_snapshot([kept(record={**KEPT["record"], "survived": survived})])[1].kind is Kind.GPU_OOM


def test_where_the_agent_had_no_time_the_rest_is_unknown() -> None:
    assert read_snapshot([kept(complete=False)])[0].devices[0].unknown_bytes == GIB


@pytest.mark.parametrize("about", [{"tensors": "no"}, {"holders": [[1, 2]]}, {"record": {"rank": "x"}}])
def test_names_that_cannot_be_read_are_refused(about: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="what memtop has written into it cannot be read"):
        read_snapshot([kept(**about)])


@pytest.mark.parametrize(
    ("stack", "place", "phase"),
    [
        (MLP, ("transformers/models/llama/modeling_llama.py", 176), "forward"),
        ([*MLP[:3], LOOP], ("/home/u/train.py", 40), "forward"),
        (ADAM, ("torch/optim/adamw.py", 180), "optimizer"),
        (LOADED, ("/home/u/train.py", 12), "load"),
        (RECOMPUTED, ("transformers/models/llama/modeling_llama.py", 176), "backward"),
        (FUSED, ("transformers/models/llama/modeling_llama.py", 176), "forward"),
        ([(SITE + "peft/tuners/lora/layer.py", 5, "forward"), TORCH, LOOP], ("peft/tuners/lora/layer.py", 5), "forward"),
        (
            [(SITE + "bitsandbytes/functional.py", 9, "f"), TORCH, *MLP[3:]],
            ("transformers/models/llama/modeling_llama.py", 176),
            "forward",
        ),
        ([(SITE + "deepspeed/runtime/engine.py", 9, "f")], ("deepspeed/runtime/engine.py", 9), "unknown"),
        ([(SITE + "torch/distributed/c10d.py", 3, "g"), TORCH], ("torch/distributed/c10d.py", 3), "forward"),
        ([("/usr/lib/python3.11/threading.py", 3, "run"), LOOP], ("/home/u/train.py", 40), "unknown"),
        ([("/home/u/torch/train.py", 3, "go"), TORCH], ("/home/u/torch/train.py", 3), "forward"),
        (
            [("C:\\v\\Lib\\site-packages\\torch\\nn\\functional.py", 1, "f"), ("C:\\me\\net.py", 2, "g")],
            ("C:/me/net.py", 2),
            "unknown",
        ),
    ],
)
def test_the_line_that_says_which_layer(stack: list[tuple[str, int, str]], place: tuple[str, int], phase: str) -> None:
    line = line_of([frame_of(*frame) for frame in stack])
    assert line is not None
    assert ((short_path(line.file or ""), line.line), line.phase) == (place, phase)


def test_a_stack_without_a_word_has_no_line() -> None:
    assert line_of([frame_of("??", 0, "at::native::empty_cuda")]) is None


# --- hostile files --------------------------------------------------------------------------------


class Calls:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/memtop-was-here",)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("value", [Calls(), {"segments": [Calls()]}, {"segments": [], "x": SimpleNamespace(a=1)}])
def test_a_pickle_that_calls_something_is_refused(value: Any, protocol: int) -> None:
    with pytest.raises(Refused, match="would run code when it is loaded"):
        read_snapshot([pickle.dumps(value, protocol)])


@pytest.mark.parametrize("opcode", [*b"ciobRPQ", 0x81, 0x82, 0x83, 0x84, 0x92, 0x93])
def test_no_opcode_that_could_call_is_read(opcode: int) -> None:
    with pytest.raises(Refused, match="would run code"):
        read_snapshot([b"\x80\x04}\x94(" + bytes((opcode,)) + b"os\nsystem\n."])


HOSTILE = {
    "marks": b"(" * 1000,
    "nested lists": b"]" * 200_000,
    "nested dictionaries": b"}" * 200_000,
    "gaps in the memo": b"]r\xff\xff\xff\xff",
    "a memo that is not there": b"j\xff\xff\xff\xff",
    "a text without end": b"X\xff\xff\xff\x7fabc",
    "a text of 2^62 bytes": b"\x8d" + (1 << 62).to_bytes(8, "little"),
    "a number of 200 bytes": b"\x8a\xc8" + b"\x01" * 200,
    "a number of 2^31 bytes": b"\x8b\xff\xff\xff\x7f",
    "an empty stack": b"e",
    "a list as a key": b"}(]K\x01u.",
    "items of a number": b"K\x01(K\x02e.",
    "pairs of a number": b"K\x01(K\x02K\x03u.",
    "an odd number of values": b"}(K\x01u.",
    "half of a character": b"\x8c\x02\xc3\x28.",
    "a set": b"\x8f(K\x01\x90.",
    "text opcodes": b"I1\n.",
    "a plain value": b"K\x01.",
    "another dictionary": pickle.dumps({"weights": [1, 2, 3]})[2:],
    "another protocol": b"\x80\x09.",
    "nothing": b"",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_or_damaged_file_is_refused(name: str) -> None:
    with pytest.raises(Refused) as refused:
        read_snapshot([b"\x80\x04" + HOSTILE[name]])
    assert len(str(refused.value)) < 200
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("change", [{"size": -1}, {"size": 1 << 70}, {"size": "1"}, {"size": True}, {"size": None}])
def test_sizes_that_are_none_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="a size in it is no number of bytes"):
        read_snapshot([pickled(snapshot([_changed(change)]))])


def _changed(change: dict[str, Any]) -> dict[str, Any]:
    found = segment(block(4))
    found["blocks"][0].update(change)
    return found


def test_a_file_that_ends_in_the_middle_is_refused() -> None:
    data = pickled(of_version())
    for end in range(2, len(data) - 1, 37):
        with pytest.raises(Refused):
            read_snapshot([data[:end]])


def test_no_mutation_raises_anything_else() -> None:
    rng = random.Random(11)
    sources = [pickled(of_version(version), version) for version in VERSIONS]
    for _ in range(600):
        data = bytearray(rng.choice(sources))
        for _ in range(rng.randrange(1, 8)):
            place = rng.randrange(2, len(data))
            if rng.random() < 0.5:
                data[place] = rng.randrange(256)
            else:
                del data[place : place + rng.randrange(1, 9)]
        try:
            found, _ = read_snapshot([bytes(data)])
        except Refused:
            continue
        assert all(total(memory) == memory.allocated_bytes for memory in found.devices)


FOREVER = {
    "values": b"N" * 1024,
    "values of the memo": b"]\x94e(" * 256,
    "texts": b"".join(b"\x8c\x0a%010d\x94" % number for number in range(2000)),
}


@pytest.mark.parametrize("name", FOREVER)
def test_a_file_without_end_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With lower limits, for speed."""
    for limit in ("_MOST_STACK", "_MOST_MEMO"):
        monkeypatch.setattr(pickled_files, limit, 50_000)
    with pytest.raises(Refused, match="has more values than any snapshot"):
        read_snapshot(itertools.chain([b"\x80\x04]\x94("], itertools.repeat(FOREVER[name])))


def test_where_texts_are_too_long_to_keep_the_sums_stay_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read_snapshot([pickled(of_version())])[0].devices[0]
    monkeypatch.setattr(pickled_files, "_LONGEST_KEPT", 60)
    found = read_snapshot([pickled(of_version())])[0].devices[0]
    assert total(found) == found.allocated_bytes == whole.allocated_bytes
    assert found.holders != whole.holders


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "any.name"
    path.write_bytes(pickled(of_version()))
    return path


def test_text(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diagnose", str(file)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("gpu_oom\nGPU 0 ran out of memory in the forward pass: it requested 6.00 GiB, 1.00 GiB was free;")
    assert "GPU 0: 11.94 GiB in tensors, 16.94 GiB reserved; 5.00 GiB free, at most 3.00 GiB in a block.\n" in out
    rows = out.partition("in a block.\n")[2].splitlines()[1:8]
    assert rows[0] == "    5.00 GiB  41.9 %  transformers/loss/loss_utils.py:36 fixed_cross_entropy (in the forward pass)"
    assert rows[3] == "    1.00 GiB   8.4 %  MmBackward0 (in the backward pass)"
    assert [row.split("%")[1].strip() for row in rows[5:]] == ["others (1)", "not known"]
    assert "What can be done, the cheapest first:" in out


def test_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diagnose", str(file), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["kind"], document["requested_bytes"], document["allocated_bytes"]) == ("gpu_oom", 6 * GIB, ALLOCATED)
    (memory,) = document["snapshot"]["devices"]
    assert set(memory) == {
        *("device_index", "allocated_bytes", "reserved_bytes", "inactive_bytes", "awaiting_free_bytes"),
        *("largest_free_block_bytes", "holders", "other_holders", "other_holders_bytes", "unknown_bytes"),
    }
    assert len(memory["holders"]) == 5
    assert memory["holders"][0] == {
        "held_bytes": 5 * GIB,
        "blocks": 1,
        "module": None,
        "what": None,
        "line": 36,
        "phase": "forward",
        "source": SITE + "transformers/loss/loss_utils.py",
        "function": "fixed_cross_entropy",
    }
    assert document["remedies"]


def test_a_log_has_no_snapshot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log").write_text("step 1\n")
    assert run(["diagnose", str(tmp_path / "log"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["snapshot"] is None


def test_standard_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(pickled(of_version())), isatty=lambda: False))
    assert run(["diagnose", "-", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "gpu_oom"


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (pickle.dumps({"a": 1}), [], "is a pickle, but no snapshot of CUDA memory: it has no segments"),
        (
            pickle.dumps(Calls()),
            [],
            "is a pickle that would run code when it is loaded (STACK_GLOBAL); memtop does",
        ),
        (pickled(of_version())[:500], [], "ends in the middle: it was not written to its end"),
        (pickled(of_version()), ["--exit-code", "1"], "--exit-code: a snapshot was written before the program ended"),
    ],
)
def test_wrong_usage_is_one_line(tmp_path: Path, runs: Runs, data: bytes, options: list[str], message: str) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(data)
    done = runs.memtop("diagnose", str(path), *options, status=2)
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_it_loads_neither_torch_nor_textual(file: Path, tmp_path: Path) -> None:
    code = f"from memtop.cli import run; assert run(['diagnose', {str(file)!r}]) == 0"
    assert loaded_after(code, tmp_path).isdisjoint(HEAVY)
