"""What ends training and is not a lack of memory, however much of it is mentioned: worth a name of its own, so that nothing is
shrunk for it."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator

from memtop.supervisor.diagnosis.finding import Finding, Shape, Weight, both_ends, not_memory
from memtop.supervisor.diagnosis.page import Page
from memtop.supervisor.diagnosis.values import Kind

ASYNCHRONOUS = frozenset({"illegal_memory_access", "device_side_assert", "gpu_lost", "cuda_error"})
"""Reported wherever the program happened to be: the frames tell no phase."""

SHAPES: tuple[Shape, ...] = (
    # CUDA's other errors.
    not_memory(r"device-side assert triggered", "device_side_assert", weight=Weight.CAUSE, confidence=0.95, needle="assert"),
    not_memory(
        r"block: \[\d+,\d+,\d+\],? thread: \[\d+,\d+,\d+\] Assertion",
        "device_side_assert",
        weight=Weight.CAUSE,
        confidence=0.95,
        needle="Assertion",
    ),
    not_memory(
        r"an illegal memory access was encountered|CUDA_ERROR_ILLEGAL_ADDRESS|cudaErrorIllegalAddress|misaligned address",
        "illegal_memory_access",
        weight=Weight.CAUSE,
        confidence=0.95,
    ),
    not_memory(r"(?i:memory access fault by GPU)", "illegal_memory_access", weight=Weight.CAUSE, confidence=0.95),
    not_memory(r"invalid device ordinal", "invalid_device", confidence=0.95, needle="ordinal"),
    not_memory(
        r"[Nn]o kernel image is available|is not compatible with the current PyTorch installation",
        "no_kernel_image",
        confidence=0.95,
    ),
    not_memory(
        r"unspecified launch failure|uncorrectable ECC|fallen off the bus|GPU is lost|CUDA_ERROR_ECC|NVRM:"
        r" Xid|hardware error was encountered",
        "gpu_lost",
        weight=Weight.CAUSE,
        confidence=0.9,
    ),
    not_memory(
        r"Failed to initialize NVML: Driver/library version mismatch|driver/library version mismatch",
        "driver_mismatch",
        confidence=0.95,
    ),
    not_memory(
        r"CUDA driver version is insufficient|NVIDIA driver on your system is too old|Found no NVIDIA"
        r" driver|no CUDA-capable device is detected",
        "driver_mismatch",
        confidence=0.9,
    ),
    not_memory(r"CU[A-Z]{3,8}_STATUS_(?!ALLOC_FAILED)[A-Z_]{1,80}", "cuda_error", confidence=0.7, needle="_STATUS_"),
    not_memory(
        r"(?:CUDA|HIP) error: (?!out of memory|CU[A-Z]{1,80}_STATUS_ALLOC)[A-Za-z]",
        "cuda_error",
        confidence=0.7,
        needle="error:",
    ),
    # Ranks that wait for another.
    not_memory(
        r"Watchdog caught collective operation timeout|(?:NCCL|c10d) .{0,40}? [Tt]imed out after|ran for"
        r" \d+ milliseconds before timing out",
        "nccl_timeout",
        weight=Weight.BROKEN,
        confidence=0.9,
    ),
    not_memory(
        r"\[Gloo\] Timed out|gloo/transport\S{0,80}? Timed out|Timed out waiting \d+ms for (?:recv|send)"
        r"|(?:DistStore|DistNetwork)Error.{0,200}?[Tt]imed? ?out|wait timeout after \d+",
        "nccl_timeout",
        weight=Weight.BROKEN,
        confidence=0.85,
    ),
    not_memory(
        r"monitored ?[Bb]arrier .{0,80}? timeout|Rank \d+ failed to pass monitored",
        "nccl_timeout",
        weight=Weight.BROKEN,
        confidence=0.85,
    ),
    not_memory(
        r"nccl(?:System|Remote|Internal|Invalid\w+)Error|NCCL error.{0,120}? unhandled (?:system|cuda) error|DistBackendError",
        "nccl_error",
        weight=Weight.BROKEN,
        confidence=0.8,
    ),
    not_memory(
        r"Connection (?:reset|closed) by (?:remote )?peer|Broken pipe|socketPollConnect|gloo\S{0,80}? Connection",
        "connection_lost",
        weight=Weight.TERMINATED,
        confidence=0.5,
    ),
    not_memory(r"EADDRINUSE|[Aa]ddress already in use", "port_in_use", confidence=0.93),
    # Programs that do not fit together.
    not_memory(
        r"Error building extension|Ninja is required to load|MissingCUDAException|CUDA_HOME (?:environment"
        r" variable is not set|does not exist)|unable to compile CUDA",
        "extension_build",
        confidence=0.95,
    ),
    not_memory(
        r"(?:undefined symbol:|cannot open shared object file|DLL load failed while importing(?!.{0,80}paging))",
        "import_error",
        confidence=0.93,
        phase="load",
    ),
    not_memory(
        r"(?:ModuleNotFoundError|ImportError):",
        "import_error",
        confidence=0.9,
        phase="load",
        at_start=True,
    ),
    not_memory(
        r"(?:should|must|to) (?:be|have) the same (?:d?type)?.{0,40}?(?:Half|Float|BFloat|Double|dtype)"
        r"|Input type \([\w:.]{1,80}\) and (?:bias|weight) type|expected (?:m1 and m2|scalar type|mat1 and"
        r" mat2).{0,40}?(?:dtype|but found|same)|expected scalar type \w+ but found",
        "dtype_mismatch",
        confidence=0.93,
    ),
    not_memory(
        r"mat1 and mat2 must have the same dtype|(?:Half|BFloat16|Float) did not match|\"\w+\" not"
        r" implemented for '(?:Half|BFloat16|Long|Int)'",
        "dtype_mismatch",
        confidence=0.9,
    ),
    not_memory(
        r"shapes cannot be multiplied|size mismatch(?: for|,)|[Ss]izes of tensors must match|The size of"
        r" tensor \w+ \(\d+\) must match|Trying to set a tensor of shape|shape '\[[^\]]{1,60}\]' is"
        r" invalid for input|Expected (?:input|target) (?:batch_)?size|expand.{0,40}? must match the"
        r" existing size",
        "shape_mismatch",
        confidence=0.93,
    ),
    not_memory(r"Expected all tensors to be on the same device", "device_mismatch", confidence=0.95, needle="samedevice"),
    not_memory(
        r"(?:Error\(s\) in loading state_dict|Missing key\(s\) in state_dict|Unexpected key\(s\))",
        "state_mismatch",
        confidence=0.85,
        phase="load",
    ),
    not_memory(
        r"(?:unrecognized arguments:|the following arguments are required:|ConfigAttributeError"
        r"|ConfigKeyError|MissingMandatoryValue|ValidationError)",
        "config_error",
        confidence=0.85,
    ),
    # Numbers.
    not_memory(r"(?i:loss (?:is|was|became|value is)\W{0,3}(?:nan|inf\b|not finite|diverg))", "loss_nan", confidence=0.9),
    not_memory(
        r"(?i:(?:nan|non-finite|infinite) (?:or inf )?(?:loss|values? in loss|detected in loss|gradients?)"
        r" (?:detected|encountered|found|,?stop))",
        "loss_nan",
        confidence=0.85,
    ),
    not_memory(
        r"Minimum loss scale reached|[Cc]urrent loss scale already at minimum|FloatingPointError:",
        "loss_nan",
        confidence=0.9,
    ),
    # The network and rights.
    not_memory(r"(?:Permission denied|\[Errno 13\]|PermissionError:)", "permission", confidence=0.85),
    not_memory(
        r"(?:HTTPError|ConnectionError|MaxRetryError|ReadTimeout(?:Error)?|ConnectTimeout|SSLError"
        r"|LocalEntryNotFoundError|GatedRepoError|RepositoryNotFoundError)\b",
        "network",
        confidence=0.8,
    ),
    not_memory(r"recursion depth exceeded", "recursion", confidence=0.9),
)

_MOST_ERRORS = 60
_ERROR_LINE = re.compile(
    r"((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupted|NotFound|Failure|Timeout|Expired"
    r"|StopIteration))(?::(?:\s|$)|$)"
)
# What others raise when one has failed, or around the error proper.
_AROUND = re.compile(
    r"(?:.*\.)?(?:ChildFailedError|SignalException|DistBackendError|DistNetworkError|DistStoreError"
    r"|BrokenPipeError|ConnectionResetError"
    r"|ConnectionRefusedError|EOFError|CalledProcessError|ProcessExitedException"
    r"|ProcessRaisedException|RayTaskError|RayActorError|ActorDiedError"
    r"|WorkerCrashedError|BrokenProcessPool|TerminatedWorkerError|OutOfMemoryError|MemoryError"
    r"|ResourceExhaustedError|XlaRuntimeError|JaxRuntimeError)$"
)
_AROUND_WORDS = re.compile(
    r"DataLoader worker|Caught \w+ in |died unexpectedly|exited unexpectedly|[Oo]ut of memory|SIGKILL|exit code:? (?:137|-9)\b"
)
_LEADERS = re.compile(r"^(?:- |\* |`|E\s{2,}|[A-Z]\d{4} |\S{1,80} ERROR:?\s|ERROR:?\s|\[ERROR\]\s|\[rank\d+\]:?\s?)+")
_DATA = re.compile(
    r"torch/utils/data/|datasets/|data\.reraise\(\)|in DataLoader worker process|webdataset"
    r"|LibsndfileError|UnidentifiedImageError|JSONDecodeError|UnicodeDecodeError|ArrowInvalid"
    r"|BadZipFile|EmptyDataError|ParserError"
)
_CONFIG = re.compile(r"deepspeed/|accelerate/|argparse|hydra|omegaconf|config", re.IGNORECASE)
_CONFIG_WORDS = re.compile(
    r"not (?:yet )?supported|must be|should be|required|[Ii]nvalid|incompatible|unknown|not recognized|config", re.IGNORECASE
)
_NOT_A_NUMBER = re.compile(r"(?:loss|grad_norm|ppl|perplexity)['\"]?\s*[:=]\s*-?(?:nan|inf)\b", re.IGNORECASE)


def python_errors(page: Page, known: Container[int]) -> list[Finding]:
    """Any exception's last line, where nothing else knows it: `known` are the lines of which a shape says more."""
    candidates = [
        index
        for index, line in enumerate(page.lines)
        if index not in known and not line.bar and any(part in line.text for part in ("rror", "xception", "Timeout"))
    ]
    return both_ends(candidates, lambda index: _python_error(page, index), _MOST_ERRORS)


