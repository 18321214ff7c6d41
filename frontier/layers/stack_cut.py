"""Which cases one kernel can hold the whole stack of, and how it cuts them.

Takes    a case, a recipe, a machine or its compute capability, sizes.
Gives    refusals as text; a `Cut`, and the kernel's compile-time arguments.
Knows nothing of weights, tensors or launches.

Letters  B rows, S positions, D width, F feed-forward width, K head width, M positions of a tile, N keys at a time.
"""

from typing import Any, Literal, NamedTuple

from frontier.case import Case
from frontier.layers.costs import NORM_EPS, SMALL
from frontier.layers.refusals import needs_capability, needs_triton
from frontier.machine import Machine
from frontier.recipe import Recipe

# A tile's residual, 64 x 128 in float32, takes half of four warps' registers; a wider one would not fit beside
# its accumulators.
WIDEST, WIDEST_FFN = 128, 512


class Cut(NamedTuple):
    """How one launch divides a case: positions of a tile, keys and columns at a time, warps, pipeline stages.

    projection   columns of q, k and v at a time, if not all
    registers    a thread may take, if not as many as the compiler wishes
    """

    attend: Literal["heads", "single", "loop"]
    M: int
    N: int
    columns: int
    warps: int
    stages: int
    projection: int | None = None
    registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """What Triton is told beside the kernel's arguments."""
        told = {"num_warps": self.warps, "num_stages": self.stages}
        return told if self.registers is None else told | {"maxnreg": self.registers}


def refuses(case: Case, recipe: Recipe, machine: Machine) -> str | None:
    """Why one kernel cannot hold this case's stack, or None."""
    if reason := needs_triton(case, recipe, machine):
        return reason
    D, S = case.d_model, case.seq_len
    if recipe.precision == "fp32":
        return "one kernel multiplies on tensor cores: fp16, bf16, tf32 or tf32x3"
    if recipe.precision != "fp16" and (reason := needs_capability(machine, (8, 0))):
        return f"{recipe.precision}: {reason}"
    if recipe.held == "held-projections":
        return "held-projections: one kernel holds the feed-forward GEMMs (held-ffn), all (held-all) or none"
    if recipe.held != "held-none" and recipe.precision != "fp16":
        return f"{recipe.held} holds GEMMs beside fp16, the precision is {recipe.precision}"
    if (recipe.held == "held-all" or recipe.redoes_small) and (reason := needs_capability(machine, (8, 0))):
        return f"{recipe.held} multiplies in TF32: {reason}"
    if recipe.fusion == "stack-at-once" and not recipe.redoes_small:
        return f"{recipe.held} does no rows again, neither at once nor later"
    if reason := size_refusal(case, "one kernel"):
        return reason
    if machine.capability is not None and machine.capability < (8, 0) and D > 64:
        return f"d_model {D}, one kernel holds 64 in the 64 KiB of shared memory of compute capability 7.5"
    if case.head_width < 8:
        return f"head width {case.head_width}, one kernel needs 8"
    if not case.causal and S > 128:
        return f"{S} positions without a causal mask, one kernel then holds 128"
    if S > 4_096:
        return f"{S:,} positions: past 4,096 attention is all that counts and a fused kernel does it better"
    return None


def size_refusal(case: Case, kernel: str) -> str | None:
    """Why a kernel that keeps a tile's whole width in registers cannot hold the case's widths, or None."""
    for name, size, most in (("d_model", case.d_model, WIDEST), ("ffn_dim", case.ffn_dim, WIDEST_FFN)):
        if size & (size - 1) or not 16 <= size <= most:
            return f"{name} {size}, {kernel} holds powers of two from 16 to {most}"
    return None


Turn = Literal["only", "first", "second"]


def turns_of(recipe: Recipe) -> tuple[Turn, ...]:
    """Launches of one call: one, or also a second for the rows in which the first found small tokens."""
    return ("first", "second") if recipe.redoes_small else ("only",)


def splits(recipe: Recipe, turn: Turn) -> bool:
    """Whether this launch's feed-forward multiplies both halves of each factor."""
    return recipe.held_at_once == "held-ffn" and turn != "second"


def splits_output_weights(recipe: Recipe, turn: Turn) -> bool:
    """Whether this launch multiplies a row's first tokens by both halves of the output projection's weights."""
    return recipe.held_at_once == "held-output" and turn != "second"


def splits_values(recipe: Recipe, turn: Turn) -> bool:
    """Whether attention weighs both halves of v: most of what fp16 spends on a case once its GEMMs are held."""
    gemms, attention = in_three(recipe, turn)
    return gemms and not attention


def in_three(recipe: Recipe, turn: Turn) -> tuple[bool, bool]:
    """Whether this launch multiplies in tf32x3: (its GEMMs, its attention)."""
    whole = recipe.precision == "tf32x3" or turn == "second"
    return whole or recipe.held == "held-all", whole


