"""What tuned records say of a call on rows that already lie on a device: who passed, who is fastest, by how much.

Takes    records of `frontier tune`, a case.
Gives    those of one problem; those that may serve, best first; the error to expect of another batch.
Knows nothing of machines or kernels.
"""

import math
from collections.abc import Iterable

from frontier.case import Case
from frontier.record import Record

# What decides the error and who can serve; the rest of a shape decides speed.
_KIN = ("d_model", "heads", "ffn_dim", "layers", "causal", "atol", "rtol")
# In `beside_ms`, the dense layer as the benchmark script has it: no recipe of ours.
BASELINE = "baseline"
YARDSTICK = "compiled fp16 layers"  # there too: plain ones at their best, see judge/reference.py
# Of the error budget, what evidence from another shape must leave free.
HEADROOM = 0.2
# Trials of the benchmark script, each of them all elements of the output.
_SCRIPT_TRIALS = 5


def tuned(records: Iterable[Record], machine: str) -> list[Record]:
    """What was tuned on a machine of this name."""
    return [r for r in records if r.kind == "tune" and r.machine == machine]


def of_call(records: Iterable[Record], case: Case) -> list[Record]:
    """Of this very problem: everything but name, seed and scale is equal, the batch too."""
    keys = (*_KIN, "seq_len", "batch_size")
    return [r for r in records if all(r.case[key] == getattr(case, key) for key in keys)]


def of_kin(records: Iterable[Record], case: Case) -> list[Record]:
    """Of problems that differ in batch and length alone."""
    return [r for r in records if all(r.case[key] == getattr(case, key) for key in _KIN)]


def shape_of(record: Record) -> tuple[int, int]:
    """Batch and length."""
    return record.case["batch_size"], record.case["seq_len"]


def distance(shape: tuple[int, int], case: Case) -> tuple[float, float]:
    """How far a batch and length are from a case's: lengths first, then batches, by ratio."""
    batch, length = shape
    return abs(math.log(length / case.seq_len)), abs(math.log(batch / case.batch_size))


def standing(records: Iterable[Record]) -> list[Record]:
    """The record that decides about each recipe of one problem, oldest first.

    The last one decides; but one that was only screened and passed does not undo what the whole program said.
    """
    decided: dict[str, Record] = {}
    for record in records:
        if record.recipe not in decided or record.notes["stage"] == "stress" or record.notes["outcome"] != "pass":
            decided.pop(record.recipe, None)
            decided[record.recipe] = record
        elif decided[record.recipe].notes["stage"] == "screen":
            decided[record.recipe] = record
    return list(decided.values())


def ranking(records: Iterable[Record]) -> list[Record]:
    """Records of one problem whose recipes may serve, best first.

    A recipe may serve if it passed the whole stress program. Records are gone through as they came: a newcomer
    passes an incumbent only if it is faster by more than the noise of both; a tie leaves the order as it was. What is
    tuned again comes as a newcomer, and of several in one run the fastest of their screening comes first.
    """
    ranked: list[Record] = []
    for record in standing(records):
        if not (record.notes["promotable"] and record.notes["outcome"] == "pass"):
            continue
        place = len(ranked)
        while place and lead(record, ranked[place - 1]) > band(record, ranked[place - 1]):
            place -= 1
        ranked.insert(place, record)
    return ranked


def why_denied(record: Record) -> str | None:
    """Why no evidence of another shape makes a recipe fit for the shape of this record, or None."""
    notes = record.notes
    if notes["outcome"] == "pass" and (notes["promotable"] or notes["stage"] == "screen"):
        return None
    reasons = record.verdicts.get("gate", {}).get("reasons", [])
    said = [record.refused] if record.refused else [r for r in reasons if "no such trial" not in r]
    return f"on this very shape: {(said or [notes['outcome']])[0]}"


def call_ms(record: Record) -> float:
    return record.call_ms["p50"]


def told(record: Record) -> str:
    """A record in a few words: where, how fast, how right."""
    case, budget = record.case, budget_of(record)
    shape = f"case {case['name']} (batch {case['batch_size']:,}, length {case['seq_len']:,}), {record.machine}"
    return (
        f"{shape}, {call_ms(record):.4g} ms a call, {'no' if budget is None else f'{budget:.2f} of the'} error budget"
    )


def lead(record: Record, rival: Record) -> float:
    """By what share of the rival's time a record is faster; the rival's time from the same run where it has one."""
    return 1 - call_ms(record) / record.beside_ms.get(rival.recipe, rival.call_ms)["p50"]


def band(record: Record, rival: Record) -> float:
    """What two times of the same thing may differ by, as measured by the baseline beside itself."""
    return max(float(record.notes["noise"]), float(rival.notes["noise"]))


def budget_of(record: Record) -> float | None:
    """The largest budget fraction that the gate saw, or None."""
    value = record.verdicts.get("gate", {}).get("budget")
    return None if value is None else float(value)


def expected_budget(record: Record, case: Case) -> float:
    """The largest budget fraction that five trials of another shape should see, from what this record saw.

    Errors of single elements are near normal, so the largest of N grows as sqrt(2 ln N).
    """
    seen = record.case["batch_size"] * record.case["seq_len"] * case.d_model * record.notes["trials"]
    ahead = case.batch_size * case.seq_len * case.d_model * _SCRIPT_TRIALS
    budget = budget_of(record)
    return math.inf if budget is None else budget * math.sqrt(max(1.0, math.log(ahead) / math.log(seen)))
