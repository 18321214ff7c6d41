"""The bytes a slice holds on the card under a recipe. Imports no torch: plans are made on a laptop.

Takes    a case, a recipe, rows of a slice.
Gives    named bytes, to be put into a ledger.
Knows nothing of budgets, slots or rings.

Letters  B rows, S positions, D width, F feed-forward width, H heads, T tokens of a tile, w bytes of the
         working precision.
"""

from dataclasses import replace
from typing import Literal

from frontier.case import FLOAT32_BYTES, Case
from frontier.recipe import Recipe
from frontier.units import MIB

# Of every LayerNorm: configs/CONTRACT.md, section 1.
NORM_EPS = 1e-5

# Tokens that pass the tokenwise parts at a time: 16,384 x 1,024 in fp16 is 32 MiB, which stays in an H200's
# 60 MB L2 from one GEMM to the next, and no temporary grows with the sequence.
TILE_TOKENS = 16_384

# cuBLAS keeps one workspace a stream, 32 MiB on Hopper, and cuBLASLt another; a third serves the default stream.
GEMM_WORKSPACE_BYTES = 96 * MIB

# What the allocator reserves beyond what is asked of it (blocks are multiples of 2 MiB and are split to fit): on an
# H200 0.10 to 0.17 GiB of case 14's 3.4, 0.24 of a million positions' 10.9.
ALLOCATOR_SLACK_BYTES, ALLOCATOR_SLACK_SHARE = 128 * MIB, 1 / 20

# Kernels address with 32-bit offsets: no tensor of one call may reach 2^31 elements (pitfalls of others:
# flash-linear-attention#1080, pytorch#181555).
MOST_ELEMENTS = (1 << 31) - 1

# Nor may one attention call hold more positions: FA3 and FA4 failed in one call at 4 and 8 million (pitfalls of
# others: flash-attention#1841, #2662); 2^20 was right with both kernels of an H200.
MOST_POSITIONS = 1 << 20
# More keys at a time only cost: a million positions took 10.8 s by 65,536 of them, 11.3 s by 524,288 (cuDNN, H200).
MOST_KEYS = 1 << 16

# Attention kernels that tell no log-sum-exp, by which blocks of keys are merged.
WITHOUT_LSE = ("short", "scores")

# CUDA graphs that one stack keeps: a full cut, a short last one, and as many for a second length.
MOST_GRAPHS = 4

# q, k and v of all layers that one launch of the one kernel may hold; a larger batch takes several launches.
STACK_SCRATCH_BYTES = 2 << 30

# A row with an input token that varies by less, as a standard deviation over its channels, is done again under
# held-small: fp16 spends 0.6 of the budget on cases 1 and 9 at a deviation of 1, 0.7 at 0.7 and 1.1 at 0.4, since
# the last norm magnifies what rounding did. Of normal rows 128 wide no token in 10^7 is so small.
SMALL = 0.65


def is_held(recipe: Recipe, gemms: Literal["projections", "ffn"]) -> bool:
    """Whether these GEMMs stay in float32 under a recipe of lower precision."""
    return recipe.held_at_once in (f"held-{gemms}", "held-all")


def gemm_bytes(recipe: Recipe, gemms: Literal["projections", "ffn"]) -> int:
    """Bytes of one operand's element in these GEMMs."""
    return FLOAT32_BYTES if is_held(recipe, gemms) else recipe.working_bytes


