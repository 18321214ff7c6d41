"""The bytes a slice holds on the card under a recipe. Imports no torch: plans are made on a laptop.

Takes    a case, a recipe, rows of a slice.
Gives    named bytes, to be put into a ledger.
Knows nothing of budgets, slots or rings.

Letters  B rows, S positions, D width, F feed-forward width, H heads, T tokens of a tile, w bytes of the
         working precision.
"""

from frontier.case import FLOAT32_BYTES, Case
from frontier.recipe import Recipe
from frontier.units import MIB

# Tokens that pass the tokenwise parts at a time: 16,384 x 1,024 in fp16 is 32 MiB, which stays in an H200's
# 60 MB L2 from one GEMM to the next, and no temporary grows with the sequence.
TILE_TOKENS = 16_384

# cuBLAS keeps one workspace a stream, 32 MiB on Hopper, and cuBLASLt another; a third serves the default stream.
GEMM_WORKSPACE_BYTES = 96 * MIB

# What the allocator reserves beyond what is asked of it: 0.10 GiB in each measured run of case 14 on an H200
# (blocks are multiples of 2 MiB and are split to fit), with as much again for other orders of events.
ALLOCATOR_SLACK_BYTES = 128 * MIB

# Kernels address with 32-bit offsets: no tensor of one call may reach 2^31 elements (pitfalls of others:
# flash-linear-attention#1080, pytorch#181555).
MOST_ELEMENTS = (1 << 31) - 1


def weight_bytes(case: Case, recipe: Recipe) -> int:
    """Packed weights of all layers on the card."""
    D, F, w = case.d_model, case.ffn_dim, recipe.working_bytes
    linears = 4 * (D * D + D) + (F * D + F) + (D * F + D)
    return case.layers * (linears * w + 4 * D * FLOAT32_BYTES) + 2 * D * FLOAT32_BYTES


def workspace_bytes(case: Case, recipe: Recipe, slice_rows: int) -> dict[str, int]:
    """What one layer holds while it computes `slice_rows` rows, by name; the residual is in the output slot."""
    B, S, D, F, H = slice_rows, case.seq_len, case.d_model, case.ffn_dim, case.heads
    T, w = min(TILE_TOKENS, B * S), recipe.working_bytes
    held = {
        "packed q, k, v": B * S * 3 * D * w,
        "attention context": B * S * D * w,
        "attention log-sum-exp": B * H * S * FLOAT32_BYTES,
        # norm in float32 and its cast beside the last tile's, not let go of yet; or normed, hidden, gelu of it;
        # or normed, gelu, out: the largest of the three
        "tile temporaries": T * max(D * (4 + (2 * w if recipe.is_half else w)), (D + 2 * F) * w, (2 * D + F) * w),
    }
    if recipe.attention == "dense":
        # float32 q, k, v and context; scores and their softmax; the causal mask
        held["dense scores"] = 4 * B * S * D * FLOAT32_BYTES + 2 * B * H * S * S * FLOAT32_BYTES + S * S
    return held


def most_rows_per_call(case: Case) -> int:
    """Rows whose packed q, k, v stay under 2^31 elements; 0 if even one row does not."""
    return MOST_ELEMENTS // (3 * case.seq_len * case.d_model)
