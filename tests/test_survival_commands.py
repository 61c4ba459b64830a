"""Live edits and rollback on real training: only the requested settings change."""

from __future__ import annotations

from tests.conftest import Runs
from tests.recovery.injected import TINY, TOO_LARGE, inject
from tests.test_survival import arguments, assert_whole


def test_a_live_edit_changes_the_split_without_a_restart(runs: Runs) -> None:
    runs.memtop(*arguments(runs, "small", "--detach", "--max-updates", "20000"))
    runs.wait("a", lambda d: (d["updates"] or 0) >= 3)
    refused = runs.memtop("restart", "a", "--live", "--seq-len", "64", status=2)
    assert "seq_len: cannot change while the program runs; restart it instead" in refused.stderr
    done = runs.memtop("restart", "a", "--live", "--batch", "4", "--accum", "8")
    assert "effective batch 32 -> 32: training is unchanged" in done.stderr
    document = runs.wait("a", lambda d: d["settings"]["batch"] == 4)
    assert (len(document["attempts"]), document["settings"]["accumulation"]) == (1, 8)
    assert [row["outcome"] for row in document["configurations"]] == ["replaced", None]
    assert "nothing changes" in runs.memtop("restart", "a", "--live", "--batch", "4", "--accum", "8").stdout
    # A new supervisor knows it, and a restart starts with it.
    runs.kill(document["supervisor_pid"])
    runs.memtop("watch", "a", "--once", "--json")
    assert runs.wait("a", lambda d: d["supervisor_pid"] is not None)["settings"]["batch"] == 4
    runs.memtop("restart", "a", "--detach")
    runs.wait("a", lambda d: len(d["attempts"]) == 2 and d["state"] == "training")
    assert runs.show("a")["attempts"][1]["settings"]["batch"] == 4
    runs.memtop("stop", "a")
    assert "was stopped at" in runs.memtop("restart", "a", "--live", "--batch", "8", status=1).stderr


def test_rollback_returns_to_the_settings_and_the_state_of_an_earlier_configuration(runs: Runs) -> None:
    runs.memtop(*arguments(runs, "small", "--headless", "--max-updates", "10", "--set", "save_total_limit=5"))
    runs.memtop("restart", "a", "--batch", "4", "--accum", "8", "--max-updates", "20", "--headless")
    before = runs.show("a", metrics=True)
    assert [row["until_update"] for row in before["configurations"]] == [10, 20]
    # Configuration 1 was complete after update 10.
    assert "the run keeps its present length" in runs.memtop("rollback", "a", "--state", "--headless").stderr
    document = runs.show("a", metrics=True)
    # It went back to update 10 and trained the same samples again, as configuration 1 would have.
    assert document["attempts"][2]["start_updates"] == 10
    assert document["attempts"][2]["settings"]["batch"] == 8
    assert "the settings of configuration 1" in document["attempts"][2]["reason"]
    assert_whole(document, 20, 32)
    digests = [[row["sample_digest"] for row in one["metrics"]] for one in (before, document)]
    assert digests[0] == digests[1]
    (aside,) = (runs.path / "a").glob("set-aside.*")
    assert (aside / "train_latest_state" / "manifest.json").exists()
    assert runs.memtop("rollback", "a", "9", status=2).stderr.startswith("memtop: N 9: run 'a' has no such configuration")


def test_after_a_death_of_memory_a_preset_enlarges_nothing_and_a_persons_own_numbers_are_warned_of(runs: Runs) -> None:
    inject(runs, TOO_LARGE.replace(">= 10", ">= 3"))
    own = ("--name", "a", "--batch", "4", "--accum", "1", "--max-updates", "20000", *TINY)
    runs.memtop("train", "first-run", "--detach", *own)
    document = runs.wait("a", lambda d: (d["updates"] or 0) >= 1)
    assert (document["settings"]["batch"], document["settings"]["accumulation"]) == (2, 2)
    runs.memtop("restart", "a", "--preset", "low", "--detach")
    document = runs.wait("a", lambda d: d["state"] == "training" and len(d["attempts"]) == 2)
    settings = document["settings"]
    assert (settings["preset"], settings["batch"], settings["accumulation"]) == ("low", 2, 2)
    words = "the run has died of memory with batch 4: this is the same, and saves nothing more"
    asked = ("restart", "a", "--preset", "standard", "--batch", "4", "--accum", "1", "--detach")
    assert f"; ! {words}" in runs.memtop(*asked).stderr
    runs.memtop("stop", "a")
    assert words in runs.memtop(*asked).stderr
