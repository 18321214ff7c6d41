"""What to compute: a case's shape, seed and comparison rule, from TOML or from flags.

Takes    a name or path, and overrides.
Gives    a checked `Case` that knows every size derived from its shape.
Knows nothing of machines, recipes or plans.
"""

import dataclasses
import difflib
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frontier.errors import CaseError

SHIPPED_CASES = Path(__file__).resolve().parent.parent / "configs" / "cases"
SIZES = ("batch_size", "seq_len", "d_model", "heads", "ffn_dim", "layers")
_MOST = 1 << 40
FLOAT32_BYTES = 4
BLOCK_POSITIONS = 4096  # that seeded rows are drawn, and rows hashed, at a time (contract sections 4 and 6)
OFFICIAL_ATOL, OFFICIAL_RTOL = 2e-3, 2e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem: the stack's shape, the seed of its weights and rows, and the rule that judges it.

    Raises   CaseError if a size is not positive, or `d_model` does not divide into `heads`.
    """

    name: str
    batch_size: int
    seq_len: int
    d_model: int
    heads: int
    ffn_dim: int
    layers: int
    causal: bool = True
    seed: int = 1234
    input_scale: float = 1.0
    atol: float = OFFICIAL_ATOL
    rtol: float = OFFICIAL_RTOL

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_type(self.name, field.name, getattr(self, field.name))
        if not self.name.strip():
            raise CaseError("the case has an empty name", hint="give it one: run directories are named after it")
        for key in SIZES:
            if not 1 <= getattr(self, key) <= _MOST:
                raise CaseError(
                    f"case {self.name}: {key} is {getattr(self, key)}",
                    hint=f"{key} must be a whole number of at least 1 and at most 2^40",
                )
        if self.d_model % self.heads:
            fits = [n for n in range(1, min(self.d_model, 1 << 20) + 1) if self.d_model % n == 0]
            nearest = min(fits, key=lambda n: abs(n - self.heads))
            raise CaseError(
                f"case {self.name}: d_model {self.d_model} does not divide into {self.heads} heads",
                hint=f"the nearest number of heads that divides it is {nearest}",
            )
        if not 0 <= self.seed < 1 << 63:
            raise CaseError(f"case {self.name}: seed {self.seed}", hint="a seed lies in 0 .. 2^63 - 1")
        for key in ("input_scale", "atol", "rtol"):
            if not 0 < getattr(self, key) < 1e300:
                raise CaseError(
                    f"case {self.name}: {key} is {getattr(self, key)}", hint=f"{key} must be positive and finite"
                )

    @classmethod
    def load(cls, name_or_path: str | Path) -> "Case":
        """The case of a shipped name ("14") or of a user's TOML file.

        Raises   CaseError if there is no such file, or it says something a case does not have.
        """
        path = SHIPPED_CASES / f"{name_or_path}.toml"
        if not os.path.isfile(path):
            path = Path(name_or_path)
        if not os.path.isfile(path):  # unlike Path.is_file, says no where a folder may not be entered
            raise CaseError(
                f"no case `{name_or_path}`",
                hint=f"shipped cases are {', '.join(shipped_names())}; a path to a TOML file works too",
            )
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as reason:
            raise CaseError(f"{path.name} is not TOML: {reason}", hint="configs/cases/14.toml shows the form") from None
        return cls(**_flatten(table, path.name))

    def override(self, **changes: Any) -> "Case":
        """This case with some values replaced; what is None stays. A changed shape gets a changed name."""
        given = {key: value for key, value in changes.items() if value is not None and value != getattr(self, key)}
        if not given:
            return self
        parts = [f"{key}={value}" for key, value in given.items()]
        return dataclasses.replace(self, name=f"{self.name} with {' '.join(parts)}", **given)

    @property
    def head_width(self) -> int:
        return self.d_model // self.heads

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the input, and of the output."""
        return self.seq_len * self.d_model * FLOAT32_BYTES

    @property
    def input_bytes(self) -> int:
        return self.batch_size * self.row_bytes

    @property
    def visible_pairs(self) -> int:
        """Query-key pairs of one row and head that the mask lets through."""
        return self.seq_len * (self.seq_len + 1) // 2 if self.causal else self.seq_len**2

    @property
    def attention_flops_per_row(self) -> int:
        """Of one layer; a multiply and an add are two, only visible pairs count (contract section 5)."""
        return 4 * self.d_model * self.visible_pairs

    @property
    def linear_flops_per_row(self) -> int:
        """Of one layer's projections and feed-forward."""
        return self.seq_len * 2 * (4 * self.d_model**2 + 2 * self.d_model * self.ffn_dim)

    @property
    def flops(self) -> int:
        return self.batch_size * self.layers * (self.attention_flops_per_row + self.linear_flops_per_row)

    @property
    def dense_scores_bytes(self) -> int:
        """Float32 scores of one layer that a dense reference would hold at once."""
        return self.batch_size * self.heads * self.seq_len**2 * FLOAT32_BYTES

    def check_watched(self, rows: tuple[int, ...]) -> None:
        """Raises CaseError if one of `rows` is none of the case's."""
        for row in rows:
            if not 0 <= row < self.batch_size:
                raise CaseError(
                    f"row {row} cannot be watched: case {self.name} has batch_size {self.batch_size}",
                    hint=f"watch rows from 0 to {self.batch_size - 1}",
                )

    @property
    def has_official_rule(self) -> bool:
        return (self.atol, self.rtol) == (OFFICIAL_ATOL, OFFICIAL_RTOL)

    def as_dict(self) -> dict[str, Any]:
        """The plain values, for manifests and records."""
        return dataclasses.asdict(self)


