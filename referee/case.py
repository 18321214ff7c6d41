"""What was to be computed, read from a manifest's table; nothing in it is trusted.

Takes    a parsed table.
Gives    a `Case` whose every field has been checked, and `take`, which checks one field of any table.
Knows nothing of other files, of tensors or of verdicts; imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from referee.errors import CannotJudge

OFFICIAL_ATOL, OFFICIAL_RTOL = 2e-3, 2e-2
MOST_LAYERS = 4096  # so that the names of a hostile manifest's weights still fit in memory
RANGES = {"seed": (0, 2**63 - 1), "row": (0, 2**40), "layers": (1, MOST_LAYERS)}
DEFAULTS = {"causal": True, "seed": 1234, "input_scale": 1.0, "atol": OFFICIAL_ATOL, "rtol": OFFICIAL_RTOL}
WORDS = {str: "a text", bool: "true or false", int: "a whole number", float: "a finite number", dict: "a table"}
Kind = TypeVar("Kind", str, bool, int, float, dict[str, Any])


def take(table: Mapping[str, Any], where: str, key: str, kind: type[Kind], default: Kind | None = None) -> Kind:
    """A field of a table, of the kind it must have; a whole number passes for a finite one.

    Raises   CannotJudge, naming the field and what stands there.
    """
    value = table.get(key, default)
    if value is None:
        raise CannotJudge(f"{where} has no `{key}`", hint="configs/CONTRACT.md, section 6, lists what it needs")
    low, high = RANGES.get(key, (1, 2**40)) if kind is int else (-1e300, 1e300)
    right = type(value) in ((int, float) if kind is float else (kind,))
    if not right or (kind in (int, float) and not low <= value <= high):  # NaN is in no range
        found, range_words = repr(value)[:60], f" of {low:,} to {high:,}" if kind is int else ""
        raise CannotJudge(
            f"{where}: `{key}` should be {WORDS[kind]}{range_words}, found {found}",
            hint="configs/CONTRACT.md describes the format",
        )
    return kind(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Shape, seed and comparison rule of a run."""

    name: str
    batch_size: int
    seq_len: int
    d_model: int
    heads: int
    ffn_dim: int
    layers: int
    causal: bool
    seed: int
    input_scale: float
    atol: float
    rtol: float

    @property
    def official_rule(self) -> bool:
        return (self.atol, self.rtol) == (OFFICIAL_ATOL, OFFICIAL_RTOL)

    @staticmethod
    def from_table(table: Mapping[str, Any], where: str) -> Case:
        """The case in a flat table, as a manifest has it.

        Raises   CannotJudge.
        """
        kinds: dict[str, Any] = {"str": str, "int": int, "bool": bool, "float": float}
        values: dict[str, Any] = {
            f.name: take(table, where, f.name, kinds[str(f.type)], DEFAULTS.get(f.name)) for f in fields(Case)
        }
        case = Case(**values)
        if case.d_model % case.heads:
            sizes = f"{case.d_model} channels do not split into {case.heads} heads"
            raise CannotJudge(f"{where}: {sizes}", hint="`heads` must divide `d_model`")
        if not (0 < case.atol < math.inf and case.rtol >= 0):
            raise CannotJudge(f"{where}: atol {case.atol} and rtol {case.rtol} are no rule", hint="make them positive")
        return case
