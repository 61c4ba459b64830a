"""Failures in real processes: two ranks, a limit of the address space, and programs that do not use
memtop.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from memtop.presets.schema import Lora
from tests.forking import run, runs_torch
from tests.train.failing import TOO_MUCH, distance
from tests.train.launching import printed_by, run_trainer, two_ranks
from tests.train.support import edited
from tests.train.survive_worker import FAILURES, FEWER_FAILURES
from tests.train.test_processes import environment, reports, trainer


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """What two ranks reported of all trainings of the worker."""
    folder = tmp_path_factory.mktemp("ranks")
    return folder, two_ranks("tests.train.survive_worker", folder)


def test_two_ranks_survive_together(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    first, second = (result["disturbed"] for result in ranks[1])
    failures = first["oom"] + second["oom"]
    assert len(failures) == FAILURES
    assert min(len(first["oom"]), len(second["oom"])) > FAILURES / 4, "both of them fail"
    assert all(survived for _, _, survived in failures)
    assert {phase for _, phase, _ in failures} == {"forward", "backward"}
    # Each rank knows the split of all.
    for name in ("weights", "losses", "digests", "splits", "settings"):
        assert first[name] == second[name], name
    changes = [(before, after) for (_, before), (_, after) in zip(first["splits"], first["splits"][1:], strict=False)]
    alone = [sum(old != new for old, new in zip(before, after, strict=True)) for before, after in changes]
    assert alone.count(1) > FAILURES, "a rank shrinks and grows alone"
    assert len({json.dumps(split) for _, split in first["splits"]}) >= 3


def test_two_ranks_end_like_a_run_with_the_same_splits(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    for result in ranks[1]:
        assert result["calm"]["oom"] == []
        for name in ("weights", "losses", "digests", "splits"):
            assert result["disturbed"][name] == result["calm"][name], name


def test_two_ranks_without_dropout_end_like_the_undisturbed_run_up_to_rounding(
    ranks: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, both = ranks
    assert sum(len(result["plain-disturbed"]["oom"]) for result in both) == FEWER_FAILURES
    assert both[0]["plain-disturbed"]["digests"] == both[0]["plain"]["digests"]
    disturbed, undisturbed = (torch.load(folder / f"{name}.pt") for name in ("plain-disturbed", "plain"))
    assert distance(disturbed, undisturbed) < 1e-5


def test_each_rank_grows_back_when_it_has_the_memory(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    for result in ranks[1]:
        assert result["full"]["settings"] == [
            [2, {"batch": 4, "accumulation": 2}, "allocation failure"],
            [4, {"batch": 8, "accumulation": 2, "rank_splits": [[4, 2], [8, 1]]}, "grown back"],
        ]


def test_pressure_on_one_rank_makes_its_micro_batch_smaller(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    for result in ranks[1]:
        changes = {"batch": 8, "accumulation": 2, "rank_splits": [[8, 1], [4, 2]]}
        assert result["pressed"]["settings"] == [[4, changes, "pressure"]]


def test_splits_of_their_own_change_neither_samples_nor_gradients(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, both = ranks
    found = {name: torch.load(folder / "uneven" / name / "gradients.pt") for name in both[0]["uneven"]}
    even, digests = found["2,2"], both[0]["uneven"]["2,2"]["digests"]
    assert len(even) == len(digests) == 6
    for name, gradients in found.items():
        assert [result["uneven"][name]["digests"] for result in both] == [digests, digests], name
        assert len(gradients) == len(even), name
        for one, other in zip(gradients, even, strict=True):
            assert float((one - other).norm() / other.norm()) < 1e-6, name


def test_each_rank_runs_its_own_number_of_micro_batches(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    passes = {name: [result["uneven"][name]["passes"] for result in ranks[1]] for name in ("3,1", "1x9,3x1", "padded")}
    assert passes["3,1"] == [[3] * 5 + [1]] * 2, "in the short update, too, each rank runs one"
    assert passes["1x9,3x1"] == passes["padded"] == [[9] * 5 + [2], [1] * 6]


def searched_in(ranks: tuple[Path, list[dict[str, Any]]], name: str) -> list[dict[str, Any]]:
    """What each rank found; they have computed the same."""
    first, second = (result["searched"][name] for result in ranks[1])
    for value in ("weights", "losses", "digests", "splits", "settings"):
        assert first[value] == second[value], value
    assert first["oom"] == second["oom"] == []
    return [first, second]


def test_the_fullest_rank_decides_which_even_batch_is_found(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    first, second = searched_in(ranks, "full")
    assert all(split == [[4, 4], [4, 4]] for _, split in first["splits"])
    (search,), (other,) = first["searches"], second["searches"]
    # Each rank tries what its own memory allows.
    assert [(one["batch"], one["own_share"] is None) for one in search["tried"]] == [
        (2, False),
        (4, False),
        (16, True),
        (8, True),
    ]
    assert [(one["batch"], one["own_share"] is None) for one in other["tried"]] == [(2, False), (4, False), (16, False)]
    for mine, its in zip(search["tried"], other["tried"], strict=False):
        assert its["share"] == mine["share"] == mine["own_share"] != its["own_share"]
    assert (search["batch"], search["accumulation"], search["rank_splits"]) == (4, 4, [])


def test_only_the_rank_that_turns_out_too_full_gets_a_smaller_batch(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    for result in searched_in(ranks, "corrected"):
        assert [split for _, split in result["splits"]] == [[[4, 4], [4, 4]], *[[[4, 4], [1, 16]]] * 3]
        assert [(update, reason) for update, _, reason in result["settings"]] == [(1, "batch search"), (2, "batch search")]


def test_alike_ranks_keep_an_even_split(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    for result in searched_in(ranks, "alike"):
        assert all(split == [[16, 1], [16, 1]] for _, split in result["splits"])
        assert result["settings"] == [[1, {"batch": 16, "accumulation": 1, "auto_batch": False}, "batch search"]]
        # With each of three sizes two passes for the peak, with gradients, and three for the time.
        assert result["passes"] == [3 * (2 + 3) + 1, 1, 1, 1]


def test_unlike_ranks_get_splits_of_their_own(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    for rank, result in enumerate(searched_in(ranks, "unlike")):
        assert all(split == [[12, 2], [4, 2]] for _, split in result["splits"])
        changes = {"batch": 12, "accumulation": 2, "rank_splits": [[12, 2], [4, 2]], "auto_batch": False}
        assert result["settings"] == [[1, changes, "batch search"]]
        (search,) = result["searches"]
        assert search["samples_per_second"] == pytest.approx([16 / 16.1, 4 / (3 * 4.1)][rank])
        assert (search["batch"], search["accumulation"], search["rank_splits"]) == (12, 2, [[12, 2], [4, 2]])
        assert search["message"] == (
            "batch auto: process 0: 16 fits (7 % of 0.000931 GiB), 0.994 samples/s; process 1: 4 fits (68 % of "
            "9.31e-05 GiB), 0.325 samples/s: 12x2,4x2, forecast to take 50 % of the time of 4 x 4"
        )


def test_unlike_ranks_compute_what_an_even_split_computes(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, both = ranks
    found, even = (torch.load(folder / f"searched/{name}/gradients.pt") for name in ("unlike", "even"))
    assert len(even) == 4
    for one, other in zip(found, even, strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-6
    for result in both:
        parts = (result["searched"][name]["digests"] for name in ("unlike", "again"))
        assert [digest for part in parts for digest in part] == both[0]["searched"]["even"]["digests"]


def test_the_next_start_on_unlike_ranks_tries_nothing(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    for result in searched_in(ranks, "again"):
        (search,) = result["searches"]
        assert (search["tried"], search["remembered"]) == ([], True)
        assert result["settings"][0][1]["rank_splits"] == [[12, 2], [4, 2]]
        assert result["passes"] == [2] * 2, "no pass outside the updates"


def test_all_ranks_halve_an_evaluation_and_apply_an_edit(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    first, second = (result["evaluated"] for result in ranks[1])
    assert (len(first["oom"]), [phase for _, phase, _ in second["oom"]]) == (0, ["evaluation"])
    changes = [
        [2, {"batch": 2, "accumulation": 4, "gradient_checkpointing": True}, "asked"],
        [4, {"eval_batch": 2}, "allocation failure"],
    ]
    for result in (first, second):
        assert sorted(result["settings"][0][1].items()) == sorted(changes[0][1].items())
        assert result["settings"][1] == changes[1]
    assert first["evaluations"] == second["evaluations"]
    assert len(first["evaluations"]) == 2
    assert first["weights"] == second["weights"]
    assert [(number, ok) for number, ok, _ in first["answers"]] == [(1, True), (2, False)]
    assert second["answers"] == [], "only the first rank got the command"


def test_no_rank_waits_for_one_without_memory_for_missing_gradients(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    first, second = (result["gaps"] for result in ranks[1])
    assert first["oom"] == []
    assert second["oom"] == [[2, "backward", True], [2, "backward", True]]
    assert [split for _, split in first["splits"]] == [[[4, 1], [4, 1]], *[[[4, 1], [1, 4]]] * 3]
    for name in ("weights", "losses", "digests", "splits", "settings"):
        assert first[name] == second[name], name


def test_all_ranks_end_when_no_smaller_batch_is_left(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    (kind, words, nothing), (error, message, records) = (result["ended"] for result in ranks[1])
    assert (kind, words, nothing) == (
        "TrainingError",
        "update 3: another rank is out of memory, and no smaller batch is left",
        [],
    )
    assert error == "RuntimeError"
    assert "can't allocate memory" in message
    assert [(record["update"], record["phase"], record["survived"]) for record in records] == [(3, "backward", False)]


def test_adapters_in_16_bits_train_on_two_ranks_what_they_train_on_one(tmp_path: Path) -> None:
    adapters = {"method": "lora", "lora": Lora(r=4, alpha=8), "precision": "bf16", "learning_rate": 2e-2}
    # The last update is short, so the second rank has no samples.
    alone = run_trainer(tmp_path / "1", edited(batch=4, accumulation=2, target_samples=84, **adapters))
    together = run_trainer(tmp_path / "2", edited(batch=4, accumulation=1, world_size=2, target_samples=84, **adapters))
    assert len(alone.losses) == 11
    assert alone.losses[-2] < alone.losses[0] - 0.1
    assert together.losses == pytest.approx(alone.losses, rel=1e-2)


def test_a_model_that_does_not_fit_while_loading_is_reported(tmp_path: Path) -> None:
    settings = edited()
    # 4 TiB for each matrix of the inner layer.
    wide = {**settings.model["config"], "hidden_size": 1 << 16, "head_dim": 8, "intermediate_size": 1 << 24}
    process = trainer(tmp_path, msgspec.structs.replace(settings, model={"config": wide}))
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "DefaultCPUAllocator: can't allocate memory" in err
    (record,) = [report for report in reports(tmp_path) if report["type"] == "oom"]
    assert (record["phase"], record["survived"], record["update"]) == ("load", False, None)
    assert reports(tmp_path)[-1]["outcome"] == "failed"


# --- a limit of the address space
# ---------------------------------------------------------------------------------------

LIMITED = """
import json, resource, sys
from pathlib import Path
import torch
from tests.train.failing import fresh, small, splits_of
torch.set_num_threads(1)
folder = Path(sys.argv[1])
config = {"model_type": "gpt2", "vocab_size": 260, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 512}
ends = {"bos_token_id": 0, "eos_token_id": 0}
settings = small(dropout=0.1, batch=64, accumulation=1, seq_len=16, target_samples=64 * 3, model={"config": {**config, **ends}})
training = fresh(folder, settings)

