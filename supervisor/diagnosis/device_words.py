"""How everything but PyTorch's allocator says that a device has no memory left: CUDA, its libraries, JAX, TensorFlow, ..."""

from __future__ import annotations

import re

from memtop.supervisor.diagnosis.finding import Shape, Weight, not_memory, shape
from memtop.supervisor.diagnosis.values import Kind

_OOM, _PINNED = Kind.GPU_OOM, Kind.PINNED_HOST_OOM

SHAPES: tuple[Shape, ...] = (
    # Page-locked host memory: worded as a device's, before the device's own words.
    shape(r"failed to alloc(?:ate)? (?P<size>\d+bytes) on host", _PINNED, confidence=0.95, needle="onhost"),
    shape(r"could not allocate pinned host memory of size:? (?P<size>\d+)?", _PINNED, confidence=0.95, needle="pinnedhost"),
    shape(r"(?i:(?:failed|unable|cannot|could ?n[o']t) (?:to)?alloc(?:ate)?[^.]{0,60}(?:pinned|page-?locked))", _PINNED),
    shape(
        r"(?:cu(?:da)?|hip)(?:Mem)?HostAlloc\w* .{0,60}?(?:out of memory|OUT_?OF_?MEMORY|MemoryAllocation)",
        _PINNED,
        needle="HostAlloc",
    ),
    shape(
        r"(?:cu(?:da)?|hip)(?:Mem)?HostRegister .{0,60}?(?:out of memory|OUT_?OF_?MEMORY|MemoryAllocation)",
        _PINNED,
        needle="HostRegister",
    ),
    # CUDA, HIP and others without figures. Whether it was pinned memory is for the frames to say.
    shape(r"(?:CUDA|HIP|XPU|NPU|MUSA|MLU)(?: driver)? error:? out of memory", _OOM, confidence=0.85, needle="outofmemory"),
    shape(
        r"(?:CUDA|HIP|XPU|NPU|MUSA|MLU|MPS backend|GPU) out of(?: the)? memory"
        r"(?!\.Tri|\(MPS|detected|errors|issues|problems|handling)",
        _OOM,
        confidence=0.8,
        needle="outof",
        asserted=True,
    ),
    shape(r"CUDA out of memory detected", _OOM, confidence=0.8),
    shape(r"(?i:(?:cuda|hip) runtime error \(?2\)?:? out of memory)", _OOM, confidence=0.9, needle="outofmemory"),
    shape(r"(?:CUDA|hip|HIP)_?E(?:RROR|rror)_?[Oo](?:UT_OF_MEMORY|utOfMemory)", _OOM, confidence=0.85),
    shape(r"Error 2: out of memory", _OOM, confidence=0.85, needle="Error2"),
    shape(r"THCudaCheck FAIL .{0,160}? error=2 : out of memory", _OOM, confidence=0.85, needle="THCudaCheck"),
    shape(r"cudaSuccess \(2 vs\. 0\) out of memory", _OOM, confidence=0.9, needle="cudaSuccess"),
    shape(r"cudaErrorMemoryAllocation", _OOM, confidence=0.85, needle="cudaErrorMem"),
    shape(r"Triton Error \[\w+\]: out of memory", _OOM, confidence=0.9, needle="TritonError"),
    shape(
        r"allocating (?P<size>SIZE) on device (?P<gpu>\d+):? cuda\w+ failed:? out of memory",
        _OOM,
        confidence=0.95,
        needle="ondevice",
    ),
    shape(r"(?:cuda|hip)Malloc\w* (?:retry)?failed:? out of memory", _OOM, confidence=0.9, needle="failed"),
    shape(
        r"OutOfMemoryError:? (?:Error:)?Out of memory allocating (?P<size>SIZE)",
        _OOM,
        confidence=0.95,
        needle="OutOfMemoryError",
    ),
    shape(
        r"Out of memory error on GPU (?P<gpu>\d+)\. Cannot allocate (?P<size>SIZE)", _OOM, confidence=0.95, needle="Outofmemory"
    ),
    shape(r"(?:torch\.(?:cuda\.)?)?OutOfMemoryError:? (?=Allocation on device)", _OOM, confidence=0.9, at_start=True),
    shape(r"Allocation on device (?P<gpu>\d{0,2}) would exceed allowed memory", _OOM, confidence=0.9, needle="wouldexceed"),
    shape(r"torch\.(?:cuda\.)?OutOfMemoryError(?!:?\w*out of memory|,|\))", _OOM, confidence=0.7, at_start=True),
    shape(r"RayTaskError\(OutOfMemoryError\)", _OOM, confidence=0.6, needle="RayTaskError(O"),
    shape(
        r"[Rr]an out of (?:GPU|CUDA|VRAM|device|video)? memory (?:when|while|during|on|in(?!memoryspace)|with)",
        _OOM,
        confidence=0.6,
    ),
    shape(r"No executable batch size found, reached zero", _OOM, confidence=0.85, needle="reachedzero"),
    shape(r"No available memory for the cache blocks", _OOM, confidence=0.6, needle="cacheblocks", phase="load"),
    # Libraries that allocate for themselves.
    shape(r"CU[A-Z]{3,8}_STATUS_ALLOC_FAILED|(?:roc|hip)blas_status_(?:memory_error|alloc_failed)", _OOM, confidence=0.8),
    shape(
        r"(?:HIPBLAS|ROCBLAS|MIOPEN|HIPSPARSE)_STATUS_(?:ALLOC_FAILED|MEMORY_ERROR)|miopenStatusAllocFailed",
        _OOM,
        confidence=0.8,
    ),
    shape(r"Unable to find a valid cuDNN algorithm", _OOM, confidence=0.55, needle="cuDNNalg"),
    shape(
        r"(?:GET|FIND) was unable to find an engine to execute this computation", _OOM, confidence=0.45, needle="unabletofind"
    ),
    shape(
        r"\[(?P<gpu>\d{1,3})\] \S{0,60}? NCCL WARN Cuda failure(?:\d+)? '?out of memory'?",
        _OOM,
        confidence=0.9,
        needle="NCCLWARNCuda",
    ),
    shape(r"Cuda failure(?:\d+)? '?out of memory'?", _OOM, confidence=0.85, needle="Cudafailure"),
    shape(r"Failed to CUDA (?:host)?[cm]alloc", _OOM, confidence=0.75, needle="FailedtoCUDA"),
    # XLA: JAX and TensorFlow.
    shape(
        r"Out of memory (?:while)?(?:trying"
        r" to)? alloc(?:ate|ating) (?P<size>SIZE)",
        _OOM,
        confidence=0.95,
        needle="Outofmemory",
    ),
    shape(r"Failed to allocate request for (?P<size>SIZE) (?:\(\d+B\))? on device ordinal (?P<gpu>\d+)", _OOM, confidence=0.95),
    shape(
        r"RESOURCE_EXHAUSTED:?(?:\w+:)? (?:Attempting to (?:allocate|reserve)|Error allocating|Failed to"
        r" allocate) [^.\d]{0,40}? (?P<size>SIZE)",
        _OOM,
        confidence=0.95,
        needle="EXHAUSTED",
    ),
    shape(
        r"Attempting to (?:allocate|reserve) (?P<size>SIZE).{0,40}? That was not possible",
        _OOM,
        confidence=0.95,
        needle="notpossible",
    ),
    shape(r"Ran out of memory in memory space (?:hbm|vmem|smem)", _OOM, confidence=0.95, needle="memoryspace"),
    shape(
        r"OOM when allocating tensor with shape[^\n]{0,200}?(?:/device:GPU:|/gpu:)(?P<gpu>\d+)",
        _OOM,
        confidence=0.95,
        needle="OOMwhen",
    ),
    shape(r"OOM when allocating tensor with shape(?![^\n]{0,200}?device:[CG]PU)", _OOM, confidence=0.85, needle="OOMwhen"),
    shape(
        r"Allocator \(GPU_(?P<gpu>\d+)_bfc\) ran out of memory trying to allocate (?P<size>SIZE)"
        r"(?!.{0,120}?not a failure)",
        _OOM,
        confidence=0.85,
        needle="ranoutofmemory",
    ),
    not_memory(
        r"Allocator \(\w+\) ran out of memory trying to allocate [\w.]{1,20}(?:\(\w+\))?(?:rounded to"
        r" \w+)?.{0,80}? not a failure",
        "allocator_warning",
        weight=Weight.HINT,
        confidence=0.95,
        needle="notafailure",
    ),
    # Other devices and languages.
    shape(r"(?:UR|PI|ZE)_(?:RESULT_)?ERROR_OUT_OF_(?:DEVICE_MEMORY|RESOURCES)", _OOM, confidence=0.85, needle="OUT_OF"),
    shape(r"CL_MEM_OBJECT_ALLOCATION_FAILURE", _OOM, confidence=0.85, needle="CL_MEM"),
    shape(
        r"\[metal::malloc\] (?:Attempting|Unable) to allocate (?P<size>\d+bytes)", _OOM, confidence=0.95, needle="metal::malloc"
    ),
    shape(r"kIOGPUCommandBufferCallbackErrorOutOfMemory", _OOM, confidence=0.9, needle="kIOGPU"),
    shape(r"rmm::out_of_memory|std::bad_alloc:? out_of_memory:? CUDA", _OOM, confidence=0.9, needle="out_of_memory"),
    shape(r"(?i:not enough (?:gpu|video|device) memory|insufficient (?:gpu|device) memory)", _OOM, confidence=0.6),
)

PIN_FRAMES = re.compile(
    r"in pin memory thread|pin_memory\.py|in pin_memory\b|\.pin_memory\(|cuda(?:Host|MallocHost)"
    r"|CachingHostAllocator|host_allocator"
)
PIN_DEVICE = re.compile(r"pin memory thread for device (\d{1,4})")
