"""The recommendations of the five guides: `guides.md` names only what exists. Also the values that
no other test checks."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from msgspec.structs import replace

from memtop.presets import Settings, apply_preset, edit_settings, load_presets, load_recipes, resolve, take_whole
from memtop.presets.comparison import describe_length, describe_split, effective_change, outlook
from memtop.presets.host_memory import HostPlan, host_plan
from memtop.presets.logits import CHUNK_BYTES
from memtop.presets.schema import ALL_TARGETS, Lora, Zero
from memtop.supervisor.monitor.values import Band
from memtop.supervisor.plan import Card, Need, PlannedPeak, estimated, largest_safe, peak_of
from memtop.train import BadInputError, TrainingError, host_memory, run
from memtop.train.channel import RECORD_EVERY, MemoryRecorder
from memtop.train.engine import PlainEngine
from memtop.train.objective import Objective
from tests.train.support import TINY, Recorder, Training

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "guides.md"
GIB = 1 << 30
PRESETS = load_presets()
RECIPES = load_recipes()
LORA = resolve(RECIPES["sft-lora"], preset=PRESETS["standard"], whole=False)
T5 = resolve(RECIPES["pretrain-t5"], preset=PRESETS["standard"])

# The rows of each section of guides.md.
ROWS = {
    "3.1": range(1, 23),
    "3.2": range(1, 26),
    "3.3": range(1, 21),
    "3.4": range(1, 15),
    "3.5": range(1, 23),
}
FOLDERS = ("tests/", "presets/", "train/", "supervisor/", "tui/", "memtop/", "bench/", "docs/")


def rows() -> dict[str, dict[int, list[str]]]:
    """Section to row number to the row's cells."""
    found: dict[str, dict[int, list[str]]] = {}
    section = ""
    for line in TABLE.read_text().splitlines():
        if line.startswith("## "):
            section = line.split()[1]
        elif re.match(r"\| \d+ \|", line):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            assert int(cells[0]) not in found.get(section, {}), f"{section} row {cells[0]} is there twice"
            found.setdefault(section, {})[int(cells[0])] = cells[1:]
    return found


def references(text: str) -> list[str]:
    return [word for word in re.findall(r"`([^`]+)`", text) if word.startswith(FOLDERS)]


@pytest.mark.parametrize("section", ROWS)
def test_every_row_is_in_the_table_and_says_where_it_is(section: str) -> None:
    table = rows()[section]
    assert sorted(table) == sorted(ROWS[section])
    for number, cells in table.items():
        assert len(cells) == 2, f"{section} row {number}"
        where = cells[1]
        says = references(where) or re.search(r"with issue (Programs|Report)\b|not in memtop: |`memtop ", where)
        assert says, f"{section} row {number} names neither a file, nor a command, nor an issue, nor a reason"


def test_the_table_names_only_what_exists() -> None:
    named = references(TABLE.read_text())
    assert len(named) > 100
    for reference in named:
        path, _, test = reference.partition("::")
        assert (ROOT / path).exists(), reference
        if test:
            assert re.search(rf"^(async )?def {re.escape(test)}\(", (ROOT / path).read_text(), re.MULTILINE), reference


# Host memory: guides S2 and S4.


def plan(gib: float | None, *, on_gpu: bool = True, **changes: Any) -> HostPlan:
    settings = replace(TINY, **{"workers": 8, **changes})
    return host_plan(settings, None if gib is None else int(gib * GIB), on_gpu=on_gpu)


@pytest.mark.parametrize(
    ("gib", "level", "workers", "pinned"),
    [
        *((0.0, "extreme", 0, False), (7.99, "extreme", 0, False), (8, "low", 2, False)),
        *(
            (11.99, "low", 2, False),
            (12, "standard", 8, True),
            (12.9, "standard", 8, True),
            (15.1, "standard", 8, True),
            (500, "standard", 8, True),
        ),
    ],
)
def test_available_memory_decides_level_workers_and_pinning(gib: float, level: str, workers: int, pinned: bool) -> None:
    found = plan(gib)
    assert (found.level, found.workers, found.pin_memory) == (level, workers, pinned)
    assert "at least 0" not in found.reason
    if gib in (7.99, 8):
        assert found.reason == {7.99: "7.9 GiB available, less than 8", 8: "8.0 GiB available, at least 8"}[gib]


