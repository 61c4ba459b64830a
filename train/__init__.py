"""The built-in trainer. `run.py` starts it, `trainer.py` is the loop; here are its errors."""

import errno

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""The errors of a disk that is full, and of a user whose quota is used up."""


def first_line(error: Exception) -> str:
    """The first line of its text, or its kind if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class TrainingError(Exception):
    """Training cannot continue; the text is one line that names what, where, and what to do."""

    exit_status = 1


class UnsavedError(TrainingError):
    """Training finished or was stopped, and its state could not be saved."""


class BadInputError(TrainingError):
    """The settings, the data or the saved state cannot be used."""

    exit_status = 2


class UnknownModelError(BadInputError):
    """This transformers does not know the model, or it does not run without numbers. The settings
    may be right."""
