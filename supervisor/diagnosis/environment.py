"""Where a program ran: on which device, with which framework, on which system and under which
manager of jobs.

Advice depends on it (`recovery/advice.toml`). A log shows it in its own words (`of_log`). For its
own runs memtop also knows what the environment variables and the kernel say (`of_process`). Pure
functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from memtop.supervisor.diagnosis.text import LogText


class Place(str, Enum):
    CUDA = "cuda"
    ROCM = "rocm"
    MPS = "mps"
    TPU = "tpu"
    XPU = "xpu"
    NPU = "npu"
    HPU = "hpu"
    DIRECTML = "directml"
    OPENCL = "opencl"
    VULKAN = "vulkan"

    PYTORCH = "pytorch"
    JAX = "jax"
    TENSORFLOW = "tensorflow"
    DEEPSPEED = "deepspeed"
    INFERENCE = "inference"
    VLLM = "vllm"
    SGLANG = "sglang"
    OLLAMA = "ollama"
    LLAMA_CPP = "llama_cpp"
    WHISPER_CPP = "whisper_cpp"
    SD_CPP = "sd_cpp"
    COMFYUI = "comfyui"
    WEBUI = "webui"
    INVOKEAI = "invokeai"
    CTRANSLATE2 = "ctranslate2"
    TENSORRT = "tensorrt"
    ONNXRUNTIME = "onnxruntime"
    XGBOOST = "xgboost"
    LIGHTGBM = "lightgbm"
    CATBOOST = "catboost"
    RAPIDS = "rapids"
    CUPY = "cupy"
    PADDLE = "paddle"
    MINDSPORE = "mindspore"
    MXNET = "mxnet"
    CHAINER = "chainer"
    TORCH7 = "torch7"
    CAFFE = "caffe"
    THEANO = "theano"
    DARKNET = "darknet"
    MLX = "mlx"
    JULIA = "julia"

    WINDOWS = "windows"
    WSL = "wsl"
    MACOS = "macos"

    SLURM = "slurm"
    PBS = "pbs"
    SGE = "sge"
    LSF = "lsf"
    HTCONDOR = "htcondor"
    YARN = "yarn"
    DASK = "dask"
    RAY = "ray"
    KUBERNETES = "kubernetes"
    COLAB = "colab"
    KAGGLE = "kaggle"
    DOCKER = "docker"
    CGROUP = "cgroup"

    @property
    def label(self) -> str:
        return _LABELS[self]


_LABELS = {
    **{place: place.value.upper() for place in Place},
    Place.ROCM: "ROCm",
    Place.MPS: "Apple GPU (MPS)",
    Place.DIRECTML: "DirectML",
    Place.OPENCL: "OpenCL",
    Place.VULKAN: "Vulkan",
    Place.PYTORCH: "PyTorch",
    Place.TENSORFLOW: "TensorFlow",
    Place.DEEPSPEED: "DeepSpeed",
    Place.INFERENCE: "inference",
    Place.VLLM: "vLLM",
    Place.SGLANG: "SGLang",
    Place.OLLAMA: "Ollama",
    Place.LLAMA_CPP: "llama.cpp",
    Place.WHISPER_CPP: "whisper.cpp",
    Place.SD_CPP: "stable-diffusion.cpp",
    Place.COMFYUI: "ComfyUI",
    Place.WEBUI: "Stable Diffusion web UI",
    Place.INVOKEAI: "InvokeAI",
    Place.CTRANSLATE2: "CTranslate2",
    Place.TENSORRT: "TensorRT",
    Place.ONNXRUNTIME: "ONNX Runtime",
    Place.XGBOOST: "XGBoost",
    Place.LIGHTGBM: "LightGBM",
    Place.CATBOOST: "CatBoost",
    Place.CUPY: "CuPy",
    Place.PADDLE: "PaddlePaddle",
    Place.MINDSPORE: "MindSpore",
    Place.MXNET: "MXNet",
    Place.CHAINER: "Chainer",
    Place.TORCH7: "Torch7",
    Place.CAFFE: "Caffe",
    Place.THEANO: "Theano",
    Place.DARKNET: "Darknet",
    Place.JULIA: "Julia",
    Place.WINDOWS: "Windows",
    Place.MACOS: "macOS",
    Place.SLURM: "Slurm",
    Place.HTCONDOR: "HTCondor",
    Place.DASK: "Dask",
    Place.RAY: "Ray",
    Place.KUBERNETES: "Kubernetes",
    Place.COLAB: "Google Colab",
    Place.KAGGLE: "Kaggle",
    Place.DOCKER: "a container",
    Place.CGROUP: "a memory cgroup",
}
DEVICES = (
    *(Place.DIRECTML, Place.OPENCL, Place.VULKAN, Place.MPS, Place.NPU, Place.XPU, Place.TPU, Place.HPU),
    *(Place.ROCM, Place.CUDA),
)
"""The names of rarer devices come first: their messages name CUDA, too."""
_IMAGES = (Place.COMFYUI, Place.WEBUI, Place.INVOKEAI)
"""All of the log of such a program is its own."""
_SERVERS = (
    *(Place.VLLM, Place.SGLANG, Place.OLLAMA, Place.WHISPER_CPP, Place.SD_CPP, Place.LLAMA_CPP, *_IMAGES),
    *(Place.CTRANSLATE2, Place.TENSORRT, Place.ONNXRUNTIME),
)
_USED_BY = {Place.LLAMA_CPP: (Place.OLLAMA, Place.WHISPER_CPP, Place.SD_CPP), Place.CUPY: (Place.CHAINER,)}
"""The programs that contain a library, which then prints their failures."""
_LIKE_TORCH = (Place.TORCH7, Place.PADDLE)
"""Some of their messages are PyTorch's, too."""
PROGRAMS = (
    *(*_SERVERS, Place.XGBOOST, Place.LIGHTGBM, Place.CATBOOST),
    *(Place.RAPIDS, Place.CHAINER, Place.CUPY, Place.MINDSPORE, Place.MXNET, *_LIKE_TORCH),
    *(Place.CAFFE, Place.THEANO, Place.DARKNET, Place.MLX, Place.JULIA),
)
"""Programs and libraries that have options of their own against a shortage of memory."""
FRAMEWORKS = (Place.PYTORCH, Place.JAX, Place.TENSORFLOW)
SYSTEMS = (Place.WSL, Place.WINDOWS, Place.MACOS)
MANAGED = frozenset(
    (
        *(Place.SLURM, Place.PBS, Place.SGE, Place.LSF, Place.HTCONDOR, Place.YARN, Place.DASK, Place.RAY),
        *(Place.KUBERNETES, Place.COLAB, Place.KAGGLE, Place.DOCKER),
    )
)
"""What sets the limits of its programs itself. Their users cannot change the machine."""

