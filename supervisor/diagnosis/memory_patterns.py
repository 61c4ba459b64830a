"""The patterns of a lack of memory or disk space that a program itself reports, and of what only
sounds like one.

PyTorch's own allocator is missing here: its messages are read by `allocator.py`. Where two patterns
with equal weight match one line, the first counts: special ones stand before general ones.
"""

from __future__ import annotations

from memtop.supervisor.diagnosis.finding import UNCERTAIN, Pattern, Weight, other
from memtop.supervisor.diagnosis.values import Kind

GPU, PINNED, HOST = Kind.GPU_OOM, Kind.PINNED_HOST_OOM, Kind.HOST_OOM_ALLOC
_BUDGET = "memory_budget"
SHM, DISK = Kind.SHM_EXHAUSTED, Kind.DISK_FULL
_FULL = r"(?:[Nn]o space left on device|[Dd]isk quota exceeded|ENOSPC|EDQUOT)"

DEVICE_MEMORY: tuple[Pattern, ...] = (
    # Page-locked host memory. Its messages contain those of a device, so they come first.
    Pattern(r"failed to alloc(?:ate)? (?P<size>\d+ bytes) on host(?!:? CUDA_ERROR_(?!OUT))", PINNED, 0.95),
    Pattern(r"could not allocate pinned host memory of size:? (?P<size>\d+)?", PINNED, 0.95),
    Pattern(
        r"(?i:(?:failed|unable|cannot|could n[o']t) (?:to )?alloc(?:ate)? (?P<size>SIZE)?(?:of )?[^.]{0,60}"
        r"(?:pinned|page-?locked)(?! (?:host |system )?memory:"
        r" (?:no CUDA|no HIP|no ROCm|initialization|driver|unknown error|invalid|(?:CUDA|hip) (?!error:? out|out))))",
        PINNED,
    ),
    Pattern(
        r"(?:cu(?:da)?|hip)(?:Mem)?HostAlloc\w* .{0,60}?(?:out of memory|OUT_?OF_?MEMORY"
        r"|MemoryAllocation)",
        PINNED,
    ),
    Pattern(
        r"(?:cu(?:da)?|hip)(?:Mem)?HostRegister .{0,60}?(?:out of memory|OUT_?OF_?MEMORY"
        r"|MemoryAllocation)",
        PINNED,
    ),
    Pattern(r"(?i:out_?of_?memory).{0,20}?(?:cu(?:da)?|hip)(?:Mem)?HostAlloc", PINNED),
    Pattern(r"(?P<size>\d+ bytes)\)? of host memory: CUDA_ERROR_OUT_OF_MEMORY", PINNED),
    Pattern(r"Cuda\w{0,40}Allocator fail(?:ed)? to allocate memory (?P<size>\d+ bytes)", GPU, 0.95),
    # CUDA, HIP and others, without figures. The traceback shows whether it was pinned memory.
    Pattern(r"(?:CUDA|HIP|ROCm|SYCL|XPU|NPU|MUSA|MLU)(?: driver)? (?i:error):? (?i:out) of memory", GPU, 0.85),
    Pattern(
        r"(?:CUDA|HIP|XPU|NPU|MUSA|MLU|MPS backend|GPU) out of(?: the)? memory(?!\.Tri|\(MPS"
        r"|detected|errors|issues|problems|handling)",
        GPU,
        0.8,
        asserted=True,
    ),
    Pattern(r"CUDA out of memory detected", GPU, 0.8),
    # The allocator asks NVML for figures only when an allocation has failed.
    Pattern(r"NVML_SUCCESS == r INTERNAL ASSERT FAILED at .{0,120}?CachingAllocator", GPU, 0.7),
    Pattern(r"(?i:(?:cuda|hip) runtime error) \(?2\)?:? out of memory", GPU),
    Pattern(r"(?:CUDA|hip|HIP)_?E(?:RROR|rror)_?[Oo](?:UT_OF_MEMORY|utOfMemory)", GPU, 0.85),
    Pattern(r"Error 2: out of memory|returned \(2\): Out of memory", GPU, 0.85),
    Pattern(r"THCudaCheck FAIL .{0,160}? error=2 : out of memory", GPU, 0.85),
    Pattern(r"== cudaSuccess \(2 vs\. 0\)", GPU),
    Pattern(r"'(?:cuda|hip)Malloc\w{0,20}\(.{0,60}?\) == (?:cuda|hip)Success' failed", GPU, 0.85),
    Pattern(r"MIOpen Error: .{0,120}? Memory not available to allocate buffer: (?P<size>\d+)", GPU),
    Pattern(r"cudaErrorMemoryAllocation(?!=\d)", GPU, 0.85),
    Pattern(r"Triton Error \[\w+\]: out of memory", GPU),
    Pattern(r"allocating (?P<size>SIZE) on device (?P<gpu>\d+):? cuda\w+ failed:? out of memory", GPU, 0.95),
    Pattern(
        r"(?:cuda|hip)Malloc\w* (?:retry )?failed:? out of memory"
        r".{0,40}? failed to allocate [A-Z]\w+? buffer of size (?P<size>\d+)",
        GPU,
        0.95,
    ),
    Pattern(r"(?:cuda|hip)Malloc\w* (?:retry )?failed:? out of memory", GPU),
    Pattern(r"failed to allocate (?:CUDA|ROCm|HIP|SYCL|Vulkan|Metal|CANN)\w{0,3}? buffer of size (?P<size>\d+)", GPU, 0.95),
    Pattern(r"failed to allocate (?:buffer for kv cache|compute (?:pp |tg )?buffers)", GPU, 0.6),
    Pattern(r"(?:failed|unable) to allocate (?:CUDA|ROCm|HIP|SYCL|Vulkan|Metal|CANN)\w{0,3}? buffer", GPU, 0.85),
    Pattern(r"[Dd]evice memory allocation of size (?P<size>\d+) failed", GPU, 0.95),
    Pattern(r"(?:radv/)?amdgpu: Failed to allocate a buffer:? (?:(?:radv/)?amdgpu: size: (?P<size>\d+ bytes))?", GPU),
    Pattern(r"ErrorOutOfDeviceMemory|VK_ERROR_OUT_OF_DEVICE_MEMORY|vk[A-Z]\w{3,40} (?:failed|returned):? -2", GPU),
    Pattern(
        r"cuMemAllocAsync failed to allocate (?P<size>\d+ bytes)"
        r"(?: .{0,160}? Free memory/Total memory: (?P<free>\d+)/(?P<total>\d+))?",
        GPU,
        0.95,
    ),
    Pattern(
        r"OutOfMemoryError(?:: |\(')? (?:Error: )?Out of memory allocating (?P<size>SIZE)"
        r"(?:\(allocated so far: (?P<allocated>SIZE))?",
        GPU,
        0.95,
    ),
    # The words of CuPy before version 7: the total would be the pool's.
    Pattern(r"out of memory to allocate (?P<size>SIZE) \(total (?P<allocated>SIZE)\)", GPU, 0.95),
    Pattern(r"Out of memory error on GPU (?P<gpu>\d+)\. Cannot allocate (?P<size>SIZE)", GPU, 0.95),
    Pattern(r"Memory allocation error on worker \d+:", GPU, 0.95),
    Pattern(r"(?:cu|cl|hip)\w{0,20}?Mem\w{0,20} failed: (?:out of memory|MEM_OBJECT_ALLOCATION_FAILURE)", GPU),
    Pattern(r"\w+ failed: MEM_OBJECT_ALLOCATION_FAILURE", GPU),
    Pattern(r"CUDA: out of memory|\[CUDA\] out of memory|Cuda Runtime \(out of memory\)", GPU),
    Pattern(
        r"CUDA failure 2: out of memory ; GPU=(?P<gpu>\d+)",
        GPU,
    ),
    Pattern(r"Requested amount of (?:GPU)? memory \(\d+ bytes\) could not be allocated", GPU, 0.95),
    Pattern(r"Error Code 2: OutOfMemory", GPU),
    Pattern(r"(?:nvenc|nvdec|cuvid).{0,80}? failed: out of memory", GPU),
    Pattern(r"Could not allocate tensor with (?P<size>\d+ bytes)\. There is not enough GPU", GPU, 0.95),
    Pattern(r"Out of GPU memory trying to allocate (?P<size>SIZE)", GPU, 0.95),
    Pattern(r"Call rtMalloc fail,.{0,80}? size:\d+", GPU, 0.85),
    Pattern(r"PT_DEVMEM Allocation failed for size::(?P<size>\d+)", GPU, 0.95),
    Pattern(r"SYNHELPER workspace Allocation of size ::(?P<size>\d+) failed", GPU, 0.95),
    Pattern(r"nrt_tensor_allocate status=4", GPU),
    Pattern(r"Out of memory on device\. You requested: (?P<size>SIZE),? device has (?P<free>SIZE) free", GPU, 0.95),
    Pattern(r"Invalid buffer size: (?P<size>SIZE)", GPU, 0.85),
    Pattern(r"(?:torch\.(?:cuda\.)?)?OutOfMemoryError:? (?=Allocation on device)", GPU, at_start=True),
    Pattern(r"!!! Allocation on device", GPU),
    Pattern(r"Allocation on device (?P<gpu>\d{0,2}) would exceed allowed memory", GPU),
    Pattern(r"torch\.(?:cuda\.)?OutOfMemoryError(?!:?\w*out of memory|,|\))", GPU, 0.7, at_start=True),
    Pattern(r"RayTaskError\(OutOfMemoryError\)", GPU, 0.6, weight=Weight.LIKELY),
    Pattern(
        r"[Rr]an out of (?:GPU|CUDA|VRAM|device|video)? memory "
        r"(?:when|while|during|on|in(?!memory space)|with)",
        GPU,
        0.6,
    ),
    Pattern(r"Dst tensor is not initialized", GPU, 0.6),
    Pattern(r"No executable batch size found, reached zero", GPU, 0.85),
    Pattern(
        r"Initial RMM allocation\((?P<size>SIZE)\) is larger than free memory\((?P<free>SIZE)\)"
        r"|RMM .{0,160}? Initial pool size exceeds the maximum pool size",
        GPU,
        reason=_BUDGET,
    ),
    # Inference engines and loaders refuse to start with the budget that they were given.
    Pattern(r"No available memory for the cache blocks", GPU, 0.85, reason=_BUDGET),
    Pattern(
        r"\(?(?P<size>SIZE) KV cache is needed, which is larger than the available KV cache memory \((?P<free>SIZE)\)",
        GPU,
        reason=_BUDGET,
    ),
    Pattern(
        r"max(?:imum)? (?:model|seq(?:uence)?)? len(?:gth)? .{0,20}? is larger than the maximum number of tokens"
        r" that can be stored in (?:the )?KV cache|KV cache is needed, which is larger than the available KV cache memory",
        GPU,
        reason=_BUDGET,
    ),
    Pattern(
        r"Free memory on device .{0,12}?\((?P<free>\d[\d.]{0,9})/(?P<total>SIZE)\) on startup is less than desired GPU"
        r" memory utilization \([\d.]{1,6}, (?P<size>SIZE)\)",
        GPU,
        reason=_BUDGET,
    ),
    Pattern(
        r"(?i:not enough memory).{0,120}? mem[-_]fraction[-_]static"
        r"|(?i:not enough memory to handle \d+ (?:prefill|total) tokens)",
        GPU,
        reason=_BUDGET,
    ),
    Pattern(
        r"Some modules are dispatched on the CPU or the disk|had weights offloaded to the disk"
        r"|trying to offload the whole model to the disk|[Ii]nsufficient VRAM (?:for model|in split for (?:model|cache))"
        r"|memory capacity is unbalanced",
        GPU,
        reason=_BUDGET,
    ),
    Pattern(
        r"(?:GPU|VRAM|HBM|device) memory (?:is|of|:)? [\d.]{1,12} [KMGT]i?B,? (?:which)? is less than (?:the)?"
        r" (?:sum|desired|required|estimated|minimum)|(?i:no enough gpu memory for (?:kv cache|runtime))"
        r"|model weight size may be larger than GPU memory size",
        GPU,
        reason=_BUDGET,
    ),
    # Libraries that allocate for themselves.
    Pattern(
        r"CU[A-Z]{3,8}_STATUS_(?:ALLOC(?:ATION)?_FAILED|INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED|INSUFFICIENT_RESOURCES)"
        r"|CU(?:FFT|RAND)_(?:STATUS_)?ALLOC(?:ATION)?_FAILED|(?:roc|hip)\w{3,6}_status_(?:memory_error|alloc_failed)"
        r"|HIPFFT_ALLOC_FAILED",
        GPU,
        0.8,
    ),
    Pattern(r"CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED", HOST, 0.8),
    Pattern(
        r"(?:HIPBLAS|ROCBLAS|MIOPEN|HIPSPARSE)_STATUS_(?:ALLOC_FAILED|MEMORY_ERROR)"
        r"|miopenStatusAllocFailed",
        GPU,
        0.8,
    ),
    Pattern(r"Unable to find a valid cuDNN algorithm", GPU, 0.55),
    Pattern(r"(?:GET|FIND) was unable to find an engine to execute this computation", GPU, UNCERTAIN),
    Pattern(r"\[(?P<gpu>\d{1,3})\] .{0,60}? NCCL WARN Cuda failure(?:\d+)? '?out of memory'?", GPU),
    Pattern(r"Cuda failure(?:\d+)? '?out of memory'?", GPU, 0.85),
    Pattern(r"Failed to CUDA host [cm]?alloc(?: async)?(?: (?P<size>\d+ bytes))?", PINNED, 0.75),
    Pattern(r"Failed to CUDA [cm]?alloc(?: async)? (?P<size>\d+ bytes)", GPU, 0.85),
    Pattern(r"Failed to CUDA [cm]alloc", GPU, 0.75),
    # XLA: JAX and TensorFlow.
    Pattern(r"Out of memory (?:while )?(?:trying to )?alloc(?:ate|ating) (?P<size>SIZE)", GPU, 0.95),
    Pattern(r"Failed to allocate request for (?P<size>SIZE) (?:\(\d+B\))? on device ordinal (?P<gpu>\d+)", GPU, 0.95),
    Pattern(
        r"RESOURCE_EXHAUSTED:?(?:\w+:)? (?:Attempting to (?:allocate|reserve)|Error allocating"
        r"|Failed to allocate) [^.\d]{0,40}? (?P<size>SIZE)",
        GPU,
        0.95,
    ),
    Pattern(r"Attempting to (?:allocate|reserve) (?P<size>SIZE|[\d.]{1,12}[KMGT]).{0,40}? That was not possible", GPU, 0.95),
    Pattern(
        r"Ran out of memory in memory space hbm\. Used [\d.]{1,12}[KMGT]i?B? of (?P<total>[\d.]{1,12}[KMGT]i?B?) hbm", GPU, 0.95
    ),
    Pattern(r"Ran out of memory in memory space hbm", GPU, 0.95),
    Pattern(r"OOM when allocating tensor (?:with|of) shape.{0,200}?(?:/device:GPU:|/gpu:)(?P<gpu>\d+)", GPU, 0.95),
    Pattern(r"OOM when allocating tensor (?:with|of) shape(?!.{0,200}?device:[CG]PU)", GPU, 0.85),
    Pattern(
        r"Allocator \(GPU_(?P<gpu>\d+)_bfc\) ran out of memory trying to allocate (?P<size>SIZE)(?!.{0,120}?not a failure)",
        GPU,
        0.85,
    ),
    Pattern(r"(?<!\))[Rr]an out of memory trying to allocate (?P<size>SIZE)(?!.{0,120}?not a failure)", GPU, 0.85),
    other(
        r"[Rr]an out of memory trying to allocate [\w.]{1,20}(?:\(\w+\))?"
        r"(?:rounded to \w+)?.{0,80}? not a failure",
        "allocator_warning",
        0.95,
        weight=Weight.HINT,
    ),
    # Other devices and languages.
    Pattern(r"(?:UR|PI|ZE)_(?:RESULT_)?ERROR_OUT_OF_DEVICE_MEMORY", GPU, 0.85),
    # Also after the device was lost.
    Pattern(r"(?:UR|PI|ZE)_(?:RESULT_)?ERROR_OUT_OF_RESOURCES", GPU, UNCERTAIN, weight=Weight.LIKELY),
    Pattern(r"(?i:mem(?:ory)?_?object_?allocation_?failure)", GPU, 0.85),
    Pattern(
        r"(?i:buffer (?:'\w+')? size \(?(?P<size>\d+)\)? (?:is larger than|exceeds) (?:the)?"
        r" (?:buffer maximum of|max buffer size limit \(|max buffer size \() \d+)",
        GPU,
        0.85,
    ),
    Pattern(
        r"Cannot allocate (?P<size>SIZE) in GPU (?P<gpu>\d+), available (?P<free>SIZE)"
        r"(?:total (?P<total>\d{5,20})GpuMin.{0,120}?GPU memory used: (?P<allocated>SIZE))?",
        GPU,
        0.85,
    ),
    Pattern(r"Not enough space to allocate (?P<size>\d+ B) DRAM buffer across \d+ banks", GPU, 0.95),
    Pattern(r"\[metal::malloc\] (?:Attempting|Unable) to allocate (?P<size>\d+ bytes)", GPU, 0.95),
    Pattern(r"kIOGPUCommandBufferCallbackErrorOutOfMemory", GPU),
    Pattern(r"\[Upstream (?P<size>\d+B)\]\[FAILURE", GPU),
    Pattern(r"rmm::out_of_memory|std::bad_alloc:? out_of_memory:? (?:CUDA|RMM)", GPU),
    Pattern(r"(?i:not enough (?:gpu|video|device) memory|insufficient (?:gpu|device) memory)", GPU, 0.6),
)

