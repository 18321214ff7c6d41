"""The recipes that a tuner tries for calls on rows that already lie on a device.

Takes    a case, and whether there is a card.
Gives    recipes, the obvious first; those that lose stay, since a loss is worth knowing.
Knows nothing of who refuses what: a recipe that cannot serve says so itself.
"""

from frontier.case import Case
from frontier.recipe import REFERENCE, Recipe, parse_recipe

# Sensible combinations, not the full product: each differs from one above it in one idea.
_ON_A_CARD = (
    # exact arithmetic, and what TF32 alone brings
    "tf32/separate/dense",
    "fp32/packed/efficient",
    "tf32/packed/efficient/graph",
    # half precision by PyTorch's own kernels, eager: what a single pass can afford
    "fp16/packed/flash",
    "fp16/packed/cudnn",
    # one launch for all of them
    "fp16/packed/efficient/graph",
    "fp16/packed/flash/graph",
    "fp16/packed/cudnn/graph",
    "fp16/packed/scores/graph",
    "fp16/packed/short/graph",
    # join and feed-forward in fewer kernels
    "fp16/packed/flash/triton-join/graph",
    "fp16/packed/cudnn/triton-join/graph",
    "fp16/packed/short/triton-join/graph",
    "fp16/packed/short/triton-join/triton-ffn/graph",
    # two kernels a layer: attention, and all between two attentions
    "fp16/packed/cudnn/graph/tail",
    "fp16/packed/flash/graph/tail",
    "fp16/packed/cudnn/held-small/graph/tail",
    "fp16/packed/cudnn/held-ffn-small/graph/tail",
    # single GEMMs kept higher, where the gate says so
    "fp16/packed/short/triton-join/held-ffn/graph",
    "fp16/packed/short/triton-join/held-all/graph",
    # or only for rows whose residual ends small
    "fp16/packed/cudnn/triton-join/held-small",
    "fp16/packed/cudnn/triton-join/held-small/graph",
    "fp16/packed/short/triton-join/held-small/graph",
    # bf16 has the range of float32 and an eighth of fp16's precision
    "bf16/packed/short/triton-join/graph",
    # a compiler's fusion
    "fp16/packed/flash/compile",
    "fp16/packed/flash/compile-reduce-overhead",
    "fp16/packed/flash/compile-max-autotune",
    "fp16/packed/cudnn/compile-max-autotune",
    # the whole stack as one kernel
    "bf16/stack",
    "tf32x3/stack",
    "fp16/stack",
    "fp16/stack/held-all",
    "fp16/stack/held-small",
    "fp16/stack/held-ffn-small",
    "fp16/stack/held-output-small",
    "fp16/stack-at-once/held-small",
    "fp16/stack-at-once/held-ffn-small",
    "fp16/stack-at-once/held-output-small",
)
_ON_A_CPU = ("fp32/packed/dense", "fp32/separate/flash", "fp32/packed/flash", "fp32/packed/flash/compile")


def candidates(case: Case, has_card: bool) -> tuple[Recipe, ...]:
    """Recipes to try for a case, each once, from the plain to the bold."""
    texts: tuple[str, ...] = _ON_A_CARD if has_card else _ON_A_CPU
    if case.seq_len > 8_192:  # scores of one head alone would fill a card
        texts = tuple(text for text in texts if "/scores" not in text)
    return tuple(dict.fromkeys((REFERENCE, *(parse_recipe(text, REFERENCE) for text in texts))))
