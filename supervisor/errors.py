"""The errors that users see.

Each is one line that says what is wrong, where, and what to do. It has an exit status.

MemtopError            exit 1   the run or the command failed
  UsageError           exit 2   wrong usage or bad input: names the field and the value
  RunFolderError       exit 1   a run's folder cannot be used
  NotRunningError      exit 1   no supervisor runs that could carry out the command
  RefusedError         exit 1   the supervisor refused the command or could not carry it out
"""

from __future__ import annotations


class MemtopError(Exception):
    """An error that is shown as one line on stderr."""

    exit_status = 1


class UsageError(MemtopError):
    exit_status = 2


class RunFolderError(MemtopError):
    pass


class NotRunningError(MemtopError):
    pass


class RefusedError(MemtopError):
    pass