HOST_MEMORY: tuple[Pattern, ...] = (
    # InfiniBand registers memory that must stay in place: the limit is `ulimit -l`.
    other(r"ibv_\w+ failed.{0,40}? Cannot allocate memory", "memlock_limit", weight=Weight.CAUSE),
    other(r"failed to mlock .{0,80}? Cannot allocate memory", "memlock_limit", weight=Weight.CAUSE),
    # The loader's reserve for variables of threads, whose size is fixed when the program starts.
    other(r"cannot allocate memory in static TLS block", "import_error", weight=Weight.CAUSE),
    Pattern(r"DefaultCPUAllocator:? .{0,60}? you tried to allocate (?P<size>\d+ bytes)", HOST, 0.97),
    Pattern(r"CPU can't allocate memory\. Tried to allocate (?P<size>SIZE)", HOST, 0.95),
    Pattern(r"JoblibMemoryError|Allocate: no space left", HOST, 0.85),
    Pattern(r"Fail to alloc memory of (?P<size>\d+) size, error code is 12", HOST, 0.95),
    Pattern(r"DefaultCPUAllocator:? (?:can't allocate|not enough) memory", HOST),
    Pattern(r"Unable to allocate (?P<size>\d[\d.]{0,40}(?:[KMGTP]iB|bytes)) for an array", HOST, 0.97),
    Pattern(r"(?:Arrow)?MemoryError:? (?:re|c|m)?alloc of size (?P<size>\d+) failed", HOST, 0.97),
    # A limit that somebody set for ONNX Runtime's arena, of whatever memory.
    Pattern(r"Failed to allocate a buffer of size (?P<size>\d+)", HOST, 0.85),
    other(r"not enough space in the context's memory pool", "internal_pool", weight=Weight.CAUSE),
    Pattern(r"Available memory of \d+ is smaller than requested bytes of \d+", HOST, UNCERTAIN, weight=Weight.LIKELY),
    Pattern(r"memory allocation of (?P<size>\d+ bytes) failed", HOST, 0.97),
    # Several threads at once.
    Pattern(r"(?:memory allocation of ){2,40} (?P<size>\d+) (?:memory allocation of ){0,40} bytes failed", HOST),
    Pattern(
        r"model requires more system memory \((?P<size>SIZE)\) than is available \((?P<free>SIZE)\)",
        HOST,
        0.95,
        _BUDGET,
        phase="load",
    ),
    Pattern(
        r"model request too large for system|[Mm]odel loading was stopped due to insufficient system resources",
        HOST,
        0.85,
        _BUDGET,
        phase="load",
    ),
    Pattern(r"ggml_aligned_malloc: insufficient memory \(attempted to allocate (?P<size>SIZE)\)", HOST, 0.95),
    Pattern(r"failed to allocate CPU\w{0,8}? buffer of size (?P<size>\d+)", HOST, 0.95),
    Pattern(r"cpu_buffer_type_alloc_buffer: failed to allocate buffer of size (?P<size>\d+)", HOST, 0.95),
    Pattern(r"Allowed memory size of (?P<allowed>\d+ bytes) exhausted \(tried to allocate (?P<size>\d+ bytes)\)", HOST, 0.95),
    Pattern(r"out of memory allocating (?P<size>\d+ bytes) after a total of", HOST, 0.95),
    Pattern(r"runtime: out of memory|LLVM ERROR: out of memory|virtual memory exhausted", HOST),
    Pattern(r"System\.OutOfMemoryException|insufficient memory for the Java Runtime", HOST),
    Pattern(r"vector memory (?:exhausted|limit of (?P<allowed>SIZE) reached)", HOST),
    Pattern(r"Native memory allocation \(\w+\) failed to (?:map|allocate) (?P<size>\d+ bytes)", HOST, 0.95),
    Pattern(r"VK_ERROR_OUT_OF_HOST_MEMORY|ErrorOutOfHostMemory", HOST),
    Pattern(r"unable to mmap (?P<size>\d+ bytes) from file .{0,300}? Cannot allocate memory", HOST, 0.95),
    Pattern(r"\[Errno 12\]|ENOMEM:", HOST, 0.95),
    Pattern(r"(?:mmap|mremap|malloc|fork|clone|brk) failed (?:w/|with)? \(?errno[:=]? 12", HOST, 0.85),
    Pattern(r"(?i:dml|d3d12|directx|dxgi).{0,300}? (?:8007000E(?![0-9A-Fa-f])|E_OUTOFMEMORY)", GPU),
    Pattern(r"0x8007000E(?![0-9A-Fa-f])|E_OUTOFMEMORY", HOST, UNCERTAIN, weight=Weight.LIKELY),
    Pattern(r"\[WinError 1450\]|out of heap space|NVRTC_ERROR_OUT_OF_MEMORY", HOST, 0.85),
    Pattern(r"Could not reserve enough space for (?P<size>SIZE) object heap", HOST, 0.95),
    Pattern(r"\[WinError (?:1455|8)\]|\(os error 1455\)|paging file is too small", HOST, 0.95),
    Pattern(r"os error 12\)", HOST),
    Pattern(
        r"(?:fork|mmap|malloc|calloc|sbrk|clone|vfork|pthread_create)\(?\)?"
        r"(?: failed)?:?(?: retry:)?(?: Resource)? Cannot allocate memory",
        HOST,
    ),
    Pattern(r"memory: Cannot allocate memory .{0,300}? request size \(currently (?P<size>\d+ bytes)\)", HOST, 0.95),
    Pattern(r"out of memory .{0,20}? Failed on request of size (?P<size>\d+)", HOST),
    Pattern(r"(?i:cannot allocate memory)(?:\(12\)|\(errno=?:?12\))?", HOST, 0.85),
    Pattern(r"(?<!rmm)std::bad_alloc(?!:out_of_memory)", HOST, 0.85),
    # Java and node limit their heaps themselves, however much memory the host has.
    Pattern(r"java\.lang\.OutOfMemoryError:? (?:Java heap space|GC overhead limit exceeded)", HOST, 0.95, reason="java_heap"),
    other(r"java\.lang\.OutOfMemoryError:? unable to create (?:new )?native thread", "thread_limit", weight=Weight.CAUSE),
    Pattern(r"java\.lang\.OutOfMemoryError", HOST),
    Pattern(
        r"JavaScript heap out of memory|FATAL ERROR: Reached heap limit"
        r"|mark-compacts near heap limit",
        HOST,
        0.95,
        reason="node_heap",
    ),
    Pattern(r"cannot allocate vector of size (?P<size>SIZE)", HOST),
    Pattern(r"(?:UR|PI|ZE)_(?:RESULT_)?ERROR_OUT_OF_HOST_MEMORY|CL_OUT_OF_HOST_MEMORY", HOST),
    Pattern(r"OOM when allocating tensor (?:with|of) shape.{0,200}?device:CPU:\d", HOST, 0.95),
    Pattern(r"Allocator \((?:mklcpu|cpu|cpu_bfc)\) ran out of memory trying to allocate (?P<size>SIZE)", HOST),
    Pattern(
        r"(?i:not enough (?:host |system |physical )?(?:ram|memory) (?:available )?to "
        r"(?:load|allocate|fork|continue))",
        HOST,
        0.7,
    ),
    # Similar words for something else.
    other(r"can't start new thread|pthread_create failed.{0,120}? Resource temporarily unavailable", "thread_limit"),
    other(r"fork:? (?:retry:)? Resource temporarily unavailable", "thread_limit"),
    other(r"received \d+ items of ancdata", "fd_limit", 0.95, phase="data"),
    other(r"\[Errno 2[34]\]|Too many open files", "fd_limit", 0.95),
    other(
        r"(?:No space left on device|ENOSPC).{0,60}? inotify"
        r"|inotify.{0,80}?(?:No space left on device|ENOSPC|watch limit)",
        "inotify_limit",
    ),
    other(r"ENOSPC: System limit for number of file watchers", "inotify_limit"),
    other(r"\[Errno 28\] inotify watch limit", "inotify_limit"),
    other(
        r"out of resources?: (?:[\w-]{1,20})?,? Required:? \d+|Required:? \d+,? Hardware limit:? \d+",
        "triton_shared_memory",
        0.95,
        weight=Weight.CAUSE,
    ),
    other(r"Ran out of memory in memory space (?:vmem|smem|sflag)", "triton_shared_memory", 0.95),
    other(
        r"(?i:uses too much shared data|too much shared memory|shared memory (?:limit|size) (?:exceeded|too large)"
        r"|exceed\w* (?:the )?(?:max\w* )?(?:available )?(?:dynamic )?shared memory (?:limit|size|capacity|per block)"
        r"|shared memory.{0,30}? exceeds (?:the )?(?:hardware|device))",
        "triton_shared_memory",
        weight=Weight.CAUSE,
    ),
    other(
        r"(?i:ResourceExhausted|RESOURCE_EXHAUSTED)\W{1,6} (?:desc=)?(?i:grpc:"
        r"|Received message larger|Quota|Resource has been|Too many)",
        "grpc_limit",
    ),
    other(r"(?i:received message larger than max)", "grpc_limit"),
    other(r"GC overhead limit", "python_error"),
)

