"""Names of containers, pods and batch jobs from the cgroup paths of real machines."""

from __future__ import annotations

import pytest

from memtop.supervisor.monitor.processes.facts import container_of

ID = "3f2a9c1b7d10" + "e5" * 26
UID = "0f6c1a52-77aa-4a0e-9d3b-2f1e5d0c9b8a"
LOW = UID.replace("-", "_")

SAMPLES = [
    (f"12:memory:/docker/{ID}\n1:name=systemd:/docker/{ID}", "docker 3f2a9c1b7d10"),
    (f"0::/system.slice/docker-{ID}.scope", "docker 3f2a9c1b7d10"),
    (f"0::/system.slice/docker-{ID}.scope/init.scope", "docker 3f2a9c1b7d10"),
    (f"0::/user.slice/user-1000.slice/user@1000.service/user.slice/docker-{ID}.scope", "docker 3f2a9c1b7d10"),
    (f"0::/docker/{'0' * 64}/docker/{ID}", "docker 3f2a9c1b7d10"),
    (f"0::/machine.slice/libpod-{ID}.scope/container", "podman 3f2a9c1b7d10"),
    (f"0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope", "podman 3f2a9c1b7d10"),
    (f"4:memory:/libpod_parent/libpod-{ID}", "podman 3f2a9c1b7d10"),
    (f"0::/system.slice/nerdctl-{ID}.scope", "containerd 3f2a9c1b7d10"),
    (f"0::/default/{ID}", "container 3f2a9c1b7d10"),
    (f"9:cpuset:/ecs/4f0f3c1d/{'a1' * 16}-1234567890", f"ecs {'a1' * 6}"),
    (f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{LOW}.slice/cri-containerd-{ID}.scope", f"pod {UID}"),
    (f"11:memory:/kubepods/besteffort/pod{UID}/{ID}", f"pod {UID}"),
    (f"0::/kubepods.slice/kubepods-pod{LOW}.slice/crio-{ID}.scope/container", f"pod {UID}"),
    (f"3:pids:/system.slice/containerd.service/kubepods-burstable-pod{LOW}.slice:cri-containerd:{ID}", f"pod {UID}"),
    (f"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{LOW}.slice/cri-containerd-{ID}.scope", f"pod {UID}"),
    ("0::/lxc.payload.build-1/user.slice", "lxc build-1"),
    ("5:memory:/lxc/101/ns", "lxc 101"),
    ("0::/machine.slice/systemd-nspawn@dev.service/payload", "nspawn dev"),
    (r"0::/machine.slice/machine-my\x2dbox.scope", "machine my-box"),
    ("8:memory:/slurm/uid_1000/job_4711/step_0/task_1", "slurm job 4711 step 0"),
    ("0::/system.slice/slurmstepd.scope/job_4711/step_batch/user/task_0", "slurm job 4711 step batch"),
    ("0::/user.slice/user-1000.slice/session-3.scope", None),
    ("0::/system.slice/ssh.service", None),
    ("0::/../../job_12", None),
    ("0::/user.slice/podcast.service", None),
    ("0::/", None),
    ("", None),
]


@pytest.mark.parametrize(("cgroup", "name"), SAMPLES)
def test_from_the_path_alone(cgroup: str, name: str | None) -> None:
    assert container_of(cgroup, {}, "node1") == name


POD_PATH = f"0::/kubepods.slice/kubepods-pod{LOW}.slice/cri-containerd-{ID}.scope"


@pytest.mark.parametrize(
    ("cgroup", "marks", "name"),
    [
        (POD_PATH, {"HOSTNAME": "qwen-0"}, "pod qwen-0"),
        (POD_PATH, {"HOSTNAME": "node1"}, f"pod {UID}"),
        (POD_PATH, {"HOSTNAME": "node1", "POD_NAME": "qwen-1", "POD_NAMESPACE": "training"}, "pod training/qwen-1"),
        (f"0::/system.slice/docker-{ID}.scope", {"HOSTNAME": "3f2a9c1b7d10"}, "docker 3f2a9c1b7d10"),
        (
            "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0",
            {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "sft"},
            "slurm job 7 (sft) step 0",
        ),
        # A program started from another job's shell inherits that job's name.
        (
            "0::/system.slice/slurmstepd.scope/job_7/step_0",
            {"SLURM_JOB_ID": "6", "SLURM_JOB_NAME": "old"},
            "slurm job 7 step 0",
        ),
        ("0::/user.slice", {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "sft", "SLURM_STEP_ID": "0"}, "slurm job 7 (sft) step 0"),
        ("0::/user.slice", {"APPTAINER_NAME": "torch.sif", "SLURM_JOB_ID": "7"}, "apptainer torch.sif"),
    ],
)
def test_with_the_environment(cgroup: str, marks: dict[str, str], name: str) -> None:
    assert container_of(cgroup, marks, "node1") == name
