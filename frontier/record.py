"""What a measured run leaves behind, to and from one JSON line. Imports no torch.

Takes    numbers from the runner.
Gives    a `Record`; records of a folder; the machine's versions and this code's commit.
Knows nothing of how the numbers came about.
"""

import dataclasses
import hashlib
import json
import math
import platform
import re
import statistics
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from frontier import __version__
from frontier.case import SIZES
from frontier.errors import DataError

SCHEMA = 1
PACKAGE = Path(__file__).resolve().parent
EVIDENCE = PACKAGE.parent / "configs" / "evidence"
TOLD_OF_TUNED = {"stage", "outcome", "promotable", "noise", "trials"}  # by what a choice is made


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One measured run, or one tuned recipe. `None` means not measured; what was refused says why and has no times.

    Units    seconds and bytes; a FLOP is a multiply or an add, causal attention counts what is visible.
    resumed  a record of this kind has the times and FLOPs of what was left to do; its notes say how much was done
    call_ms  of a tuned recipe: p20, p50, p80 and trials of one call on rows that lie on the device; `beside_ms`
             has the same of other recipes, timed in turn with it; `first_result_s` is from weights on the host to
             its first output, without a compile cache.
    """

    kind: str
    case: dict[str, Any]
    recipe: str
    machine: str
    command: str
    versions: dict[str, str]
    commit: str | None
    source_sha256: str
    started: str
    plan: dict[str, Any] = field(default_factory=dict)
    input: str = "on-the-fly"
    output: str = "none"
    flops: int = 0
    pass_s: tuple[float, ...] = ()
    first_slice_s: float | None = None
    startup_s: float | None = None
    busy_s: dict[str, float] = field(default_factory=dict)
    card_s: tuple[float, ...] = ()
    road_s: tuple[float, ...] = ()
    gemm_tflops: float | None = None
    call_ms: dict[str, float] = field(default_factory=dict)
    beside_ms: dict[str, dict[str, float]] = field(default_factory=dict)
    first_result_s: float | None = None
    device_planned_bytes: int | None = None
    device_peak_bytes: int | None = None
    device_allocated_peak_bytes: int | None = None
    host_planned_bytes: int | None = None
    host_peak_bytes: int | None = None
    verdicts: dict[str, Any] = field(default_factory=dict)
    refused: str | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def median_s(self) -> float | None:
        return statistics.median(self.pass_s) if self.pass_s else None

    @property
    def tflops(self) -> float | None:
        return self.flops / self.median_s / 1e12 if self.median_s else None

    @property
    def of_the_wall(self) -> float | None:
        """How near the run came to the slower of its two ceilings: the card alone, the road alone."""
        walls = [statistics.median(wall) for wall in (self.card_s, self.road_s) if wall]
        return max(walls) / self.median_s if walls and self.median_s else None

    @property
    def given_verdicts(self) -> list[str]:
        """What each judge said: "pass" or "fail"; empty if none was asked."""
        return [str(verdict.get("verdict")) for verdict in self.verdicts.values()]

    @property
    def passed(self) -> bool:
        """Judged at least once, and never found wrong."""
        return bool(self.given_verdicts) and all(verdict == "pass" for verdict in self.given_verdicts)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), separators=(", ", ": "))

    @classmethod
    def from_json(cls, line: str | bytes) -> "Record":
        """Raises DataError if the line is no record of this schema."""
        try:
            table = json.loads(line)
            if table["schema"] != SCHEMA:
                raise ValueError(f"it is of schema {table['schema']}")
            for key in ("pass_s", "card_s", "road_s"):
                table[key] = tuple(table.get(key, ()))
            if table["kind"] == "tune" and (missing := TOLD_OF_TUNED - table["notes"].keys()):
                raise ValueError(f"its notes lack {', '.join(sorted(missing))}")
            _check(table)
            return cls(**table)
        except (ValueError, TypeError, AttributeError, KeyError) as reason:
            raise DataError(f"not a record of schema {SCHEMA}: {reason}", hint="see frontier/record.py") from None


def _check(table: dict[str, Any]) -> None:
    """Raises ValueError, or what Python does at a wrong type, where a choice or a report would stumble."""
    if not all(isinstance(table.get(key, {}), dict) for key in ("case", "verdicts", "notes", "call_ms", "beside_ms")):
        raise ValueError("what should hold names and values does not")
    if any(type(table["case"].get(size)) is not int or table["case"][size] < 1 for size in SIZES):
        raise ValueError(f"its case lacks sizes above 0 for {', '.join(SIZES)}")
    if not isinstance(table["case"].get("name"), str) or type(table["case"].get("causal")) is not bool:
        raise ValueError("its case lacks a name, or whether it is causal")
    for key in ("recipe", "machine"):
        if not isinstance(table[key], str):
            raise ValueError(f"its {key} is {table[key]!r}")
    if table["kind"] == "tune" and table["notes"]["outcome"] == "pass":
        notes = table["notes"]
        told = [table["call_ms"]["p50"], notes["trials"], notes["noise"], table["verdicts"]["gate"]["budget"]]
        if not all(math.isfinite(number) for number in told) or min(told[:2]) <= 0:
            raise ValueError(f"time, trials, noise and budget of its pass are {told}")


def read_records(folder: Path = EVIDENCE) -> Iterator[Record]:
    """Every record in the folder's .jsonl files, by file name, then line.

    Raises   DataError naming file and line.
    """
    for path in sorted(folder.glob("*.jsonl")):
        yield from _records_of(path)


def _records_of(path: Path) -> Iterator[Record]:
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if line.strip():
            try:
                yield Record.from_json(line)
            except DataError as reason:
                raise DataError(f"{path.name}:{number}: {reason}", hint=reason.hint) from None


def evidence_path(machine_name: str, folder: Path = EVIDENCE) -> Path:
    """Where a machine's evidence lies: its name in small letters and dashes."""
    return folder / f"{re.sub(r'[^a-z0-9]+', '-', machine_name.lower()).strip('-')}.jsonl"


class EvidenceFile:
    """Records in one .jsonl file, safe on disk one by one: work that is cut short loses nothing.

    Raises   DataError naming file and line if it holds what is no record, or the file if there can be none.
    """

    def __init__(self, path: Path) -> None:
        if path.is_dir():
            raise DataError(f"`{path}` is a folder", hint="name a file of records, FILE.jsonl")
        self.path = path
        self.records = list(_records_of(path)) if path.is_file() else []

    def put(self, record: Record, instead_of: Callable[[Record], bool]) -> None:
        """Add a record at the end, and drop the ones it stands instead of."""
        self.records = [*(known for known in self.records if not instead_of(known)), record]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f"{self.path.name}.partial")
        partial.write_text("".join(f"{known.to_json()}\n" for known in self.records))
        partial.replace(self.path)


def versions() -> dict[str, str]:
    """Python, and the packages that numbers may depend on, as installed."""
    found = {"python": platform.python_version(), "frontier": __version__}
    for package in ("torch", "triton", "numpy", "flash-attn-4", "nvidia-cudnn-cu13"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The checkout's commit, marked when files differ from it; None outside a checkout."""
    try:
        run = ["git", "-C", str(PACKAGE.parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        done = subprocess.run(run, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def source_sha256() -> str:
    """A fingerprint of this package's own code: it names what ran where there is no commit."""
    total = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        total.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:16]
