"""The patterns of everything else that ends a program: kills, schedulers, signals, other errors.

Where two patterns with equal weight match one line, the first counts: special ones stand before
general ones.
"""

from __future__ import annotations

from memtop.supervisor.diagnosis.finding import SUSPECTED, UNCERTAIN, Pattern, Weight, other
from memtop.supervisor.diagnosis.values import Kind

KILLED = Kind.HOST_OOM_KILLED
_NO_SHORTAGE = r"(?:bandwidth|latency|speed|clock|tier|class|profil|upgrade|test|node|queue|partition)"
"""Words that turn `memory` into something of which no program can use too much."""


def _sigkill(pattern: str, phase: str | None = None) -> Pattern:
    """SIGKILL, with no word about who sent it."""
    return Pattern(pattern, KILLED, confidence=SUSPECTED, weight=Weight.KILLED, phase=phase)


ENDS: tuple[Pattern, ...] = (
    # Schedulers and containers that enforce a memory limit.
    Pattern(r"(?i:detected [1-9]\d* oom[-_]?kill events?)", KILLED, 0.97),
    # Slurm counts the cache of files, too: many of these jobs end well.
    Pattern(r"Exceeded (?:job|step) memory limit at some point", KILLED, UNCERTAIN, weight=Weight.LIKELY),
    Pattern(r"(?i:task \d+:? out of memory|tasks have been oom killed)", KILLED, 0.95),
    Pattern(r"(?i:gone over memory limit of) (?P<allowed>SIZE)", KILLED, 0.93),
    Pattern(
        r"(?i:(?:exceeded|over|above) (?:the|an?)? (?:job|step|virtual|requested|its|cgroup|hard|container|process)? "
        r"(?:memory|vmem|mem) (?:usage )?(?:resource )?(?:hard )?(?:limit|request)(?! at some point))",
        KILLED,
        0.93,
    ),
    Pattern(
        r"(?i:(?:memory|vmem|mem|rss|pmem|pvmem) (?:usage )?"
        r"\(?\d[\d.]{0,40}[kmg]?b?\)? exceeded (?:the )?(?:limit|request))",
        KILLED,
        0.93,
    ),
    Pattern(
        r"(?i:vmem|mem(?!b)(?:ory)?) (?P<process>SIZE)? .{0,24}? exceeded limit (?P<allowed>SIZE)?|exceeded memory limit",
        KILLED,
        0.93,
    ),
    Pattern(r"hard limit \"?h_vmem.{0,60}?\((?P<process>\d+)(?:\.\d+)? > limit: (?P<allowed>\d+)", KILLED, 0.93),
    Pattern(r"(?i:memory limit) (?:of)? (?P<allowed>SIZE)? exceeded(?: with (?P<process>SIZE) used)?", KILLED, 0.8),
    Pattern(r"(?i:memory quota (?:vastly )?exceeded|over(?:ran)? (?:its )?memory budget)", KILLED, 0.8),
    Pattern(r"(?i:exceeded \d+% memory budget\. Restarting)", KILLED, 0.85),
    Pattern(r"(?i:killed by YARN for exceeding .{0,20}? memory (?:limits\. SIZE of (?P<allowed>SIZE) physical)?)", KILLED),
    Pattern(r"(?i:container killed due to memory)", KILLED),
    Pattern(
        r"(?i:(?:job|container|worker|pod|task|process|executor|session|kernel|instance) (?:\d{1,12} )?(?:was |has been )?"
        r"(?:killed|terminated|evicted) (?:by\w{1,36}?)?(?:due to|because of|for) (?:(?:excessive|too much|exceeding"
        rf"|insufficient|lack of) (?:\w{{1,12}} )?memory(?! {_NO_SHORTAGE})"
        r"|high (?:\w{1,12} )?memory (?:us|consum|pressure)))",
        KILLED,
        0.8,
    ),
    Pattern(
        r"(?i:(?:(?:put|placed) on hold|held) .{0,40}? (?:due to|because of|for) (?:memory(?!\w)|(?:too much|exce\w{2,5}|high)"
        r" memory|\w{0,20}? memory (?:us|consum|exceed|limit|over)))",
        KILLED,
        0.8,
    ),
    Pattern(r"(?i:notebook|session|kernel) tried to allocate more memory than is available", KILLED, 0.8),
    Pattern(
        r"(?i:(?:violat|exceed|surpass|reach)\w{1,5} (?:the |its )?(?:\w{1,12} )?memory limit"
        r".{0,80}?(?:killed|terminated|evicted))",
        KILLED,
        0.8,
    ),
    Pattern(r"TERM_MEMLIMIT|TERM_SWAP|DUE TO MEMORY LIMIT", KILLED, 0.97),
    Pattern(
        r"(?i:exceeded (?:the |its )?(?:max(?:imum)?|allowed|available) (?:amount of )?memory)|had condition: \[MemoryPressure",
        KILLED,
        0.8,
    ),
    Pattern(r"OOM-?[Kk]illed(?!\"?:?\"?(?:false|False|0))", KILLED, 0.95),
    Pattern(r"(?<!_)OUT_OF_ME(?:MORY|\+)(?!_|[:=]?0)", KILLED),
    Pattern(r"node was low on resource:? memory", KILLED),
    Pattern(
        r"killed by (?:the )?(?:operating system \()?OOM-?killer|result 'oom-kill'|systemd-oomd.{0,20}? [Kk]illed", KILLED, 0.95
    ),
    Pattern(r"sending SIG(?:TERM|KILL) to process \d+.{0,60}?(?:badness|VmRSS|oom_score)", KILLED),
    Pattern(r"earlyoom.{0,40}? sending SIG(?:TERM|KILL) to process", KILLED),
    Pattern(r"(?:node )?running low on memory(?!\.?if)", KILLED, 0.95),
    Pattern(r"ray\.exceptions\.OutOfMemoryError|killed due to memory pressure", KILLED, 0.95),
    Pattern(r"exceeds the memory usage threshold of [\d.]{1,8}\d\. Ray killed", KILLED, 0.95),
    Pattern(
        r"(?i:(?:replica|container|pod) .{0,40}? ran out of memory(?! in memory space)"
        r"|(?:replica|container|worker|job|instance|process|pod) .{0,40}? ran out-of-memory)",
        KILLED,
    ),
    Pattern(r"using all (?:of (?:the|your) )?available RAM", KILLED),
    Pattern(r"manager\.go:\d+\] Created an OOM event in contain", KILLED),
    Pattern(r"OutOfMemoryError:? [Mm]ore than \d+% of the memory on (?:the )?node .{0,80}? used", KILLED, 0.95),
    Pattern(r"(?i:cgroup out-?of-?memory handler)", KILLED, 0.95),
    # Only an error: a launcher that ends a program for another reason kills its workers, too.
    Pattern(
        r"DataLoader worker \(pid\(?s?\)? [\d,]{1,400}\) is killed by signal:? Killed",
        KILLED,
        0.75,
        weight=Weight.ERROR,
        phase="data",
    ),
    # A compiler needs gigabytes and is the kernel's likely victim. The words are those of SIGKILL
    # alone.
    Pattern(
        r"Killed signal terminated program|internal compiler error: Killed"
        r"|terminated with signal 9 \[Killed\]"
        r"|clang.{0,20}? error: unable to execute command: Killed|died due to signal 9",
        KILLED,
        SUSPECTED,
        weight=Weight.ERROR,
    ),
    _sigkill(r"exitcode:? -9|exit(?:ed|s)? with (?:return )?code =? -9|exit(?:ed)? code:? =?-9"),
    _sigkill(r"FAILED: \[code=137\]|failed \(exit (?:code )?137\)|return code =? -9|returned non-zero exit status (?:-9|137)"),
    _sigkill(
        r"Signal 9 \(SIGKILL\)|Signals\.SIGKILL|SIGKILL\(-9\)|signal:? killed|signal SIGKILL"
        r"|signal:? 9|was sent SIGKILL|Negsignal\.SIGKILL|died through signal KILL|task \d+: Killed"
        r"|terminated by SIGKILL|died of signal 9|code=killed, status=9"
    ),
    _sigkill(
        r"(?i:exit(?:ed)?(?: with)?(?: exit)?(?: status| code)[:=]?(?: of)? \(?137)"
        r"|\*\*\* \[[^\]]{1,120}\] (?:Killed|Error 137)"
    ),
    # Kubernetes names a kill for memory: OOMKilled.
    other(r"Reason: Error Exit Code: 137", "killed_by_something", 0.6, weight=Weight.DENIED),
    # A server that kills a worker of its own.
    other(r"WORKER TIMEOUT \(pid:\d+\)", "time_limit", 0.8, weight=Weight.DENIED),
    other(r"OOMKilled\"?:? (?i:false)", "killed_by_something", 0.6, weight=Weight.DENIED),
    _sigkill(r":? line \d+:? \d+ Killed|: \d+: \d+ [Kk]illed"),
    _sigkill(r"\[\d+\][+-]? (?:\d+)? [Kk]illed"),
    other(
        r"exit codes? of the workers are \{(?![^}]{0,400}SIGKILL)[A-Z]",
        "worker_died",
        0.6,
        weight=Weight.DENIED,
        phase="data",
    ),
    _sigkill(r"worker process managed by the executor was unexpectedly terminated", phase="data"),
    _sigkill(r"abruptly died during map operation", phase="data"),
    _sigkill(r"KilledWorker: Attempted to run"),
    other(
        r"DataLoader worker \(pid\(?s?\)? [\d,]{1,400}\) exited unexpectedly",
        "worker_died",
        0.5,
        weight=Weight.BROKEN,
        phase="data",
    ),
    # Time limits, preemption, a person, other signals.
    other(
        r"DUE TO PREEMPTION|(?:instance|VM|job|node|pod) (?:was |has been |is being )?"
        r"(?i:preempt(?:ed|ing))|TERM_PREEMPT",
        "preempted",
        0.95,
    ),
    other(r"(?i:spot instance (?:interruption|termination|reclaim))", "preempted"),
    other(
        r"DUE TO TIME LIMIT|TERM_RUNLIMIT|(?i:(?:walltime|cput) .{0,24}? exceeded"
        r"|exceeded (?:its )?wall-?(?:clock)?time)|DeadlineExceeded(?!:)",
        "time_limit",
        0.95,
    ),
    other(r"DUE TO NODE FAILURE|NODE_FAIL", "node_failure", 0.95),
    other(r"CANCELLED AT|TERM_OWNER|TERM_FORCE_OWNER|TERM_ADMIN", "cancelled", 0.8, weight=Weight.KILLED),
    other(r"KeyboardInterrupt", "keyboard_interrupt", 0.93, at_start=True),
    other(r"\[\d+\][+-] Interrupt", "keyboard_interrupt", weight=Weight.TERMINATED),
    other(
        r"got signal:? (?:15|SIGTERM)|SIGTERM death signal|signal:? 15|signal: terminated"
        r"|exit(?:ed)? (?:with )?(?:status|code):? 143|(?:exitcode:?|return code =) -15"
        r"|Signal 15 \(SIGTERM\)|Received SIGTERM",
        "sigterm",
        0.85,
        weight=Weight.TERMINATED,
    ),
    other(r"closing signal SIGTERM|\[\d+\][+-]? Terminated|line \d+: \d+ Terminated", "sigterm", 0.7, weight=Weight.TERMINATED),
    other(r"got signal:? (?:1|2|SIGHUP|SIGINT)|SIG(?:HUP|INT) death signal", "interrupted", 0.85, weight=Weight.TERMINATED),
    # Windows has status codes instead of signals; programs print them with and without a sign.
    Pattern(
        r"(?i:0xC0000017|0xC000012D)|exit(?:ed)? (?:with )?(?:status|code):? (?:3221225495|-1073741801)",
        Kind.HOST_OOM_ALLOC,
        0.8,
    ),
    other(
        r"(?i:0xC0000005|0xC00000FD)|exit(?:ed)? (?:with )?(?:status|code):? (?:3221225477|-1073741819|3221225725|-1073741571)"
        r"|Windows fatal exception: access violation",
        "segfault",
        0.85,
        weight=Weight.BROKEN,
    ),
    other(
        r"(?i:0xC0000409|0xC0000374)|exit(?:ed)? (?:with )?(?:status|code):? (?:3221226505|-1073740791|3221226356|-1073740940)",
        "aborted",
        0.6,
        weight=Weight.TERMINATED,
    ),
    other(
        r"double free or corruption|(?:malloc|free|realloc|munmap_chunk)\(\): (?:corrupted|invalid|memory corruption|unaligned)"
        r"|corrupted (?:size vs\. prev_size|double-linked list)|stack smashing detected|free detected in tcache",
        "aborted",
        weight=Weight.BROKEN,
    ),
    other(r"Illegal instruction(?:\(core dumped\)|: 4)|SIGILL", "illegal_instruction", weight=Weight.BROKEN),
    other(
        r"terminate called after throwing an instance of|Assertion ['`\"].{1,200}? failed|\] Check failed: \w",
        "aborted",
        0.6,
        weight=Weight.TERMINATED,
    ),
    other(
        r"Segmentation fault|SIGSEGV|signal 11|(?:exitcode:?|return code =) -11"
        r"|exit(?:ed)? (?:with )?(?:status|code):? 139",
        "segfault",
        0.85,
        weight=Weight.BROKEN,
    ),
    other(
        r"\d Bus error|Bus error \(core dumped\)|Fatal Python error: Bus error|SIGBUS"
        r"|(?:exitcode:?|return code =) -7|exit(?:ed)? (?:with )?(?:status|code):? 135",
        "bus_error",
        0.5,
        weight=Weight.BROKEN,
    ),
    other(
        r"SIGABRT|(?:exitcode:?|return code =) -6|exit(?:ed)? (?:with )?(?:status|code):? 134",
        "aborted",
        0.6,
        weight=Weight.TERMINATED,
    ),
)

