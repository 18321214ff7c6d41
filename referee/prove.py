"""The judge is judged: faithful half-precision outputs must pass, each planted fault must not.

Takes    nothing; builds small run directories of its own, in a temporary place.
Gives    one finding per planted fault: what came of it, and the place that gave it away.
Knows nothing of the float64 layer: its half-precision emulation is dense, batched and written apart from it.

Letters  B rows, S positions, D width, H heads, K head width, T key positions.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor
from torch.nn import functional

from referee.case import OFFICIAL_ATOL, OFFICIAL_RTOL, Case
from referee.cli import describe
from referee.crew import Crew
from referee.errors import CannotJudge
from referee.files import hash_file
from referee.inputs import hash_row, seeded_block, seeded_weights
from referee.verdict import judge

CHUNK = 64  # what a run might stream at a time, in positions
CASE = Case(
    name="proof", batch_size=3, seq_len=300, d_model=64, heads=4, ffn_dim=96, layers=2, causal=True, seed=1234,
    input_scale=1.0, atol=OFFICIAL_ATOL, rtol=OFFICIAL_RTOL,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    """Mistakes that the emulation can be told to make."""

    scale: float = 1.0
    sees_ahead: int = 0
    counts: float = 1.0  # how often the second chunk of keys and values enters, for the queries after it
    tanh: bool = False
    forgets_mask: bool = False


def emulate(x_BSD: Tensor, weights: Mapping[str, Tensor], case: Case, mask_BS: Tensor | None, wrong: Wrong) -> Tensor:
    """The stack as a card would run it: operands of products in half precision, all else in float32."""

    def half(value: Tensor) -> Tensor:
        return value.half().float()

    def linear(value: Tensor, name: str) -> Tensor:
        return half(value) @ half(weights[f"{name}.weight"]).T + weights[f"{name}.bias"]

    def norm(value: Tensor, name: str) -> Tensor:
        return functional.layer_norm(value, value.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)

    rows, positions, width = x_BSD.shape
    query, key = torch.arange(positions)[:, None], torch.arange(positions)[None]
    hidden = (key > query + wrong.sees_ahead) & (key > 0) if case.causal else torch.zeros_like(key > query)
    often_ST = torch.where((key // CHUNK == 1) & (query // CHUNK > 1), wrong.counts, 1.0)
    hidden_BHST = hidden.expand(rows, 1, -1, -1)
    valid_BS1 = torch.ones(rows, positions, 1) if mask_BS is None or wrong.forgets_mask else mask_BS[..., None].float()
    hidden_BHST = hidden_BHST | (valid_BS1[:, None, None, :, 0] == 0)
    for index in range(case.layers):
        own = f"layers.{index}"
        h_BSD = norm(x_BSD, f"{own}.norm1")
        q_BHSK, k_BHTK, v_BHTK = (
            half(linear(h_BSD, f"{own}.attention.{part}_proj")).view(rows, positions, case.heads, -1).transpose(1, 2)
            for part in "qkv"
        )
        s_BHST = q_BHSK @ k_BHTK.mT * (wrong.scale * (width // case.heads) ** -0.5)
        p_BHST = (s_BHST + often_ST.log()).masked_fill(hidden_BHST, -1e30).softmax(-1)
        a_BSD = (half(p_BHST) @ v_BHTK).transpose(1, 2).flatten(2)
        x_BSD = x_BSD + linear(a_BSD, f"{own}.attention.out_proj")
        inner = functional.gelu(
            linear(norm(x_BSD, f"{own}.norm2"), f"{own}.ffn_in"), approximate="tanh" if wrong.tanh else "none"
        )
        x_BSD = (x_BSD + linear(inner, f"{own}.ffn_out")) * valid_BS1
    return norm(x_BSD, "final_norm") * valid_BS1


@dataclass(slots=True, kw_only=True)
class Run:
    """A small run that can be made wrong and written down."""

    case: Case
    weights: dict[str, Tensor]
    weights_kind: str = "seeded"
    mask_BS: Tensor | None = None

    def inputs(self) -> Tensor:
        return torch.stack([seeded_block(self.case, row, 0) for row in range(self.case.batch_size)])

    def outputs(self, wrong: Wrong) -> np.ndarray[Any, Any]:
        return emulate(self.inputs(), self.weights, self.case, self.mask_BS, wrong).numpy()

    def write(self, run_dir: Path, y_BSD: np.ndarray[Any, Any]) -> None:
        """A whole run directory, as section 6 of the contract has it, with every row watched."""
        (run_dir / "watched").mkdir(parents=True)
        safetensors.torch.save_file(self.weights, run_dir / "weights.safetensors")
        if self.mask_BS is not None:
            np.save(run_dir / "mask.npy", self.mask_BS.numpy())
        watched = []
        with Crew(1) as crew:
            for row, x_SD in enumerate(self.inputs().numpy()):
                name = f"watched/row_{row:08d}.npy"
                np.save(run_dir / name, y_BSD[row])
                input_sha256, output_sha256 = hash_row(x_SD, crew), hash_row(y_BSD[row], crew)
                entry = {"row": row, "input_sha256": input_sha256, "output": name, "output_sha256": output_sha256}
                watched.append(entry)
        manifest = {
            "schema": 1,
            "complete": True,
            "case": asdict(self.case),
            "input": {"kind": "seeded"},
            "weights": {"kind": self.weights_kind, "sha256": hash_file(run_dir / "weights.safetensors")},
            "mask": None if self.mask_BS is None else {"sha256": hash_file(run_dir / "mask.npy")},
            "watched": watched,
        }
        (run_dir / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def small_runs() -> dict[str, Run]:
    """Three runs: plain; masked and not causal; and one whose feed-forward lives where gelu's two forms differ."""
    plain = Run(case=CASE, weights=seeded_weights(CASE))
    case = replace(CASE, name="masked", causal=False, seq_len=97)
    mask_BS = torch.ones(3, 97, dtype=torch.bool)
    mask_BS[0, :30], mask_BS[1, 10:90:3], mask_BS[2] = False, False, False
    masked = Run(case=case, weights=seeded_weights(case), mask_BS=mask_BS)
    # At -2.5 gelu is -0.0155 and its tanh form 3 % off; large weights behind it make that most of the output.
    cold = dict(plain.weights)
    for name in cold:
        if name.endswith("ffn_in.bias"):
            cold[name] = torch.full_like(cold[name], -2.5)
        if name.endswith("ffn_out.weight"):
            cold[name] = cold[name] * 20
    return {"plain": plain, "masked": masked, "cold": Run(case=CASE, weights=cold, weights_kind="file")}


