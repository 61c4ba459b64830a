"""Processes: who they are (`facts`), what they belong to (`jobs`, `roles`, `tree`), and how they are signalled (`signals`).

`proc` reads /proc, `table` keeps its rows from look to look; `watching` and `filling` put processes into the GPUs' samples.
"""

from memtop.supervisor.monitor.processes.facts import ProcessDescriber, ProcessFacts, describe_process
from memtop.supervisor.monitor.processes.members import RunProcess, run_marker, run_processes, tree_rss_bytes
from memtop.supervisor.monitor.processes.proc import (
    ATTEMPT_VARIABLE,
    PROC,
    RUN_VARIABLE,
    TRUST_VARIABLE,
    ProcessId,
    environment_of,
    holds_gpu,
    identify,
    in_host_pid_namespace,
    is_alive,
    own_family,
    parent_of,
    started_ticks,
)
from memtop.supervisor.monitor.processes.signals import (
    ProcessGone,
    SignalRefused,
    open_process,
    send_signal,
    signal_process,
    user_name,
)

__all__ = [
    "ATTEMPT_VARIABLE",
    "PROC",
    "RUN_VARIABLE",
    "TRUST_VARIABLE",
    "ProcessDescriber",
    "ProcessFacts",
    "ProcessGone",
    "ProcessId",
    "RunProcess",
    "SignalRefused",
    "describe_process",
    "environment_of",
    "holds_gpu",
    "identify",
    "in_host_pid_namespace",
    "is_alive",
    "open_process",
    "own_family",
    "parent_of",
    "run_marker",
    "run_processes",
    "send_signal",
    "signal_process",
    "started_ticks",
    "tree_rss_bytes",
    "user_name",
]
