"""The error tree. Each error that a person can cause is one line: what, where, what to do; and knows its exit status.

MemtopError            exit 1   the run or the command failed
  UsageError           exit 2   wrong usage or bad input: names the field and the value
  RunFolderError       exit 1   a run's folder cannot be used
  NotRunningError      exit 1   nobody is there to carry out the command
  RefusedError         exit 1   the supervisor refused or could not carry out a command
"""

from __future__ import annotations


class MemtopError(Exception):
    """An error to be shown as one line on stderr."""

    exit_status = 1


class UsageError(MemtopError):
    exit_status = 2


class RunFolderError(MemtopError):
    pass


class NotRunningError(MemtopError):
    pass


class RefusedError(MemtopError):
    pass
