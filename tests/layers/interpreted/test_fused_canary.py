"""A fused stack on a card that has no evidence of its own: its canary lets right numbers through and no others."""

from collections.abc import Callable

import pytest
import torch
from stacks import small

from frontier.layers.canary import fused_canary
from frontier.layers.stack import StackProgram
from frontier.machine import Machine
from frontier.recipe import REFERENCE, parse_recipe

CASE = small(batch_size=3, seq_len=40, d_model=32, heads=2, ffn_dim=32, layers=2)
Break = Callable[[torch.Tensor], object]


def told(words: str = "fp16/stack/held-small") -> str | None:
    return fused_canary(CASE, parse_recipe(words, REFERENCE), Machine.detect("cpu"))


@pytest.mark.parametrize("words", ["fp16/stack/held-small", "fp16/stack-at-once/held-small", "fp16/packed/short/tail"])
def test_right_stacks_are_let_through(words: str) -> None:
    assert told(words) is None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda out_BSD: out_BSD.fill_(42.0),
        lambda out_BSD: out_BSD[1, 7].mul_(1.05),
        lambda out_BSD: out_BSD[2, 39, 31].fill_(torch.nan),
    ],
    ids=["everywhere", "a token", "a NaN"],
)
def test_wrong_stacks_are_refused_with_a_count(monkeypatch: pytest.MonkeyPatch, spoil: Break) -> None:
    right = StackProgram.__call__

    def wrong(self: StackProgram, x_BSD: torch.Tensor, out_BSD: torch.Tensor, *mask: torch.Tensor) -> None:
        right(self, x_BSD, out_BSD, *mask)
        spoil(out_BSD)

    monkeypatch.setattr(StackProgram, "__call__", wrong)
    reason = told()
    assert reason is not None and "elements fail the rule against float32" in reason


def test_a_stack_that_fails_is_refused_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("out of resources: shared memory\nand more")

    monkeypatch.setattr(StackProgram, "__call__", broken)
    assert told() == "it failed: out of resources: shared memory"


def test_stacks_by_part_are_no_concern_of_it() -> None:
    assert told("fp16/packed/flash") is None
