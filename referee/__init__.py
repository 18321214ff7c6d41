"""The independent judge of a run: float64, slow and obvious.

Takes    a run directory (configs/CONTRACT.md, section 6).
Gives    `judge`, on first use, so that nothing heavy loads early; the program `referee`, to check and to prove.
Knows nothing of the program that made the run: what both obey is the contract, and no code is shared.
"""

from __future__ import annotations

from typing import Any

__all__ = ["CannotJudge", "judge"]


def __getattr__(name: str) -> Any:
    if name == "CannotJudge":
        from referee.errors import CannotJudge

        return CannotJudge
    if name == "judge":
        from referee.verdict import judge

        return judge
    raise AttributeError(f"module 'referee' has no attribute {name!r}")
