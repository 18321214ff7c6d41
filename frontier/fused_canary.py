"""A start-up check of a stack that one kernel fuses, on a card that has no evidence of its own.

Takes    a case, a recipe, a machine.
Gives    the reason for which the recipe must not be used there, or None.
Knows nothing of evidence or speed.

Letters  B rows, S positions, D width.
"""

import torch

from frontier.case import OFFICIAL_ATOL, OFFICIAL_RTOL, Case
from frontier.judge.gate import compare_rows
from frontier.layers.costs import workspace_bytes
from frontier.layers.program import make_program
from frontier.layers.weights import seeded_state
from frontier.machine import CONTEXT_BYTES, Machine
from frontier.recipe import REFERENCE, Recipe

# A cut depends on the batch, and all 1.28 million tokens of case 6 are 0.6 GiB.
FUSED_MOST_TOKENS = 1 << 21
# For who asks for bf16 or TF32, which may fail the official rule: bf16 has three bits fewer than fp16.
COARSER = {"bf16": 8, "tf32": 2}


def fused_canary(case: Case, recipe: Recipe, machine: Machine) -> str | None:
    """Run a stack that a kernel of ours fuses on as many rows as the case has, and check some of them in float32.

    For cards on which it never ran: there it is cut otherwise than where evidence is from. Judged by the official rule,
    on seeded weights, against the recipe that spells the formula out; where small rows are done again one checked
    row is such, and a second call has a mask with holes.
    """
    if recipe.fusion == "by-part":
        return None
    B, S, coarser = rows_tried(case, recipe, machine), case.seq_len, COARSER.get(recipe.precision, 1)
    try:
        device, state = torch.device(machine.device), seeded_state(case)
        generator = torch.Generator(device).manual_seed(7)
        x_BSD = torch.randn(B, S, case.d_model, device=device, generator=generator)
        if recipe.redoes_small:
            x_BSD[B // 2, S // 2] *= 0.01
        holes_BS = torch.arange(B * S, device=device).view(B, S) % 7 != 1
        program, plain = (make_program(state, case, kind, device) for kind in (recipe, REFERENCE))
        checked = sorted({0, B // 2, B - 1})
        checked_BSD = x_BSD[checked]
        for valid_BS in (None, holes_BS):
            out_BSD, want_BSD = torch.full_like(x_BSD, torch.nan), torch.empty_like(checked_BSD)
            program(x_BSD, out_BSD, valid_BS)
            plain(checked_BSD, want_BSD, None if valid_BS is None else valid_BS[checked])
            found = compare_rows(out_BSD[checked], want_BSD, coarser * OFFICIAL_ATOL, coarser * OFFICIAL_RTOL)
            if not found.passes:
                where = "" if valid_BS is None else " under a mask"
                wrong = f"{found.failing:,} of {found.elements:,} elements"
                return f"wrong numbers{where}: {wrong} fail the rule against float32"
    except Exception as reason:
        return f"it failed: {[*str(reason).strip().splitlines(), repr(reason)][0][:300]}"
    return None


def rows_tried(case: Case, recipe: Recipe, machine: Machine) -> int:
    """Rows of a fused stack's canary: the case's, or fewer to hold no more than half of the device's budget."""
    rows = max(1, min(case.batch_size, FUSED_MOST_TOKENS // case.seq_len))
    most_bytes = (machine.device_budget_bytes - CONTEXT_BYTES) // 2
    while rows > 1 and 2 * rows * case.row_bytes + sum(workspace_bytes(case, recipe, rows).values()) > most_bytes:
        rows = -(-rows // 2)
    return rows
