"""A fused stack on a card that has no evidence of its own: its canary lets right numbers through and no others."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from stacks import small

from frontier.fused_canary import fused_canary, rows_tried
from frontier.layers.stack import StackProgram
from frontier.machine import CONTEXT_BYTES, Machine
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


@pytest.mark.parametrize("words", ["fp16/stack/held-small", "fp16/stack-at-once/held-small"])
def test_a_second_turn_that_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    right = StackProgram.__init__

    def wrong(self: StackProgram, *given: object) -> None:
        right(self, *given)  # type: ignore[arg-type]
        self.packed["second"][0].mul_(1.05)

    monkeypatch.setattr(StackProgram, "__init__", wrong)
    reason = told(words)
    assert reason is not None and reason.startswith("wrong numbers: ")


def test_a_mask_that_is_not_heeded_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = StackProgram.__call__
    monkeypatch.setattr(
        StackProgram, "__call__", lambda self, x_BSD, out_BSD, valid_BS=None: right(self, x_BSD, out_BSD)
    )
    reason = told()
    assert reason is not None and reason.startswith("wrong numbers under a mask: ")


def test_fewer_rows_are_tried_where_the_cases_would_not_fit() -> None:
    recipe, machine = parse_recipe("fp16/stack/held-small", REFERENCE), Machine.detect("cpu")
    assert rows_tried(CASE, recipe, machine) == 3
    tight = dataclasses.replace(machine, device_budget_bytes=CONTEXT_BYTES + 1)
    assert rows_tried(CASE, recipe, tight) == 1


def test_a_stack_that_fails_is_refused_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("out of resources: shared memory\nand more")

    monkeypatch.setattr(StackProgram, "__call__", broken)
    assert told() == "it failed: out of resources: shared memory"


def test_stacks_by_part_are_no_concern_of_it() -> None:
    assert told("fp16/packed/flash") is None
