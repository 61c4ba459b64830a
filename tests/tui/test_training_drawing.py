"""The drawings of a run: header, numbers, events, loss, and the line about the link."""

from __future__ import annotations

import dataclasses
import re

import msgspec
import pytest
from rich.cells import cell_len

from memtop.supervisor import language, units, wire
from memtop.supervisor.monitor.vram import RankMemory
from memtop.supervisor.observed.shown import state_of
from memtop.supervisor.observed.values import Observed, ObservedProcess
from memtop.supervisor.program import Knob, Knobs, Program
from memtop.supervisor.run_memory import HostMemory, RoleMemory
from memtop.tui.dashboard.events import draw_events
from memtop.tui.dashboard.header import PHASE_MARKS, draw_header
from memtop.tui.dashboard.layout import plan
from memtop.tui.dashboard.notice import notice
from memtop.tui.dashboard.training import draw_compact_training, draw_loss, draw_training
from memtop.tui.feed import Connected, Disconnected, Followed, Others, ReplayPosition
from memtop.tui.keymap import ACTIONS, BY_ID, label_of, offered
from memtop.tui.line import beginning, plain, width_of, wrap_within
from memtop.tui.machine.host import draw_host
from memtop.tui.store import Store, fold
from tests.tui.support import (
    GIB,
    NOW,
    RecordingFeed,
    gpu,
    machine,
    opened,
    resize,
    running,
    screen_text,
    store_of,
    text_of,
)


def test_every_mark_is_one_cell() -> None:
    assert all(cell_len(mark) == 1 for mark, _ in PHASE_MARKS.values())


def test_training_numbers() -> None:
    store = store_of(running(gpu()))
    text = text_of(draw_training(store, 60, 10))
    for expected in ("update 24 / 60", "40 %", "ETA 02:11:30", "loss 1.842 best 1.790", "lr 8.7e-05", "55.9 k tok/s"):
        assert expected in text
    assert "checkpoint update 20  12 s ago  1.0 GiB" in text


def test_the_share_of_padding_is_shown_where_there_is_room() -> None:
    store = store_of(running(padding_fraction=0.31))
    assert "55.9 k tok/s 31 % padding" in text_of(draw_training(store, 90, 10))
    assert "padding" not in text_of(draw_training(store, 60, 10))
    for width in range(40, 160):
        drawn = text_of(draw_training(store, width, 10))
        assert ("31 %" in drawn) == ("31 % padding" in drawn), f"cut off at {width}"
    assert "padding" not in text_of(draw_training(store_of(running(padding_fraction=0.001)), 90, 10))
    assert "padding" not in text_of(draw_training(store_of(running()), 90, 10))


LONG = wire.StepSplit(data_wait_seconds=12.5, forward_seconds=33.25, backward_seconds=61.75, optimizer_seconds=10.5)
BUSY = {
    "updates": 987_654,
    "total_updates": 999_999,
    "samples_seen": 31_604_928,
    "epoch": 12.34,
    "loss": 12.345,
    "best_loss": 11.987,
    "gradient_norm": 1234.56,
    "samples_per_second": 456.7,
    "tokens_per_second": 1_234_567.0,
    "padding_fraction": 0.31,
    "step_seconds": 118.0,
    "eta_seconds": 1_000_000.0,
    "split": LONG,
    "checkpoint": wire.Checkpoint(
        path="x", updates=987_000, saved_at=NOW - 4000, size_bytes=123 * GIB + GIB // 2, complete=True, samples_seen=1
    ),
}


def numbers_in(text: str) -> set[str]:
    """Every word with a digit."""
    return {word for word in text.split() if re.search(r"\d", word)}


def whole_numbers(update: wire.StateUpdate) -> set[str]:
    """The numbers of both drawings where there is room for all of them."""
    store = store_of(update)
    return numbers_in(text_of([*draw_training(store, 400, 20), *draw_compact_training(store, 400, 3)]))


@pytest.mark.parametrize("fields", [{}, BUSY], ids=["usual", "long"])
def test_no_number_is_cut_at_any_width(fields: dict[str, object]) -> None:
    update = running(gpu(), **fields)
    store, whole = store_of(update), whole_numbers(update)
    for width in range(30, 200):
        for drawn in (draw_training(store, width, 20), draw_compact_training(store, max(60, width), 3)):
            assert "…" not in text_of(drawn), width
            assert numbers_in(text_of(drawn)) <= whole, width