# Plain words that only such a program prints, without white space. Each is searched for anywhere in
# the text, so none may be a part of a common word: "TPU" is in OUTPUT, "NPU" in INPUT.
_SIGNS: dict[Place, tuple[str, ...]] = {
    Place.MPS: (
        *("MPSbackend", "PYTORCH_MPS", "'mps'", "device=mps", "device:mps", "metal::malloc", "ggml_metal", "IOGPU"),
        *("Invalidbuffersize", "[METAL]", "[metal::", "mlx_engine"),
    ),
    Place.DIRECTML: ("torch_directml", "DmlAllocator", "notenoughGPUvideomemory", "device:DML", "-directml\\"),
    Place.OPENCL: (
        *("OPENCL", "OpenCL", "pyopencl", "opencl_error", "CL_MEM_OBJECT", "clEnqueue", "clCreateBuffer"),
        *("MemoryObjectAllocationFailure", "MemoryobjectallocationFailure", "Memoryobjectallocationfailure"),
    ),
    Place.VULKAN: ("vkAllocateMemory", "VK_ERROR_", "ErrorOutOfDeviceMemory", "ggml_vulkan"),
    Place.NPU: (
        *("NPUoutofmemory", "NPUerror", "NPUStream", "HCCL_", "Memory_Allocation_Failure(EL", "ascend910"),
        *("torch_npu", "PYTORCH_NPU", "npu:0", "/Ascend/", "AscendCL", "aclrt"),
    ),
    Place.XPU: (
        *("XPUoutofmemory", "XPUerror", "torch.xpu", "torch/xpu", "xpu:0", "UR_RESULT_ERROR"),
        *("UR_ERROR_OUT_OF", "PI_ERROR_OUT_OF", "ZE_RESULT_ERROR", "level_zero", "ggml_sycl"),
        *("intel_extension_for_pytorch", "memoryblockwithsizelargerthan4GB"),
    ),
    Place.TPU: (
        *("libtpu", "TPUv", "TPU_", "device:TPU", "TpuDevice", "memoryspacehbm", "hbmcapacity", "cloud.google.com/tpu"),
        "TPUEstimator",
    ),
    Place.HPU: ("PT_DEVMEM", "habana", "hpu:0", "HPU_"),
    Place.ROCM: (
        *("HIPoutofmemory", "HIPerror:", "PYTORCH_HIP", "hipMalloc", "hipErrorOutOf", "hipErrorMemory", "hipblas", "HIPBLAS"),
        *("MIOPEN", "HIP_VISIBLE", "/rocm", "+rocm", "ROCm"),
    ),
    Place.CUDA: ("CUDA", "cuda", "Cuda", "NVIDIA", "nvidia", "CUBLAS", "CUDNN"),
    Place.VLLM: (
        *("vllm/", "vllm.", "vLLM", "EngineCore", "RayWorkerVllm", "VllmWorker", "gpu_memory_utilization", "vllmserve"),
        *("desiredGPUmemoryutilization", "KVcacheisneeded", "storedinKVcache", "storedintheKVcache"),
    ),
    Place.SGLANG: ("sglang", "mem-fraction-static", "mem_fraction_static"),
    Place.DEEPSPEED: ("deepspeed", "DeepSpeed"),
    Place.OLLAMA: ("ollama", "OLLAMA_", "Ollama", "llamarunner", "modelrequiresmoresystemmemory"),
    Place.LLAMA_CPP: (
        *("ggml_", "llama_model_load", "llama_init_from", "llama_context", "llama_new_context", "llama_kv_cache", "llama.cpp"),
        *("llama-server", "llama-cli", "common_init_from"),
    ),
    Place.WHISPER_CPP: ("whisper_init", "whisper_model_load", "whisper_full", "whisper.cpp"),
    Place.SD_CPP: ("stable-diffusion.cpp", "sd-cli", "ggml_extend.hpp"),
    Place.COMFYUI: (
        *("ComfyUI/", "ComfyUI\\", "comfy/", "comfy\\", "custom_nodes", "ComfyUI-", "ComfyUIrun", "comfy_kitchen"),
        "ThiserrormeansyouranoutofmemoryonyourGPU",
    ),
    Place.WEBUI: ("stable-diffusion-webui", "sd_hijack", "Fooocus", "fooocus", "ldm_patched", "webui-user", "sd_models.py"),
    Place.INVOKEAI: (
        "invokeai",
        "InvokeAI",
        "ldm/invoke",
        "ldm\\invoke",
        "MaxVRAMusedtoloadthemodel",
        "MaxVRAMusedforthisgeneration",
    ),
    Place.CTRANSLATE2: ("ctranslate2", "faster_whisper", "CUDAfailedwitherroroutofmemory"),
    Place.TENSORRT: (
        *("[TRT]", "trtexec", "nvinfer", "tensorrt/", "TensorRT/demo", "TensorRTengine", "torch2trt", "IBuilder::"),
        *("RequestedamountofGPUmemory", "executionContext.cpp", "defaultAllocator.cpp"),
    ),
    Place.ONNXRUNTIME: ("ONNXRuntimeError", "onnxruntime", "onnxruntime_src"),
    Place.XGBOOST: ("xgboost", "XGBoost", "libxgboost"),
    Place.LIGHTGBM: ("lightgbm", "LightGBM", "lgb.LGBM", "lgb.train"),
    Place.CATBOOST: ("catboost", "CatBoost", "NCudaLib"),
    Place.RAPIDS: ("rmm/mr", "RMMfailure", "RMM_", "cudf/", "cudf.", "cuml/", "numba/cuda", "numba.cuda"),
    Place.CUPY: ("cupy.cuda", "cupy/core", "cupy/cuda", "cupy.core", "importcupy", "cupy_backends"),
    Place.CHAINER: ("chainer",),
    Place.MINDSPORE: ("mindspore", "MindSpore"),
    Place.MXNET: ("mxnet", "MXNet", "MXNET_"),
    Place.TORCH7: ("luajit", "/lua/5.1/", ".lua:", "torch/install/"),
    Place.PADDLE: ("paddle/", "paddle.", "PaddlePaddle", "paddle::", "startPaddle"),
    Place.CAFFE: ("caffe::", "tools/caffe", "libcaffe", "syncedmem.cpp"),
    Place.THEANO: ("theano", "Theano", "CudaNdarrayType", "Driverreport"),
    Place.DARKNET: ("darknet", "dark_cuda", "./src/cuda.c", "Resizing,random_coef"),
    Place.MLX: ("/mlx/", "mlx_", "mlx.core", "[metal::malloc]", "[METAL]"),
    Place.JULIA: (".jl:", ".julia/packages", "\\.julia\\packages", "CuArrays", "CUDAdrv"),
    Place.INFERENCE: (
        *("generation/utils.py", "ingenerate", ".generate(", "diffusers/pipelines", "transformers/pipelines", "inference_mode"),
        *("inference.py", "infer.py", "demo.py", "predict.py", "vae.decode", "/inference/", "transcribe", "inferenceerror"),
    ),
    Place.PYTORCH: (
        *("torch/", "torch\\", "torch.", "torchrun", "PYTORCH_", "byPyTorch", "outofmemory.Triedtoallocate"),
        *("DefaultCPUAllocator", "DataLoaderworker", "cudaruntimeerror(2)", "THCudaCheck", "PytorchStreamWriter"),
        *("AcceleratorError", "deepspeed", "transformers/", "pytorch_lightning", "sigkill_handler", "local_rank:"),
    ),
    Place.JAX: (
        *("jaxlib", "jax/_src", "jax._src", "jax.numpy", "importjax", "JaxRuntimeError", "XlaRuntimeError"),
        *("XLA_PYTHON_CLIENT", "XLA_CLIENT_MEM", "flax/", "xla/python/"),
    ),
    Place.TENSORFLOW: ("tensorflow", "OP_REQUIRES", "keras/", "OOMwhenallocatingtensor"),
    Place.WSL: ("/usr/lib/wsl/", "microsoft-standard", "WSL2", "/mnt/c/Users/", "wsl.exe", "WSLisdetected"),
    Place.WINDOWS: (
        *('File"C:\\', 'File"D:\\', 'File"E:\\', 'File"F:\\', "C:\\Users\\", "c:\\users\\", "C:\\Program", "C:\\Windows"),
        *("WinError", "pagingfile", "\\site-packages\\", "0xC0000005", "0xC0000017", "0xC000012D"),
    ),
    Place.MACOS: ('File"/Users/', "/opt/homebrew", "macOS-", "DarwinKernel"),
    Place.SLURM: (
        *("slurmstepd", "SLURM_", "srun:error", "srun:job", "srun:Job", "srun:Force", "slurm_script", "slurmd/", "/slurm/uid_"),
        *("#SBATCH", "Submittedbatchjob", "sbatch--"),
    ),
    Place.PBS: ("PBS:job", "=>>PBS", "PBS_JOBID", "PBS_O_", "PBSJobId", "pbs_mom"),
    Place.SGE: ("SGE_ROOT", "SGE_TASK", "SGE_O_", "SGE_JOB", "h_vmem", "sge_shepherd", "GridEngine"),
    Place.LSF: ("TERM_MEMLIMIT", "LSFmemory", "LSFSystem", "LSB_", ".lsbatch"),
    Place.HTCONDOR: ("Jobhasgoneovermemorylimit", "condor_starter", "_CONDOR_", "HTCondor"),
    Place.YARN: ("YarnScheduler", "YarnAllocator", "killedbyYARN", "org.apache.hadoop.yarn"),
    Place.DASK: ("distributed.nanny", "distributed.scheduler", "distributed.worker_memory"),
    Place.RAY: (
        *("ray.exceptions", "raylet", "RayTaskError", "ray/_private", "ray._private", "ray/python/"),
        *("RAY_memory_usage", "RAY_memory_monitor", "exceedsthememoryusagethreshold", "ray.memory_monitor"),
        *("RayOutOfMemoryError", "ray/memory_monitor"),
    ),
    Place.KUBERNETES: (
        *("kubectl", "kubelet", "kubepods", "kubernetes.io", "KUBERNETES_", "CrashLoopBackOff"),
        *(":OOMKilled", "=OOMKilled", "/1OOMKilled", "/2OOMKilled", "OOMKilled("),
        "Thenodewaslowonresource",
    ),
    Place.COLAB: ('File"/content/', "google.colab", "COLAB_", "usingallavailableRAM", "https://localhost:8080/#"),
    Place.KAGGLE: ("/kaggle/working", "/kaggle/input", "/kaggle/src", "KAGGLE_", "notebooktriedtoallocatemorememory"),
    Place.DOCKER: (
        *("dockerrun", "dockercompose", "docker-compose", "docker-entrypoint", ".dockerenv", "libpod", "/docker/containers/"),
        *(
            "memcg=/docker/",
            "cgroup/docker/",
            ".slice/docker-",
            '"OOMKilled":true',
            "Exited(137)",
            "Removingintermediatecontainer",
        ),
    ),
}
_CGROUP = ("Memorycgroupoutofmemory", "CONSTRAINT_MEMCG", "oom_memcg=")
"""The kernel killed at the limit of a memory cgroup, not because the machine was full."""
_AFTER = 8
_ONLY_ROCM = ("ROCm0", "ROCm1", "ROCmerror", "HipCustom", "amdgpu:", "AMDInstinct", "AMDRadeon")
"""PyTorch and llama.cpp call AMD's GPUs "cuda", too."""
_TRAINS = (
    *("backward()", "loss.backward", "training_step", "Trainer", "trainer.", "train.py", "finetune", "Epoch", "epoch"),
    "optimizer",
)
# The report of a step: its number and a figure that only training has, or a loss.
_STEP = re.compile(
    r"(?i)(?:\b(?:step|iter|iteration|update|episode|global_step|timestep)s?\b[^0-9a-z\n]{0,4}\d.{0,200}?"
    r"(?:\b|_)(?:rewards?|returns?|lr|learning_rate|grad_norm|kl|ppl|perplexity|loss)|(?:\b|_)loss)"
    r"(?:[_/]\w{1,20})?['\"]?[ \t:=|]{1,4}-?(?:\d|nan\b)"
)
_WINDOWS_PATH = re.compile(
    r"(?<![A-Za-z0-9\\])[A-Za-z]:\\{1,2}[A-Za-z_.][^\\/:\"'|<>]*\\"  # C:\FOLDER\
    r"|(?<![\w\\.])\.\.?\\[A-Za-z]\w+[\\/]"  # .\FOLDER\
    r"|\w\\[A-Za-z_][\w-]*\\[\w.-]+\.(?:pyx?|cpp|hpp|jl|exe)\b"  # FOLDER\FOLDER\FILE.py
)


