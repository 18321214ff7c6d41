"""What commands print for people: cases, machines, plans and records as short tables.

Takes    our nouns.
Gives    text for stdout.
Knows nothing of flags or exit codes.
"""

import statistics
from collections.abc import Iterator

from frontier.case import Case
from frontier.chooser import Choice
from frontier.estimate import Estimate
from frontier.machine import Machine
from frontier.planner import PLACES, Place, Plan, budgets, host_total_bytes
from frontier.record import Record
from frontier.tuned import budget_of, call_ms
from frontier.units import show_bytes, show_flops, show_seconds

_PLACE_TITLES = {"card": "on the card", "pinned": "pinned on the host", "host": "host memory", "disk": "disk"}

_HOST_TITLES = {**_PLACE_TITLES, "card": "device (the host)", "pinned": "slots on the host"}


def show_case(case: Case) -> str:
    """One line: shape, bytes, work."""
    kind = "causal" if case.causal else "not causal"
    return (
        f"case {case.name}: {case.batch_size:,} rows x {case.seq_len:,} positions x {case.d_model:,} wide, "
        f"{case.heads} heads, {case.layers} layers, {kind}; float32 {show_bytes(case.input_bytes)} each way, "
        f"{show_flops(case.flops)}"
    )


def show_plan(plan: Plan, choice: Choice, guess: Estimate, free_disk_bytes: int | None) -> str:
    """The recipe and those passed over, the cut, the ledger against budgets, and the time to expect."""
    lines = [
        show_case(plan.case),
        *_recipe_lines(choice),
        f"cut    {plan.cut}, {plan.ring_depth} in flight; {_flow_reason(plan)}",
        f"time   about {show_seconds(guess.pass_s)} a pass, bound by {guess.bound_by} ({guess.basis})",
        "",
        *_ledger_lines(plan, free_disk_bytes),
    ]
    return "\n".join(lines)


def _ledger_lines(plan: Plan, free_disk_bytes: int | None) -> Iterator[str]:
    limits = budgets(plan.machine, free_disk_bytes)
    for place in PLACES:
        entries = [entry for entry in plan.ledger if entry.place == place]
        if not entries and place == "disk":
            continue
        yield f"  {_PLACE_TITLES[place] if plan.machine.has_card else _HOST_TITLES[place]}"
        for entry in entries:
            yield f"    {entry.name:<34}{show_bytes(entry.num_bytes):>14}"
        yield from _total_lines(plan, place, limits[place])


def _total_lines(plan: Plan, place: Place, budget: int | None) -> Iterator[str]:
    yield f"    {'total':<34}{show_bytes(plan.held_bytes(place)):>14}"
    if place == "host":
        yield f"    {'total with all that is pinned':<34}{show_bytes(host_total_bytes(plan)):>14}"
    if budget is not None:
        yield f"    {'budget':<34}{show_bytes(budget):>14}"


def _recipe_lines(choice: Choice) -> Iterator[str]:
    yield f"recipe {choice.recipe} ({choice.why})"
    yield from (f"not    {passed_over}" for passed_over in choice.passed_over)


def show_plan_line(plan: Plan, choice: Choice) -> str:
    """The plan on a few lines, for stderr."""
    held = ", ".join(f"{place} {show_bytes(plan.held_bytes(place))}" for place in PLACES if plan.held_bytes(place))
    cut = f"{plan.cut}, {plan.ring_depth} in flight" + f"; {_flow_reason(plan)}" * (plan.chunk is not None)
    return "\n".join([show_case(plan.case), *_recipe_lines(choice), f"{cut}; {held}"])


def _flow_reason(plan: Plan) -> str:
    if plan.chunk is None:
        return plan.why
    places = {"card": "on the device", "pinned": "in pinned memory", "host": "in host memory", "disk": "in a file"}
    where = places[plan.spool or "card"]
    anew = plan.spool != "disk" and any(entry.name == "output" and entry.place == "disk" for entry in plan.ledger)
    lost = "; a row that is under way when the run is killed begins anew (not so with --spool file)" * anew
    return f"keys and values wait {where} ({plan.why}){lost}"


