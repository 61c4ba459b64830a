"""Which processes form a job, and the role of each, in process tables of real launchers."""

from __future__ import annotations

import pytest

from memtop.supervisor.monitor.processes.jobs import Grouping, JobDraft, Program, job_name, program, read_program
from memtop.supervisor.monitor.processes.proc import ProcessId, ProcessStat

TRAIN = "/venv/bin/python -u train.py --lr 1"
FORK_SERVER = ("/venv/bin/python", "-c", "from multiprocessing.forkserver import main; main(5, 6)")
SPAWNED = (
    "/venv/bin/python",
    "-c",
    "from multiprocessing.spawn import spawn_main; spawn_main(pipe=7)",
    "--multiprocessing-fork",
)
TRACKER = ("/venv/bin/python", "-c", "from multiprocessing.resource_tracker import main;main(9)")


class Table:
    """Processes under pid 1, written as (pid, parent, command, ...)."""

    def __init__(self) -> None:
        self.rows: dict[int, ProcessStat] = {}
        self.programs: dict[int, Program] = {}
        self.gpu: set[int] = set()

    def add(
        self,
        pid: int,
        parent: int,
        command: str | tuple[str, ...],
        *,
        gpu: bool = False,
        comm: str | None = None,
        uid: int = 1000,
        session: int = 0,
        run: tuple[str, int] | None = None,
        dead: bool = False,
        **marks: str,
    ) -> Table:
        words = tuple(command.split()) if isinstance(command, str) else command
        comm = comm or program(words)[:15]
        self.rows[pid] = ProcessStat(ProcessId(pid, pid * 10), comm, dead, parent, session, 1, 0, 0, 1, uid)
        self.programs[pid] = read_program(words, comm, marks, run)
        if gpu:
            self.gpu.add(pid)
        return self

    def drafts(self) -> list[JobDraft]:
        return Grouping(self.rows, frozenset(self.gpu), self.programs.__getitem__).drafts()

    def only(self) -> JobDraft:
        (draft,) = self.drafts()
        return draft


def test_torchrun_its_ranks_and_their_loader_workers() -> None:
    table = Table().add(10, 1, "tmux").add(11, 10, "-bash").add(12, 11, f"/venv/bin/python /venv/bin/torchrun {TRAIN}")
    for rank in range(2):
        table.add(20 + rank, 12, TRAIN, gpu=True, comm="pt_main_thread", RANK=str(rank))
        table.add(30 + rank, 20 + rank, TRAIN, comm="pt_data_worker", RANK=str(rank))
        table.add(40 + rank, 20 + rank, TRACKER, RANK=str(rank))
        table.add(50 + rank, 20 + rank, TRAIN, RANK=str(rank))
    job = table.only()
    assert (job.leader, job.pids[0]) == (12, 12)
    assert job.counts == {"launcher": 1, "rank": 2, "loader worker": 4, "process": 2}
    assert {pid: part for pid, part in job.roles.items() if pid < 30} == {12: "launcher", 20: "rank 0", 21: "rank 1"}
    assert job.key == "pid 12@120"


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nproc-per-node 2 train.py",
        "/venv/bin/python -m torch.distributed.run --standalone train.py",
        "/venv/bin/python -u -X dev -m torch.distributed.launch train.py",
        "/venv/bin/python /venv/bin/accelerate launch --use_deepspeed train.py",
        "/venv/bin/python -m accelerate.commands.launch train.py",
        "/venv/bin/python /venv/bin/deepspeed --num_gpus 2 train.py",
        "/venv/bin/python -m deepspeed.launcher.launch train.py",
        "mpirun -np 2 python train.py",
        "/usr/lib/openmpi/orted --hnp",
        "srun -n 2 python train.py",
        "/opt/ray/raylet --node",
    ],
)
def test_launchers(command: str) -> None:
    table = Table().add(10, 1, command).add(20, 10, TRAIN, gpu=True).add(21, 10, TRAIN, gpu=True)
    job = table.only()
    assert job.leader == 10
    # None reports its rank: launchers start them in order.
    assert job.roles == {10: "launcher", 20: "rank 0", 21: "rank 1"}


@pytest.mark.parametrize(
    "command",
    [
        *("bash train.sh", "-zsh", "tmux new", "sshd: me@pts/0", "/usr/lib/systemd/systemd --user", "slurmstepd: [4.0]"),
        *("/venv/bin/python -m ipykernel_launcher -f k.json", "/venv/bin/python /venv/bin/jupyter-lab", "code-server x"),
        *("containerd-shim-runc-v2 -id 1", "accelerate config", "/venv/bin/python sweep.py", "sudo -u me bash"),
    ],
)
def test_programs_that_never_lead(command: str) -> None:
    table = Table().add(10, 1, command).add(20, 10, TRAIN, gpu=True).add(21, 10, "python other.py", gpu=True)
    assert {job.leader: job.roles for job in table.drafts()} == {20: {20: "process"}, 21: {21: "process"}}


def test_subshells_of_a_script_do_not_make_one_job_of_its_programs() -> None:
    table = Table().add(10, 1, "bash all.sh").add(11, 10, "bash all.sh").add(12, 10, "bash all.sh").add(13, 10, "bash all.sh")
    table.add(20, 11, TRAIN, gpu=True).add(21, 12, "python other.py", gpu=True).add(22, 13, "sleep 9")
    assert {job.leader: job.roles for job in table.drafts()} == {20: {20: "process"}, 21: {21: "process"}}