def of_log(page: LogText, line: int | None, message: Sequence[str], *, of_torch: bool = False) -> tuple[Place, ...]:
    """The places that the log of a failure shows.

    The message of the failure (`message`) says more than its traceback, which ends at index `line`,
    and that says more than the rest of the log: a program that trains can also serve a model.
    `of_torch`: the failure is known to be PyTorch's.
    """
    told = _text(message)
    near = told if line is None else _text(each.shown for each in (*page.context(line), *page.lines[line : line + _AFTER]))
    whole = _text(each.shown for each in page.lines)
    texts = (told, near, whole)
    found = [_device(texts), *_programs(texts, of_torch=of_torch)]
    found.append(Place.MACOS if Place.MPS in found else _system(page, whole))
    found += [place for place in Place if place in MANAGED and _shows(whole, place)]
    found.append(Place.CGROUP if any(sign in whole.joined for sign in _CGROUP) else None)
    return together(place for place in found if place is not None)


class _Text(NamedTuple):
    """Some lines of a log in two forms."""

    joined: str
    """Without white space, so that a sign is found wherever a line was folded."""
    lines: str


def _device(texts: tuple[_Text, _Text, _Text]) -> Place | None:
    found = _first(DEVICES, texts)
    return Place.ROCM if found is Place.CUDA and any(sign in texts[-1].joined for sign in _ONLY_ROCM) else found