def hungry(module, args, output):
    # As much for each sample as a long sequence would take.
    output[0].register_hook(lambda gradient: gradient + 0 * torch.ones(len(gradient), 1 << 20).sum())

training.model.base_model.register_forward_hook(hungry)
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + (192 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
outcome = training.run()
records = [[r["update"], r["batch"], r["phase"], r["survived"], r["message"]] for r in training.channel.of("oom")]
print(json.dumps({"outcome": outcome, "records": records, "splits": splits_of(training.channel)}))
"""


def test_a_batch_that_does_not_fit_under_a_real_limit_is_survived(tmp_path: Path) -> None:
    result = printed_by("-c", LIMITED, str(tmp_path))
    assert result["outcome"] == "finished"
    # One sample takes 4 MB: 64 need 256 MB, 32 need half of that, and 192 MB are available.
    assert result["records"]
    assert result["records"][0][:4] == [1, 64, "backward", True]
    assert "can't allocate memory" in result["records"][0][4]
    assert {batch for batch, _ in result["splits"].values()} <= {32, 16, 8}
    assert [int(update) for update in result["splits"]] == [1, 2, 3]


# --- external commands
# --------------------------------------------------------------------------------------------------


def run_dying(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A program that imports torch is forked from a process that has it already."""
    start = run if runs_torch(code) else subprocess.run
    return start([sys.executable, "-c", code], env=environment(folder), capture_output=True, text=True, timeout=120)


def test_an_external_command_that_runs_out_of_memory_is_reported(tmp_path: Path) -> None:
    done = run_dying("import sys\nx = bytearray(1 << 60)", tmp_path)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("MemoryError"), "the program's own error message is unchanged"
    hello, record = reports(tmp_path)
    assert (hello["type"], record["type"]) == ("hello", "oom")
    assert (record["error"], record["survived"], record["phase"], record["update"]) == ("MemoryError", False, "unknown", None)
    assert record["rss_bytes"] > 1_000_000
    assert record["allocated_bytes"] is record["total_bytes"] is record["device_uuid"] is None, (
        "without CUDA it is unknown, not 0"
    )


@pytest.mark.parametrize(
    ("at", "phase"),
    [
        ("forward", "forward"),
        ("backward", "backward"),
        ("optimizer", "optimizer"),
    ],
)
def test_the_report_names_update_and_phase(tmp_path: Path, at: str, phase: str) -> None:
    code = f"""
import torch
at, update = {at!r}, 0
def fail(*_):
    if update == 2:
        torch.empty({TOO_MUCH})
class Layer(torch.nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        if at == "forward":
            fail()
        if at == "backward":
            x.register_hook(fail)
        return x
model = Layer(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
if at == "optimizer":
    optimizer.register_step_pre_hook(fail)
for update in range(5):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""
    done = run_dying(code, tmp_path)
    assert done.returncode == 1
    record = reports(tmp_path)[-1]
    assert (record["type"], record["update"], record["phase"]) == ("oom", 3, phase)
    assert (record["error"], record["survived"]) == ("RuntimeError", False)
    assert "DefaultCPUAllocator: can't allocate memory" in record["message"]


def test_existing_hooks_are_called_and_other_errors_are_not_reported(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nbefore = sys.excepthook\nsys.excepthook = lambda *a: (print('theirs', flush=True), before(*a))\n"
    )
    env = environment(tmp_path)
    env["PYTHONPATH"] += os.pathsep + str(tmp_path)
    for code, lines in (("bytearray(1 << 60)", 2), ("1 / 0", 0)):
        (tmp_path / "rank-0.jsonl").unlink(missing_ok=True)
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.stdout == "theirs\n"
        path = tmp_path / "rank-0.jsonl"
        assert len(path.read_text().splitlines() if path.exists() else []) == lines


def test_a_thread_that_runs_out_of_memory_is_reported_and_the_program_continues(tmp_path: Path) -> None:
    code = """
import sys, threading
thread = threading.Thread(target=lambda: bytearray(1 << 60))
thread.start(); thread.join()
print("torch" in sys.modules)
"""
    done = run_dying(code, tmp_path)
    assert (done.returncode, done.stdout) == (0, "False\n")
    assert [report["type"] for report in reports(tmp_path)] == ["hello", "oom"]


def test_a_failing_report_does_not_disturb_the_programs_end(tmp_path: Path) -> None:
    code = """
import memtop_agent
class Odd(MemoryError):
    def __str__(self): raise RuntimeError("no words")
    def __setattr__(self, name, value): raise RuntimeError("no marks")
memtop_agent.memory.at_failure = lambda *a, **k: 1 / 0
raise Odd()
"""
    done = run_dying(code, tmp_path)
    assert done.returncode == 1
    assert "Odd" in done.stderr
    assert "ZeroDivisionError" not in done.stderr


def test_one_error_is_reported_once(tmp_path: Path) -> None:
    code = """
import memtop_agent as a
a.offer("stop")
try:
    bytearray(1 << 60)
except MemoryError as error:
    a.oom(error, update=7, phase="load", survived=False, batch=None, accumulation=None)
    raise
"""
    run_dying(code, tmp_path)
    (record,) = [report for report in reports(tmp_path) if report["type"] == "oom"]
    assert (record["update"], record["phase"]) == (7, "load")