@pytest.mark.parametrize("height", [24, 45])
@pytest.mark.parametrize("fields", [{}, BUSY], ids=["usual", "long"])
async def test_no_number_is_cut_on_any_terminal(height: int, fields: dict[str, object]) -> None:
    update = running(gpu(), **fields)
    whole = whole_numbers(update)
    async with opened(RecordingFeed(update), size=(80, height)) as (app, pilot):
        for width in (*range(80, 200, 10), 109, 111, 117, 119, 200):
            await resize(pilot, width, height)
            shown = next(one for one in ("#training", "#compact-training") if app.screen.query_one(one).region.area)
            place = app.screen.query_one(shown).content_region
            rows = screen_text(app).splitlines()[place.y : place.bottom]
            text = "\n".join(row[place.x : place.right] for row in rows)
            assert "loss" in text
            assert "samples/s" in text
            assert "…" not in text, (width, text)
            assert numbers_in(text) <= whole, (width, text)


def test_the_least_important_numbers_are_left_out_first() -> None:
    store = store_of(running(padding_fraction=0.31))
    order = (
        "31 % padding",
        "best 1.790",
        "grad 0.61",
        "samples 768",
        "step 1.15 s",
        "epoch 0.40",
        "55.9 k tok/s",
        "lr 8.7e-05",
    )
    gone: list[str] = []
    for width in range(120, 15, -1):
        text = text_of(draw_training(store, width, 10))
        gone += [one for one in order if one not in text and one not in gone]
        assert "loss 1.842" in text
        assert "31.2 samples/s" in text
    assert tuple(gone) == order


@pytest.mark.parametrize("most", [1, 2])
def test_a_text_without_room_ends_with_an_ellipsis_and_never_within_a_number(most: int) -> None:
    text = "stopped at update 12 345 of 67 890, because the disk had 1 234 567 bytes left; 89 more were needed"
    numbers = re.findall(r"\d[\d ]*\d|\d", text)
    for width in range(10, 120):
        rows = wrap_within(text, width, most)
        assert len(rows) <= most
        assert all(width_of(row) <= width for row in rows)
        shown = " ".join(plain(row) for row in rows)
        assert shown == text or shown.endswith(" …")
        assert [number for number in re.findall(r"\d[\d ]*\d|\d", shown) if number not in numbers] == [], (width, shown)


@pytest.mark.parametrize("text", ["汉字汉字汉字汉字", "第 12 次更新时内存不足", "out of memory at update 12", "1234567"])
def test_the_beginning_of_a_text_is_never_wider_than_its_room(text: str) -> None:
    for width in range(cell_len(text)):
        shown = beginning(text, width)
        assert cell_len(shown) <= width, (width, shown)
        assert shown.endswith("…"[:width]), width
    assert beginning(text, cell_len(text)) == text


def test_a_notice_without_room_is_not_cut_within_a_number() -> None:
    spike = wire.Spike(update=43, message="update 43: the loss rose from 2 to 9 at update 41 and stayed high", back_words="")
    store = store_of(running(spike=spike))
    for width in range(40, 100):
        text = notice(store, width)
        assert cell_len(text) <= width
        assert numbers_in(text) <= numbers_in(f"! {spike.message}"), (width, text)


def test_training_without_any_number_has_dashes() -> None:
    bare = wire.RunState(name="mine", folder="x", state=wire.Phase.STARTING, created=NOW, command=("python", "mine.py"))
    text = text_of(draw_training(store_of(wire.StateUpdate(run=bare)), 60, 10))
    assert "update – / –" in text
    assert "checkpoint none yet" in text
    assert "0.0" not in text
    assert msgspec.structs.replace(bare, state=wire.Phase.FAILED).checkpoint_words == "none"


def test_the_source_of_the_numbers_of_a_users_program() -> None:
    program = Program(grip="output", why="loss: read from the output, by lines like `step 2 loss 1.0`")
    text = text_of(draw_training(store_of(running(program=program, checkpoint=None)), 70, 10))
    assert "checkpoint none seen" in text, "where such a program saves is not known"
    assert "loss: read from the output, by lines like `step 2 loss 1.0`" in text