def _python_error(page: Page, index: int) -> Finding | None:
    text = page.lines[index].text
    match = _ERROR_LINE.match(_LEADERS.sub("", text))
    if match is None or _AROUND.match(match[1]) or _AROUND_WORDS.search(text) or "Warning" in match[1]:
        return None
    above = "\n".join(each.text for each in page.context(index, 30))
    reason, phase, confidence = "python_error", None, 0.8
    if _DATA.search(above):
        reason, phase, confidence = "data_error", "data", 0.85
    elif "AssertionError" in match[1] and _CONFIG.search(above) and _CONFIG_WORDS.search(text):
        reason, phase = "config_error", "unknown"
    return Finding(index, Kind.NOT_MEMORY, reason, Weight.ERROR, confidence, phase, last_line=index)


def not_a_number(page: Page) -> Iterator[Finding]:
    """A meter that shows nan, in the last lines only: a shown one may be a skipped step."""
    first = max(0, len(page.lines) - 40)
    for index in range(first, len(page.lines)):
        if "n" in page.lines[index].text and _NOT_A_NUMBER.search(page.lines[index].text):
            nan = "nan" in page.lines[index].text.lower()
            if nan:
                yield Finding(index, Kind.NOT_MEMORY, "loss_nan", Weight.HINT, 0.6, "unknown", last_line=index)
                return
