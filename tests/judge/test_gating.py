"""The gate's trials are the promised ones, its references are sound, and it ends early or refuses as it says."""

import dataclasses
import json
from typing import Any

import pytest
import torch
from cheats import CHEATS, CPU, case_of, honest
from torch import Tensor

from frontier import gating
from frontier.case import Case
from frontier.errors import DoesNotFit, Unsupported
from frontier.gating import gate
from frontier.judge import reference as reference_module
from frontier.judge.reference import reference, slice_rows
from frontier.judge.stress import FAMILIES, MASKS
from frontier.layers.program import make_program
from frontier.layers.weights import seeded_state
from frontier.machine import Machine
from frontier.recipe import REFERENCE, parse_recipe


def recorder(calls: list[tuple[Tensor, Tensor | None]]) -> Any:
    def make(state: Any, case: Case, device: Any) -> Any:
        true = honest(state, case, device)

        def program(x_BSD: Tensor, out_BSD: Tensor, valid_BS: Tensor | None = None) -> None:
            assert bool(out_BSD.isnan().all()) or not calls, "the output is poisoned"
            calls.append((x_BSD.clone(), None if valid_BS is None else valid_BS.clone()))
            true(x_BSD, out_BSD, valid_BS)

        return program

    return make


def test_the_first_five_trials_are_the_benchmark_scripts_own() -> None:
    calls: list[tuple[Tensor, Tensor | None]] = []
    case = case_of()
    gate(case, CPU, recorder(calls), trials=5, seeds=1, input_scales=(1,), padding=(0, 0.3), adversarial=False)
    plain, padded = calls[1:6], calls[6:]
    for number in range(5):
        generator = torch.Generator().manual_seed(case.seed + number)
        x_BSD = torch.randn(3, 20, 16, generator=generator)
        lengths_B = torch.randint(14, 21, (3,), generator=generator)
        valid_BS = torch.arange(20)[None, :] < lengths_B[:, None]
        assert torch.equal(plain[number][0], x_BSD)
        assert torch.equal(padded[number][0], x_BSD.masked_fill(~valid_BS[..., None], 0))
        assert torch.equal(padded[number][1], valid_BS)
    masks = [mask for _, mask in plain]
    assert masks[0] is None and masks[1] is not None and bool(masks[1].all()), "None and all true, in turn"


def test_each_seed_has_its_own_weights_and_inputs() -> None:
    states, case = [], case_of()

    def make(state: Any, case: Case, device: Any) -> Any:
        states.append(state)
        return honest(state, case, device)

    report = gate(case, CPU, make, trials=2, seeds=2, input_scales=(0.5, 2), padding=(0,), adversarial=False)
    assert [(t.seed, t.number) for t in report.groups[0].trials] == [(1234, 0), (1234, 1), (1235, 2), (1235, 3)]
    assert len(states) == 2, "a program a seed, whatever the scales"
    for seed, state in zip((1234, 1235), states, strict=True):
        wanted = seeded_state(dataclasses.replace(case, seed=seed))
        assert all(torch.equal(state[name], wanted[name]) for name in wanted)


def test_adversarial_trials_are_one_for_each_family_and_mask() -> None:
    report = gate(case_of(), CPU, honest, trials=1, seeds=1, input_scales=(1,), padding=(0,))
    assert [group.name for group in report.groups[1:]] == [*FAMILIES, *MASKS]
    assert all(group.passes for group in report.groups)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mask", [None, *MASKS])
def test_the_reference_agrees_with_the_layers_that_share_no_line_with_it(causal: bool, mask: str | None) -> None:
    case = case_of(causal=causal)
    x_BSD = torch.randn(3, 20, 16, generator=torch.Generator().manual_seed(3))
    valid_BS = None if mask is None else MASKS[mask](torch.rand(3, 20, generator=torch.Generator().manual_seed(4)))
    state = seeded_state(case)
    out_BSD = torch.empty_like(x_BSD)
    make_program(state, case, REFERENCE, torch.device("cpu"))(x_BSD, out_BSD, valid_BS)
    got_BSD = reference(x_BSD, state, case, valid_BS)
    assert float((got_BSD - out_BSD).abs().max()) < 1e-5
    doubled = {name: tensor.double() for name, tensor in state.items()}
    assert reference(x_BSD, doubled, case, valid_BS).dtype == torch.float64
    assert float((reference(x_BSD, doubled, case, valid_BS) - out_BSD).abs().max()) < 1e-5
    other = reference(x_BSD, state, dataclasses.replace(case, causal=not causal), valid_BS)
    assert mask in ("one valid token", "none valid") or float((other - out_BSD).abs().max()) > 1e-2


def test_the_reference_is_the_same_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(batch_size=7)
    x_BSD, state = torch.randn(7, 20, 16), seeded_state(case)
    valid_BS = torch.rand(7, 20) > 0.3
    whole_BSD = reference(x_BSD, state, case, valid_BS)
    monkeypatch.setitem(reference_module.MOST_SCORES_BYTES, "cpu", 2 * 2 * 2 * 20 * 20 * 4)
    assert slice_rows(case, torch.device("cpu")) == 2
    assert float((reference(x_BSD, state, case, valid_BS) - whole_BSD).abs().max()) < 1e-6