def test_one_byte_below_a_border_is_below_it() -> None:
    settings = replace(TINY, workers=8)
    assert host_plan(settings, 12 * GIB - 1, on_gpu=True).level == "low"
    assert host_plan(settings, 8 * GIB - 1, on_gpu=True).level == "extreme"


def test_the_host_plan_never_exceeds_the_requested_values() -> None:
    assert plan(500, workers=1).workers == 1
    assert plan(500, workers=0).workers == 0
    assert plan(500, host_level="extreme").level == "extreme"
    assert plan(9, host_level="low").level == "low"
    assert not plan(500, pin_memory=False).pin_memory


def test_page_locked_buffers_need_a_gpu_and_can_be_insisted_on() -> None:
    assert not plan(500, on_gpu=False).pin_memory
    assert not plan(500, on_gpu=False, pin_memory=True).pin_memory
    assert plan(4, pin_memory=True).pin_memory


def test_all_ranks_of_a_machine_share_its_workers() -> None:
    # Guide S2's min(8, 2 x GPUs) counts per rank: 6 on three cards are 18 processes.
    for world in (1, 2, 3, 4, 8, 16):
        assert plan(12, world_size=world).workers == 8 // world
        assert plan(8, world_size=world).workers * world <= 2


def test_memory_that_cannot_be_read_leaves_the_settings_alone() -> None:
    found = plan(None, workers=5, host_level="low")
    assert (found.level, found.workers, found.pin_memory) == ("low", 5, True)


def test_the_first_rank_decides_and_nothing_that_is_trained_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = [3 * GIB]
    monkeypatch.setattr(host_memory, "available_bytes", readings.pop)
    found = host_memory.agree_on_host_plan(replace(TINY, workers=4), Accelerator(cpu=True))
    assert (found.level, found.workers) == ("extreme", 0)
    assert readings == [], "read once"
    # What a plan can say at all: neither batch, nor accumulation, nor length.
    assert set(HostPlan.__struct_fields__) == {"level", "workers", "pin_memory", "reason"}


def test_the_memory_record_is_a_report_and_a_line() -> None:
    channel, lines = Recorder(), list[str]()
    MemoryRecorder(channel, Accelerator(cpu=True), lines.append)("after model load")
    (report,) = channel.of("memory")
    assert report["stage"] == "after model load"
    assert 0 < report["used_bytes"] < report["total_bytes"]
    assert "allocated_bytes" not in report, "without a GPU nothing is said of one"
    assert re.fullmatch(r"\[memory - after model load\] host \d+\.\d\d / \d+\.\d\d GiB \(\d+\.\d%\)", lines[0])
    assert RECORD_EVERY == 200


# Precision: guide S0 asks for fp16 everywhere, S3 for bf16.