def test_a_shell_between_a_launcher_and_its_ranks() -> None:
    table = Table().add(10, 1, "mpirun -np 2 bash run.sh").add(11, 10, "bash run.sh").add(12, 10, "bash run.sh")
    table.add(20, 11, TRAIN, gpu=True, OMPI_COMM_WORLD_RANK="0").add(21, 12, TRAIN, gpu=True, OMPI_COMM_WORLD_RANK="1")
    assert table.only().leader == 10


def test_a_program_that_forks_its_ranks() -> None:
    table = Table().add(10, 1, TRAIN).add(11, 10, SPAWNED, gpu=True).add(12, 10, SPAWNED, gpu=True).add(13, 10, TRACKER)
    job = table.only()
    assert job.leader == 10
    assert job.counts == {"launcher": 1, "rank": 2, "process": 1}


def test_workers_of_a_fork_server() -> None:
    table = Table().add(10, 1, TRAIN, gpu=True).add(11, 10, FORK_SERVER).add(12, 11, FORK_SERVER).add(13, 11, FORK_SERVER)
    assert table.only().counts == {"process": 2, "loader worker": 2}


def test_a_notebook_that_computes_leads_itself_but_not_what_is_started_from_it() -> None:
    kernel = "/venv/bin/python -m ipykernel_launcher -f k.json"
    table = Table().add(10, 1, kernel, gpu=True).add(11, 10, kernel).add(12, 10, "sh -c x").add(13, 12, TRAIN, gpu=True)
    assert {job.leader: set(job.pids) for job in table.drafts()} == {10: {10, 11, 12}, 13: {13}}


def test_gpu_processes_that_a_training_program_starts_belong_to_it() -> None:
    table = (
        Table().add(10, 1, TRAIN, gpu=True, RANK="0").add(11, 10, "sh -c x").add(12, 11, "python eval.py", gpu=True, RANK="0")
    )
    job = table.only()
    assert (job.leader, job.roles[12]) == (10, "process")


def test_another_users_launcher_does_not_lead() -> None:
    table = Table().add(10, 1, "mpirun x", uid=0).add(20, 10, TRAIN, gpu=True)
    assert table.only().leader == 20


def test_a_run_holds_together_by_its_marker() -> None:
    """The launcher of the first rank has died, the second rank is in another session, a worker is
    an orphan."""
    run = ("/runs/a", 2)
    table = Table().add(9, 1, "python shim.py").add(10, 9, "bash train.sh", run=run, session=10)
    table.add(11, 10, TRAIN, gpu=True, run=run, session=10).add(12, 1, TRAIN, gpu=True, run=run, session=12)
    table.add(13, 1, TRAIN, comm="pt_data_worker", session=10)
    job = table.only()
    assert (job.leader, set(job.pids), job.run) == (10, {10, 11, 12, 13}, run)


def test_attempts_of_a_run_are_separate_jobs() -> None:
    table = Table().add(10, 1, TRAIN, gpu=True, run=("/runs/a", 1)).add(11, 1, TRAIN, gpu=True, run=("/runs/a", 2))
    assert [job.run for job in table.drafts()] == [("/runs/a", 1), ("/runs/a", 2)]


def test_a_slurm_step_of_several_tasks() -> None:
    table = Table().add(10, 1, "slurmstepd: [7.0]", uid=0)
    for rank in range(3):
        step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "3", "SLURM_PROCID": str(rank)}
        table.add(20 + rank, 10, TRAIN, gpu=True, **step)
    job = table.only()
    assert (job.key, job.roles) == ("slurm 7.0", {20: "rank 0", 21: "rank 1", 22: "rank 2"})


def test_programs_in_an_interactive_allocation_are_separate_jobs() -> None:
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "3", "SLURM_PROCID": "0", "SLURM_PTY_PORT": "9"}
    table = Table().add(10, 1, "bash").add(20, 10, TRAIN, gpu=True, **step).add(21, 10, TRAIN, gpu=True, **step)
    assert [job.roles for job in table.drafts()] == [{20: "process"}, {21: "process"}]


def test_servers_that_name_their_own_parts() -> None:
    table = (
        Table().add(10, 1, "/venv/bin/python /venv/bin/vllm serve m").add(11, 10, ("VLLM::EngineCore",), comm="VLLM::EngineCor")
    )
    table.add(12, 11, ("VLLM::Worker_TP0",), gpu=True, comm="VLLM::Worker_TP")
    table.add(13, 11, ("VLLM::Worker_TP1",), gpu=True, comm="VLLM::Worker_TP")
    table.add(30, 1, "/ray/raylet").add(31, 30, ("ray::Trainer.train",), gpu=True, comm="ray::Trainer.tr")
    first, second = table.drafts()
    assert first.roles[12] == "worker TP0"
    assert second.roles == {30: "launcher", 31: "ray worker"}
    assert 13 in first.pids, "both workers are one job"


def test_a_zombie_is_no_member_and_a_circle_ends() -> None:
    table = Table().add(10, 12, TRAIN, gpu=True).add(11, 10, TRAIN, dead=True).add(12, 10, TRAIN)
    assert set(table.only().pids) == {10, 12}


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (TRAIN, "train.py"),
        ("python -m memtop.train --settings x", "memtop.train"),
        ("python -c pass", "python"),
        ("/opt/bin/llama-server -m x", "llama-server"),
    ],
)
def test_names(command: str, name: str) -> None:
    assert job_name(tuple(command.split()), "comm") == name