def test_an_ill_conditioned_family_is_judged_by_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of tiny variance at d_model 1,024: exact float32 itself is far from the truth, by rounding alone."""
    case = case_of(batch_size=1, seq_len=32, d_model=1024, heads=4, ffn_dim=64, layers=4)
    report = gate(case, CPU, honest, trials=1, seeds=1, input_scales=(1,), padding=(0,))
    by = {group.name: group.trials[0].judged_by for group in report.groups}
    assert by["tiny variance"] == "float64" and by["ties"] == "float32"
    monkeypatch.setattr(gating, "FAMILIES", {"wild": lambda x_BSD: x_BSD.fill_(torch.inf)})
    report = gate(case_of(), CPU, honest, trials=1, seeds=1, input_scales=(1,), padding=(0,))
    assert report.groups[1].trials[0].judged_by == "float64" and not report.passes, "no excuse for what is not finite"


def test_a_noisy_script_reference_is_told_apart_from_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """TF32 by a stand-in: while its switch is on, the reference is off by 0.9 of the budget."""
    true = gating.reference

    def noisy(x_BSD: Tensor, state: Any, case: Case, valid_BS: Tensor | None = None) -> Tensor:
        return true(x_BSD, state, case, valid_BS) + 0.0018 * torch.backends.cuda.matmul.allow_tf32

    monkeypatch.setattr(gating, "reference", noisy)
    monkeypatch.setattr(gating, "has_tf32", lambda machine: True)
    report = gate(case_of(), CPU, honest, trials=3, seeds=1, input_scales=(1,), padding=(0,))
    group = report.groups[0]
    assert report.has_tf32 and report.passes
    assert max(group.budgets("exact")) < 1e-3
    assert min(group.budgets("script")) == pytest.approx(0.9, abs=1e-2) == min(group.budgets("noise"))
    assert not torch.backends.cuda.matmul.allow_tf32, "the switch is put back"
    assert report.groups[1].trials[0].script is None, "adversarial inputs are judged by the truth"


def test_it_ends_at_the_first_group_that_fails_if_asked() -> None:
    heard: list[str] = []
    report = gate(
        case_of(), CPU, CHEATS["zeros"], trials=1, seeds=1, until_failure=True, watch=lambda g: heard.append(g.name)
    )
    assert heard == ["scale 0.001, padding 0"] == [group.name for group in report.groups]
    assert not report.passes and not report.promotable


def test_a_report_is_plain_values() -> None:
    options: dict[str, Any] = {"trials": 9, "seeds": 1, "input_scales": (1,), "padding": (0,), "adversarial": False}
    report = gate(case_of(), CPU, parse_recipe("fp16", REFERENCE), **options)
    told = json.loads(json.dumps(report.as_dict()))
    assert told["verdict"] == "pass" and told["recipe"] == "fp16/separate/dense" and told["promotable"] is False
    group = told["groups"][0]
    assert len(group["exact"]["budgets"]) == 9 and group["exact"]["odds"]["trials"] == 9
    assert told["budget"] == pytest.approx(max(group["exact"]["budgets"]), abs=1e-4) and 0.05 < told["budget"] < 1
    assert set(told["worst"]) > {"row", "position", "channel", "got", "wanted", "trial"}


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_report_on_what_is_not_finite_is_strict_json(value: str) -> None:
    def broken(state: Any, case: Case, device: Any) -> Any:
        return lambda x_BSD, out_BSD, valid_BS=None: out_BSD.fill_(float(value))

    report = gate(case_of(), CPU, broken, trials=9, seeds=1, input_scales=(1,), padding=(0,))
    told = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert told["verdict"] == "fail" and told["budget"] == "inf" == told["groups"][0]["exact"]["budgets"][0]
    assert told["worst"]["got"] == value and told["worst"]["budget"] == "inf"


def test_masked_trials_take_few_rows_unless_masks_may_lie_on_the_device() -> None:
    case, seen = case_of(batch_size=300, seq_len=4, layers=1), []

    def on_device(state: Any, case: Case, device: Any) -> Any:
        class Program:
            takes_device_masks = True
            true = staticmethod(honest(state, case, device))

            def __call__(self, x_BSD: Tensor, out_BSD: Tensor, valid_BS: Tensor | None = None) -> None:
                seen.append(len(x_BSD))
                self.true(x_BSD, out_BSD, valid_BS)

        return Program()

    options: dict[str, Any] = {"trials": 1, "seeds": 1, "input_scales": (1,), "padding": (0.3,), "adversarial": False}
    assert gate(case, CPU, honest, **options).masked_rows == 128
    assert gate(case, CPU, on_device, **options).masked_rows == 300
    assert seen == [300, 300]


def test_what_cannot_serve_or_does_not_fit_is_refused_before_anything_is_made() -> None:
    with pytest.raises(Unsupported, match=r"recipe fp16/packed/cudnn cannot serve case tiny .* needs a card"):
        gate(case_of(), CPU, parse_recipe("fp16/packed/cudnn", REFERENCE))
    small = Machine.detect("cpu", device_budget_bytes=1 << 30, host_budget_bytes=1 << 30)
    with pytest.raises(DoesNotFit, match=r"judging case 14 needs .* dense scores; the budget is 1.00 GiB") as refused:
        gate(Case.load("14"), small, REFERENCE)
    assert "frontier proxy" in str(refused.value.hint)
