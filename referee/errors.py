"""The one way in which the referee declines to judge.

Takes    what happened, with both values, and what to do about it.
Gives    `CannotJudge`, which the command line turns into `error:`, `hint:` and exit code 2.
Knows nothing of what is judged.
"""

from __future__ import annotations


class CannotJudge(Exception):
    """No verdict is possible: neither pass nor fail would be honest."""

    exit_code = 2

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint
