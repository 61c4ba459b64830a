"""What a log reports: every failure, in order, and which of them ended the program."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace

from memtop.supervisor.diagnosis import allocator, figures, kills, memory_patterns, other_patterns, shortage
from memtop.supervisor.diagnosis.aftermath import (
    StepLines,
    has_traceback,
    is_mild,
    is_ordinary,
    is_repeated,
    is_taken_lightly,
    went_on,
)
from memtop.supervisor.diagnosis.finding import UNCERTAIN, Finding, Weight, both_ends
from memtop.supervisor.diagnosis.phase import phase_of
from memtop.supervisor.diagnosis.text import TRACEBACK, JoinedLines, LogLine, LogText
from memtop.supervisor.diagnosis.values import Kind

PATTERNS = (*memory_patterns.PATTERNS, *other_patterns.PATTERNS)
_TEARDOWN = "teardown_noise"
_GIVEN_UP = 0.7
"""The confidence in a failure that the program meant to survive."""
_SAME_FAILURE = 6
"""The most lines between two messages about one failure."""


@dataclass(frozen=True)
class Reading:
    page: LogText
    cause: Finding | None
    """What ended the program, as far as the log says."""
    survived: tuple[tuple[Finding, str], ...]
    """The failures after which the program went on, each with a reason of `values.REASONS`."""
    findings: tuple[Finding, ...]


def read(page: LogText, member_pids: frozenset[int] = frozenset(), *, failed: bool = False) -> Reading:
    """Read the log. `member_pids` are the run's processes; `failed`: the program is known to have
    failed."""
    findings = _findings(page, member_pids)
    fatal, survived = [], []
    progress, last = StepLines(page), _last_uncaught(page, findings)
    for index, finding in enumerate(findings):
        how = (
            _TEARDOWN
            if progress.completed and _is_worker_death(page, finding)
            else went_on(page, progress, finding, _until(page, findings, index), failed=failed)
            or ("oom_handled" if finding.line < last and _was_caught(page, finding, last) else None)
        )
        if how is None:
            fatal.append(finding)
        else:
            survived.append((finding, how))
    for finding in list(fatal):
        how = _survived_later(page, finding, survived)
        if how is not None:
            fatal.remove(finding)
            survived.append((finding, how))
    survived.sort(key=lambda pair: pair[0].line)
    if fatal and fatal[-1].weight is Weight.KILLED and fatal[-1].last_line == len(page.lines) - 1:
        # It still ran when it was killed: a library that it could do without did not end it.
        fatal = [each for each in fatal if each.reason != "import_error" or has_traceback(page, each)]
    if any(how == _TEARDOWN for _, how in survived):
        fatal = [finding for finding in fatal if finding.weight >= Weight.CAUSE]
    if failed and not fatal and survived and progress.between(survived[-1][0].last_line + 1, len(page.lines))[0] == 0:
        # It said that it would go on, but it made no progress.
        given_up, how = survived[-1]
        if how == "oom_retried" and given_up.kind is not Kind.NOT_MEMORY:
            fatal = [replace(given_up, confidence=min(given_up.confidence, _GIVEN_UP))]
    cause = min(fatal, key=lambda finding: (-finding.weight, finding.line), default=None)
    cause = _with_most_figures(cause, fatal)
    if cause is not None and not failed and any(is_repeated(page, each, cause) for each, _ in survived):
        cause = replace(cause, confidence=min(cause.confidence, UNCERTAIN))
    return Reading(page, cause, tuple(survived), tuple(findings))


# A fault in the program's own code, and no error that passes another one on.
_OWN_FAULT = re.compile(
    # Not of a variable that has no value: that can follow from a failure that was caught.
    r"(?:ZeroDivision|Type|Attribute|Key|Index|Value|FileNotFound|Assertion|Import|ModuleNotFound)Error\b"
)


def _last_uncaught(page: LogText, findings: list[Finding]) -> int:
    """The line where the last traceback of the log begins, if it is of another fault; else -1."""
    if not findings or findings[-1].kind is not Kind.NOT_MEMORY or findings[-1].weight is not Weight.ERROR:
        return -1
    end = findings[-1].line
    start = next((index for index in range(end, max(-1, end - 200), -1) if TRACEBACK in page.lines[index].text), -1)
    return start if _OWN_FAULT.match(page.lines[end].text) else -1


def _was_caught(page: LogText, finding: Finding, last: int) -> bool:
    """Whether the program caught the failure: it printed the message of an exception without its
    traceback and class, and went on before the traceback that begins at line `last`."""
    if not finding.kind.of_gpu or finding.figures.requested is None or finding.weight < Weight.CAUSE:
        return False
    raised = has_traceback(page, finding) or "Error" in page.lines[finding.line].text.partition("memory")[0]
    went_on = any(is_ordinary(line) for line in page.lines[finding.last_line + 1 : last])
    return went_on and not raised


def _until(page: LogText, findings: list[Finding], index: int) -> int:
    """The line where the next failure begins: the progress up to there was made after this one.

    Messages about the same memory a few lines apart are about one failure.
    """
    this = findings[index]
    end = this.last_line
    for other in findings[index + 1 :]:
        if other.line <= end or other.weight < Weight.CAUSE:
            continue
        same = other.kind is this.kind or (other.kind.of_gpu and this.kind.of_gpu)
        if not same or this.kind is Kind.NOT_MEMORY or other.line > end + _SAME_FAILURE or _another_rank(page, this, other):
            return other.line
        end = other.last_line
    return len(page.lines)


def _survived_later(page: LogText, finding: Finding, survived: list[tuple[Finding, str]]) -> str | None:
    """How the program survived a later message about the same failure. After a warning, it went on
    as far as to any later one."""
    if finding.kind is Kind.NOT_MEMORY:
        return None
    far = len(page.lines) if is_mild(page.lines[finding.line]) else finding.last_line + _SAME_FAILURE
    for other, how in survived:
        if (
            other.kind is finding.kind
            and finding.line < other.line
            and (other.line <= far or is_repeated(page, finding, other))
        ):
            return how
    return None


def _another_rank(page: LogText, one: Finding, other: Finding) -> bool:
    return page.lines[one.line].rank != page.lines[other.line].rank


def _is_worker_death(page: LogText, finding: Finding) -> bool:
    return finding.kind in (Kind.HOST_OOM_KILLED, Kind.SHM_EXHAUSTED) and "DataLoader worker" in page.lines[finding.line].text


def _with_most_figures(cause: Finding | None, fatal: list[Finding]) -> Finding | None:
    """The report of the same failure that prints the most. A failure is often printed more than
    once, first by the code that passes it on; the phase is taken from the report that has one."""
    if cause is None:
        return None
    same = [other for other in fatal if other.kind is cause.kind or (other.kind.of_gpu and cause.kind.of_gpu)]
    if cause.kind is Kind.HOST_OOM_KILLED and cause.phase == "unknown":
        phase = next((other.phase for other in same if other.phase != "unknown"), "unknown")
        return replace(cause, phase=phase)
    if cause.figures.known > 1:
        return cause
    requested = cause.figures.requested
    fuller = (other for other in same if other.figures.known > cause.figures.known)
    found = next((other for other in fuller if requested in (None, other.figures.requested)), cause)
    if found.figures.device_index is None:
        found = replace(found, figures=replace(found.figures, device_index=cause.figures.device_index))
    return replace(found, confidence=max(found.confidence, cause.confidence), weight=cause.weight)


def _findings(page: LogText, member_pids: frozenset[int]) -> list[Finding]:
    """One finding for each line that reports a failure."""
    best: dict[int, Finding] = {}
    for view in page.views:
        for finding in _of_view(view, page, member_pids):
            known = best.get(finding.line)
            # Of one line's findings, keep the one that says more; of equals the first, whose
            # pattern is more special.
            if known is None or _worth(finding) > _worth(known):
                best[finding.line] = finding
    explained = {line for finding in best.values() for line in range(finding.line, finding.last_line + 1)}
    likely = [finding for finding in shortage.find(page, explained) if not shortage.is_listed(page, finding)]
    best = {line: finding for line, finding in best.items() if not shortage.is_listed(page, finding)}
    for finding in [*likely, *_python_errors(page, best)]:
        best.setdefault(finding.line, finding)
    for finding in _not_a_number(page):
        best.setdefault(finding.line, finding)
    return [_placed(page, best[line], best) for line in sorted(best)]


def _worth(finding: Finding) -> tuple[int, int]:
    return finding.weight, finding.figures.known


def _of_view(view: JoinedLines, page: LogText, member_pids: frozenset[int]) -> Iterator[Finding]:
    yield from (finding for finding in allocator.find(view) if not _IF_SEEN.search(page.lines[finding.line].text))
    for pattern in PATTERNS:
        yield from pattern.find(view)
    yield from _memory_errors(view)
    yield from kills.of_kernel(view, page, member_pids)
    yield from kills.of_shell(view)


# Advice that quotes the message: `if you see "CUDA out of memory ..."`.
_IF_SEEN = re.compile(
    r"(?i)\b(?:if|whenever|in case of)\W{1,3}(?:(?:you|we|it|the|an?|get|gets|see|hit|encounter|still|error)\W{1,3}){0,4}"
    r"(?:\w*Error\W{0,3})?(?-i:[A-Z]{2,4}|MPS backend) out of memory"
)
_EXACT = 0.95
"""The least confidence of a pattern that names the allocation with its size."""
_OF_A_REQUEST = frozenset({Kind.HOST_OOM_ALLOC, Kind.PINNED_HOST_OOM, Kind.SHM_EXHAUSTED})
_WITHOUT_PHASE = frozenset({"keyboard_interrupt", "sigterm", "nccl_timeout", "nccl_error", "port_in_use", "invalid_device"})
# Errors that CUDA reports wherever the program happens to be: the traceback does not give their
# phase.
_ASYNCHRONOUS = frozenset({"illegal_memory_access", "device_side_assert", "gpu_lost", "cuda_error"})


def _placed(page: LogText, finding: Finding, others: Container[int]) -> Finding:
    """The finding with its phase, and as pinned or shared memory where only the traceback shows
    that."""
    context, here = page.context(finding.line), page.lines[finding.line]
    if finding.kind is Kind.GPU_OOM and finding.figures.known == 0:
        is_pinned, device = pinned(context, page.lines[finding.line + 1 : finding.line + 9])
        if is_pinned:
            finding = replace(finding, kind=Kind.PINNED_HOST_OOM, figures=replace(finding.figures, device_index=device))
    if finding.kind is Kind.DISK_FULL and in_shared_memory(context):
        finding = replace(finding, kind=Kind.SHM_EXHAUSTED, phase="data")
    if finding.kind is Kind.HOST_OOM_ALLOC and "bad_alloc" in here.text and _of_device(context[-2:]):
        finding = replace(finding, kind=Kind.GPU_OOM)  # C++ libraries of a device raise it, too
    other = _other_cause(page, finding) if finding.kind is not Kind.NOT_MEMORY else None
    if other is not None:
        finding = Finding(Kind.NOT_MEMORY, other, 0.6, Weight.ERROR, line=finding.line, last_line=finding.last_line)
    if is_taken_lightly(finding, here):
        finding = replace(finding, confidence=min(finding.confidence, UNCERTAIN), weight=min(finding.weight, Weight.BROKEN))
    if finding.kind in _OF_A_REQUEST or finding.kind.of_gpu:
        finding = figures.with_printed(page, finding, others)
    if finding.weight is Weight.KILLED and finding.kind is Kind.HOST_OOM_KILLED and kills.by_hand(context):
        finding = replace(finding, kind=Kind.NOT_MEMORY, reason="killed_by_something", confidence=0.6)
    light = finding.weight is Weight.ERROR or finding.reason == "memlock_limit"
    if finding.kind is Kind.NOT_MEMORY and light and is_mild(here):
        finding = replace(finding, weight=Weight.HINT)
    return finding if finding.phase is not None else replace(finding, phase=_phase(finding, context))


_DENIED = re.compile(r"(?i)permission denied|operation not permitted|read-only file system|function not implemented")
_OF_DRIVER = re.compile(
    r"(?i)no (?:cuda|hip|rocm)-capable|no (?:cuda |gpu )?devices? (?:is |are |was |were )?(?:found|detected|available)"
    r"|no pinned memory pool"
    r"|driver version|invalid (?:argument|device|value|resource)|initialization error|unknown error|(?:not |un)supported"
    r"|illegal (?:memory access|address|instruction)|device-side assert|(?:CUDA|HIP)_ERROR_(?!OUT)|launch failure"
)
_OF_MEMORY = re.compile(
    r"(?i)out[ _]?of[ _]?(?:\w+[ _])?memory|cannot allocate memory"
    r"|(?:not|n't) (?:\w+ )?enough|insufficient (?:\w+ ){0,2}memory|exceed|no space"
)
_IN_SHARED_MEMORY = re.compile(r"/dev/shm|/torch_|shm_open|SemLock|(?i:shared memory)")


def _other_cause(page: LogText, finding: Finding) -> str | None:
    """A message about a refused allocation can name another reason than a lack of memory, and so
    can a line about shared memory just above it. Returns that reason, or None."""
    if finding.confidence >= _EXACT or not (finding.kind in _OF_A_REQUEST or finding.kind.of_gpu):
        return None
    own = [line.text for line in page.lines[finding.line : finding.last_line + 1]]
    if any(_OF_MEMORY.search(text) for text in own):
        return None
    above = page.context(finding.line)[-4:] if finding.kind is Kind.SHM_EXHAUSTED else []
    if any(_DENIED.search(text) for text in (*own, *(line.text for line in above if _IN_SHARED_MEMORY.search(line.text)))):
        return "permission"
    return "cuda_error" if any(_OF_DRIVER.search(text) for text in own) else None


def _of_device(lines: Sequence[LogLine]) -> bool:
    return any(shortage.names_device(line.text) for line in lines if "bad_alloc" in line.text)


def _phase(finding: Finding, context: list[LogLine]) -> str:
    if finding.reason in _WITHOUT_PHASE or finding.weight < Weight.BROKEN or finding.kind is Kind.HOST_OOM_KILLED:
        return "unknown"
    if finding.reason in _ASYNCHRONOUS:
        return "data" if in_pin_thread(context) else "unknown"
    return phase_of(context)


# --- what needs more than a pattern --------------------------------------------------------------

_MEMORY_ERROR = re.compile(
    r"MemoryErrorTraceback|.*[)\]]MemoryError$|"
    r"(?:\[[\w-]{0,12}\]\s+)?(?:[\w.]{1,80}(?:Error|Exception): )?(?:[\w.]+\.)?"
    r"_?(?:Array|Arrow)?MemoryError(?::.*|\s{3}.*|\(\(.*\)|[`'\"*)\]]{0,3})?$"
)


def _memory_errors(view: JoinedLines) -> Iterator[Finding]:
    """Python's MemoryError, which mostly has no message."""
    if "MemoryError" not in view.text:
        return
    found = [index for index, line in enumerate(view.lines) if _is_memory_error(line.text)]
    yield from both_ends(found, lambda index: Finding(_kind_of(view, found, index), line=index, last_line=index))


