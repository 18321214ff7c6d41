"""Exact attention over batches of giant sequences that no card can hold, streamed from host to host.

    import frontier

    case = frontier.Case.load("14")                        # what
    machine = frontier.Machine.detect()                    # where
    recipe = frontier.choose(case, machine).recipe         # how
    plan = frontier.plan(case, machine, recipe)            # how much at a time
    record = frontier.run(plan)                            # do it, and say how it went

Nothing is imported until it is asked for: `frontier --help` costs no torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "Case": "frontier.case",
    "Machine": "frontier.machine",
    "Recipe": "frontier.recipe",
    "REFERENCE": "frontier.recipe",
    "Plan": "frontier.planner",
    "plan": "frontier.planner",
    "choose": "frontier.chooser",
    "run": "frontier.runner",
    "Record": "frontier.record",
}
__all__ = [*_HOME]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module `frontier` has no `{name}`; it has {', '.join(_HOME)}")
    return getattr(import_module(_HOME[name]), name)
