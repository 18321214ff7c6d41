"""The table of cuts: whatever the shape, no tile takes more than there is, since the kernel masks no columns."""

import itertools

import pytest
from stacks import small

from frontier.layers.stack_cut import cut_of, turns_of
from frontier.recipe import REFERENCE, parse_recipe

WORDS = ("fp16/stack", "fp16/stack/held-small", "fp16/stack/held-output-small", "fp16/stack/held-ffn-small",
         "fp16/stack/held-all", "bf16/stack", "tf32/stack", "tf32x3/stack")  # fmt: skip
SIZES = list(itertools.product((1, 140, 10_000), (1, 32, 128, 200, 1024), (16, 32, 128), (16, 32, 512), (8, 16, 128)))


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("words", WORDS)
def test_no_cut_takes_more_columns_than_there_are(words: str, capability: tuple[int, int]) -> None:
    recipe = parse_recipe(words, REFERENCE)
    for B, S, D, F, K in SIZES:
        if K > D:
            continue
        case = small(batch_size=B, seq_len=S, d_model=D, ffn_dim=F, heads=D // K)
        for turn in turns_of(recipe):
            cut = cut_of(case, recipe, B, S, capability, turn)
            assert F % cut.columns == 0 and cut.M % 16 == 0 and cut.N % 16 == 0, (case, turn, cut)
            assert D % min(cut.projection or D, D) == 0, (case, turn, cut)
