"""What was to be computed, read from a manifest's table or a case file; nothing in it is trusted.

Takes    a parsed table, or a TOML file.
Gives    a `Case` whose every field has been checked, and `take`, which checks one field of any table.
Knows nothing of run directories, of tensors or of verdicts; imports no torch.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
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

    @staticmethod
    def from_toml(path: Path) -> Case:
        """The case of a case file: the same fields, with `atol` and `rtol` in a table `[rule]`.

        Raises   CannotJudge; an unknown key is named with the nearest known one.
        """
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as fault:
            raise CannotJudge(f"{path} is no case file: {fault}", hint="configs/cases/14.toml shows the form") from None
        rule = take(table, path.name, "rule", dict, {})
        flat = {key: value for key, value in table.items() if key != "rule"}
        in_rule = ("atol", "rtol")
        for given, known in ((flat, [f.name for f in fields(Case) if f.name not in in_rule]), (rule, [*in_rule])):
            for key in given:
                if key not in known:
                    near = difflib.get_close_matches(key, known, n=1)
                    hint = f"did you mean `{near[0]}`?" if near else f"known keys: {', '.join(known)}"
                    raise CannotJudge(f"{path.name}: unknown key `{key}`", hint=hint)
        return Case.from_table(flat | rule, path.name)

    def differences(self, other: Case) -> list[str]:
        """What differs between two cases, names aside, in words."""
        return [
            f"{f.name} {getattr(self, f.name)} is not {getattr(other, f.name)}"
            for f in fields(Case)
            if f.name != "name" and getattr(self, f.name) != getattr(other, f.name)
        ]