def _programs(texts: tuple[_Text, _Text, _Text], *, of_torch: bool) -> list[Place | None]:
    """The program with options of its own, or else the framework and how it is used.

    Only a server of models is looked for in the whole log: other libraries that it names did not
    have to fail.
    """
    told, near, whole = texts
    framework = Place.PYTORCH if of_torch else _first(FRAMEWORKS, (told, near))
    if framework is None:
        program = _first(PROGRAMS, (told, near)) or _first(_SERVERS, (whole,))
    else:
        program = _first((*_SERVERS, *_LIKE_TORCH), (told, near)) or _first(_IMAGES, (whole,))
    users = _USED_BY.get(program, ()) if program is not None else ()
    program = next((user for user in users if _shows(whole, user)), program)
    if program is not None:
        return [program]
    framework = framework or _of_xla(told) or _first(FRAMEWORKS, (whole,))
    if framework is not Place.PYTORCH:
        return [framework]
    deepspeed = Place.DEEPSPEED if _shows(whole, Place.DEEPSPEED) else None
    trains = deepspeed is not None or any(sign in whole.joined for sign in _TRAINS)
    infers = _shows(near, Place.INFERENCE) and not trains and _STEP.search(whole.lines) is None
    return [framework, deepspeed, Place.INFERENCE if infers else None]