Spoil = Callable[[np.ndarray[Any, Any]], None]


def _swap(y_BSD: np.ndarray[Any, Any]) -> None:
    y_BSD[[0, 1]] = y_BSD[[1, 0]]


def _stale(positions: slice) -> Spoil:
    def spoil(y_BSD: np.ndarray[Any, Any]) -> None:
        y_BSD[2, positions] = y_BSD[1, positions]

    return spoil


def _flip(y_BSD: np.ndarray[Any, Any]) -> None:
    y_BSD.view(np.uint32)[1, 150, 7] ^= 1 << 30  # the top bit of the exponent


def _put(place: tuple[int, int, int], value: float) -> Spoil:
    def spoil(y_BSD: np.ndarray[Any, Any]) -> None:
        y_BSD[place] = value

    return spoil


def _shift(y_BSD: np.ndarray[Any, Any]) -> None:
    y_BSD[:, -CHUNK + 1 :] = y_BSD[:, -CHUNK:-1].copy()


def _nothing(y_BSD: np.ndarray[Any, Any]) -> None:
    pass


def _zero(y_BSD: np.ndarray[Any, Any]) -> None:
    y_BSD[:] = 0


# What is planted, in which run, how the layer goes wrong, how its output is spoilt.
FAITHFUL = "nothing: a faithful half-precision run"
FAULTS: tuple[tuple[str, str, Wrong, Spoil], ...] = (
    (FAITHFUL, "plain", Wrong(), _nothing),
    (FAITHFUL, "masked", Wrong(), _nothing),
    (FAITHFUL, "cold", Wrong(), _nothing),
    ("softmax scale of the width, not of a head", "plain", Wrong(scale=CASE.heads**-0.5), _nothing),
    ("causal mask sees one position ahead", "plain", Wrong(sees_ahead=1), _nothing),
    ("causal mask hides a position from itself", "plain", Wrong(sees_ahead=-1), _nothing),
    ("a chunk of keys and values left out", "plain", Wrong(counts=0.0), _nothing),
    ("a chunk of keys and values counted twice", "plain", Wrong(counts=2.0), _nothing),
    ("gelu in its tanh form", "cold", Wrong(tanh=True), _nothing),
    ("valid-token mask forgotten", "masked", Wrong(forgets_mask=True), _nothing),
    ("something in an invalid position", "masked", Wrong(), _put((1, 10, 3), 0.01)),
    ("two rows swapped", "plain", Wrong(), _swap),
    ("a stale slot: row 2 repeats row 1", "plain", Wrong(), _stale(slice(None))),
    ("half a stale slot", "plain", Wrong(), _stale(slice(150, None))),
    ("one flipped bit in an exponent", "plain", Wrong(), _flip),
    ("one NaN", "plain", Wrong(), _put((0, 299, 63), float("nan"))),
    ("one infinity", "plain", Wrong(), _put((2, 0, 0), float("inf"))),
    ("all zeros", "plain", Wrong(), _zero),
    ("last chunk of positions shifted by one", "plain", Wrong(), _shift),
)