def show_machine(machine: Machine, kernels: dict[str, str | None], tried: str, pinning_s: float | None) -> str:
    """The card, the host, the budgets, and which attention kernels may serve."""
    lines = [f"device    {machine.device}, {machine.name}, compute capability {machine.capability_text}"]
    if machine.has_card:
        free, total = show_bytes(machine.device_free_bytes), show_bytes(machine.device_total_bytes)
        pinned = "refused even for 64 MiB" if pinning_s is None else f"{show_seconds(pinning_s)} a GiB"
        lines += [f"card      {free} free of {total}", f"pinning   {pinned}"]
    available, total = show_bytes(machine.host_available_bytes), show_bytes(machine.host_total_bytes)
    lines += [
        f"host      {available} available of {total} (cgroup limits counted, page cache not), {machine.cores} cores",
        f"budgets   device {show_bytes(machine.device_budget_bytes)}, "
        f"pinned {show_bytes(machine.pinned_budget_bytes)}, host {show_bytes(machine.host_budget_bytes)}",
        f"attention kernels ({tried})",
        *(f"    {word:<10}{_kernel_state(word, reason)}" for word, reason in kernels.items()),
    ]
    return "\n".join(lines)


def _kernel_state(word: str, reason: str | None) -> str:
    if reason is not None:
        return f"refused: {reason}"
    return "the reference that canaries are checked by; for short rows" if word == "dense" else "passes its canary"


def show_outcome(record: Record) -> str:
    """One line of a tuned recipe: its outcome, its time beside the others', or why there is none."""
    head = f"case {record.case['name']}  {record.recipe}  {record.notes['outcome']}"
    if not record.call_ms:
        return f"{head}: {record.refused}"
    beside = ", ".join(f"{name} {times['p50']:.4g}" for name, times in record.beside_ms.items())
    budget = budget_of(record)
    gate = f", {record.notes['stage']}ed" if record.notes["stage"] == "screen" else ", whole stress program"
    error = "" if budget is None else f"; {budget:.3g} of the error budget{gate}"
    first = f"; first result after {show_seconds(record.first_result_s)}" if record.first_result_s else ""
    return f"{head}: {call_ms(record):.4g} ms (beside {beside or 'nothing'}){error}{first}"


def show_record(record: Record) -> str:
    """How a run went: times with spread, both ceilings, peaks beside their plan."""
    return "\n".join(f"{name:<10}{text}" for name, text in _record_lines(record))


def _record_lines(record: Record) -> Iterator[tuple[str, str]]:
    median_s = record.median_s or 0.0
    spread = f", {show_seconds(min(record.pass_s))} to {show_seconds(max(record.pass_s))}"
    times = f"{show_seconds(median_s)}, median of {len(record.pass_s)}{spread if len(record.pass_s) > 1 else ''}"
    yield "pass", f"{times}; {record.tflops:.4g} TFLOP/s (causal attention counts what is visible)"
    if "resumed" in record.notes:
        drifted = ", ".join(record.notes["resumed"]["drifted"])
        differs = f"other than before: {drifted}" if drifted else "same cut, so the same bytes"
        told = record.notes["resumed"]
        at = f", gone on with at {told['at']}" if "at" in told else ""
        yield "resumed", f"{told['done_rows']} rows were done{at}; times are of the others; {differs}"
    yield "recipe", f"{record.recipe} on {record.machine}, input {record.input}, output {record.output}"
    yield "busy", ", ".join(f"{verb} {show_seconds(seconds)}" for verb, seconds in record.busy_s.items())
    if record.card_s and record.road_s:
        card_s, road_s = statistics.median(record.card_s), statistics.median(record.road_s)
        ratio = f"the pass took {median_s / max(card_s, road_s):.3f} x the slower"
        yield "ceilings", f"card alone {show_seconds(card_s)}, road alone {show_seconds(road_s)}; {ratio}"
    if record.gemm_tflops and record.tflops:
        share = record.tflops / record.gemm_tflops
        yield "MFU", f"{share:.1%} of this card's measured half-precision matmul, {record.gemm_tflops:.0f} TFLOP/s"
    if record.first_slice_s is not None and record.startup_s is not None:
        began = f"{show_seconds(record.startup_s)} from process start"
        yield "start", f"{began}, first slice out {show_seconds(record.first_slice_s)} later"
    for place in ("device", "host"):
        planned, peak = getattr(record, f"{place}_planned_bytes"), getattr(record, f"{place}_peak_bytes")
        if planned and peak:
            yield place, f"planned {show_bytes(planned)}, peak {show_bytes(peak)} ({peak / planned:.1%})"
