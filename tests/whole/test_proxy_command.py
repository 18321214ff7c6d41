"""`frontier proxy`: the streaming path judged on every element, and the judge shown a fault."""

import json
from typing import Any

import pytest
import torch
from commandline import assert_refused, flags, frontier
from torch import Tensor

from frontier.layers import attention, block

TINY = ("proxy", "--device", "cpu", *flags(), "--quiet")


def test_three_seeds_of_a_true_layer_pass() -> None:
    done = frontier(*TINY, "--seeds", "3")
    assert done.exit_code == 0 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["seed 1234", "seed 1235", "seed 1236"]
    assert all("pass, 0 of 48,000 elements fail" in line for line in lines)


def test_as_json_each_seed_is_a_record_with_its_verdict() -> None:
    done = frontier(*TINY, "--seeds", "2", "--seed", "5", "--no-causal", "--json")
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["case"]["seed"] for record in records] == [5, 6]
    for record in records:
        assert record["kind"] == "proxy" and record["verdicts"]["proxy"]["verdict"] == "pass"
        assert record["verdicts"]["proxy"]["elements"] == 5 * 150 * 64


def test_a_wrong_softmax_scale_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def sharp(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, causal: bool) -> Tensor:
        return attention.ATTENTION["flash"].attend(q_BSHK * 2.0, k_BSHK, v_BSHK, causal)

    # In the layer alone, so that the canary does not see it.
    kernels = attention.ATTENTION | {"flash": attention.ATTENTION["flash"]._replace(attend=sharp)}
    monkeypatch.setattr(block, "ATTENTION", kernels)
    done = frontier(*TINY, "--seeds", "2")
    assert done.exit_code == 1
    assert done.stdout.count("FAIL") == 2


def test_one_wrong_element_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    true_layers = block.run_layers

    def spoilt(x_BSD: Tensor, *rest: Any) -> None:
        true_layers(x_BSD, *rest)
        if len(x_BSD) == 2:  # the stream's slices; the reference goes row by row
            x_BSD[1, 149, 63] += 0.05

    monkeypatch.setattr(block, "run_layers", spoilt)
    done = frontier(*TINY, "--seeds", "1")
    assert done.exit_code == 1
    assert "2 of 48,000 elements fail" in done.stdout and "position 149, channel 63" in done.stdout


def test_a_kernel_with_wrong_numbers_is_refused_by_its_canary(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, causal: bool) -> Tensor:
        return torch.roll(attention.dense(q_BSHK, k_BSHK, v_BSHK, causal), 1, dims=1)

    monkeypatch.setitem(attention.ATTENTION, "flash", attention.ATTENTION["flash"]._replace(attend=shifted))
    done = frontier(*TINY, "--recipe", "flash")
    assert_refused(done, 3, "wrong numbers at S = 150", "relative error")
    done = frontier(*TINY, "--seeds", "1")
    assert done.exit_code == 0 and "dense" in done.stdout


def test_a_reference_that_does_not_fit_is_refused_with_the_sum() -> None:
    done = frontier("proxy", "--device", "cpu", "--case", "14", "--seq-len", "50000", "--quiet")
    assert_refused(done, 3, "dense scores")
