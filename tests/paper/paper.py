"""Made-up cases, machines and records, for all tests of this room."""

from typing import Any

from frontier.case import Case
from frontier.machine import Machine
from frontier.record import Record
from frontier.units import GIB

H200_NAME = "NVIDIA H200"


def card(device_gib: float = 139.0, pinned_gib: float = 64.0, host_gib: float = 120.0, **facts: Any) -> Machine:
    given: dict[str, Any] = {
        "device": "cuda:0", "name": H200_NAME, "capability": (9, 0), "cores": 16,
        "device_total_bytes": int(device_gib * GIB), "device_free_bytes": int(device_gib * GIB),
        "host_total_bytes": 128 * GIB, "host_available_bytes": 128 * GIB,
        "device_budget_bytes": int(device_gib * GIB), "pinned_budget_bytes": int(pinned_gib * GIB),
        "host_budget_bytes": int(host_gib * GIB),
    }  # fmt: skip
    return Machine(**{**given, **facts})


def laptop(host_gib: float = 8.0, device_gib: float | None = None) -> Machine:
    host = int(host_gib * GIB)
    return Machine(
        device="cpu", name="laptop", cores=4, host_total_bytes=2 * host, host_available_bytes=host,
        device_budget_bytes=int(device_gib * GIB) if device_gib else host, pinned_budget_bytes=host // 2,
        host_budget_bytes=host,
    )  # fmt: skip


def small(**sizes: Any) -> Case:
    shape = {"batch_size": 8, "seq_len": 128, "d_model": 128, "heads": 4, "ffn_dim": 128, "layers": 4}
    return Case(**{"name": "small", **shape, **sizes})


def a_record(case: Case, recipe: str, seconds: float | None = 1.0, **facts: Any) -> Record:
    given: dict[str, Any] = {
        "kind": "run", "case": case.as_dict(), "recipe": recipe, "machine": H200_NAME, "command": "frontier run",
        "versions": {"torch": "2.11"}, "commit": None, "source_sha256": "0" * 16, "started": "2026-01-01T00:00:00",
        "pass_s": () if seconds is None else (seconds * 1.1, seconds, seconds * 0.9), "flops": case.flops,
        "verdicts": {"gate": {"verdict": "pass"}},
    }  # fmt: skip
    return Record(**{**given, **facts})


def a_tuned(case: Case, recipe: str, ms: float = 1.0, **facts: Any) -> Record:
    """A tuned record that may be promoted; `budget`, `noise`, `stage`, `outcome`, `beside` and any field may differ."""
    notes = {"stage": facts.pop("stage", "stress"), "outcome": facts.pop("outcome", "pass"), "trials": 50}
    notes |= {"noise": facts.pop("noise", 0.02), "promotable": facts.pop("promotable", True)}
    verdict = {"verdict": notes["outcome"], "budget": facts.pop("budget", 0.4)}
    beside = {name: {"p50": other} for name, other in facts.pop("beside", {}).items()}
    given = {"kind": "tune", "call_ms": {"p50": ms}, "beside_ms": beside, "first_result_s": 0.5}
    return a_record(case, recipe, None, **{**given, "verdicts": {"gate": verdict}, "notes": notes, **facts})