def rows_at_once(seq_len: int) -> int:
    """Batch rows that go through the whole stack together: what fits one tile of tokens, at least one."""
    return max(1, TILE_TOKENS // seq_len)


def weight_bytes(case: Case, recipe: Recipe) -> int:
    """Packed weights of all layers on the card; where small rows are done again both kinds."""
    if recipe.redoes_small:
        return sum(weight_bytes(case, kind) for kind in both_kinds(recipe))
    D, F = case.d_model, case.ffn_dim
    projections = 4 * (D * D + D) * gemm_bytes(recipe, "projections")
    ffn = (F * D + F + D * F + D) * gemm_bytes(recipe, "ffn")
    return case.layers * (projections + ffn + 4 * D * FLOAT32_BYTES) + 2 * D * FLOAT32_BYTES


def both_kinds(recipe: Recipe, attention: Literal["efficient", "flash"] = "efficient") -> tuple[Recipe, Recipe]:
    """What takes turns where small rows are done again: the fast recipe, and plain float32.

    Not only the GEMMs: with these alone in float32 attention's v, rounded to fp16, spends 0.9 of the budget on small
    rows (case 8 at an input scale of 1e-3). `attention` is that of float32: "flash" on a CPU.
    """
    return replace(recipe, held=recipe.held_at_once), Recipe(precision="fp32", projection="packed", attention=attention)


def workspace_bytes(case: Case, recipe: Recipe, slice_rows: int) -> dict[str, int]:
    """What the stack holds while it computes `slice_rows` rows, by name; the residual is in the output slot."""
    if recipe.is_one_kernel:
        return {"scratch of the one kernel": _stack_scratch_bytes(case, recipe, slice_rows)}
    if recipe.redoes_small:
        fast, held = (workspace_bytes(case, kind, slice_rows) for kind in both_kinds(recipe))
        return {name: max(fast[name], held.get(name, 0)) for name in fast}
    B, S, D, H = min(slice_rows, rows_at_once(case.seq_len)), case.seq_len, case.d_model, case.heads
    tile_bytes, w = min(TILE_TOKENS, B * S) * _token_bytes(case, recipe), recipe.working_bytes
    if recipe.fusion == "tail":  # all rows at once, and between attentions nothing but registers
        B, tile_bytes = min(slice_rows, max(1, most_rows_per_call(case))), 0
    held = {
        "packed q, k, v": B * S * 3 * D * w,
        "attention context": B * S * D * w,
        "attention log-sum-exp": B * H * S * FLOAT32_BYTES,
        "tile temporaries": tile_bytes,
    }
    if recipe.attention == "dense":
        # float32 q, k, v and context; scores and their softmax; the causal mask
        held["dense scores"] = 4 * B * S * D * FLOAT32_BYTES + 2 * B * H * S * S * FLOAT32_BYTES + S * S
    if recipe.attention == "scores":
        # q, k, v of each head in one piece; the scores, softmaxed in place; the context before its heads are joined
        held["scores"] = 4 * B * S * D * w + B * H * S * S * w
    if recipe.launch != "eager":
        # A graph's or a compiled program's own temporaries lie beside those of its eager warm-up; it reads and
        # writes rows of its own: each kept graph, or a compiled program's input and output.
        held["launched twice"] = sum(held.values())
        held["rows of the launched"] = MOST_GRAPHS * B * S * D * FLOAT32_BYTES
    return held


def stack_rows_per_launch(case: Case, recipe: Recipe, seq_len: int) -> int:
    """Rows of such a length whose q, k and v of all layers stay within the scratch of one launch; at least 1."""
    return max(1, STACK_SCRATCH_BYTES // _scratch_row_bytes(case, recipe, seq_len))


def _scratch_row_bytes(case: Case, recipe: Recipe, seq_len: int) -> int:
    """q, k and v of all layers; where the GEMMs are held also what rounding left of v."""
    return case.layers * seq_len * (4 if recipe.held == "held-all" else 3) * case.d_model * recipe.working_bytes


def _stack_scratch_bytes(case: Case, recipe: Recipe, slice_rows: int) -> int:
    """q, k, v of every layer, and counters for each layer and 16 positions: a full cut's and a short last one's.

    A second launch, for small rows, has its own q, k, v, in float32.
    """
    a_row = _scratch_row_bytes(case, recipe, case.seq_len)
    rows = min(slice_rows, stack_rows_per_launch(case, recipe, case.seq_len))
    counters = slice_rows * case.layers * -(-case.seq_len // 16) * 4
    again = recipe.redoes_small
    return rows * a_row * (3 if again else 1) + 2 * counters * (2 if again else 1)


def _token_bytes(case: Case, recipe: Recipe) -> int:
    """The most that one token of a tile holds at a time between attention and the next layer's attention."""
    D, F = case.d_model, case.ffn_dim
    p, f = gemm_bytes(recipe, "projections"), gemm_bytes(recipe, "ffn")
    packed = 3 if recipe.projection == "packed" else 1
    moments = [
        _join_bytes(recipe, D, p, f),  # what out_proj adds, joined for the feed-forward network
        (D + (1 if recipe.ffn == "triton-ffn" else 2) * F) * f,  # normed, hidden, gelu of it
        (2 * D + F) * f,  # normed, gelu, what ffn_out adds
        _join_bytes(recipe, D, f, p),  # what ffn_out adds, joined for the next projections
    ]
    if is_held(recipe, "projections"):
        # what ffn_out added, normed tokens in float32, and a float32 GEMM's output before its cast
        moments.append(D * (f + (1 + packed) * FLOAT32_BYTES))
    return max(moments)


def _join_bytes(recipe: Recipe, width: int, added: int, normed: int) -> int:
    """Added, normed, and PyTorch's float32 norm before its cast, of one token."""
    cast = recipe.join == "torch-join" and normed < FLOAT32_BYTES
    return width * (added + normed + cast * FLOAT32_BYTES)


def most_rows_per_call(case: Case) -> int:
    """Rows whose packed q, k, v stay under 2^31 elements; 0 if even one row does not, or is too long for a call."""
    return 0 if case.seq_len > MOST_POSITIONS else MOST_ELEMENTS // (3 * case.seq_len * case.d_model)


def most_positions_per_call(case: Case) -> int:
    """Positions of a chunk whose packed q, k, v stay under 2^31 elements, in one attention call; at least 1."""
    return max(1, min(MOST_POSITIONS, MOST_ELEMENTS // (3 * case.d_model)))


def most_keys_per_call(case: Case, recipe: Recipe) -> int:
    """Neighbouring keys on the card that one call meets: their rows, keys beside values, end below 2^31 bytes."""
    bytes_end = MOST_ELEMENTS // (2 * case.d_model * recipe.working_bytes)
    return max(1, min(MOST_KEYS, most_positions_per_call(case), bytes_end))


def chunk_refusal(recipe: Recipe) -> str | None:
    """Why rows cannot be cut into chunks under a recipe, or None."""
    if recipe.fusion != "by-part":
        return f"{recipe.fusion} fuses what lies around attention and takes whole rows, not chunks"
    if recipe.attention in WITHOUT_LSE:
        return f"attention {recipe.attention} tells no log-sum-exp, by which chunks are merged"
    if recipe.launch != "eager":
        return f"{recipe.launch} serves whole rows of one shape; chunks are launched eagerly"
    if recipe.redoes_small:
        return f"{recipe.held} judges whole rows; chunks of a row leave one by one"
    return None


def keys_bytes(case: Case, recipe: Recipe, positions: int) -> int:
    """Keys and values of one layer for so many positions."""
    return positions * 2 * case.d_model * recipe.working_bytes


def chunk_floats(case: Case, recipe: Recipe) -> int:
    """Float32 numbers of a slot that one position takes: its residual, or its keys and values."""
    return max(case.d_model, 2 * case.d_model * recipe.working_bytes // FLOAT32_BYTES)


def spool_bytes(case: Case, recipe: Recipe) -> int:
    """Keys and values of one row: of all layers if it is causal; else of one, and the residual between layers."""
    if case.causal:
        return case.layers * keys_bytes(case, recipe, case.seq_len)
    return keys_bytes(case, recipe, case.seq_len) + case.row_bytes


def chunk_workspace_bytes(case: Case, recipe: Recipe, chunk: int) -> dict[str, int]:
    """What one chunk holds on the card while it computes, by name."""
    C, D, H, w = min(chunk, case.seq_len), case.d_model, case.heads, recipe.working_bytes
    lse = C * H * FLOAT32_BYTES
    held = {
        "chunk's residual and attention": 2 * C * D * FLOAT32_BYTES + lse,
        "chunk's packed q, k, v": C * 3 * D * w,
        # its context, its log-sum-exp and what the merge makes of that
        "attention to one key chunk": C * D * w + 10 * lse,
        # of a whole row's, and the merged context before its GEMM
        "tile temporaries": min(TILE_TOKENS, C) * (_token_bytes(case, recipe) + D * gemm_bytes(recipe, "projections")),
    }
    if recipe.attention == "dense":
        # float32 q, k, v and context; scores, their softmax and exponentials; the causal mask
        held["dense scores"] = 4 * C * D * FLOAT32_BYTES + 3 * H * C * C * FLOAT32_BYTES + C * C
    return held