def cut_of(
    case: Case, recipe: Recipe, batch_size: int, seq_len: int, capability: tuple[int, int], turn: Turn = "only"
) -> Cut:
    """The cut for some rows; the numbers are medians on an H200 (evidence: scripts/probe_cuts.py)."""
    D, F, K = case.d_model, case.ffn_dim, case.head_width
    keys = max(16, 1 << (seq_len - 1).bit_length())
    columns = min(F, 32 if splits(recipe, turn) else 64)
    if not case.causal:  # a tile must be the whole row: later tiles may not be waited for
        return Cut("loop", keys, min(keys, 64), columns, 8 if keys == 128 else 4, 1)
    # Weights of 128 x 128 in float32 take 64 KiB of shared memory: one stage, and narrow tiles where that is scarce.
    gemms_in_three, _ = in_three(recipe, turn)
    wide = D > 64 and (gemms_in_three or not recipe.is_half)
    if capability != (9, 0):
        rows = min(32 if wide else 64, keys)
        return Cut("loop", rows, rows, min(columns, rows), 4, 1)
    if wide:
        return Cut("loop", min(64, keys), min(64, keys), min(F, 32), 4, 1, 32)
    half = recipe.is_half and not gemms_in_three
    sixteens = batch_size * -(-seq_len // 16)
    if (
        half
        and not splits_output_weights(recipe, turn)
        and keys <= 128
        and sixteens <= 132
        and D == F == 128
        and K >= 16
    ):
        # Few rows: tiles of 16 positions use every multiprocessor. Case 2: 0.042 ms, tiles of 64 take 0.098.
        return Cut("heads", 16, keys, columns, 8, 1)
    rows = min(64, keys)
    tiles = batch_size * -(-seq_len // rows)
    if keys <= 128 and K < 128 and tiles <= 264:
        # 0.057 ms on case 1, 0.068 with two stages; two leave room for two tiles a multiprocessor (case 5).
        # All columns of q, k or v at once take 0.059 ms on case 1, 64 0.062; on case 11 0.103 and 0.098.
        return Cut("single", rows, keys, columns, 4, 2 if tiles > 132 and half else 3, 64 if K < 16 else None)
    if not half or K == 128:
        return Cut("loop", rows, rows, columns, 4, 2 if K == 128 else 3)
    if splits(recipe, turn):
        return Cut("loop", rows, rows, columns, 4, 3, 64)
    # 168 registers leave room for three tiles a multiprocessor: 6.2 ms on case 6 for 6.5, 0.69 on case 13 for 0.73.
    # With the output projection's other halves 64 columns in two stages take 7.4 ms on case 6, 32 in three 6.6.
    if seq_len > 128 or splits_output_weights(recipe, turn):
        return Cut("loop", rows, rows, min(F, 32), 4, 3, 64, 168)
    return Cut("loop", rows, rows, columns, 4, 2, 64, 168)


def constants_of(
    case: Case,
    recipe: Recipe,
    cut: Cut,
    seq_len: int,
    turn: Turn = "only",
    *,
    masked: bool,
    on_card: bool,
    first_tiles: int | None = None,
) -> dict[str, Any]:
    """`stack_kernel`'s compile-time arguments, in its order; `first_tiles` are those of the launch before a second."""
    K, tiles = case.head_width, -(-seq_len // cut.M)
    first_tiles = first_tiles or tiles
    three = any(in_three(recipe, turn))
    return {
        "L": case.layers,
        "D": case.d_model,
        "F": case.ffn_dim,
        "H": case.heads,
        "K": K,
        "P": max(16, K),
        "GROUP": 16 // K if cut.attend == "single" and K < 16 else 1,
        "M": cut.M,
        "N": cut.N,
        "FC": cut.columns,
        "TILES": tiles,
        "TILES_UP": 1 << (tiles - 1).bit_length(),
        "ATTEND": cut.attend,
        "CAUSAL": case.causal,
        "MASKED": masked,
        "SPLIT": splits(recipe, turn),
        "SPLIT_V": splits_values(recipe, turn),
        "DOT": "tf32x3" if three else "tf32",  # of float32 operands; half precision has one way only
        "STAGES": cut.stages,
        "EPS": NORM_EPS,
        "SMALL": SMALL,
        "TURN": turn,
        "FIRST_TILES": first_tiles,
        "FIRST_TILES_UP": 1 << (first_tiles - 1).bit_length(),
        "FAST": on_card,
        "SPLIT_OUT": splits_output_weights(recipe, turn),
        "PC": min(cut.projection or case.d_model, case.d_model),
    }


def second_at_once(cut: Cut, first: Cut) -> Cut:
    """The second turn's cut where it shares its launch with the first: as many warps, and key by key."""
    return cut._replace(attend="loop", N=min(cut.N, 64), warps=first.warps)


def at_once(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """`stack_at_once_kernel`'s compile-time arguments, in its order, from those of its turns."""
    own = ("M", "N", "FC", "TILES", "TILES_UP", "STAGES", "PC")
    told = {name: value for name, value in first.items() if name not in ("TURN", "FIRST_TILES", "FIRST_TILES_UP")}
    return told | {f"AGAIN_{name}": second[name] for name in own}
