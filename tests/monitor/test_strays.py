"""Which processes are strays and which may be chosen: decisions over values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from memtop.supervisor.errors import RefusedError
from memtop.supervisor.monitor.processes.facts import ProcessFacts
from memtop.supervisor.monitor.processes.proc import ProcessId
from memtop.supervisor.monitor.strays import GPU_SERVICES, KnownRun, Verdict, choose, judge
from memtop.supervisor.monitor.values import GpuProcess, GpuSample, MachineSnapshot

ME, OTHER = 1000, 1001
LIVE = KnownRun(name="live", folder="/runs/live", alive=True, attempt=3)
OVER = KnownRun(name="over", folder="/runs/over", alive=False, attempt=1)
RUNS = (LIVE, OVER)
PROTECTED = frozenset({0, 1, 50, 51})


def facts(
    pid: int = 700,
    *,
    uid: int | None = ME,
    folder: str | None = None,
    attempt: int | None = None,
    name: str = "python",
    kernel: bool = False,
) -> ProcessFacts:
    user = "me" if uid == ME else "other"
    return ProcessFacts(
        pid=pid,
        identity=ProcessId(pid, 1),
        uid=uid,
        user=user,
        name=name,
        kernel=kernel,
        run_folder=folder,
        attempt=attempt,
    )


def verdict(process: ProcessFacts, kind: str = "compute", own_uid: int = ME) -> Verdict:
    return judge(process, kind, RUNS, own_uid=own_uid, protected=PROTECTED)


def test_left_over_from_a_run_that_is_over() -> None:
    found = verdict(facts(folder="/runs/over"))
    assert found == Verdict("over", True, True, "left over from run over, which is over")


@pytest.mark.parametrize("folder", ["/runs/over", "/runs/live"])
def test_a_process_of_a_run_that_was_renamed_is_not_of_the_new_run_in_its_place(folder: str) -> None:
    """The renamed run may still run: it is no proof that the new one is over."""
    found = verdict(replace(facts(folder=folder, attempt=1), run_id="1f"))
    assert (found.stray, found.reason) == (False, f"started for an earlier run in {folder}, which memtop does not know")


def test_left_over_from_an_older_attempt() -> None:
    found = verdict(facts(folder="/runs/live", attempt=2))
    assert (found.run, found.stray, found.choosable) == ("live", True, True)
    assert "attempt 2" in found.reason


@pytest.mark.parametrize("attempt", [3, 4, None])
def test_part_of_a_live_run(attempt: int | None) -> None:
    found = verdict(facts(folder="/runs/live", attempt=attempt))
    assert (found.run, found.stray, found.choosable) == ("live", False, False)
    assert "memtop stop live" in found.reason


def test_a_run_that_nothing_is_known_of_is_no_proof() -> None:
    found = verdict(facts(folder="/elsewhere/x"))
    assert (found.run, found.stray, found.choosable) == ("x", False, True)


def test_an_own_process_without_a_run_may_be_chosen_but_is_no_stray() -> None:
    found = verdict(facts())
    assert (found.run, found.stray, found.choosable) == (None, False, True)
    assert found.reason


@pytest.mark.parametrize("own_uid", [ME, 0])
def test_other_users_processes_are_never_chosen_not_even_by_root(own_uid: int) -> None:
    found = verdict(facts(uid=OTHER, folder="/runs/over"), own_uid=own_uid)
    assert (found.stray, found.choosable) == (True, False)
    assert "belongs to other" in found.reason


@pytest.mark.parametrize("kind", ["graphics", "compute+graphics"])
def test_graphics_is_never_chosen(kind: str) -> None:
    assert not verdict(facts(folder="/runs/over"), kind).choosable


@pytest.mark.parametrize("name", sorted(GPU_SERVICES))
def test_services_are_never_chosen(name: str) -> None:
    assert not verdict(facts(name=name)).choosable


def test_a_process_that_cannot_be_seen() -> None:
    found = judge(
        ProcessFacts(pid=9, unknown={"name": "not visible from this container"}),
        "compute",
        RUNS,
        own_uid=ME,
        protected=PROTECTED,
    )
    assert found == Verdict(None, False, False, "not visible from this container")


def row(pid: int, *, choosable: bool, ticks: int | None = 5) -> GpuProcess:
    return GpuProcess(pid=pid, choosable=choosable, started_ticks=ticks, reason="because")


def snapshot(*gpus: tuple[GpuProcess, ...]) -> MachineSnapshot:
    return MachineSnapshot(time=0.0, gpus=tuple(GpuSample(index=i, processes=rows) for i, rows in enumerate(gpus)))


def test_choice_by_number_gives_identities() -> None:
    assert choose(snapshot((row(7, choosable=True),)), [7, 7]) == [ProcessId(7, 5)]


@pytest.mark.parametrize(
    ("gpus", "reason"),
    [
        ((), "process 7 is not on a GPU"),
        (((row(7, choosable=False),),), "cannot be ended from here: because"),
        (((row(7, choosable=False),), (row(7, choosable=True),)), "cannot be ended from here: because"),
        (((row(7, choosable=True, ticks=None),),), "cannot be ended from here: because"),
    ],
)
def test_choice_by_number_is_refused(gpus: tuple[tuple[GpuProcess, ...], ...], reason: str) -> None:
    with pytest.raises(RefusedError, match=reason):
        choose(snapshot(*gpus), [7])


process_tables = st.builds(
    facts,
    st.sampled_from([1, 50, 51, 700, 701]),
    uid=st.sampled_from([None, 0, ME, OTHER]),
    folder=st.sampled_from([None, "/runs/live", "/runs/over", "/runs/ove", "/runs/over/", "/x"]),
    attempt=st.sampled_from([None, 0, 1, 2, 3, 4]),
    name=st.sampled_from(["python", "Xorg"]),
    kernel=st.booleans(),
)


@given(process_tables, st.sampled_from(["compute", "graphics", "compute+graphics"]), st.sampled_from([0, ME]))
def test_no_wrong_kill(process: ProcessFacts, kind: str, own_uid: int) -> None:
    """Only the user's visible compute processes can be chosen; only proven ones are strays."""
    found = verdict(process, kind, own_uid)
    if found.choosable:
        assert process.uid == own_uid
        assert process.pid not in PROTECTED
        assert kind == "compute"
        assert not process.kernel
        assert process.name not in GPU_SERVICES
        current = process.attempt is None or process.attempt >= 3
        assert not (process.run_folder == "/runs/live" and current)
    if found.stray:
        older = process.run_folder == "/runs/live" and process.attempt is not None and process.attempt < 3
        assert process.run_folder == "/runs/over" or older
    assert found.reason
