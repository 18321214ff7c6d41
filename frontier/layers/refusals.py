"""Reasons that several tables share for not serving: no card, no Triton, a card too old.

Takes    a case, a recipe, a machine.
Gives    the reason as text, or None.
Knows nothing of what any kernel computes.
"""

import importlib.util
import os
from collections.abc import Callable

from frontier.case import Case
from frontier.machine import Machine
from frontier.recipe import Recipe

Refuses = Callable[[Case, Recipe, Machine], str | None]


def never(case: Case, recipe: Recipe, machine: Machine) -> str | None:
    return None


def needs_triton(case: Case, recipe: Recipe, machine: Machine) -> str | None:
    """What any of our Triton kernels needs: the package, and a card or Triton's own interpreter."""
    if not is_installed("triton"):
        return "the package triton is not installed"
    if machine.capability is None:
        if os.environ.get("TRITON_INTERPRET") != "1":
            return "a Triton kernel needs a card (or TRITON_INTERPRET=1, which is very slow)"
        # It multiplies their bit patterns as whole numbers (seen in 3.9).
        return "Triton's interpreter cannot multiply bf16" if recipe.precision == "bf16" else None
    return needs_capability(machine, (7, 5))


def needs_capability(machine: Machine, least: tuple[int, int]) -> str | None:
    if machine.capability is not None and machine.capability < least:
        return f"compute capability {machine.capability_text}, needs {least[0]}.{least[1]}"
    return None


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