def test_the_source_of_the_numbers_has_a_line_of_its_own() -> None:
    program = Program(grip="output", why="loss: read from the output")
    rows = {}
    for name, known in (("without", None), ("with", program)):
        store = store_of(running(program=known))
        height = plan(store, 150, 45, notice=False).heights["#training"]
        rows[name] = text_of(draw_training(store, 70, height - 2))
    assert "loss: read from the output" in rows["with"]
    assert "checkpoint update 20" in rows["without"]


def observed(**fields: object) -> wire.StateUpdate:
    """A program that memtop did not start."""
    process = ObservedProcess(pid=7, parent_pid=1, role="process", command="python train.py", rss_bytes=GIB)
    seen = {"pid": 7, "started_ticks": 1, "name": "train.py", "command": ("python", "train.py"), "folder": "/work"}
    known = {**seen, "started": NOW - 60, "processes": (process,), **fields}
    return wire.StateUpdate(run=state_of(msgspec.convert(known, Observed), NOW))


def test_a_program_that_memtop_did_not_start() -> None:
    saved = wire.Checkpoint(path="x", complete=True, saved_at=NOW - 5)
    update = observed(updates=20, total_updates=50, loss=2.5, example="step 2/50 loss 2.5", checkpoint=saved)
    store = dataclasses.replace(store_of(update), label="not started by memtop", read_only=True)
    text = text_of(draw_training(store, 100, 10))
    assert "update 20 / 50" in text
    assert "checkpoint update – " in text
    assert "not started by memtop; 1 process; read from the output, by lines like `step 2/50 loss 2.5`" in text
    assert "train.py  ● training" in text_of(draw_header(store, 160, 1))
    assert "not started by memtop · read-only" in text_of(draw_header(store, 160, 1))
    assert not any(offered(action, store) for action in ACTIONS if action.group in ("run", "machine"))
    assert not any(offered(BY_ID[name], store) for name in ("recovery", "configurations", "speed"))
    assert label_of(BY_ID["detach"], store, narrow=False) == "Quit"


def test_what_is_not_known_of_a_program_that_memtop_did_not_start() -> None:
    store = store_of(observed(unknown={"updates": "its output goes to /dev/pts/3, which cannot be read"}))
    text = text_of(draw_training(store, 160, 10))
    assert "update – / –" in text
    assert "checkpoint none seen" in text
    assert "its output goes to /dev/pts/3, which cannot be read" in text
    assert "progress not known" in text_of(draw_header(store, 160, 1))
    ended = store_of(observed(alive=False))
    assert "the exit status is not known" in text_of(draw_training(ended, 160, 10))


def test_the_machine_without_a_run_names_the_programs_that_memtop_did_not_start() -> None:
    store = store_of(Connected(), machine(), Others(("train.py  pid 7", "sft.py  pid 9")))
    assert notice(store) == "train.py  pid 7  (and 1 more)"
    assert notice(fold(store, Others(()))) == ""


def test_an_incomplete_checkpoint_says_why() -> None:
    saved = wire.Checkpoint(path="x", complete=False, problem="model.safetensors is missing")
    text = text_of(draw_training(store_of(running(checkpoint=saved)), 70, 10))
    assert "! not complete: model.safetensors is missing" in text


def test_ranks_that_differ_are_named() -> None:
    def told(*pairs: tuple[float, float], name: str = "peak_bytes") -> str:
        ranks = tuple(
            RankMemory(rank=n, pid=n, **{name: int(gib * GIB)}, step_seconds=1.0, data_wait_seconds=wait)
            for n, (gib, wait) in enumerate(pairs)
        )
        return text_of(draw_training(store_of(running(ranks=ranks)), 100, 12))

    both = told((3, 0.02), (7.5, 0.02), (4, 0.4))
    assert "ranks differ  peak 3.0 GiB (rank 0) to 7.5 GiB (rank 1)  data 2 % (rank 0) to 40 % (rank 2)" in both
    assert "ranks differ  RAM 1.0 GiB (rank 0) to 2.0 GiB (rank 1)" in told((1, 0), (2, 0), name="pss_bytes")
    assert "ranks differ  RSS 1.0 GiB (rank 0) to 2.0 GiB (rank 1)" in told((1, 0), (2, 0), name="rss_bytes")
    for alike in (told((3, 0.1), (3.5, 0.1)), told((0.1, 0.1), (0.2, 0.1)), told((3, 0.5))):
        assert "ranks differ" not in alike


