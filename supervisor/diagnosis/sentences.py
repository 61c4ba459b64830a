"""A diagnosis in one sentence for a person."""

from __future__ import annotations

from memtop.supervisor import units
from memtop.supervisor.diagnosis.values import Diagnosis, Kind

PHASES = {
    "load": "while the model was loaded",
    "forward": "in the forward pass",
    "loss": "in the loss",
    "backward": "in backward",
    "optimizer": "in the optimizer's step",
    "evaluation": "during evaluation",
    "save": "while saving",
    "data": "while data was loaded",
}

OUTCOMES = {
    "gpu_oom": "ran out of GPU memory",
    "gpu_oom_fragmented": "ran out of GPU memory, in pieces",
    "gpu_oom_other_process": "ran out of GPU memory that others held",
    "host_oom_alloc": "ran out of host memory",
    "host_oom_killed": "was killed for lack of host memory",
    "pinned_host_oom": "ran out of page-locked memory",
    "shm_exhausted": "ran out of shared memory",
    "disk_full": "found the disk full",
}
"""How a stretch of a run ended, by the value of its `Kind`."""

REASONS = {
    "aborted": "the program aborted itself",
    "allocator_warning": "an allocator warned that it could do with more memory; by its own words that is no failure",
    "asked_to_stop": "the program was asked to stop",
    "bus_error": "the program crashed (bus error): a mapped file was cut short, or /dev/shm was full",
    "cancelled": "the job was cancelled",
    "config_error": "the configuration was refused",
    "connection_lost": "a connection to another process was lost",
    "cuda_error": "CUDA reported an error that is not about memory",
    "data_error": "the data could not be read",
    "device_mismatch": "tensors of different devices met",
    "device_side_assert": "an assertion failed on the device, mostly an index or a label out of range",
    "driver_mismatch": "the GPU driver and its library do not fit together; a reboot or reloading the driver helps",
    "dtype_mismatch": "tensors of different types met",
    "extension_build": "an extension could not be built",
    "fd_limit": "too many open files: a limit of descriptors (ulimit -n), not of memory",
    "finished": "the program ended well",
    "gpu_lost": "the GPU failed or was lost",
    "grpc_limit": "a limit of messages or of a quota was exceeded, not one of memory",
    "illegal_memory_access": "a kernel read or wrote outside its memory: a bug, not a lack of memory",
    "import_error": "a module could not be imported",
    "inotify_limit": "the limit of watched files is used up, not the disk",
    "interrupted": "the program was interrupted",
    "invalid_device": "a GPU was asked for that is not there",
    "java_heap": "Java's heap was full",
    "keyboard_interrupt": "somebody pressed Ctrl-C",
    "killed_by_something": "something killed the program",
    "loss_nan": "the loss was no longer a number",
    "nccl_error": "the communication between ranks failed",
    "nccl_timeout": "a rank waited for another until its time was up",
    "network": "something could not be had from the network",
    "no_evidence": "nothing here tells of a lack of memory; why the program ended is not known",
    "no_kernel_image": "this build has no code for this GPU",
    "node_failure": "the node failed",
    "node_heap": "JavaScript's heap (node) was full",
    "oom_handled": "memory ran out for a moment; the program caught that and went on",
    "oom_kill_of_other_process": "the kernel killed another program for lack of memory, not this one",
    "oom_retried": "memory ran out for a moment; the program tried again or left something out, and went on",
    "permission": "a file or device may not be used by this user",
    "port_in_use": "a network port is in use already",
    "preempted": "the scheduler took the machine for another job",
    "python_error": "the program failed with an error of its own",
    "recursion": "the program called itself too deeply",
    "segfault": "the program crashed (segmentation fault)",
    "shape_mismatch": "tensors of shapes that do not fit met",
    "sigterm": "the program was told to end (SIGTERM)",
    "state_mismatch": "a checkpoint does not fit the model",
    "teardown_noise": "workers were killed while a completed run was put away",
    "thread_limit": "no more threads or processes may be started: a limit (ulimit -u), not of memory",
    "time_limit": "the job's time was up",
    "worker_died": "a data loader's worker ended, and nothing here says why",
    "triton_shared_memory": "a kernel needs more on-chip memory than the GPU has: smaller blocks help, smaller batches do not",
}


def summary(diagnosis: Diagnosis, detail: str | None = None, caveat: str | None = None) -> str:
    """`detail` is what the program said, for failures that have no sentence of their own; `caveat` a sentence to close with."""
    said = _sentence(diagnosis, detail)
    return said if caveat is None else f"{said} {caveat}"