def _kind_of(view: JoinedLines, found: Sequence[int], index: int) -> Kind:
    """Of host memory or of a device. A notebook prints the class above the traceback, and the
    message below it."""
    text = view.lines[index].text
    if TRACEBACK in text:
        text = next((view.lines[later].text for later in found if later > index), text)
    return Kind.GPU_OOM if shortage.names_device(text) else Kind.HOST_OOM_ALLOC


def _is_memory_error(text: str) -> bool:
    return "MemoryError" in text and "OutOfMemoryError" not in text and _MEMORY_ERROR.match(text) is not None


_MOST_ERRORS = 60
_ERROR_LINE = re.compile(
    r"((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupted|NotFound|Failure|Timeout|Expired"
    r"|StopIteration))(?::(?:\s|$)|$)"
)
# Exceptions that others raise when one process has failed, or that wrap the actual error.
_AROUND = re.compile(
    r"(?:.*\.)?(?:ChildFailedError|SignalException|DistBackendError|DistNetworkError|DistStoreError"
    r"|BrokenPipeError|ConnectionResetError"
    r"|ConnectionRefusedError|EOFError|CalledProcessError|ProcessExitedException"
    r"|ProcessRaisedException|RayTaskError|RayActorError|ActorDiedError"
    r"|MultiprocessingError|EngineDeadError|WorkerCrashedError|BrokenProcessPool|TerminatedWorkerError|OutOfMemoryError|MemoryError"
    r"|ResourceExhaustedError|XlaRuntimeError|JaxRuntimeError)$"
)
_AROUND_WORDS = re.compile(
    r"DataLoader worker|Caught \w+ in |died unexpectedly|exited unexpectedly|[Oo]ut of memory|SIGKILL|exit code:? (?:137|-9)\b"
)
# Messages that refer to another one.
_ELSEWHERE = re.compile(
    r"(?i)\bsee (?:the )?(?:root cause|stack ?trace|logs?|error|above)|root cause above|\bfailed to start\b"
    r"|\bfailed core proc|\b(?:workers?|process|subprocess|actor|engine|proc) \w{0,20} ?(?:died|failed|exited|terminated)"
    r"|\bdied unexpectedly|\bterminated unexpectedly"
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


def _python_errors(page: LogText, known: Container[int]) -> list[Finding]:
    """The last line of any exception, except on the `known` lines, where a pattern has matched."""
    candidates = [
        index
        for index, line in enumerate(page.lines)
        if index not in known and not line.bar and any(part in line.text for part in ("rror", "xception", "Timeout"))
    ]
    return both_ends(candidates, lambda index: _python_error(page, index), _MOST_ERRORS)


def _python_error(page: LogText, index: int) -> Finding | None:
    text = page.lines[index].text
    match = _ERROR_LINE.match(_LEADERS.sub("", text))
    if match is None or _AROUND.match(match[1]) or _AROUND_WORDS.search(text) or "Warning" in match[1]:
        return None
    if _ELSEWHERE.search(text):
        return Finding(Kind.NOT_MEMORY, "python_error", 0.5, Weight.BROKEN, line=index, last_line=index)
    above = "\n".join(each.text for each in page.context(index, 30))
    reason, phase, confidence = "python_error", None, 0.8
    if _DATA.search(above):
        reason, phase, confidence = "data_error", "data", 0.85
    elif "AssertionError" in match[1] and _CONFIG.search(above) and _CONFIG_WORDS.search(text):
        reason, phase = "config_error", "unknown"
    return Finding(Kind.NOT_MEMORY, reason, confidence, Weight.ERROR, phase, line=index, last_line=index)


_NAN = re.compile(r"(?:loss|grad_norm|ppl|perplexity)['\"]?\s*[:=]\s*-?nan\b", re.IGNORECASE)


def _not_a_number(page: LogText) -> Iterator[Finding]:
    """A metric that is nan, in the last 40 lines only: an earlier one can be a step that was
    skipped."""
    for index in range(max(0, len(page.lines) - 40), len(page.lines)):
        if _NAN.search(page.lines[index].text):
            yield Finding(Kind.NOT_MEMORY, "loss_nan", 0.6, Weight.HINT, "unknown", line=index, last_line=index)
            return


_PIN_FRAMES = re.compile(
    r"in pin memory thread|pin_memory\.py|in pin_memory\b|\.pin_memory\(|cuda(?:Host|MallocHost)"
    r"|(?:empty|zeros|ones|full|rand\w{0,5}|tensor|like)\(.{0,200}pin_memory=True"
    r"|CachingHostAllocator|host_allocator"
)
_PIN_DEVICE = re.compile(r"pin memory thread for device (\d{1,4})")
# "OSError: No space left on device" without a path, raised by code that makes files in /dev/shm.
_SHARED_FRAMES = re.compile(
    r"pandarallel[/\\]core\.py|multiprocessing[/\\](?:shared_memory|synchronize|heap|reductions?)\.py|\bSemLock\b|joblib[/\\]_multiprocessing_helpers"
)


def in_pin_thread(context: Sequence[LogLine]) -> bool:
    return any("in pin memory thread" in line.text for line in context)


def pinned(context: Sequence[LogLine], following: Sequence[LogLine]) -> tuple[bool, int | None]:
    """Whether a device's message is about page-locked host memory, and the device that the thread
    serves."""
    if not in_pin_thread(context) and not any(_PIN_FRAMES.search(line.text) for line in [*context[-5:], *following]):
        return False, None
    device = next((match for line in context if (match := _PIN_DEVICE.search(line.text))), None)
    return True, None if device is None else int(device[1])


def in_shared_memory(context: Sequence[LogLine]) -> bool:
    """Whether the last frames are of code that makes files in /dev/shm."""
    return any(_SHARED_FRAMES.search(line.text) for line in context[-8:])