def test_ranks_that_do_not_fit_are_counted() -> None:
    ranks = tuple(RankMemory(rank=n, pid=n, connected=n != 1) for n in range(8))
    text = text_of(draw_training(store_of(running(ranks=ranks)), 70, 9))
    assert "rank 1 CPU  ! its agent does not answer" in text
    assert "6 more ranks" in text
    assert "ranks differ" not in text
    over = text_of(draw_training(store_of(running(ranks=ranks, alive=False, state=wire.Phase.FINISHED)), 70, 9))
    assert "rank" not in over, "its ranks are gone: not silent"


@pytest.mark.parametrize("phase", list(wire.Phase))
def test_the_header_has_a_word_and_a_mark_for_every_state(phase: wire.Phase) -> None:
    store = store_of(running(gpu(), state=phase, total_updates=None))
    text = plain(draw_header(store, 160, 1)[0])
    assert f"{PHASE_MARKS[phase][0]} {phase.value}" in text
    assert "preset standard  8 x 4 x 1 = 32  T 128  this attempt 00:22:10" in text
    assert width_of(draw_header(store, 60, 1)[0]) == 60


def test_a_run_that_evaluates_says_so() -> None:
    text = plain(draw_header(store_of(running(gpu(), doing="evaluating")), 160, 1)[0])
    assert f"{PHASE_MARKS[wire.Phase.TRAINING][0]} evaluating" in text
    assert "training" not in text


def test_a_run_that_starts_says_in_which_stage_it_is() -> None:
    starting = {"state": wire.Phase.STARTING, "stage": wire.Stage.LOADING_MODEL, "updates": None}
    store = store_of(running(gpu(), **starting))
    assert "◌ loading the model" in plain(draw_header(store, 80, 1)[0])
    wide = "✓ starting  ✓ importing torch  ◌ loading the model  · reading the data  · first update"
    assert plain(draw_training(store, 100, 12)[0]).rstrip() == wide
    assert plain(draw_training(store, 60, 12)[0]).rstrip() == "◌ loading the model, stage 3 of 5"
    compiles = store_of(running(gpu(), **starting | {"stage": wire.Stage.COMPILING}))
    assert (
        plain(draw_training(compiles, 70, 12)[0]).rstrip()
        == "◌ compiling parts of DeepSpeed (first use only; a minute or more)"
    )
    own = store_of(running(gpu(), **starting | {"stage": wire.Stage.LOADING, "settings": None}))
    assert plain(draw_training(own, 60, 12)[0]).rstrip() == "✓ starting  ◌ loading  · first update"
    again = store_of(running(gpu(), **starting | {"updates": 12}))
    assert plain(draw_training(again, 100, 12)[0]).startswith("update 12 /"), "a resumed run has its place"


def test_slow_runs_have_numbers_that_mean_something() -> None:
    slow = store_of(running(gpu(), samples_per_second=0.0268, tokens_per_second=1.5, step_seconds=194.55))
    for lines in (draw_training(slow, 70, 12), draw_compact_training(slow, 80, 3)):
        text = text_of(lines)
        assert "0.027 samples/s" in text
        assert "1.5 tok/s" in text
        assert "step 195 s" in text


def test_the_parts_of_an_update_add_up_to_the_update() -> None:
    split = wire.StepSplit(data_wait_seconds=0.0, forward_seconds=2.7, backward_seconds=4.8, optimizer_seconds=0.1)
    text = text_of(draw_training(store_of(running(gpu(), split=split, step_seconds=10.0)), 76, 12))
    assert "data 0 %  forward 27 %  backward 48 %  optimizer 1 %  other 24 %" in text


def test_why_a_run_has_ended_goes_on_below_itself() -> None:
    why = "not saved: 16 MiB needed, 3 MiB free; the state before is kept, free some space, and what was lost is at the end"
    store = store_of(running(gpu(), state=wire.Phase.FAILED, alive=False, reason=why))
    for lines in (draw_training(store, 70, 13), draw_compact_training(store, 80, 3)):
        assert why in " ".join(text_of(lines).split())