@pytest.mark.parametrize(
    ("asked", "on_gpu", "has_bf16", "taken"),
    [
        *(("auto", True, True, "bf16"), ("auto", True, False, "fp16"), ("auto", False, True, "fp32")),
        *(("fp16", True, True, "fp16"), ("bf16", False, False, "bf16"), ("fp32", True, True, "fp32")),
    ],
)
def test_precision_by_what_the_hardware_has(
    asked: Any, on_gpu: bool, has_bf16: bool, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: has_bf16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr(
        run, "Accelerator", lambda **arguments: SimpleNamespace(num_processes=1, device=torch.device("cpu"), **arguments)
    )
    products: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", products.append)
    accelerator = run.open_accelerator(replace(TINY, precision=asked, device="auto"), None)
    assert accelerator.mixed_precision == ("no" if taken == "fp32" else taken)
    # TF32, for what is computed in fp32 on a GPU.
    assert products == (["high"] if on_gpu and taken == "fp32" else [])


def test_fp16_without_a_gpu_is_refused() -> None:
    with pytest.raises(BadInputError, match="precision fp16: requires a GPU; give --set precision=bf16 or fp32"):
        run.open_accelerator(replace(TINY, precision="fp16"), None)


# Presets and sizes.


def test_three_times_six_is_flagged() -> None:
    whole = take_whole(LORA, PRESETS["stage2_offload"])
    assert (whole.batch, whole.accumulation, whole.effective_batch) == (3, 6, 18)
    assert effective_change(16, 18) == "16 -> 18 (+12.5 %)"
    words = describe_split(LORA, whole)
    assert words.startswith("effective batch 16 -> 18 (+12.5 %), tokens per update ")
    assert ": changes training; to keep " in words
    look = outlook(LORA, PRESETS["stage2_offload"])
    assert "effective batch 16 -> 18 (+12.5 %)" in look.whole_changes
    assert (look.kept.batch, look.kept.accumulation) == (2, 8)


@pytest.mark.parametrize(
    ("name", "effective", "change"),
    [("t5-balanced", 144, "(-25.0 %)"), ("t5-conservative", 120, "(-37.5 %)"), ("t5-aggressive", 216, "(+12.5 %)")],
)
def test_the_20_gb_family_on_the_guides_three_cards(name: str, effective: int, change: str) -> None:
    before = replace(T5, batch=32, accumulation=2, world_size=3)
    after = take_whole(before, PRESETS[name])
    assert (before.effective_batch, after.effective_batch) == (192, effective)
    assert change in describe_split(before, after)
    # A switch in the run: 24 and 20 do not divide 64, the largest exact split below them does.
    kept = apply_preset(before, PRESETS[name])
    assert (kept.batch, kept.accumulation, kept.effective_batch) == (16, 4, 192)


@pytest.mark.parametrize("name", ["qlora-16g-safe", "qlora-16g-min"])
def test_qlora_holds_alpha_to_rank_and_the_effective_batch(name: str) -> None:
    s = resolve(RECIPES["sft-qlora"], preset=PRESETS[name])
    assert s.lora is not None
    assert s.lora.alpha == 2 * s.lora.r
    assert (s.method, s.precision, s.effective_batch, s.pin_memory, s.lora.targets) == ("qlora", "auto", 16, False, ALL_TARGETS)


SMALL_T5 = {"d_model": 384, "d_ff": 1536, "num_layers": 4, "num_heads": 6}


def millions(model: torch.nn.Module) -> float:
    return round(sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad) / 1e6, 1)


@pytest.mark.parametrize(("change", "size"), [({}, 196.6), ({"vocab_size": 29298}, 187.7), (SMALL_T5, 46.4)])
def test_the_t5_of_the_guides(change: dict[str, int], size: float) -> None:
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    settings = edit_settings(T5, assignments={f"model.config.{key}": str(value) for key, value in change.items()})
    config = dict(settings.model["config"])
    with torch.device("meta"):
        model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    assert millions(model) == size


@pytest.fixture(scope="module")
def qwen_7b() -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "vocab_size": 151936}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 32, "tie_word_embeddings": False}
    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **shape, **heads))
    return model


@pytest.mark.parametrize(("r", "size"), [(64, 159.9), (32, 80.0), (16, 40.0)])
def test_adapters_of_qwen_7b(qwen_7b: Any, r: int, size: float) -> None:
    from peft import LoraConfig, get_peft_model

    with torch.device("meta"):
        model = get_peft_model(qwen_7b, LoraConfig(r=r, lora_alpha=2 * r, target_modules=list(Lora(r=r, alpha=2 * r).targets)))
    assert millions(model) == size
    model.unload()


def test_the_logits_are_never_in_memory_as_a_whole() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    vocabulary = 151936
    assert round(2 * 2048 * vocabulary * 4 / GIB, 2) == 2.32, "what the guide's run could not get"
    values = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = AutoConfig.for_model("qwen2", vocab_size=vocabulary, num_key_value_heads=1, **values)
    chunk = Objective(AutoModelForCausalLM.from_config(config)).chunk
    assert chunk > 0
    assert chunk * vocabulary * 4 <= CHUNK_BYTES < (chunk + 1) * vocabulary * 4