def _sentence(diagnosis: Diagnosis, detail: str | None) -> str:
    if diagnosis.kind is Kind.NOT_MEMORY:
        sentence = REASONS.get(diagnosis.reason or "", "the program failed, not for lack of memory")
        if detail and diagnosis.reason in ("python_error", "data_error", "config_error", "import_error", "cuda_error"):
            sentence += f": {detail}"
        return _capital(sentence)
    phase = PHASES.get(diagnosis.phase)
    return {
        Kind.HOST_OOM_ALLOC: _host_alloc,
        Kind.HOST_OOM_KILLED: _host_killed,
        Kind.PINNED_HOST_OOM: _pinned,
        Kind.SHM_EXHAUSTED: _shm,
        Kind.DISK_FULL: _disk,
    }.get(diagnosis.kind, _gpu)(diagnosis, f" {phase}" if phase else "")


def _gpu(diagnosis: Diagnosis, phase: str) -> str:
    name = "The GPU" if diagnosis.device_index is None else f"GPU {diagnosis.device_index}"
    told = []
    if diagnosis.requested_bytes is not None:
        purpose = f" ({diagnosis.requested_for})" if diagnosis.requested_for else ""
        told.append(f"asked for {size(diagnosis.requested_bytes)}{purpose}")
    total = diagnosis.total_bytes
    if diagnosis.free_bytes is not None:
        told.append(f"{size(diagnosis.free_bytes)} was free" + (f" of {size(total)}" if total else ""))
    parts = [", ".join(told)] if told else []
    held, word = diagnosis.process_bytes, "this process held"
    if held is None:
        held, word = diagnosis.allocated_bytes, "the program's tensors held"
    if held is not None:
        parts.append(f"{word} {size(held)}{_share(held, total)}")
    if diagnosis.kind is Kind.GPU_OOM_FRAGMENTED:
        spare = diagnosis.reserved_unallocated_bytes
        amount = f"{size(spare)} was" if spare is not None else "more than that was"
        parts.append(f"{amount} reserved but unallocated, in pieces")
    elif diagnosis.kind is Kind.GPU_OOM_OTHER_PROCESS:
        pids = ", ".join(map(str, diagnosis.other_process_pids))
        amount = size(diagnosis.other_process_bytes)
        parts.append(
            f"other processes held {amount}{_share(diagnosis.other_process_bytes, total)}" + (f", pid {pids}" if pids else "")
        )
    elif _refused_with_room(diagnosis):
        allowed = diagnosis.allowed_bytes
        why = f"the program may use {size(allowed)}" if allowed is not None else "the driver refused it although there was room"
        parts.append(why)
    return f"{name} ran out of memory{phase}" + (f": {'; '.join(parts)}." if parts else ".")


def _refused_with_room(diagnosis: Diagnosis) -> bool:
    requested, free = diagnosis.requested_bytes, diagnosis.free_bytes
    return requested is not None and free is not None and free > requested


def _host_alloc(diagnosis: Diagnosis, phase: str) -> str:
    if diagnosis.reason is not None:
        return f"{REASONS[diagnosis.reason]}{phase}: a limit of its own, which may be far below what the host has."
    amount = "An allocation" if diagnosis.requested_bytes is None else size(diagnosis.requested_bytes)
    limit = diagnosis.address_space_bytes
    why = "" if limit is None else f": its address space is limited to {size(limit)} (ulimit -v)"
    return f"{amount} of host memory was refused{phase}{why}."


def _host_killed(diagnosis: Diagnosis, phase: str) -> str:
    if diagnosis.confidence < 0.5:
        return (
            "The program, or one that it had started, was killed (SIGKILL), probably by the kernel for lack of host memory; "
            "it may also have been killed by hand, which looks the same."
        )
    certain = diagnosis.confidence >= 0.9
    who = "A data loader's worker" if diagnosis.phase == "data" else "The program"
    return f"{who} was {'killed' if certain else 'most likely killed'} for lack of host memory."


def _pinned(diagnosis: Diagnosis, phase: str) -> str:
    amount = "" if diagnosis.requested_bytes is None else f" of {size(diagnosis.requested_bytes)}"
    return f"Page-locked host memory{amount} was refused{phase}: that is the host's memory, not the GPU's."


def _shm(diagnosis: Diagnosis, phase: str) -> str:
    return f"/dev/shm, through which data loaders and ranks pass their data, was full{phase}."


def _disk(diagnosis: Diagnosis, phase: str) -> str:
    if diagnosis.confidence < 0.8:
        return f"A file could not be written{phase}: probably the disk is full; a folder on the network may say the same."
    return f"The disk was full{phase}."


def size(size_bytes: int | None) -> str:
    """As exact as the allocator prints it: two decimals of a GiB."""
    if size_bytes is not None and units.GIB <= size_bytes < 1024 * units.GIB:
        return f"{units.gib(size_bytes, 2)} GiB"
    return units.size(size_bytes)


def _share(part: int | None, total: int | None) -> str:
    """Only where it can be one: NVML may not see the process, and Windows lets it spill over into host memory."""
    return f" ({units.percent(part / total)})" if part is not None and total and part <= total else ""


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:] + ("" if sentence.endswith(".") else ".")