def test_the_header_of_a_followed_process() -> None:
    store = store_of(machine(gpu()), Followed(12, "python train.py", frozenset({12, 13}), 3 * GIB))
    assert (units.processes(1), RoleMemory(role="rank", processes=1).words) == ("1 process", "1 rank")
    assert RoleMemory(role="loader worker", processes=3).words == "3 loader workers"
    assert "pid 12: 2 processes, 3.0 GiB resident: python train.py" in plain(draw_header(store, 120, 1)[0])
    gone = fold(store, Followed(12))
    assert "pid 12 has ended" in plain(draw_header(gone, 120, 1)[0])


def test_events_are_newest_first_and_go_on_below_themselves() -> None:
    rows = (
        wire.Event(id=1, time=NOW, attempt=1, kind="attempt", message="attempt 1 started"),
        wire.Event(id=2, time=NOW + 60, attempt=1, kind="band", message="GPU 0: edge -> danger, 91.0 %, cache grew"),
    )
    text = text_of(draw_events(store_of(wire.EventRows(rows=rows)), 40, 6)).splitlines()
    assert "!! GPU 0: edge -> danger" in text[0]
    assert text[1].startswith(" " * 12)
    assert "attempt 1 started" in text[-1]


def test_an_event_without_room_ends_with_a_mark() -> None:
    rows = (wire.Event(id=1, time=NOW, attempt=1, kind="attempt", message="attempt 2: restart with batch 4, accumulation 8"),)
    store = store_of(wire.EventRows(rows=rows))
    for width, height in ((40, 1), (30, 2)):
        shown = text_of(draw_events(store, width, height)).splitlines()
        assert len(shown) == height
        assert shown[-1].rstrip().endswith(" …")
    assert "…" not in text_of(draw_events(store, 40, 2))


def test_only_the_newest_of_consecutive_checkpoints_is_shown() -> None:
    kinds = ("attempt", "checkpoint", "checkpoint", "warning", "checkpoint", "checkpoint", "checkpoint")
    rows = tuple(
        wire.Event(id=n, time=NOW + n, attempt=1, kind=kind, message=f"{kind} {n}") for n, kind in enumerate(kinds, start=1)
    )
    text = text_of(draw_events(store_of(wire.EventRows(rows=rows)), 40, 6)).splitlines()
    assert [" ".join(row.split()[1:]) for row in text] == ["checkpoint 7", "! warning 4", "checkpoint 3", "attempt 1"]


def test_loss_comes_from_the_metrics() -> None:
    rows = tuple(wire.Metric(update=n, attempt=1, loss=3 - n / 100) for n in range(1, 50))
    assert "3.00" in text_of(draw_loss(store_of(wire.MetricRows(rows=rows)), 60, 8))


def test_the_notice_words_every_state_of_the_link() -> None:
    connected = store_of(running(gpu()))
    assert notice(connected) == ""
    assert notice(Store()) == "… waiting for the first sample"
    gone = fold(connected, Disconnected("supervisor is gone - reconnecting"))
    assert notice(gone) == "! supervisor is gone - reconnecting"
    assert notice(fold(gone, Connected())) == ""
    assert notice(store_of(running(gpu(), warnings=("disk is nearly full",)))) == "! disk is nearly full"


def test_the_time_of_an_attempt_is_not_that_of_the_whole_run() -> None:
    two = {**OVER, "attempt": 2, "started": NOW - 10, "earlier_seconds": 180.0, "state": wire.Phase.FINISHED}
    store = store_of(running(gpu(), **two))
    assert plain(draw_header(store, 160, 1)[0]).rstrip().endswith("this attempt 00:00:10")
    assert "after 00:03:10 in all" in notice(store)
    # The hour in which nothing ran does not count.
    idle = running(gpu(), **two | {"created": NOW - 3790})
    assert "after 00:03:10 in all" in notice(store_of(idle))