def shipped_names() -> list[str]:
    """The names of the cases in configs/cases, in numerical order."""
    names = (path.stem for path in SHIPPED_CASES.glob("*.toml"))
    return sorted(names, key=lambda name: (len(name), name))


def _flatten(table: dict[str, Any], file_name: str) -> dict[str, Any]:
    """The TOML's keys as the dataclass's, `[rule]` opened; refuses what is unknown or missing."""
    fields = {field.name: field for field in dataclasses.fields(Case)}
    rule = table.pop("rule", {})
    if not isinstance(rule, dict):
        raise CaseError(f"{file_name}: `rule` is {rule!r}", hint="write it as a table: [rule] with atol and rtol")
    known_keys = {"": [key for key in fields if key not in ("atol", "rtol")] + ["rule"], "rule.": ["atol", "rtol"]}
    for prefix, given in (("", table), ("rule.", rule)):
        for key in given:
            if key not in known_keys[prefix]:
                nearest = difflib.get_close_matches(key, known_keys[prefix], n=1, cutoff=0.5)
                raise CaseError(
                    f"{file_name}: unknown key `{prefix}{key}`",
                    hint=f"did you mean `{prefix}{nearest[0]}`?"
                    if nearest
                    else f"known keys: {', '.join(known_keys[prefix])}",
                )
    missing = [key for key in ("name", *SIZES) if key not in table]
    if missing:
        raise CaseError(f"{file_name}: no {', '.join(missing)}", hint="configs/cases/14.toml shows all the keys")
    return {**table, **rule}


def _check_type(case_name: str, key: str, value: Any) -> None:
    numbers: tuple[type, ...] = (int, float)
    kinds: dict[str, tuple[tuple[type, ...], str]] = {
        "name": ((str,), "text"),
        "causal": ((bool,), "true or false"),
        "input_scale": (numbers, "a number"),
        "atol": (numbers, "a number"),
        "rtol": (numbers, "a number"),
    }
    wanted, article = kinds.get(key, ((int,), "a whole number"))
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        raise CaseError(f"case {case_name}: {key} is {value!r}", hint=f"{key} must be {article}")
