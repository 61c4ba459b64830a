"""What a person can do wrong on the training side: one line each, with the exit status it leads to."""


class TrainingError(Exception):
    """Training cannot go on; the text is one line: what, where, what to do."""

    exit_status = 1


class BadInputError(TrainingError):
    """The settings, the data or the saved state cannot be used as they are."""

    exit_status = 2
