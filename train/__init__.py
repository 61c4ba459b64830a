"""What a person can do wrong on the training side: one line each, with the exit status it leads to."""

import errno

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""The errors of a disk that is full, or whose user has used up a quota."""


class TrainingError(Exception):
    """Training cannot go on; the text is one line: what, where, what to do."""

    exit_status = 1


class UnsavedError(TrainingError):
    """Training has come to its end, or was stopped, and its state could not be saved."""


class BadInputError(TrainingError):
    """The settings, the data or the saved state cannot be used as they are."""

    exit_status = 2