ERRORS: tuple[Pattern, ...] = (
    # CUDA's other errors.
    other(r"device-side assert triggered", "device_side_assert", 0.95, weight=Weight.CAUSE),
    other(r"block: \[\d+,\d+,\d+\],? thread: \[\d+,\d+,\d+\] Assertion", "device_side_assert", 0.95, weight=Weight.CAUSE),
    # PhysX prints CUDA's number only.
    other(r"internal error : [^\d]{1,80}?fail\w{0,2}!{0,3} 700", "illegal_memory_access", 0.9),
    other(
        r"an illegal memory access was encountered|CUDA_ERROR_ILLEGAL_ADDRESS"
        r"|cudaErrorIllegalAddress|misaligned address",
        "illegal_memory_access",
        0.95,
        weight=Weight.CAUSE,
    ),
    other(r"(?i:memory access fault by GPU)", "illegal_memory_access", 0.95, weight=Weight.CAUSE),
    other(r"invalid device ordinal", "invalid_device", 0.95),
    other(r"[Nn]o kernel image is available|is not compatible with the current PyTorch installation", "no_kernel_image", 0.95),
    other(
        r"unspecified launch failure|uncorrectable ECC|fallen off the bus|GPU is lost"
        r"|CUDA_ERROR_ECC|NVRM: Xid|hardware error was encountered",
        "gpu_lost",
        weight=Weight.CAUSE,
    ),
    other(
        r"Failed to initialize NVML: Driver/library version mismatch"
        r"|driver/library version mismatch",
        "driver_mismatch",
        0.95,
    ),
    other(
        r"CUDA driver version is insufficient|NVIDIA driver on your system is too old"
        r"|Found no NVIDIA driver|no CUDA-capable device is detected",
        "driver_mismatch",
    ),
    other(r"too many resources requested for launch|CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "cuda_error", weight=Weight.CAUSE),
    other(r"== cudaSuccess \((?!(?:0|2) vs)\d+ vs\. 0\)", "cuda_error", weight=Weight.CAUSE),
    other(r"CU[A-Z]{3,8}_STATUS_(?!ALLOC_FAILED)[A-Z_]{1,80}|CU(?:FFT|RAND)_(?!ALLOC)[A-Z_]{4,80}", "cuda_error", 0.7),
    other(r"(?:CUDA|HIP) error: (?![Oo]ut of memory|CU[A-Z]{1,80}_STATUS_ALLOC)[A-Za-z]", "cuda_error", 0.7),
    # Ranks that wait for each other.
    other(
        r"Watchdog caught collective operation timeout|Watchdog timeout \(self\.watchdog"
        r"|(?:NCCL|c10d) .{0,40}? [Tt]imed out after"
        r"|ran for \d+ milliseconds before timing out",
        "nccl_timeout",
        weight=Weight.BROKEN,
    ),
    other(
        r"\[Gloo\] Timed out|gloo/transport.{0,80}? Timed out|Timed out waiting \d+ms for (?:recv"
        r"|send)|(?:DistStore|DistNetwork)Error.{0,200}?[Tt]imed? out|wait timeout after \d+",
        "nccl_timeout",
        0.85,
        weight=Weight.BROKEN,
    ),
    other(
        r"monitored [Bb]arrier .{0,80}? timeout|Rank \d+ failed to pass monitored", "nccl_timeout", 0.85, weight=Weight.BROKEN
    ),
    other(
        r"nccl(?:System|Remote|Internal|Invalid\w+)Error|NCCL error.{0,120}? unhandled (?:system"
        r"|cuda) error|DistBackendError",
        "nccl_error",
        0.8,
        weight=Weight.BROKEN,
    ),
    other(
        r"Connection (?:reset|closed) by (?:remote )?peer|Broken pipe|socketPollConnect"
        r"|gloo.{0,80}? Connection",
        "connection_lost",
        0.5,
        weight=Weight.TERMINATED,
    ),
    other(r"EADDRINUSE|[Aa]ddress already in use", "port_in_use", 0.93),
    # Versions, shapes and options that do not fit together.
    other(
        r"Error building extension|Ninja is required to load|MissingCUDAException"
        r"|CUDA_HOME (?:environment variable is not set|does not exist)|unable to compile CUDA",
        "extension_build",
        0.95,
    ),
    other(
        r"undefined symbol:|cannot open shared object file"
        r"|DLL load failed while importing(?!.{0,80}paging)",
        "import_error",
        0.93,
        phase="load",
    ),
    other(r"ModuleNotFoundError:|ImportError:", "import_error", phase="load", at_start=True),
    other(
        r"(?:should|must|to) (?:be|have) the same (?:d?type)?.{0,40}?(?:Half|Float|BFloat|Double"
        r"|dtype)|Input type \([\w:.]{1,80}\) and (?:bias|weight) type|expected (?:m1 and m2"
        r"|scalar type|mat1 and mat2).{0,40}?(?:dtype|but found|same)"
        r"|expected scalar type \w+ but found",
        "dtype_mismatch",
        0.93,
    ),
    other(
        r"mat1 and mat2 must have the same dtype|(?:Half|BFloat16|Float) did not match"
        r"|\"\w+\" not implemented for '(?:Half|BFloat16|Long|Int)'",
        "dtype_mismatch",
    ),
    other(
        r"shapes cannot be multiplied|size mismatch(?: for|,)|[Ss]izes of tensors must match"
        r"|The size of tensor \w+ \(\d+\) must match|Trying to set a tensor of shape"
        r"|shape '\[[^\]]{1,60}\]' is invalid for input|Expected (?:input|target) (?:batch_)?size"
        r"|expand.{0,40}? must match the existing size",
        "shape_mismatch",
        0.93,
    ),
    other(r"Expected all tensors to be on the same device", "device_mismatch", 0.95),
    other(
        r"Error\(s\) in loading state_dict|Missing key\(s\) in state_dict|Unexpected key\(s\)",
        "state_mismatch",
        0.85,
        phase="load",
    ),
    other(
        r"unrecognized arguments:|the following arguments are required:|ConfigAttributeError"
        r"|ConfigKeyError|MissingMandatoryValue|ValidationError",
        "config_error",
        0.85,
    ),
    # The loss.
    other(
        r"(?i:loss (?:is|was|became|value is)\W{0,3}"
        r"(?:nan|infinite|inf|not finite|diverge[ds]?|diverging))",
        "loss_nan",
        whole_word=True,
    ),
    other(
        r"(?i:(?:nan|non-finite|infinite) (?:or inf )?(?:loss|values? in loss|detected in loss"
        r"|gradients?) (?:detected|encountered|found|,?stop))",
        "loss_nan",
        0.85,
    ),
    other(r"Minimum loss scale reached|[Cc]urrent loss scale already at minimum|FloatingPointError:", "loss_nan"),
    # Permissions and the network.
    other(r"Permission denied|\[Errno 13\]|PermissionError:", "permission", 0.85),
    other(
        r"HTTPError|ConnectionError|MaxRetryError|ReadTimeout(?:Error)?|ConnectTimeout|SSLError"
        r"|LocalEntryNotFoundError|GatedRepoError|RepositoryNotFoundError",
        "network",
        0.8,
        whole_word=True,
    ),
    other(r"recursion depth exceeded", "recursion"),
    other(r"EOFError: EOF when reading a line", "no_input", at_start=True),
)

PATTERNS = (*ENDS, *ERRORS)