def _change_output(run_dir: Path) -> None:
    path = run_dir / "watched" / "row_00000001.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")


def _change_seed(run_dir: Path) -> None:
    path = run_dir / "manifest.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"seed": 1234', '"seed": 1235'), encoding="utf-8")


def _change_path(run_dir: Path) -> None:
    path = run_dir / "manifest.json"
    path.write_text(path.read_text(encoding="utf-8").replace("watched/row", "../0/watched/row"), encoding="utf-8")


def _change_delivered(run_dir: Path) -> None:
    """The run handed over a file whose watched row 1 differs in a bit that no tolerance would notice."""
    y_BSD = np.stack([np.load(path) for path in sorted((run_dir / "watched").iterdir())])
    y_BSD.view(np.uint32)[1, 150, 7] ^= 1
    np.save(run_dir / "y.npy", y_BSD)
    path = run_dir / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8")) | {"output": str((run_dir / "y.npy").resolve())}
    path.write_text(json.dumps(manifest), encoding="utf-8")


# What happens to a faithful run's files behind its back; then there is nothing to judge.
CHANGES = {
    "an output changed after its run": _change_output,
    "an output file that is not what was kept of it": _change_delivered,
    "a manifest that names another seed": _change_seed,
    "a path into the directory of another run": _change_path,
}


def prove() -> list[dict[str, Any]]:
    """Judge every run of `FAULTS`, and of `CHANGES`."""
    findings, runs = [], small_runs()
    with tempfile.TemporaryDirectory(prefix="referee-") as place:
        for number, (fault, name, wrong, spoil) in enumerate(FAULTS):
            y_BSD, run_dir = runs[name].outputs(wrong), Path(place, str(number))
            spoil(y_BSD)
            runs[name].write(run_dir, y_BSD)
            verdict = judge(run_dir)
            total, wanted = verdict["total"], "pass" if fault == FAITHFUL else "fail"
            evidence = f"{total['failing']:,} of {total['elements']:,} fail; worst {describe(total['worst'])}"
            findings.append(_finding(f"{fault} ({name})", verdict["verdict"], wanted, evidence) | {"total": total})
        for change, spoil_files in CHANGES.items():
            run_dir = Path(place, change)
            runs["plain"].write(run_dir, runs["plain"].outputs(Wrong()))
            spoil_files(run_dir)
            try:
                findings.append(_finding(change, judge(run_dir)["verdict"], "refused", ""))
            except CannotJudge as refusal:
                findings.append(_finding(change, "refused", "refused", str(refusal)))
    return findings


def _finding(fault: str, verdict: str, wanted: str, evidence: str) -> dict[str, Any]:
    return {"fault": fault, "verdict": verdict, "as_expected": verdict == wanted, "evidence": evidence}
