"""The command line as a contract: its names, its exit statuses, its one-line errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from rich.cells import cell_len

from memtop.cli import COMMAND_GROUPS, COMMANDS, EXAMPLES, app, run, strays
from memtop.cli.requests import final_answer
from memtop.presets import load_presets, load_recipes
from memtop.supervisor.errors import NotRunningError
from memtop.supervisor.language.catalogue import Catalogue, read_catalogue
from memtop.supervisor.monitor.processes.proc import identify
from memtop.supervisor.monitor.values import GpuProcess, GpuSample, MachineSnapshot
from memtop.supervisor.run.record.folder import find_run
from memtop.supervisor.wire import Change, Restart
from tests.conftest import Runs
from tests.terminal import Terminal

CONTRACT = {
    "train": {
        *("recipe", "--preset", "--batch", "--accum", "--seq-len", "--set", "--gpus", "--name", "--runs-dir"),
        *("--max-updates", "--save-every", "--headless", "--detach", "--on-oom", "--fresh", "--python", "--program-profile"),
        *("--on-spike", "--after", "--queue", "--then", "--notify"),
    },
    "watch": {
        *("run_name", "--pid", "--once", "--json", "--csv", "--follow", "--count", "--prometheus", "--replay"),
        *("--gpus", "--interval", "--read-only", "--demo", "--runs-dir", "--serve", "--allow-actions"),
    },
    "adopt": {
        *("pid", "--yes", "--from-zero", "--wait", "--name", "--headless", "--detach", "--on-oom", "--runs-dir"),
    },
    "notify": {"run_name", "--test", "--runs-dir"},
    "free": {"run_name", "--runs-dir"},
    "checkpoint": {"run_name", "--runs-dir"},
    "stop": {"run_name", "--runs-dir"},
    "next": {"run_name", "--runs-dir"},
    "report": {"run_name", "--html", "--markdown", "--runs-dir"},
    "restart": {
        *("run_name", "--batch", "--accum", "--seq-len", "--preset", "--set", "--max-updates", "--headless", "--detach"),
        *("--live", "--gpus", "--this-environment", "--runs-dir"),
    },
    "rollback": {"run_name", "number", "--state", "--before-spike", "--accept-spike", "--headless", "--detach", "--runs-dir"},
    "runs": {"--json", "--runs-dir"},
    "show": {"run_name", "--json", "--metrics", "--samples", "--runs-dir"},
    "export": {"run_name", "out", "--adapter", "--merge", "--runs-dir"},
    "sample": {"run_name", "prompt", "--gpu", "--max-new-tokens", "--temperature", "--seed", "--runs-dir"},
    "advise": {"run_name", "--json", "--try", "--runs-dir"},
    "compare": {"run_names", "--json", "--runs-dir"},
    "strays": {"--json", "--kill", "--runs-dir"},
    "presets": {"name", "--json"},
    "plan": {
        *("recipe", "--model", "--method", "--preset", "--all", "--batch", "--accum", "--seq-len", "--set", "--gpus"),
        *("--vram", "--host-ram", "--json"),
    },
    "doctor": {"--json", "--runs-dir"},
    "config": {"--json"},
    "diagnose": {"log", "--exit-code", "--json"},
}


def test_the_command_line_is_the_documented_one() -> None:
    found = {
        name: {
            option.name if option.param_type_name == "argument" else option.opts[0]
            for option in command(name).params
            if option.name != "help" and not getattr(option, "hidden", False)
        }
        for name in app.list_commands(click.Context(app))
    }
    assert found == CONTRACT


def test_help_lists_the_commands_in_groups_and_then_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    headings = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["Options:", "Train:", "Watch:", "Recover:", "Inspect:", "Examples:"]
    for title, commands in COMMAND_GROUPS.items():
        start = lines.index(f"{title}:") + 1
        assert [line.split()[0] for line in lines[start : start + len(commands)]] == list(commands)
    assert set(COMMANDS) == set(CONTRACT), "each command is in one group"
    assert max(map(len, lines)) <= 80
    for example in EXAMPLES:
        _, name, *arguments = example.partition(" -- ")[0].split()
        command = app.get_command(click.Context(app), name)
        assert command is not None
        command.make_context(name, arguments)


@pytest.mark.parametrize("name", CONTRACT)
def test_the_list_of_commands_shows_the_first_sentence_of_their_help(name: str) -> None:
    found = command(name)
    assert found.name == name
    assert found.help is not None
    assert found.help.splitlines()[0] == COMMANDS[name]
    assert len(COMMANDS[name]) <= 80 - len("  checkpoint  "), "one line of a terminal"


def command(name: str) -> click.Command:
    found = app.get_command(click.Context(app), name)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "No such command 'trian'; did you mean train?"),
        (
            ["train", "first-run", "--", "python"],
            "RECIPE first-run: a recipe and a command of your own exclude each other; leave",
        ),
        (["train", "no-such-recipe"], "RECIPE 'no-such-recipe': unknown; there are first-run, pretrain-causal"),
        (
            ["train", "--preset", "lwo"],
            "preset 'lwo': unknown; there are deepspeed, stage2_offload, stage3, minimal, standard, low",
        ),
        (["train", "--preset", "lwo"], "; did you mean low?"),
        (["train", "--fresh", "--preset", "deepspeed"], "seq_len 2048: beyond the model's 1024 positions"),
        (
            ["train", "sft-lora"],
            "data.train: not given; add --set data.train=FILE (parquet, jsonl or text with columns prompt, resp",
        ),
        (
            ["train", "sft-lora", "--set", "data.train=~nobody-of-that-name/x"],
            "data.train ~nobody-of-that-name/x: no such file",
        ),
        (["train", "sft-lora", "--set", "data.train=no.jsonl"], "data.train no.jsonl: no such file; looked for /"),
        (["train", "sft-lora", "--set", "data.train=."], "data.train .: is a folder; give a file; looked for /"),
        (["train", "pretrain-causal", "--set", "model.path=./no"], "model.path ./no: no such folder; looked for /"),
        (["train", "sft-qlora", "--preset", "stage3"], "zero.stage 3: a 4-bit base cannot be sharded"),
        (["train", "--batch", "0"], "batch 0: must be at least 1"),
        (["train", "--batch", "9" * 30], "is too large a number"),
        (
            ["train", "--batch", "x"],
            "'--batch': 'x': give a whole number, B,B (one for each of several processes) or auto (the largest that fits)",
        ),
        (["train", "--accum", "two"], "'--accum': 'two' is not a whole number"),
        *(
            (
                ["plan", "--batch", text],
                f"'{text}': give a whole number, for all processes; the plan says which is the largest that is safe",
            )
            for text in ("auto", "3,1")
        ),
        (["train", "--seq-len", "4096"], "seq_len 4096: beyond the model's 1024 positions"),
        (["train", "--set", "speed=1"], "--set speed: unknown key"),
        (["train", "--set", "learnin_rate=1"], "learnin_rate: unknown key; did you mean learning_rate? There are batch, "),
        (["train", "--set", "learning_rate=abc"], "learning_rate 'abc': must be a number\n"),
        (["train", "--set", "precision=fp17"], "precision 'fp17': there are auto, fp32, bf16, fp16; did you mean fp16?"),
        (
            ["train", "--set", "model.config.num_hidden_layers=1000000000"],
            "model.config.num_hidden_layers 1000000000: must be at most 10000\n",
        ),
        (["train", "--set", "speed"], "--set 'speed': give KEY=VALUE"),
        (["train", "--gpus", "a"], "--gpus 'a': give different device indices"),
        (["train", "--gpus", "9999"], "--gpus 9999: "),
        (["train", "--gpus", "9999", "--", "true"], "--gpus 9999: "),
        (["train", "--on-oom", "never"], "--on-oom never: give auto"),
        (["train", "--headless", "--detach"], "give one of them"),
        (["train", "--name", "a/b"], "--name 'a/b'"),
        (["train", "--"], "nothing follows the two dashes"),
        (["watch", "--interval", "0"], "--interval 0.0: give 0.2 to 10 seconds"),
        (["watch", "--json"], "--json: goes with --once or --follow"),
        (["watch", "--follow"], "--follow: goes with --json or --csv"),
        (["watch", "--csv", "--json", "--follow"], "--json and --csv: give one of them"),
        (["watch", "--json", "--follow", "--count", "0"], "--count 0: give 1 or more"),
        (["watch", "--csv", "--count", "3"], "--count: goes with --follow"),
        (["watch", "--prometheus", "localhost:http"], "--prometheus 'localhost:http': give [HOST:]PORT"),
        (["watch", "--replay"], "--replay: name the run"),
        (["watch", "a", "--replay", "--once"], "--replay: cannot be combined with other forms of watching"),
        (
            ["watch", "a", "--replay", "--gpus", "0"],
            "--replay: cannot be combined with other forms of watching, --pid or --gpus",
        ),
        (["watch", "a", "--demo"], "--demo: cannot be combined with other forms of watching, RUN, --pid or --gpus"),
        (["watch", "nobody", "--pid", "1"], "--pid and RUN: give one of them"),
        (["watch", "--once", "--gpus", "0,x"], "--gpus '0,x': give different device indices like 0 or 0,1, or visible"),
        (["watch", "--once", "--gpus", "free:1"], "--gpus 'free:1': give different device indices"),
        (["watch", "nobody", "--prometheus", "9400"], "run 'nobody': not found"),
        (["watch"], "watch: the dashboard needs a terminal; `memtop watch --once` prints one snapshot"),
        (["watch", "--demo"], "needs a terminal; `memtop watch --demo --serve 8000` shows it in a browser"),
        (["watch", "nobody", "--once"], "run 'nobody': not found"),
        (["watch", "--once", "--pid", "4194304"], "--pid 4194304: no such process"),
        (["watch", "--once", "--pid", "-1"], "--pid -1: no such process"),
        (["watch", "--once", "--pid", "99999999999"], "--pid 99999999999: no such process"),
        (["show", "n" * 300], f"run '{'n' * 300}': not found"),
        (["show", "nobody"], "run 'nobody': not found"),
        (["show"], "Missing argument 'RUN'"),
        (["show", "nobody", "--metrics"], "--metrics: goes with --json"),
        (["presets", "nothing"], "preset 'nothing': unknown"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_status_2(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(runs.root)
    for name in ("MEMTOP_RUNS_DIR", "MEMTOP_SOCKET_DIR", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, runs.environment[name])
    assert run(arguments) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.startswith("memtop: ")
    assert len(said.err.splitlines()) == 1
    assert said.out == ""
    assert not list(runs.path.glob("*")), "a refused command leaves nothing behind"


def test_training_data_that_cannot_be_prepared_is_wrong_usage_of_one_line(runs: Runs) -> None:
    (runs.root / "data.txt").write_text("a line of text\n" * 1000)
    runs.environment.pop("XDG_CACHE_HOME", None)
    runs.environment["HOME"] = "/dev/null"
    settings = ("device=cpu", "data.train=data.txt", "model.config.hidden_size=8", "model.config.num_hidden_layers=1")
    done = runs.memtop("train", "--headless", *(word for one in settings for word in ("--set", one)), status=2)
    assert done.stderr.splitlines()[-1] == (
        "memtop: run first-run: failed (exit status 2: /dev/null/.cache/memtop: prepared data cannot be written there: "
        "Not a directory; set XDG_CACHE_HOME to a folder that you can write); memtop show first-run"
    )


def test_a_supervisor_that_exits_during_a_request_is_reported(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.memtop("train", "--headless", "--name", "a", "--", "true")

    def ask(*arguments: object, **options: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("memtop.supervisor.run.client.ask", ask)
    with pytest.raises(NotRunningError, match="the supervisor of run 'a' ended: memtop watch a starts a new one"):
        final_answer(find_run("a", runs.path), lambda number: Restart(id=number, change=Change()))
    assert run(["stop", "a", "--runs-dir", str(runs.path)]) == 1
    said = capsys.readouterr().err
    assert re.fullmatch(r"memtop: run 'a' finished at [0-9-]{10} [0-9:]{8}; nothing to stop\n", said), "it was over"


def test_killing_needs_a_process_that_is_on_a_gpu(runs: Runs) -> None:
    done = runs.memtop("strays", "--kill", "1", status=1)
    assert done.stderr == "memtop: --kill 1: no GPU lists this process; see `memtop strays`\n"


def test_a_reused_pid_is_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen(["sleep", "60"]) as bystander:
        found = identify(bystander.pid)
        assert found is not None
        before = GpuProcess(pid=found.pid, choosable=True, started_ticks=found.started_ticks - 1)
        machine = MachineSnapshot(time=0.0, gpus=(GpuSample(index=0, processes=(before,)),))
        monkeypatch.setattr(strays.Sampler, "sample", lambda sampler: machine)
        assert strays.list_or_end(tmp_path, as_json=False, kill=[found.pid]) == 1
        assert bystander.poll() is None
        bystander.kill()
    assert "is not the one that was chosen: its pid was reused" in capsys.readouterr().out


def test_closing_the_dashboard_of_a_failed_run(runs: Runs) -> None:
    train = ["train", "--name", "a", "--", "sh", "-c", "exit 3"]
    for arguments, status in ((train, 1), (["watch", "a"], 0)):
        command = [sys.executable, "-m", "memtop", *arguments]
        screen = Terminal(command, columns=100, rows=30, cwd=str(runs.root), environment=runs.environment)
        try:
            screen.wait_for("failed")
            screen.keys("q")
            assert screen.wait() == status
            assert "memtop: a: failed (" in " ".join(screen.text().split())
        finally:
            screen.close()


def test_json_is_one_document_on_stdout(runs: Runs) -> None:
    for arguments in (["runs"], ["presets"], ["presets", "low"], ["doctor"], ["strays"], ["watch", "--once"]):
        done = runs.memtop(*arguments, "--json", status=None)
        json.loads(done.stdout)
        assert done.stderr == ""


def test_presets_show_what_they_change(runs: Runs) -> None:
    rows = json.loads(runs.memtop("presets", "--json").stdout)
    levels = [row for row in rows if row["family"] == "level"]
    assert [(row["name"], row["batch"], row["accumulation"]) for row in levels] == [
        ("standard", 8, 4),
        ("low", 4, 8),
        ("extreme", 1, 32),
    ]
    assert {row["effective_batch"] for row in levels} == {32}
    assert {row["tokens_per_update"] for row in levels} == {32 * 128}
    assert {(row["recipe"], row["switch"]) for row in levels} == {("first-run", "resumes")}


def test_the_ladder_shows_the_values_after_a_switch_and_those_of_its_guide(runs: Runs) -> None:
    rows = {row["name"]: row for row in json.loads(runs.memtop("presets", "--json").stdout)}
    ladder = [rows[name] for name in ("deepspeed", "stage2_offload", "stage3", "minimal")]
    assert [row["guide_effective_batch"] for row in ladder] == [16, 18, 16, 16]
    assert [row["guide_tokens_per_update"] for row in ladder] == [32768, 32256, 24576, 16384]
    assert {row["effective_batch"] for row in ladder} == {16}
    assert [(row["batch"], row["accumulation"]) for row in ladder] == [(4, 4), (2, 8), (2, 8), (1, 16)]
    assert {row["switch"] for row in ladder} == {"resumes"}
    assert {row["switch_whole"] for row in ladder} == {"new run"}
    assert rows["stage2_offload"]["zero"] == {"stage": 2, "offload_optimizer": True, "offload_parameters": False}
    assert "gradient checkpointing on" in rows["stage2_offload"]["changes"]
    assert "lora.r 64 -> 48" in rows["stage2_offload"]["reason_whole"]
    assert "a new run: effective batch 16 -> 18 (+12.5 %)" in runs.memtop("presets", "stage2_offload").stdout


def test_presets_are_a_table_with_a_heading(runs: Runs) -> None:
    lines = runs.memtop("presets").stdout.splitlines()
    heads = ["key", "preset", "B x A x W", "effective", "T", "tokens/update", "strategy", "switch"]
    assert re.split(r" {2,}", lines[0]) == heads
    low = next(line for line in lines if line.startswith("6 "))
    assert re.split(r" {2,}", low) == ["6", "low", "4 x 8 x 1", "32", "128", "4096", "no ZeRO", "resumes"]
    assert low.index("low") == lines[0].index("preset")
    assert low.index("no ZeRO") == lines[0].index("strategy")
    assert low.index("4096") + 4 == lines[0].index("tokens/update") + len("tokens/update")
    speeds = [line.strip() for line in lines if line.startswith("     speed: ")]
    assert any(line.startswith("speed: not known: whether the data still come in time is not known") for line in speeds)
    assert {line.split(": ")[1] for line in speeds} == {"not known", "slower", "much slower"}, "the word speed is there once"
    chinese = runs.memtop("presets", "--lang", "zh").stdout.splitlines()
    assert any(line.startswith("     速度：未知：") for line in chinese)
    low = next(line for line in chinese if line.startswith("6 "))
    translate = Catalogue(read_catalogue("zh")).translate
    assert cell_len(low[: low.index(translate("no ZeRO"))]) == cell_len(chinese[0][: chinese[0].index(translate("strategy"))])
    screen = Terminal(
        [sys.executable, "-m", "memtop", "presets"], columns=80, rows=160, cwd=str(runs.root), environment=runs.environment
    )
    try:
        assert screen.wait() == 0
        assert "strategy" in screen.text()
        assert "tokens/update" not in screen.text(), "a narrow terminal leaves columns out"
    finally:
        screen.close()


def test_help_of_train_lists_recipes_and_presets_also_those_of_the_user(runs: Runs, tmp_path: Path) -> None:
    help_text = runs.memtop("train", "--help").stdout
    for name in (*load_recipes(), *load_presets()):
        assert re.search(rf"^  {name}  +\S", help_text, re.MULTILINE), name
    assert max(map(len, help_text.splitlines())) <= 80
    levels = tmp_path / "config" / "memtop" / "levels"
    levels.mkdir(parents=True)
    (levels / "mine.toml").write_text('title = "My own"\ndescription = "Mine."\n')
    environment = runs.environment | {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    assert re.search(r"^  mine +My own$", runs.memtop("train", "--help", env=environment).stdout, re.MULTILINE)
    (levels / "mine.toml").write_text("title = 3 =")
    assert "The recipes and presets cannot be listed: " in runs.memtop("train", "--help", env=environment).stdout


def test_presets_are_compared_with_the_run_in_progress(runs: Runs) -> None:
    runs.memtop("train", "--name", "a", "--batch", "2", "--accum", "8", "--max-updates", "20000", "--detach")
    runs.wait("a", lambda d: d["alive"])
    rows = json.loads(runs.memtop("presets", "--json").stdout)
    assert {row["recipe"] for row in rows} == {"first-run"}
    assert {row["effective_batch"] for row in rows} == {16}
    assert [row["key"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert rows[0]["switch_whole"] == "refused"
    assert "beyond the model's 1024 positions" in rows[0]["reason_whole"]
    table = runs.memtop("presets")
    refused = next(line for line in table.stdout.splitlines() if "a new run: refused: " in line)
    assert refused.strip() == f"a new run: refused: {rows[0]['reason_whole']}"
    assert len(re.findall("a new run: ", table.stdout)) == sum(
        row["switch_whole"] == "refused" or row["guide_effective_batch"] != row["effective_batch"] for row in rows
    )
    assert "(compared with a, the newest run in progress; " in table.stderr
    assert json.loads(runs.memtop("presets", "t5-balanced", "--json").stdout)["recipe"] == "pretrain-t5"
    refused = runs.memtop("restart", "a", "--set", "seed=1", status=2).stderr
    assert "seed 1: makes a new run: memtop train first-run --name NEW --set seed=1, or --fresh" in refused
    runs.memtop("stop", "a")


def test_once_prints_plain_text(runs: Runs) -> None:
    text = runs.memtop("watch", "--once").stdout
    assert "RAM " in text
    assert any(word in text for word in ("safe", "edge", "danger"))