@pytest.mark.parametrize(
    ("batch", "accumulation", "seq_len", "precision", "effective"), [(1, 8, 256, "fp32", 16), (2, 16, 384, "fp16", 64)]
)
def test_the_guides_configurations_for_short_host_memory_can_be_given(
    batch: int, accumulation: int, seq_len: int, precision: str, effective: int
) -> None:
    two = replace(T5, world_size=2)
    given: Settings = edit_settings(
        two,
        assignments={"batch": str(batch), "accumulation": str(accumulation), "seq_len": str(seq_len), "precision": precision},
    )
    assert (given.effective_batch, given.seq_len, given.precision) == (effective, seq_len, precision)


def test_half_the_processes_take_twice_the_accumulation() -> None:
    recipe = RECIPES["first-run"]
    one, two = (resolve(recipe, preset=PRESETS["standard"], world_size=world) for world in (1, 2))
    assert (one.batch, one.accumulation) == (two.batch, 2 * two.accumulation)
    assert one.effective_batch == two.effective_batch


# What is said before a start. The guides' gigabytes are of 10^9 bytes; their programs keep all
# logits.

GB = 10**9
THREE_CARDS = replace(T5, device="cuda", precision="bf16", world_size=3, accumulation=2, loss_chunk=0)
QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 151936,
}


def foreseen(settings: Settings, gib: float = 19.58) -> PlannedPeak:
    card = Card(total_bytes=int(gib * GIB), generation=86)
    found = estimated(settings, card)
    assert isinstance(found, Need), found
    return peak_of(found, card)


@pytest.mark.parametrize(
    ("batch", "accumulation", "seq_len", "least", "most", "effective"),
    [(24, 2, 256, 14, 16, 144), (20, 2, 256, 12, 14, 120), (24, 3, 256, 14, 16, 216), (20, 2, 192, 10, 12, 120)],
)
def test_the_plans_for_the_t5_take_what_its_guide_says(
    batch: int, accumulation: int, seq_len: int, least: float, most: float, effective: int
) -> None:
    asked = replace(THREE_CARDS, batch=batch, accumulation=accumulation, seq_len=seq_len)
    found = foreseen(asked)
    assert least * GB < found.bytes < most * GB
    assert asked.effective_batch == effective
    assert found.band is Band.SAFE
    # 32 ran out of memory on 19.58 GiB, and 40 would have; they are not called safe.
    tried = [foreseen(replace(asked, batch=size, seq_len=256)).band for size in (32, 40)]
    assert tried[0] in (Band.EDGE, Band.DANGER)
    assert tried[1] is Band.DANGER
    card = Card(total_bytes=int(19.58 * GIB), generation=86)
    tight = replace(THREE_CARDS, batch=32)
    best = largest_safe(tight, card, *[lambda one: need_on(one, card)] * 2)
    assert best is not None
    assert (best[0].batch, best[0].accumulation) == (16, 4), "24 and 20 do not divide 64"


def need_on(settings: Settings, card: Card) -> Need | None:
    found = estimated(settings, card)
    return found if isinstance(found, Need) else None


def test_what_accumulation_length_checkpointing_and_precision_cost() -> None:
    at_24 = replace(THREE_CARDS, batch=24, seq_len=252)
    size = foreseen(at_24).bytes
    assert foreseen(replace(at_24, accumulation=8)).bytes == size, "accumulation is not a factor"
    assert 0.5 < foreseen(replace(at_24, gradient_checkpointing=True)).bytes / size < 0.7, "-30 to -40 % or more"
    assert 0.7 < foreseen(replace(at_24, seq_len=192)).bytes / size < 0.85, "T 256 -> 192: -20 to -30 %"
    assert foreseen(replace(at_24, seq_len=512)).bytes > 1.6 * size
    # Mixed precision off: only where activations are tiny it saves the copies of the weights.
    assert foreseen(replace(at_24, precision="fp32")).bytes > 1.1 * size
    tiny = replace(at_24, batch=1, seq_len=64)
    saved = foreseen(tiny).bytes - foreseen(replace(tiny, precision="fp32")).bytes
    assert 0 < saved < 0.37 * GIB


