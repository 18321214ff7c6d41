"""The errors meant for users: one class per remedy, each with a hint and an exit code.

Takes    what happened, with both values, and the next step.
Gives    exceptions that only `cli.py` turns into text and exit codes.
Knows nothing of what is computed.
"""


class FrontierError(Exception):
    """What went wrong in one sentence; `hint` says what to do next."""

    exit_code = 2

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class CaseError(FrontierError):
    """The case, a recipe's words, or another option must be mended."""


class DataError(FrontierError):
    """An input, output, weight or mask file must be mended, or the case that names it."""


class RunDirError(FrontierError):
    """The run directory is not one, is in use, or belongs to another run."""


class ResumeError(FrontierError):
    """What a killed run left does not belong to this one, or is damaged: name the right one, or start anew."""


class Unsupported(FrontierError):
    """This recipe or device cannot serve here: pick another. Carries the refusal."""

    exit_code = 3


class DoesNotFit(FrontierError):
    """The plan holds more bytes than a budget allows: raise it, lower the depth, or cut finer."""

    exit_code = 3


class InUse(FrontierError):
    """Somebody times on this device, or computes where we would time: wait, or end that process."""

    exit_code = 3


class NonFinite(FrontierError):
    """A NaN or infinity passed through the pipeline; the row that held it was not written."""

    exit_code = 4


class Interrupted(FrontierError):
    """Ctrl-C or SIGTERM ended the run; the message says what is safe."""

    exit_code = 130