SAVED = wire.Checkpoint(path="/runs/tiny/train_latest_state", updates=20, samples_seen=640, complete=True)
OVER: dict[str, object] = {"alive": False, "attempt": 1, "updates": 24, "started": NOW - 190, "ended": NOW, "checkpoint": SAVED}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"state": wire.Phase.FINISHED},
            "✓ finished at update 24 after 00:03:10; memtop export tiny DIR writes the model",
        ),
        (
            {"state": wire.Phase.STOPPED},
            "■ stopped at update 24 after 00:03:10; r resumes at update 20; memtop export tiny DIR writes the model",
        ),
        (
            {"state": wire.Phase.FAILED, "reason": "ended by signal 9 (SIGKILL)", "ended_by": 9, "checkpoint": None},
            "✗ killed at update 24 after 00:03:10: ended by signal 9 (SIGKILL); r starts it again from the beginning",
        ),
        (
            {"state": wire.Phase.FAILED, "reason": "ended by signal 11 (SIGSEGV)", "ended_by": 11, "checkpoint": None},
            "✗ failed at update 24 after 00:03:10: ended by signal 11 (SIGSEGV); r starts it again from the beginning",
        ),
        (
            {"state": wire.Phase.FAILED, "reason": "python_error: no such file"},
            "✗ failed at update 24 after 00:03:10: python_error: no such file; r resumes at update 20"
            "; memtop export tiny DIR writes the model",
        ),
        (
            {"state": wire.Phase.STOPPED, "checkpoint": None, "updates": None},
            "■ stopped after 00:03:10; r starts it again from the beginning",
        ),
        (
            {"state": wire.Phase.STOPPED, "checkpoint": None, "settings": None, "command": ("python", "t.py")},
            "■ stopped at update 24 after 00:03:10; r starts it again from the beginning, unless it resumes by itself",
        ),
        (
            {"state": wire.Phase.FINISHED, "settings": None, "command": ("python", "t.py")},
            "✓ finished at update 24 after 00:03:10; memtop report tiny writes a page about it",
        ),
    ],
)
def test_every_end_says_what_when_and_what_to_do_next(fields: dict[str, object], words: str) -> None:
    live = store_of(running(gpu(), **{**OVER, **fields}))
    assert notice(live) == words
    # The same for a dashboard that is opened later.
    assert notice(fold(live, Disconnected("the run is over", ended=True))) == words
    assert notice(dataclasses.replace(live, replaying=True)) == ""


def test_the_key_that_goes_on_is_shown_on_a_narrow_terminal_too() -> None:
    store = store_of(running(gpu(), **{**OVER, "state": wire.Phase.FAILED, "reason": "x" * 200}))
    assert cell_len(notice(store, 79)) <= 79
    assert notice(store, 79).endswith("…; r resumes at update 20")
    killed = {**OVER, "state": wire.Phase.FAILED, "reason": "ended by signal 9 (SIGKILL)", "ended_by": 9, "checkpoint": None}
    words = "✗ killed at update 24 after 00:03:10: ended by signal 9 (SIGKILL); r starts it again"
    assert notice(store_of(running(gpu(), **killed)), 86) == words
    assert notice(store_of(running(gpu(), **killed)), 79) == words.replace(" after 00:03:10", "")
    failed = {**killed, "ended_by": None, "reason": "exit status 3: boom"}
    words = "✗ failed at update 24 after 00:03:10: exit status 3: boom; r starts it again"
    assert notice(store_of(running(gpu(), **failed)), 79) == words
    own = store_of(running(gpu(), **failed, settings=None, command=("python", "t.py")))
    assert notice(own, 79) == words
    long = {**failed, "reason": "x" * 200, "settings": None, "command": ("python", "t.py")}
    assert notice(store_of(running(gpu(), **long)), 79).endswith("…; r starts it again")
    language.use("zh")
    try:
        assert notice(own).endswith("按 r 从头开始，除非它自己恢复")
    finally:
        language.use("en")


@pytest.mark.parametrize("width", [60, 80, 100, 160])
@pytest.mark.parametrize("name", ["tiny", "a-run-with-a-name-that-takes-the-whole-line-of-a-small-terminal"])
def test_a_replay_never_looks_live(width: int, name: str) -> None:
    update = running(gpu(), name=name, attempt=12, state=wire.Phase.RESTARTING)
    played = ReplayPosition("replay, 00:03:11 of 00:41:02, 60x", "replay 60x")
    (header,) = draw_header(dataclasses.replace(store_of(update, played), read_only=True), width, 1)
    assert "replay" in plain(header)
    assert "60x" in plain(header)
    assert width_of(header) <= width