def _system(page: LogText, whole: _Text) -> Place | None:
    found = _first(SYSTEMS, (whole,))
    return Place.WINDOWS if found is None and any(_WINDOWS_PATH.search(each.shown) for each in page.lines) else found


def _of_xla(told: _Text) -> Place | None:
    return Place.JAX if "RESOURCE_EXHAUSTED" in told.joined else None


def _text(lines: Iterable[str]) -> _Text:
    text = "\n".join(lines)
    return _Text("".join(text.split()), text)


def _first(places: Sequence[Place], texts: Sequence[_Text]) -> Place | None:
    return next((place for text in texts for place in places if _shows(text, place)), None)


def _shows(text: _Text, place: Place) -> bool:
    found = (sign for sign in _SIGNS[place] if sign in text.joined)
    if place not in PROGRAMS:
        return any(found)
    return any(sign.lower() != place.value or _as_word(sign).search(text.lines) for sign in found)


@cache
def _as_word(name: str) -> re.Pattern[str]:
    """The name of a program, as no part of a longer one: `langchainer` is not Chainer, and
    `darknet53` is a model."""
    return re.compile(r"(?<![A-Za-z0-9])(?:lib)?" + r"\s*".join(name) + r"(?![a-z0-9])")


_VARIABLES: dict[str, Place] = {
    "SLURM_JOB_ID": Place.SLURM,
    "PBS_JOBID": Place.PBS,
    "SGE_TASK_ID": Place.SGE,
    "LSB_JOBID": Place.LSF,
    "_CONDOR_SCRATCH_DIR": Place.HTCONDOR,
    "KUBERNETES_SERVICE_HOST": Place.KUBERNETES,
    "COLAB_RELEASE_TAG": Place.COLAB,
    "KAGGLE_KERNEL_RUN_TYPE": Place.KAGGLE,
}
CONTAINER_FILES = ("/.dockerenv", "/run/.containerenv")
"""Docker and Podman make these files in every container."""


def of_process(variables: Mapping[str, str], kernel_release: str, *, in_container: bool) -> tuple[Place, ...]:
    """The places that a running process can see: those of its environment variables, of its kernel
    and of the files above."""
    found = [place for name, place in _VARIABLES.items() if variables.get(name)]
    if "microsoft" in kernel_release.lower():
        found.append(Place.WSL)
    if in_container:
        found.append(Place.DOCKER)
    return together(found)


def together(places: Iterable[Place]) -> tuple[Place, ...]:
    """The places in the order of `Place`, each once, without those that others of them imply."""
    found = set(places)
    if found & {Place.COLAB, Place.KAGGLE}:
        found -= {Place.KUBERNETES, Place.DOCKER}
    if Place.KUBERNETES in found:
        found.discard(Place.DOCKER)
    if found & MANAGED:
        found.discard(Place.CGROUP)
    if Place.WSL in found:
        found.discard(Place.WINDOWS)
    return tuple(place for place in Place if place in found)
