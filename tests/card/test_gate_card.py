"""What only a card can show of the gate: work that comes late on another stream, TF32's own noise."""

from typing import Any

import pytest
import torch
from torch import Tensor

from frontier.case import Case
from frontier.gating import gate
from frontier.layers.program import Program, make_program
from frontier.layers.weights import State
from frontier.machine import Machine
from frontier.recipe import REFERENCE, Recipe, parse_recipe

pytestmark = [pytest.mark.card, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")]
FP16 = parse_recipe("fp16/packed/flash", REFERENCE)
SPIN_CYCLES = 400_000_000  # about 0.2 s: on a card that others share the judge's own reads wait for a while
QUICK: dict[str, Any] = {"trials": 3, "seeds": 1, "input_scales": (1.0,), "padding": (0.0,), "adversarial": False}


@pytest.fixture
def machine() -> Machine:
    return Machine.detect("cuda")


def on_another_stream(*, joined: bool, spin: bool) -> Any:
    """Programs that fork a stream, compute there (10 ms late, if `spin`), and do or do not wait for it."""

    def make(state: State, case: Case, device: torch.device) -> Program:
        true, side = make_program(state, case, FP16, device), torch.cuda.Stream(device)

        def program(x_BSD: Tensor, out_BSD: Tensor, valid_BS: Tensor | None = None) -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                if spin:
                    torch.cuda._sleep(SPIN_CYCLES)
                true(x_BSD, out_BSD, valid_BS)
            if joined:
                torch.cuda.current_stream().wait_stream(side)

        return program

    return make


def on_the_default_stream(state: State, case: Case, device: torch.device) -> Program:
    true = make_program(state, case, FP16, device)

    def program(x_BSD: Tensor, out_BSD: Tensor, valid_BS: Tensor | None = None) -> None:
        with torch.cuda.stream(torch.cuda.default_stream(device)):
            torch.cuda._sleep(SPIN_CYCLES)
            true(x_BSD, out_BSD, valid_BS)

    return program


def test_work_on_another_stream_that_is_waited_for_passes(machine: Machine) -> None:
    assert gate(Case.load("3"), machine, on_another_stream(joined=True, spin=True), **QUICK).passes


def test_work_on_another_stream_that_is_not_waited_for_is_caught(machine: Machine) -> None:
    report = gate(Case.load("3"), machine, on_another_stream(joined=False, spin=True), **QUICK)
    assert all(trial.exact.nonfinite == trial.exact.elements for trial in report.trials), "the poison is what was read"
    assert not report.passes


def test_work_on_the_default_stream_is_caught(machine: Machine) -> None:
    assert not gate(Case.load("3"), machine, on_the_default_stream, **QUICK).passes


@pytest.mark.parametrize("name", ["2", "7", "8", "13"])
def test_half_precision_passes_usual_inputs_and_tf32_spends_part_of_the_budget(machine: Machine, name: str) -> None:
    report = gate(Case.load(name), machine, FP16, **QUICK)
    [group] = report.groups
    assert report.passes and report.has_tf32
    assert 0.05 < max(group.budgets("noise")) < 1, "TF32 was on for the script's reference"
    assert max(group.budgets("exact")) != max(group.budgets("script"))


def test_exact_float32_spends_nothing(machine: Machine) -> None:
    report = gate(Case.load("4"), machine, parse_recipe("fp32/packed/efficient", REFERENCE), **QUICK)
    assert max(report.groups[0].budgets("exact")) < 0.05


def test_a_recipe_in_tf32_is_not_taken_for_exact(machine: Machine) -> None:
    report = gate(Case.load("4"), machine, Recipe(precision="tf32"), **QUICK)
    [group] = report.groups
    assert min(group.budgets("exact")) > 2 * max(group.budgets("script"))