def test_a_live_run_in_a_read_only_dashboard_says_so_at_80_columns() -> None:
    (header,) = draw_header(dataclasses.replace(store_of(running(gpu())), read_only=True), 80, 1)
    assert "read-only" in plain(header)


def test_the_header_shows_the_split_of_a_program_of_the_user() -> None:
    knobs = Knobs(batch=Knob(value=2), accumulation=Knob(value=4), seq_len=Knob(value=512))
    program = Program(grip="hooks", knobs=knobs)

    def header(**fields: object) -> str:
        own = {"settings": None, "command": ("python", "train.py"), "program": program, **fields}
        return plain(draw_header(store_of(running(gpu(), **own)), 160, 1)[0])

    for words in ("train.py", "2 x 4 x 2 = 16", "T 512"):
        assert words in header(effective_batch=16)
    assert "=" not in header(effective_batch=None)
    assert "T" not in header(effective_batch=16, program=Program())


def test_the_source_of_the_numbers_uses_the_line_of_parts_that_nobody_knows() -> None:
    program = Program(grip="output", why="total, loss: read from the output, by lines like `step 2 loss 1.0`; updates: counted")
    split = wire.StepSplit(data_wait_seconds=0.1)
    text = text_of(draw_training(store_of(running(program=program, split=split)), 60, 10))
    assert "forward" in text
    assert "by lines like `step 2" in text
    bare = wire.RunState(
        name="a", folder="x", state=wire.Phase.TRAINING, created=NOW, command=("torchrun", "a/train.py"), program=program
    )
    store = store_of(wire.StateUpdate(run=bare))
    text = text_of(draw_training(store, 60, 10))
    assert "forward" not in text
    assert "`step 2\nloss 1.0`; updates: counted" in text
    assert "train.py" in text_of(draw_header(store, 120, 1))


@pytest.mark.parametrize("device", [None, "GPU-0"])
def test_a_rank_shows_its_part_of_the_memory_of_the_run(device: str | None) -> None:
    """What it reports itself counts shared pages in full and is of another moment: more than the
    run."""
    rank = RankMemory(rank=0, pid=7, connected=True, device_uuid=device, rss_bytes=5 * GIB)
    held = (
        RoleMemory(role="launcher", processes=1, pss_bytes=GIB // 2),
        RoleMemory(role="rank", processes=1, pss_bytes=4 * GIB),
    )
    read = (msgspec.structs.replace(rank, pss_bytes=4 * GIB),)
    store = fold(Store(), running(ranks=read, run_memory=held, run_rss_bytes=6 * GIB))
    text = text_of(draw_training(store, 100, 12))
    assert "RAM 4.0 GiB" in text
    assert "RSS" not in text
    assert store.run is not None
    assert store.run.host_memory == HostMemory(int(4.5 * GIB), "PSS")
    unread = fold(Store(), running(ranks=(rank,), run_memory=(), run_rss_bytes=6 * GIB))
    assert "RSS 5.0 GiB" in text_of(draw_training(unread, 100, 12))
    assert "this run, RSS 6.0" in text_of(draw_host(unread, 100, 12))


def test_the_numbers_of_speed_on_one_line_are_of_the_same_updates() -> None:
    fields = {"samples_per_second": 40.0, "tokens_per_second": 400.0, "step_seconds": 9.0, "pace_seconds": 0.8}
    text = text_of(draw_training(store_of(running(**fields)), 100, 12))
    assert re.search(r"40.0 samples/s +400 tok/s +mean step 0.80 s", text)
    newest = text_of(draw_training(store_of(running(**{**fields, "pace_seconds": None})), 100, 12))
    assert "mean" not in newest
    assert "step 9.00 s" in newest


def test_why_there_are_no_samples_per_second() -> None:
    own = {"settings": None, "program": Program(grip="optimizer", why="x"), "samples_per_second": None, "updates": 3}
    text = text_of(draw_training(store_of(running(**own, effective_batch=None)), 100, 12))
    assert "– samples/s batch not known" in text
