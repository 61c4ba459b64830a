"""Advice fits the place: for each environment one wording of a failure, what is offered there, and
what is not."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from memtop.supervisor.diagnosis.diagnose import diagnose
from memtop.supervisor.diagnosis.environment import MANAGED, Place, of_process, together
from memtop.supervisor.diagnosis.values import Evidence, Kind
from memtop.supervisor.recovery.advice import About, advice, table
from memtop.supervisor.recovery.external import ExternalCommand, remedies_for_command
from memtop.supervisor.recovery.situation import HostFacts
from memtop.supervisor.recovery.values import Snippet
from memtop.tui.line import wrap
from tests.diagnosis import logs
from tests.recovery.support import GIB, died, gib, ids, words

FULL = (
    "out of memory. Tried to allocate 1.12 GiB. GPU 0 has a total capacity of 19.98 GiB of which 32.00 MiB is free. "
    "Of the allocated memory 18.09 GiB is allocated by PyTorch, and 143.00 MiB is reserved by PyTorch but unallocated."
)
TORCH = (
    'Traceback (most recent call last):\n  File "{file}", line 9, in <module>\n    loss.backward()\ntorch.OutOfMemoryError: '
)
LLAMA = (
    "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 9216.00 MiB on device 0: cudaMalloc failed: out of memory\n"
    "llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache\n"
)
KILLED_BY_KERNEL = "Memory cgroup out of memory: Killed process 30211 (python) total-vm:1182203kB, anon-rss:43230644kB\n"
MACHINE_FULL = KILLED_BY_KERNEL.replace("Memory cgroup out of", "Out of")
KUBEPODS = "oom-kill:constraint=CONSTRAINT_MEMCG,oom_memcg=/kubepods/burstable/pod7,task=python,pid=30211,uid=0\n"
DOCKER = "oom-kill:constraint=CONSTRAINT_MEMCG,oom_memcg=/docker/6c1f,task=python,pid=30211,uid=0\n"

# The text of the log; the environment; what the commands and titles contain; what they do not.
CASES: dict[str, tuple[str, set[Place], tuple[str, ...], tuple[str, ...]]] = {
    "cuda": (
        TORCH.format(file="/home/me/train.py") + "CUDA " + FULL,
        {Place.CUDA, Place.PYTORCH},
        ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "half the batch"),
        ("HIP", "MPS"),
    ),
    "rocm": (
        TORCH.format(file="/home/me/train.py") + "HIP " + FULL + " If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.",
        {Place.ROCM, Place.PYTORCH},
        ("PYTORCH_HIP_ALLOC_CONF=", "half the batch"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable"),
    ),
    "mps": (
        "RuntimeError: MPS backend out of memory (MPS allocated: 14.29 GiB, other allocations: 3.65 GiB, max allowed: "
        "20.13 GiB). Tried to allocate 2.67 GiB on shared pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper "
        "limit for memory allocations (may cause system failure).",
        {Place.MPS, Place.PYTORCH, Place.MACOS},
        ("PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0", "half the batch"),
        ("ALLOC_CONF", "ZeRO", "memtop strays"),
    ),
    "xpu": (
        TORCH.format(file="/home/me/train.py") + "XPU " + FULL,
        {Place.XPU, Place.PYTORCH},
        ("half the batch",),
        ("ALLOC_CONF", "RELAXED"),
    ),
    "xpu with room": (
        "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 15.11 GiB of "
        "which 12.40 GiB is free. Of the allocated memory 2.29 GiB is allocated by PyTorch, and 1.00 MiB is reserved by "
        "PyTorch but unallocated.",
        {Place.XPU, Place.PYTORCH},
        ("UR_L0_ENABLE_RELAXED_ALLOCATION_LIMITS=1",),
        ("half the batch", "ALLOC_CONF"),
    ),
    "npu": (
        "RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 29.50 GiB total capacity; 26.91 GiB already "
        "allocated; 26.91 GiB current active; 1.20 GiB free; 27.30 GiB reserved in total by PyTorch)",
        {Place.NPU, Place.PYTORCH},
        ("PYTORCH_NPU_ALLOC_CONF=expandable_segments:True", "half the batch"),
        ("PYTORCH_CUDA",),
    ),
    "tpu": (
        "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. "
        "Used 19.59G of 15.48G hbm. Exceeded hbm capacity by 4.10G.",
        {Place.TPU, Place.JAX},
        ("half the batch", "jax.checkpoint", "more TPU cores"),
        ("ALLOC_CONF", "XLA_", "ZeRO", "LoRA"),
    ),
    "jax": (
        "2026-01-03 W external/xla/xla/tsl/framework/bfc_allocator.cc:497] Allocator (GPU_0_bfc) ran out of memory trying to "
        "allocate 19.59GiB\njaxlib._jax.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate "
        "21034434560 bytes.",
        {Place.JAX},
        ("XLA_PYTHON_CLIENT_MEM_FRACTION=.95", "XLA_PYTHON_CLIENT_PREALLOCATE=false", "half the batch"),
        ("XLA_CLIENT_MEM_FRACTION=", "ALLOC_CONF", "ZeRO", "LoRA"),
    ),
    "tensorflow": (
        "tensorflow.python.framework.errors_impl.ResourceExhaustedError: OOM when allocating tensor with "
        "shape[64,512,512,64] and type float on /job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc",
        {Place.TENSORFLOW},
        ("TF_GPU_ALLOCATOR=cuda_malloc_async", "TF_FORCE_GPU_ALLOW_GROWTH=true", "half the batch"),
        ("ALLOC_CONF", "ZeRO"),
    ),
    "vllm": (
        'Traceback (most recent call last):\n  File "/venv/lib/python3.12/site-packages/vllm/v1/worker/gpu_worker.py", line '
        "271, in determine_available_memory\n    self.model_runner.profile_run()\ntorch.OutOfMemoryError: CUDA " + FULL,
        {Place.CUDA, Place.VLLM},
        ("--gpu-memory-utilization 0.8", "--max-model-len", "--max-num-seqs"),
        ("half the batch", "accumulation", "ALLOC_CONF", "gradient"),
    ),
    "sglang": (
        'Traceback (most recent call last):\n  File "/venv/lib/python3.12/site-packages/sglang/srt/managers/scheduler.py", '
        "line 271, in event_loop\n    self.run_batch(batch)\ntorch.OutOfMemoryError: CUDA " + FULL,
        {Place.CUDA, Place.SGLANG},
        ("--mem-fraction-static 0.7", "--chunked-prefill-size", "--max-running-requests"),
        ("half the batch", "ALLOC_CONF", "vLLM"),
    ),
    "llama.cpp": (
        LLAMA,
        {Place.CUDA, Place.LLAMA_CPP},
        ("--ctx-size", "-ngl", "--cache-type-k q8_0"),
        ("half the batch", "ALLOC_CONF", "num_ctx", "gradient"),
    ),
    "ollama": (
        'time=2026-02-02T10:00:00.000Z level=INFO source=server.go:110 msg="starting runner" cmd=/usr/bin/ollama\n' + LLAMA,
        {Place.CUDA, Place.OLLAMA},
        ("OLLAMA_CONTEXT_LENGTH", "/set parameter num_gpu", "OLLAMA_KV_CACHE_TYPE=q8_0"),
        ("export", "half the batch", "ALLOC_CONF", "--ctx-size"),
    ),
    "unknown program": (
        "Error: CUDA out of memory.\nrender: not enough GPU memory to continue",
        {Place.CUDA},
        ("smaller pieces", "a smaller model", "nvidia-smi"),
        ("ALLOC_CONF", "ZeRO", "LoRA", "half the batch", "gradient", "512 tokens"),
    ),
    "windows gpu": (
        TORCH.format(file="C:\\Users\\me\\train.py") + "CUDA " + FULL,
        {Place.CUDA, Place.PYTORCH, Place.WINDOWS},
        ("in cmd.exe: set PYTORCH_CUDA_ALLOC_CONF=", "in PowerShell: $env:PYTORCH_CUDA_ALLOC_CONF = '", "half the batch"),
        ("export", "expandable"),
    ),
    "windows host": (
        'Traceback (most recent call last):\n  File "C:\\Users\\me\\train.py", line 1, in <module>\n    import torch\n'
        "OSError: [WinError 1455] The paging file is too small for this operation to complete.",
        {Place.WINDOWS},
        ("a larger paging file",),
        ("sudo", "ulimit", "docker"),
    ),
    "wsl host": (
        'Linux 5.15.167.4-microsoft-standard-WSL2\nTraceback (most recent call last):\n  File "/home/me/load.py", line 3, in '
        "<module>\nnumpy._core._exceptions._ArrayMemoryError: Unable to allocate 11.4 GiB for an array with shape (3, 4)",
        {Place.WSL},
        ("in %UserProfile%\\.wslconfig: memory=24GB", "\nwsl --shutdown"),
        ("sudo", "docker"),
    ),
    "macos host": (
        'Traceback (most recent call last):\n  File "/Users/me/load.py", line 3, in <module>\nMemoryError',
        {Place.MACOS},
        ("data read in pieces",),
        ("sudo", "docker", "ulimit"),
    ),
    "slurm": (
        "slurmstepd: error: Detected 1 oom_kill event in StepId=3801897.batch. Some of the step tasks have been OOM Killed.",
        {Place.SLURM},
        ("sbatch --mem=", "--mem-per-cpu", "sacct"),
        ("sudo", "num_workers", "docker"),
    ),
    "slurm, pytorch": (
        'File "/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 1133\n'
        "slurmstepd: error: Detected 1 oom_kill event in StepId=3801897.batch. Some of the step tasks have been OOM Killed.",
        {Place.SLURM, Place.PYTORCH},
        ("sbatch --mem=", "num_workers 0"),
        ("sudo", "docker"),
    ),
    "pbs": (
        "=>> PBS: job killed: mem 34034000kb exceeded limit 33554432kb\n" + KILLED_BY_KERNEL,
        {Place.PBS},
        ("qsub -l select=1:ncpus=8:mem=", "vmem="),
        ("sudo", "sbatch", "num_workers"),
    ),
    "sge": (
        "SGE_TASK_ID=3\n" + KILLED_BY_KERNEL,
        {Place.SGE},
        ("qsub -l h_vmem=",),
        ("sudo", "sbatch", "num_workers"),
    ),
    "lsf": (
        "TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.\nExited with exit code 137.",
        {Place.LSF},
        ("bsub -M", "rusage[mem="),
        ("sudo", "sbatch", "num_workers"),
    ),
    "htcondor": (
        "Job was evicted. Job has gone over memory limit of 2048 megabytes. Peak usage: 2059 megabytes.\n" + KILLED_BY_KERNEL,
        {Place.HTCONDOR},
        ("in the submit file: request_memory = 3GB",),
        ("sudo", "num_workers"),
    ),
    "yarn": (
        "ERROR YarnScheduler: Lost executor 3: Container killed by YARN for exceeding memory limits. 5.5 GB of 5.5 GB "
        "physical memory used.",
        {Place.YARN},
        ("spark.executor.memoryOverhead",),
        ("sudo", "num_workers", "docker"),
    ),
    "dask": (
        "distributed.nanny.memory - WARNING - Worker tcp://1:2 (pid=3) exceeded 95% memory budget. Restarting...",
        {Place.DASK},
        ("memory_limit=",),
        ("sudo", "num_workers"),
    ),
    "kubernetes": (
        "    Last State:     Terminated\n      Reason:       OOMKilled\n      Exit Code:    137\n",
        {Place.KUBERNETES},
        ("resources.limits.memory", "kubectl describe pod"),
        ("sudo", "num_workers", "docker"),
    ),
    "kubernetes, kernel": (KUBEPODS + KILLED_BY_KERNEL, {Place.KUBERNETES}, ("resources.limits.memory",), ("sudo", "docker")),
    "kubernetes shm": (
        'File "/opt/app/torch/multiprocessing/reductions.py", line 2\nKUBERNETES_SERVICE_HOST=10.0.0.1\n'
        "RuntimeError: unable to write to file </torch_41_9>: No space left on device (28)",
        {Place.KUBERNETES, Place.PYTORCH},
        ("medium: Memory", "mountPath: /dev/shm", "num_workers 0"),
        ("sudo", "docker", "--shm-size"),
    ),
    "slurm shm": (
        "SLURM_JOB_ID=7\nRuntimeError: unable to write to file </torch_41_9>: No space left on device (28)",
        {Place.SLURM},
        ("num_workers 0",),
        ("sudo", "docker"),
    ),
    "docker": (DOCKER + KILLED_BY_KERNEL, {Place.DOCKER}, ("docker run --memory",), ("sudo", "sbatch")),
    "docker shm": (
        "docker run --gpus all image python train.py\n"
        "RuntimeError: DataLoader worker (pid 1219) is killed by signal: Bus error. It is possible that dataloader's workers "
        "are out of shared memory. Please try to raise your shared memory limit.",
        {Place.DOCKER, Place.PYTORCH},
        ("--shm-size", "num_workers 0"),
        ("sudo",),
    ),
    "ray": (
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\nMemory on the node (IP: "
        "172.17.0.2) was 32.62GB / 33.28GB (0.980175), which exceeds the memory usage threshold of 0.96.",
        {Place.RAY},
        ("num_cpus=4", "RAY_memory_usage_threshold", "--object-store-memory"),
        ("sudo", "num_workers", "docker"),
    ),
    "kaggle": (
        'File "/kaggle/src/script.py", line 3, in <module>\n' + KILLED_BY_KERNEL,
        {Place.KAGGLE},
        ("a machine with more memory",),
        ("sudo", "docker", "num_workers"),
    ),
    "colab": (
        'File "/content/train.py", line 3, in <module>\n' + KILLED_BY_KERNEL,
        {Place.COLAB},
        ("a machine with more memory",),
        ("sudo", "docker", "num_workers"),
    ),
    "cgroup": (KILLED_BY_KERNEL, {Place.CGROUP}, ("MemoryMax=MORE_THAN_NOW", "fallocate"), ("num_workers",)),
    "plain linux": (
        MACHINE_FULL,
        set(),
        ("fallocate", "fewer processes at once"),
        ("sbatch", "kubectl", "paging", "num_workers"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_advice_of_each_environment(name: str) -> None:
    text, environment, offered, absent = CASES[name]
    found = logs.of(text)
    assert set(found.environment) == environment
    said = words(remedies_for_command(found))
    assert [part for part in offered if part not in said] == []
    assert [part for part in absent if part in said] == []


# What a piece of advice says, and the places of which one must be known for it.
NEEDS: dict[str, set[Place]] = {
    "PYTORCH_": {Place.PYTORCH},
    "ZeRO": {Place.PYTORCH},
    "PYTORCH_CUDA_ALLOC_CONF": {Place.CUDA, Place.PYTORCH},
    "PYTORCH_HIP_ALLOC_CONF": {Place.ROCM},
    "PYTORCH_MPS_": {Place.MPS},
    "XLA_": {Place.JAX},
    "TF_": {Place.TENSORFLOW},
    "vllm": {Place.VLLM},
    "sglang": {Place.SGLANG},
    "sacct": {Place.SLURM},
    "qsub": {Place.PBS, Place.SGE},
    "bsub": {Place.LSF},
    "kubectl": {Place.KUBERNETES},
    "nvidia-smi": {Place.CUDA, Place.WINDOWS},
    "rocm-smi": {Place.ROCM},
}
UNFIT = {"sudo": {*MANAGED, Place.WINDOWS, Place.MACOS}, "export": {Place.WINDOWS}, "ulimit": {Place.WINDOWS, Place.MACOS}}


def test_no_known_log_gets_advice_of_another_environment() -> None:
    known = [*logs.read("failure_logs.jsonl"), *logs.read("more_logs.jsonl")]
    others = (logs.DATA / "other_programs.jsonl").read_bytes().splitlines()
    texts = [(log.id, log.data, log.exit_code) for log in known]
    texts += [(text[:60], text.encode(), None) for text in (msgspec.json.decode(row)["text"] for row in others)]
    for name, data, exit_code in texts:
        found = diagnose([data], Evidence(exit_status=exit_code))
        here, said = set(found.environment), words(remedies_for_command(found))
        assert [part for part, places in NEEDS.items() if part in said and not here & places] == [], name
        assert [part for part, places in UNFIT.items() if part in said and here & places] == [], name
        if (found.requested_bytes or 0) > (found.total_bytes or 1 << 60):
            assert "half the batch" not in said, name


@pytest.mark.parametrize("device", [Place.CUDA, Place.ROCM, Place.NPU, Place.MPS])
@pytest.mark.parametrize("system", [Place.WINDOWS, Place.MACOS])
def test_variables_of_pytorch_need_pytorch_and_are_set_as_the_system_does(device: Place, system: Place) -> None:
    assert [*advice("allocator", (device, system))] == []
    said = words(tuple(advice("allocator", (device, Place.PYTORCH, system))))
    assert ("export" not in said) is (system is Place.WINDOWS or not said)
    assert ("$env:PYTORCH_" in said) is (system is Place.WINDOWS)


NEAR_MISSES = (
    "OUTPUT_DIR=/runs INPUT_DIR=/data timestamps: 0 clamps:0 PROC_API_ERROR=0 RelationshipError Ascending order",
    "SIZE_RESULT ok, ARRAY_memory MESSAGE_JOB done, Tests run: 5, errors: 0, array::view",
    "supports Linux, macOS and Windows; see docs/docker/README.md and /srv/docker/compose",
    "loading Qwen/Qwen2.5-7B-Instruct, learning_rate: 1e-6, 2025-11-07 04:11:39",
)


def test_ordinary_words_are_no_sign_of_an_environment() -> None:
    for line in NEAR_MISSES:
        assert logs.of(f"{line}\nOut of memory: Killed process 7 (python) total-vm:9kB").environment == (), line


def test_what_served_a_model_before_is_not_what_failed() -> None:
    served = "INFO 01-02 [vllm/engine/llm_engine.py:12] vLLM engine started with gpu_memory_utilization=0.4\n"
    trained = served * 40 + TORCH.format(file="/app/verl/workers/actor.py") + "CUDA " + FULL
    assert logs.of(trained).environment == (Place.CUDA, Place.PYTORCH)


def test_a_request_that_hardly_any_machine_can_hold_is_a_wrong_size() -> None:
    text = "numpy._core._exceptions._ArrayMemoryError: Unable to allocate {} for an array with shape (3, 4)"
    assert ids(remedies_for_command(logs.of(text.format("11.4 TiB")))) == ["one_request"]
    assert "swap" in ids(remedies_for_command(logs.of(text.format("11.4 GiB"))))


@pytest.mark.parametrize(
    ("environment", "command"),
    [
        ((Place.CUDA, Place.PYTORCH), "memtop strays"),
        ((Place.ROCM, Place.PYTORCH), "rocm-smi --showpids"),
        ((Place.NPU, Place.PYTORCH), "npu-smi info"),
        ((Place.CUDA, Place.WINDOWS), "nvidia-smi"),
    ],
)
def test_other_processes_are_listed_by_the_tool_of_the_device(environment: tuple[Place, ...], command: str) -> None:
    fields = {"other_process_bytes": gib(12), "other_process_pids": (7,), "environment": environment}
    first = remedies_for_command(died(Kind.GPU_OOM_OTHER_PROCESS, **fields))[0]
    assert first.command == command
    assert first.title.endswith("they hold 12.0 GiB (pid 7)")


# --- what memtop itself knows ---------------------------------------------------------------------


def test_the_environment_of_a_run_of_memtop() -> None:
    assert of_process({"SLURM_JOB_ID": "7", "PATH": "/bin"}, "6.1.0-generic", in_container=False) == (Place.SLURM,)
    assert of_process({"PBS_JOBID": ""}, "5.15.167.4-microsoft-standard-WSL2", in_container=False) == (Place.WSL,)
    assert of_process({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "6.1.0", in_container=True) == (Place.KUBERNETES,)
    assert of_process({"COLAB_RELEASE_TAG": "x"}, "6.1.0", in_container=True) == (Place.COLAB,)
    assert of_process({}, "6.1.0", in_container=True) == (Place.DOCKER,)
    assert together((Place.WSL, Place.WINDOWS, Place.CUDA, Place.CUDA)) == (Place.CUDA, Place.WSL)


def test_a_limit_of_the_address_space_or_of_a_scheduler_comes_first_and_others_last() -> None:
    seen = ExternalCommand(command=("python", "t.py"), host=HostFacts(limit_bytes=GIB, in_cgroup=True))
    refused = died(Kind.HOST_OOM_ALLOC)
    for places, expected in (
        ((Place.SLURM,), ["memory_limit", "host_level"]),
        ((Place.DOCKER,), ["host_level", "memory_limit"]),
        ((), ["host_level", "memory_limit", "swap"]),
    ):
        assert ids(remedies_for_command(replace(refused, environment=places), seen)) == expected
        limited = replace(refused, environment=places, address_space_bytes=GIB)
        assert ids(remedies_for_command(limited, seen)) == ["address_space", "host_level"]


def test_a_container_has_a_limit_only_if_one_was_measured() -> None:
    killed = died(Kind.HOST_OOM_KILLED, environment=(Place.DOCKER,))
    for in_cgroup in (True, False):
        known = ExternalCommand(command=("python", "t.py"), host=HostFacts(limit_bytes=GIB, in_cgroup=in_cgroup))
        assert ("memory_limit" in ids(remedies_for_command(killed, known))) is in_cgroup


@pytest.mark.parametrize("place", sorted(MANAGED - {Place.DOCKER}))
def test_managers_of_jobs_start_the_container_themselves(place: Place) -> None:
    assert "docker run" not in words(tuple(advice("shm", (place,))))


def test_macos_has_no_limit_of_the_address_space_to_lift() -> None:
    assert [*advice("address_space", (Place.MACOS,))] == []


def test_layers_on_the_cpu_in_8_bits_change_the_results() -> None:
    (offload,) = (one for one in advice("budget", (Place.CUDA, Place.PYTORCH)) if one.id == "cpu_offload")
    assert not offload.keeps_math


@pytest.mark.parametrize(("about", "resource"), [("limit", "memory"), ("disk", "ephemeral-storage")])
def test_a_limit_of_a_pod_is_written_into_the_manifest_of_its_job(about: About, resource: str) -> None:
    first = next(advice(about, (Place.KUBERNETES,)))
    assert first.writes[0] == Snippet("the Job's manifest", f"resources.limits.{resource}: MORE_THAN_NOW")
    assert "kubectl set" not in "".join(first.instructions)


def test_a_heap_is_enlarged_as_the_system_sets_variables() -> None:
    for environment, command in (((), "export JAVA_"), ((Place.WINDOWS,), "in cmd.exe: set JAVA_")):
        (only,) = remedies_for_command(died(Kind.HOST_OOM_ALLOC, reason="java_heap", environment=environment))
        assert next(only.instructions).startswith(command)


# --- the table ------------------------------------------------------------------------------------


def test_every_place_has_at_most_one_piece_of_advice_of_a_name() -> None:
    for place in Place:
        for about in {one.about for one in table()}:
            found = [one.id for one in advice(about, (place,))]
            assert len(found) == len(set(found)), (place, about)


def test_everything_in_the_table_can_be_offered_and_fits_the_recovery_screen() -> None:
    for one in table():
        assert one.fits((*one.places, *one.needs)), one.title
        assert bool(one.lines) is bool(one.file), one.title
        assert len(wrap(one.title, 67)) == 1, one.title
        assert len(wrap(one.why, 72)) <= 2, one.why
        assert [*one.remedy(one.places).to_type] or one.why, one.title
