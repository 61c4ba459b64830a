"""Errors that a command prints as one line: what happened, where, and what to do. Each has an exit
status.

MemtopError            exit 1   the run or the command failed
  UsageError           exit 2   wrong usage or bad input: names the field and the value
  RunFolderError       exit 1   a run's folder cannot be used
  NotRunningError      exit 1   no process can carry out the command
  RefusedError         exit 1   the supervisor refused or could not carry out a command
"""

from __future__ import annotations


class MemtopError(Exception):
    """An error that is printed as one line to stderr."""

    exit_status = 1


class UsageError(MemtopError):
    exit_status = 2


class RunFolderError(MemtopError):
    pass


class NotRunningError(MemtopError):
    pass


class RefusedError(MemtopError):
    pass
