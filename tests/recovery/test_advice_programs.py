"""Advice is worded for the program that failed: nothing about training where nothing is trained,
nothing that the program does not have."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from memtop.supervisor.diagnosis.environment import PROGRAMS, Place
from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.recovery.advice import advice
from memtop.supervisor.recovery.external import MEMORY_BUDGET, ExternalCommand, remedies_for_command
from memtop.supervisor.recovery.situation import HostFacts
from memtop.supervisor.recovery.values import Remedy
from tests.diagnosis import logs
from tests.recovery.support import GIB, died, gib, ids, words

TRAINING = ("accumulation", "gradient checkpointing", "fused loss", "LoRA", "512 tokens", "ALLOC_CONF", "num_workers", "ZeRO")
CUDA_FULL = (
    "CUDA out of memory. Tried to allocate 1.12 GiB. GPU 0 has a total capacity of 19.98 GiB of which 32.00 MiB is free. "
    "Of the allocated memory 19.09 GiB is allocated by PyTorch, and 43.00 MiB is reserved by PyTorch but unallocated."
)


def traceback(file: str, message: str) -> str:
    return f'Traceback (most recent call last):\n  File "{file}", line 7, in run\n    x = step(x)\n{message}\n'


TORCH = "torch.OutOfMemoryError: " + CUDA_FULL
ARRAY = "numpy._core._exceptions._ArrayMemoryError: Unable to allocate {} for an array with shape (7, 9)"

# The text of the log; places that it shows; the first remedy; what is said; what is not, besides
# words about training.
CASES: dict[str, tuple[str, set[Place], str, tuple[str, ...], tuple[str, ...]]] = {
    "comfyui": (traceback("/opt/ComfyUI/nodes.py", TORCH), {Place.COMFYUI}, "tiles", ("--lowvram",), ("batch 1",)),
    "webui": (
        traceback("/opt/stable-diffusion-webui/modules/processing.py", TORCH),
        {Place.WEBUI},
        "tiles",
        ("--medvram",),
        ("ComfyUI",),
    ),
    "invokeai": (
        traceback("/venv/site-packages/invokeai/app/run.py", TORCH),
        {Place.INVOKEAI},
        "tiles",
        ("invokeai.yaml: enable_partial_loading: true",),
        ("--lowvram",),
    ),
    "inference": (
        traceback("/venv/site-packages/transformers/generation/utils.py", TORCH),
        {Place.PYTORCH, Place.INFERENCE},
        "smaller_inputs",
        ("nothing is trained", "device_map='auto'", "expandable_segments"),
        (),
    ),
    "whisper.cpp": (
        "whisper_init_state: compute buffer\nggml_backend_cuda_buffer_type_alloc_buffer: allocating 913.00 MiB on device 0: "
        "cudaMalloc failed: out of memory\n",
        {Place.WHISPER_CPP},
        "smaller_model",
        ("whisper-cli",),
        ("--ctx-size", "llama"),
    ),
    "ctranslate2": (
        traceback("/venv/site-packages/faster_whisper/transcribe.py", "RuntimeError: CUDA failed with error out of memory"),
        {Place.CTRANSLATE2},
        "quantised",
        ("compute_type='int8_float16'",),
        (),
    ),
    "tensorrt": (
        "[TRT] [E] 1: [defaultAllocator.cpp::allocate::19] Error Code 1: Cuda Runtime (out of memory)\n"
        "[TRT] [W] Requested amount of GPU memory (2887181312 bytes) could not be allocated. There may not be enough free "
        "memory for allocation to succeed.\n",
        {Place.TENSORRT},
        "smaller_inputs",
        ("--maxShapes=", "--memPoolSize=workspace:"),
        ("half the batch",),
    ),
    "xgboost": (
        "xgboost.core.XGBoostError: [10:00:00] device_helpers.cuh:414: Memory allocation error on worker 0: std::bad_alloc: "
        "cudaErrorMemoryAllocation: out of memory\n- Free memory: 8388608\n- Requested memory: 33554432\n",
        {Place.XGBOOST},
        "data_matrix",
        ("QuantileDMatrix", "'max_bin'"),
        ("batch",),
    ),
    "catboost": (
        "(NCudaLib::TOutOfMemoryError) catboost/cuda/cuda_lib/memory_pool/stack_like_memory_pool.h:303: Error: Out of memory. "
        "Requested 7110 MB; Free 5120.5 MB\n",
        {Place.CATBOOST},
        "smaller_trees",
        ("border_count=32", "CpuPinnedMemory"),
        ("batch",),
    ),
    "paddle": (
        "ResourceExhaustedError: Out of memory error on GPU 0. Cannot allocate 2.500000GB memory on GPU 0, available memory is "
        "only 96.000000MB.\nPlease check whether there is any other process using GPU 0.\n"
        "1. If yes, please stop them, or start PaddlePaddle on another GPU.\n",
        {Place.PADDLE},
        "smaller_batch",
        ("FLAGS_allocator_strategy=auto_growth",),
        (),
    ),
    "cupy": (
        traceback("cupy/cuda/memory.pyx", "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 900 bytes"),
        {Place.CUPY},
        "managed_memory",
        ("free_all_blocks()",),
        ("batch",),
    ),
    "chainer on cupy": (
        "import chainer\n"
        + traceback("cupy/cuda/memory.pyx", "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 900 bytes"),
        {Place.CHAINER},
        "free_pool",
        ("a smaller batch",),
        ("malloc_managed",),
    ),
    "caffe": (
        "F0101 10:00:00.000000 77 syncedmem.cpp:56] Check failed: error == cudaSuccess (2 vs. 0)  out of memory\n",
        {Place.CAFFE},
        "smaller_batch",
        ("iter_size",),
        (),
    ),
    "opencl": (
        "Allocation of the table failed: Memory object allocation failure\nGPU 0: CL_MEM_OBJECT_ALLOCATION_FAILURE\n",
        {Place.OPENCL},
        "smaller_inputs",
        ("smaller pieces",),
        ("half the batch", "nvidia-smi"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_advice_for_each_program(name: str) -> None:
    text, places, first, offered, absent = CASES[name]
    found = logs.of(text)
    assert found.kind.of_gpu
    assert {place for place in found.environment if place not in (Place.CUDA, Place.MACOS)} == places
    remedies = remedies_for_command(found)
    said = words(remedies)
    assert ids(remedies)[0] == first
    assert [part for part in offered if part not in said] == []
    unfit = tuple(part for part in TRAINING if part != "ALLOC_CONF" or Place.INFERENCE not in places)
    assert [part for part in (*unfit, *absent) if part in said] == []


@pytest.mark.parametrize("place", PROGRAMS)
def test_every_program_has_advice_for_a_full_gpu_that_names_no_option_of_pytorch(place: Place) -> None:
    said = words(remedies_for_command(died(environment=(Place.CUDA, place), phase="unknown")))
    assert said
    assert [part for part in TRAINING if part in said] == []


def test_a_program_that_trains_is_no_inference() -> None:
    lines = traceback("/venv/site-packages/transformers/generation/utils.py", TORCH)
    assert Place.INFERENCE not in logs.of("trainer.evaluate()\n" + lines).environment
    assert "smaller_batch" in ids(remedies_for_command(logs.of("epoch 3\n" + lines)))


@pytest.mark.parametrize(
    ("line", "trains"),
    [
        ("step 10 reward 1.0", True),
        ("[update 3/500] kl=0.02 reward_mean=-1.5", True),
        ("iteration 100 | lr: 1e-5", True),
        ("{'loss': 1.92}", True),
        ("step 10/50 of the sampler", False),
        ("Step 1: calculate what the function returns", False),
    ],
)
def test_the_report_of_a_step_means_training_although_it_failed_in_generate(line: str, trains: bool) -> None:
    found = logs.of(f"{line}\n" + traceback("ppo.py", "    out = model.generate(ids)\n" + TORCH))
    assert (Place.INFERENCE not in found.environment) is trains
    assert ("smaller_batch" in ids(remedies_for_command(found))) is trains


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Successfully installed xgboost-2.0\n{prep}MemoryError", ()),
        ("Loading darknet53.conv.74\nepoch 1 loss 3\nRuntimeError: CUDA error: out of memory", (Place.CUDA,)),
        ("starting langchainer service\nMemoryError", ()),
        ("Traceback of langchainer:\n{chainer}MemoryError", (Place.CHAINER,)),
        ("{prep}xgboost.core.XGBoostError: std::bad_alloc", (Place.XGBOOST,)),
        ("{prep}MemoryError: bad allocation in libxgboost.so", (Place.XGBOOST,)),
        ("./darknet detector train\nCUDA Error: out of memory", (Place.CUDA, Place.DARKNET)),
    ],
)
def test_a_library_that_the_log_only_names_did_not_fail(text: str, expected: tuple[Place, ...]) -> None:
    prep = traceback("/home/me/prep.py", "    df = pandas.read_csv(path)\n")
    chainer = traceback("/venv/site-packages/chainer/training/updater.py", "    loss = func(x)\n")
    assert logs.of(text.format(prep=prep, chainer=chainer)).environment == expected


@pytest.mark.parametrize(
    ("line", "windows"),
    [
        (r'  File "G:\work\net\train.py", line 3', True),
        (r'  File "custom\nodes_of_me\bridge.py", line 3', True),
        (r"[enforce fail at ..\c10\core\CPUAllocator.cpp:73] data", True),
        (r"GRPC:\n\tunavailable\n", False),
        (r"a regular expression \d+\.\d+ and C:\n", False),
        ('  File "/home/me/train.py", line 3', False),
    ],
)
def test_a_path_with_backslashes_is_a_sign_of_windows(line: str, windows: bool) -> None:
    assert (Place.WINDOWS in logs.of(f"{line}\n{ARRAY.format('2.00 GiB')}").environment) is windows


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("ray.memory_monitor.RayOutOfMemoryError: More than 95% of the memory on node h is used (15.9 / 16.8 GB).", Place.RAY),
        ("The node was low on resource: memory. Container a was using 5053216Ki.", Place.KUBERNETES),
        ("WARNING Using 'pin_memory=False' as WSL is detected.", Place.WSL),
        ("ggml_gallocr_reserve_n: failed to allocate ROCm0 buffer; cudaMalloc failed", Place.ROCM),
    ],
)
def test_signs_of_a_place(line: str, place: Place) -> None:
    assert place in logs.of(f"{line}\n{ARRAY.format('2.00 GiB')}").environment


# --- host memory ----------------------------------------------------------------------------------


def refused(size: str, *lines: str) -> tuple[Remedy, ...]:
    return remedies_for_command(logs.of("\n".join([*lines, ARRAY.format(size)])))


def test_a_refused_allocation_of_an_unknown_program_says_nothing_about_loaders() -> None:
    found = refused("2.25 GiB")
    assert ids(found) == ["host_level", "swap"]
    assert "2.25 GiB were requested at once" in found[0].why


def test_eight_gib_of_swap_are_no_answer_to_a_far_larger_request() -> None:
    assert "swap" in ids(refused("30.0 GiB"))
    assert ids(refused("400. GiB")) == ["host_level"]


def test_offload_is_turned_off_only_where_deepspeed_is_in_use() -> None:
    killed = died(Kind.HOST_OOM_KILLED)
    assert "offload_off" not in ids(remedies_for_command(killed))
    assert "offload_off" in ids(remedies_for_command(replace(killed, environment=(*killed.environment, Place.DEEPSPEED))))


@pytest.mark.parametrize("place", [Place.COMFYUI, Place.INVOKEAI, Place.INFERENCE, Place.XGBOOST, Place.WHISPER_CPP])
def test_host_memory_of_programs_with_options_of_their_own(place: Place) -> None:
    said = words(remedies_for_command(died(Kind.HOST_OOM_ALLOC, environment=(place,), phase="unknown")))
    assert said
    assert [part for part in ("num_workers", "pin_memory", "offload off", "whole files") if part in said] == []


@pytest.mark.parametrize(
    ("kind", "sizes", "command"),
    [
        (Kind.HOST_OOM_KILLED, {}, "--mem=MORE_THAN_NOW "),
        (Kind.HOST_OOM_KILLED, {"allowed_bytes": 96 * GIB}, "--mem=144G"),
        (Kind.HOST_OOM_KILLED, {"allowed_bytes": GIB}, "--mem=2G"),
        (Kind.HOST_OOM_KILLED, {"total_bytes": 2 * GIB}, "--mem=MORE_THAN_NOW "),
        (Kind.HOST_OOM_KILLED, {"allowed_bytes": 2 * GIB, "requested_bytes": 12 * GIB}, "--mem=14G"),
        (Kind.HOST_OOM_ALLOC, {"total_bytes": 2 * GIB, "requested_bytes": 12 * GIB}, "--mem=MORE_THAN_NOW "),
        (Kind.HOST_OOM_ALLOC, {"allowed_bytes": 128 << 20}, "--mem=MORE_THAN_NOW "),
    ],
)
def test_the_limit_to_request_is_above_the_one_that_was_reached(kind: Kind, sizes: dict[str, int], command: str) -> None:
    assert f"sbatch {command}" in words(remedies_for_command(died(kind, environment=(Place.SLURM,), **sizes)))


def test_a_limit_that_was_measured_is_raised_and_the_memory_of_the_machine_is_none() -> None:
    refused = died(Kind.HOST_OOM_ALLOC, environment=(Place.DOCKER,), requested_bytes=12 * GIB)
    seen = ExternalCommand(command=("python", "t.py"), host=HostFacts(limit_bytes=4 * GIB, in_cgroup=True))
    assert "docker update --memory 16g" in words(remedies_for_command(refused, seen))
    whole = replace(refused, environment=(Place.SLURM,))
    machine = replace(seen, host=HostFacts(limit_bytes=4 * GIB))
    assert "sbatch --mem=MORE_THAN_NOW" in words(remedies_for_command(whole, machine))


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("SLURM_JOB_ID=7\n{array}\ntotal memory: 2 GiB read", "sbatch --mem=MORE_THAN_NOW "),
        ("KUBERNETES_SERVICE_HOST=1\n{array}\ntotal memory: 4 GiB", "resources.limits.memory: MORE_THAN_NOW"),
        ("slurmstepd: error: Job 12 exceeded memory limit (140000000 > 134217728), being killed", "--mem="),
        ("TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.\nExited with exit code 9.", "bsub -M MORE_THAN_NOW"),
        ("=>> PBS: job killed: mem 34034000kb exceeded limit 33554432kb", "mem=48gb,vmem=48gb"),
    ],
)
def test_no_limit_is_made_up_from_other_sizes_of_the_log(text: str, limit: str) -> None:
    said = words(remedies_for_command(logs.of(text.format(array=ARRAY.format("12.0 GiB")))))
    assert limit in said
    assert "--mem=64G" not in said


def test_a_kill_at_the_limit_of_a_cgroup_raises_the_limit_first() -> None:
    killed = died(Kind.HOST_OOM_KILLED, environment=(Place.CGROUP,), phase="unknown")
    assert ids(remedies_for_command(killed))[0] == "memory_limit"
    assert "memory_limit" not in ids(remedies_for_command(replace(killed, environment=())))
    kernel = "oom-kill:constraint=CONSTRAINT_MEMCG,task=python,pid=7\nMemory cgroup out of memory: Killed process 7 (python)"
    assert logs.of(kernel).environment == (Place.CGROUP,)
    assert logs.of(f"slurmstepd: error: Detected 1 oom_kill event\n{kernel}").environment == (Place.SLURM,)


def test_pytorch_that_may_not_train_is_told_what_helps_then() -> None:
    assert "inference" in ids(remedies_for_command(logs.of(TORCH)))
    assert "inference" not in ids(remedies_for_command(logs.of(traceback("/home/me/t.py", "    loss.backward()\n" + TORCH))))


# --- the GPU --------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", [Place.PYTORCH, Place.JAX, Place.TENSORFLOW])
def test_while_the_model_is_loaded_neither_batch_nor_optimizer_matter(framework: Place) -> None:
    found = ids(remedies_for_command(died(phase="load", environment=(Place.CUDA, framework))))
    assert "smaller_model" in found
    assert not {"smaller_batch", "seq_len", "offload_optimizer", "checkpointing"} & set(found)


def test_ranks_that_share_a_gpu_are_named_as_well_as_other_programs() -> None:
    shared = died(Kind.GPU_OOM_OTHER_PROCESS, other_process_bytes=gib(30))
    assert ids(remedies_for_command(shared))[:2] == ["strays", "ranks"]
    assert "ranks" not in ids(remedies_for_command(replace(shared, environment=(Place.CUDA, Place.VLLM))))


@pytest.mark.parametrize(("others", "first"), [(3.4, "strays"), (2.0, "smaller_batch"), (0.5, "smaller_batch")])
def test_other_processes_come_first_if_the_request_would_have_fitted_without_them(others: float, first: str) -> None:
    sizes = {"total_bytes": gib(24), "free_bytes": gib(0.9), "requested_bytes": gib(3.8)}
    assert ids(remedies_for_command(died(**sizes, other_process_bytes=gib(others))))[0] == first


def test_the_log_of_an_image_generator_is_its_own() -> None:
    started = "Starting server in /opt/ComfyUI/main.py\n" + "step\n" * 300
    assert Place.COMFYUI in logs.of(started + TORCH).environment


def test_a_share_that_holds_no_model_is_not_offered() -> None:
    budget = died(reason=MEMORY_BUDGET, environment=(Place.CUDA, Place.VLLM), phase="load", total_bytes=80 * GIB)
    near = remedies_for_command(replace(budget, free_bytes=gib(60), requested_bytes=gib(72)))
    assert "--gpu-memory-utilization 0.75" in words(near)
    assert ids(remedies_for_command(replace(budget, free_bytes=gib(4), requested_bytes=gib(72)))) == ["strays"]


@pytest.mark.parametrize(("requested_gib", "first"), [(5, "refused"), (3.5, "smaller_batch")])
def test_intel_gpus_refuse_more_than_4_gib_at_once(requested_gib: float, first: str) -> None:
    room: Diagnosis = died(
        environment=(Place.XPU, Place.PYTORCH),
        total_bytes=gib(15),
        allocated_bytes=gib(9),
        requested_bytes=gib(requested_gib),
    )
    assert ids(remedies_for_command(room))[0] == first


def test_layers_of_a_model_that_does_not_load_come_before_its_context() -> None:
    for phase, first in (("load", "gpu_layers"), ("unknown", "context_length")):
        assert next(advice("program", (Place.CUDA, Place.LLAMA_CPP), phase)).id == first


def test_a_request_larger_than_the_device_keeps_only_what_makes_requests_smaller() -> None:
    beyond = died(environment=(Place.CUDA, Place.XGBOOST), total_bytes=8 * GIB, requested_bytes=9 * GIB, phase="unknown")
    assert ids(remedies_for_command(beyond)) == ["one_request"]
    inferring = replace(beyond, environment=(Place.CUDA, Place.PYTORCH, Place.INFERENCE))
    assert ids(remedies_for_command(inferring)) == ["one_request", "smaller_inputs"]


# --- shared and page-locked memory, disk ----------------------------------------------------------


def test_segments_of_ranks_are_no_reason_for_fewer_loader_workers() -> None:
    ranks = died(Kind.SHM_EXHAUSTED, environment=(), phase="unknown")
    assert "workers" not in ids(remedies_for_command(ranks))
    assert ids(remedies_for_command(replace(ranks, phase="data")))[0] == "workers"
    assert ids(remedies_for_command(replace(ranks, environment=(Place.RAY,))))[0] == "ray_object_store"


@pytest.mark.parametrize(
    ("environment", "offered", "absent"),
    [
        ((Place.CUDA, Place.TENSORFLOW), "TF_GPU_HOST_MEM_LIMIT_IN_MB", "ulimit"),
        ((Place.CUDA, Place.TENSORFLOW, Place.WINDOWS), "half of the RAM", "export"),
        ((Place.CUDA, Place.PYTORCH, Place.WSL), ".wslconfig", "ulimit"),
        ((Place.CUDA,), "ulimit", "pin_memory"),
    ],
)
def test_page_locked_memory(environment: tuple[Place, ...], offered: str, absent: str) -> None:
    said = words(remedies_for_command(died(Kind.PINNED_HOST_OOM, environment=environment, phase="unknown")))
    assert offered in said
    assert absent not in said


def test_only_a_failed_save_is_a_reason_for_fewer_checkpoints() -> None:
    assert ids(remedies_for_command(died(Kind.DISK_FULL, phase="unknown"))) == ["free_disk", "other_disk"]
    assert ids(remedies_for_command(died(Kind.DISK_FULL, phase="save")))[0] == "save_total_limit"


def test_mere_words_on_windows_and_macos_are_to_be_measured_there() -> None:
    for place, tool in ((Place.WINDOWS, "Task Manager"), (Place.MACOS, "Activity Monitor")):
        (only,) = remedies_for_command(died(Kind.HOST_OOM_ALLOC, confidence=0.45, environment=(place,)))
        assert tool in only.title
        assert "memtop train" not in (only.command or "")