@pytest.mark.parametrize(
    ("batch", "seq_len", "r", "least", "most"), [(1, 1024, 32, 10, 12), (1, 512, 16, 8, 10), (2, 2048, 64, 16, 99)]
)
def test_qlora_of_a_7b_model_takes_what_its_guide_says(batch: int, seq_len: int, r: int, least: int, most: int) -> None:
    """The last one is that with which its program ran out of 16 GB."""
    preset = resolve(RECIPES["sft-qlora"], preset=PRESETS["qlora-16g-safe"])
    assert preset.lora is not None
    asked = replace(
        preset,
        device="cuda",
        model={"config": QWEN_7B},
        batch=batch,
        accumulation=16 // batch,
        seq_len=seq_len,
        lora=replace(preset.lora, r=r, alpha=2 * r),
        loss_chunk=0,
    )
    found = foreseen(asked, 16)
    assert least * GB < found.bytes < most * GB
    assert foreseen(replace(asked, loss_chunk=-1), 16).bytes < found.bytes - 0.4 * GIB, "the loss in pieces"


def test_the_ladder_goes_from_the_most_memory_to_the_least() -> None:
    asked = replace(LORA, device="cuda", model={"config": QWEN_7B}, batch=4, accumulation=4)
    sizes = [foreseen(apply_preset(asked, PRESETS[name]), 80).bytes for name in ("deepspeed", "stage2_offload", "minimal")]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0] / 2


def test_another_batch_says_how_many_updates_the_run_then_has() -> None:
    """The guide adds a fifth; from 32 to 24 it is a third."""
    before = replace(THREE_CARDS, batch=32, target_samples=51_000 * 192)
    said = describe_length(before, replace(before, batch=24), 0, 0, 51_000)
    assert said is not None
    assert said.startswith("the run ends after update 68000, not 51000: it keeps its number of samples")


# What runs, and what never runs.


def test_another_stage_than_requested_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainEngine, "strategy", lambda self: Zero(stage=2))
    with pytest.raises(TrainingError, match="zero: requested plain, but DeepSpeed runs ZeRO-2"):
        Training(tmp_path / "state")


def sources() -> dict[str, str]:
    return {
        str(path.relative_to(ROOT)): path.read_text()
        for folder in ("memtop", "tui", "supervisor", "train", "presets")
        for path in (ROOT / folder).rglob("*.py")
        if not any(parent.is_symlink() for parent in path.parents)
    }


def commands(source: str) -> list[str]:
    """The strings of a program that can be a command: all but docstrings, and of a list only the
    first."""
    nodes = list(ast.walk(ast.parse(source)))
    passed_over = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            passed_over |= {id(element) for element in node.elts[1:]}
    constants = [node for node in nodes if isinstance(node, ast.Constant) and id(node) not in passed_over]
    return [node.value for node in constants if isinstance(node.value, str)]


def test_the_guides_root_and_force_commands_are_never_run() -> None:
    found = sources()
    assert len(found) > 50
    begins = re.compile(r"(^|[;&|`]\s*)(sudo|fallocate|mkswap|swapon|pip install --force)(\s|$)")
    assert [(path, text) for path, source in found.items() for text in commands(source) if begins.search(text)] == []


def test_such_a_command_is_found() -> None:
    source = 'run(["sudo", "mkswap"])\nshell("cd /; sudo reboot")\n"""sudo in a docstring"""'
    assert set(commands(source)) == {"sudo", "cd /; sudo reboot"}


def test_the_cache_is_emptied_only_inside_the_training_process() -> None:
    # A new process that empties its own cache frees no memory of another process, and opens a
    # context of some hundred MB.
    found = {path for path, text in sources().items() if re.search(r"\bempty_cache\(", text)}
    # The agent empties the cache on request, the built-in trainer after a failed allocation: both
    # in the process that has the cache.
    assert found
    assert {Path(path).parts[0] for path in found} == {"train"}