SHARED_MEMORY_AND_DISK: tuple[Pattern, ...] = (
    # File names of torch, Python and NCCL in /dev/shm.
    Pattern(
        rf"(?:write|resize|open|allocate|truncate|mmap)[^<]{{0,50}}</?torch_\w+> .{{0,60}}? {_FULL}", SHM, 0.95, phase="data"
    ),
    Pattern(r"unable to write to file </?torch_\w+>", SHM, 0.85, phase="data"),
    Pattern(r"failed to extend /dev/shm/nccl-\w+ to (?P<size>\d+ bytes)", SHM, 0.85),
    Pattern(rf"shm\w*\.(?:h|cc|c|py):\d+.{{0,80}}? {_FULL}", SHM),
    Pattern(
        r"(?:failed to|unable to|Error while) (?:creat\w+|extend\w*|attach\w* to|open|allocate) shared memory segment"
        r".{0,60}?\(size (?P<size>\d+)\)",
        SHM,
        0.85,
    ),
    Pattern(rf"{_FULL}.{{0,160}}? -> '?/dev/shm", SHM, 0.95),
    Pattern(r"Usage of EmptyDir volume \"(?:d?shm|shared)", SHM, 0.85),
    Pattern(r"unable to allocate shared memory\(shm\)", SHM, 0.85, phase="data"),
    # Ray keeps its objects in /dev/shm.
    Pattern(r"ObjectStoreFullError|PlasmaStoreFull|in object store because it is full(?!.{0,20}?spill)", SHM, 0.85),
    Pattern(r"(?i:insufficient shared memory|out of shared memory(?!,))", SHM, 0.85, phase="data"),
    Pattern(r"DataLoader worker \(pid\(?s?\)? [\d,]{1,400}\) is killed by signal:? Bus error", SHM, phase="data"),
    Pattern(r"shared memory key .{0,80}? to requested size \((?P<size>\d+ bytes)\)", SHM, 0.85),
    Pattern(r"bus error encountered in worker", SHM, phase="data"),
    Pattern(rf"{_FULL}.{{0,30}}?/dev/shm|/dev/shm/.{{0,120}}? {_FULL}", SHM, 0.95),
    Pattern(rf"{_FULL}:? '?/(?:psm_|torch_|sem\.|loky)", SHM),
    Pattern(
        r"(?:failed to|unable to|Error while) (?:extend|creating|attach\w* to|open"
        r"|allocate) (?:shared memory segment)? [^:]{0,20}?/dev/shm/nccl",
        SHM,
        0.85,
    ),
    Pattern(rf"could not resize shared memory segment .{{0,80}}? to (?P<size>\d+ bytes):? {_FULL}", SHM),
    Pattern(rf"could not resize shared memory segment .{{0,80}}? {_FULL}", SHM),
    # The disk.
    Pattern(
        r"[Ee]rror writing .{0,200}? Resource exhausted:"
        r"(?!.{0,80}?(?i:(?<!disk)quota (?:exceeded )?(?:for|metric)"
        r"|rate (?:limit|exceeded)|per minute|too many|message larger))",
        DISK,
        0.85,
        phase="save",
    ),
    Pattern(r"kind:? StorageFull|\(os error (?:28|122|112)\)|code: (?:28|122), kind", DISK, 0.95),
    Pattern(r"(?i:exceed\w{0,3} (?:the |its )?(?:\w{1,12} )?(?:disk|jobfs|storage|scratch|file system) quota)", DISK),
    Pattern(rf"{_FULL}(?!:? System limit|,?['\"]inotify)", DISK, 0.92),
    Pattern(r"\[Errno 28\](?! inotify)|\[Errno 122\]|\[WinError 112\]", DISK, 0.95),
    Pattern(
        r"not enough space on the disk"
        r"|[Nn]ot enough (?:free |disk )?space to (?:write|save|extract) (?P<size>\d+ bytes)?"
        r"(?!.{0,60}?(?i:memory|cache|buffer|arena))"
        r"|(?i:(?:not enough|insufficient|out of) (?:free )?disk space|disk full)"
        r"|(?:database or )?disk is full",
        DISK,
    ),
    # memtop's own trainer.
    Pattern(r"(?:finished|stopped at) update \d+, not saved: \d+ MiB needed", DISK, phase="save"),
    Pattern(r"PytorchStreamWriter failed", DISK, 0.7, phase="save"),
    Pattern(r"inline_container.{0,30}? unexpected pos \d+ vs \d+", DISK, 0.7, phase="save"),
    Pattern(r"Usage of EmptyDir volume|had condition: \[DiskPressure|OutOfDiskError|(?i:too much disk space)", DISK, 0.85),
    Pattern(r"(?:ephemeral|local ephemeral|emptyDir).{0,40}?(?:storage|usage).{0,40}? exceeds", DISK, 0.85),
    Pattern(r"node was low on resource: ephemeral-storage", DISK),
)

PATTERNS = (*DEVICE_MEMORY, *HOST_MEMORY, *SHARED_MEMORY_AND_DISK)
