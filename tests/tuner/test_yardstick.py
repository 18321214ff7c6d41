"""The yardstick computes the very case, whole and as it is; one that fails or computes something else is left out."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from frontier import bench as bench_module
from frontier import tuner
from frontier.bench import Bench
from frontier.case import Case
from frontier.judge.reference import reference, yardstick
from frontier.layers.weights import seeded_state
from frontier.machine import Machine
from frontier.recipe import REFERENCE, parse_recipe
from frontier.record import EvidenceFile
from frontier.tuned import BASELINE, YARDSTICK

CPU = Machine.detect("cpu")
CASE = Case(name="tiny", batch_size=2, seq_len=24, d_model=16, heads=2, ffn_dim=40, layers=2)
FAST = parse_recipe("packed/flash", REFERENCE)


@pytest.fixture(autouse=True)
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Nothing is compiled here; what the compiler was asked for."""
    asked: list[dict[str, Any]] = []

    def compile(layers: Callable[[Tensor], Tensor], **how: Any) -> Callable[[Tensor], Tensor]:
        asked.append(how)
        return layers

    monkeypatch.setattr(torch, "compile", compile)
    return asked


def outputs(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The yardstick's and the reference's, of norms that are not all ones and zeros."""
    generator = torch.Generator().manual_seed(5)
    state = seeded_state(case)
    state = {n: t + 0.1 * torch.randn(t.shape, generator=generator) if "norm" in n else t for n, t in state.items()}
    x_BSD = torch.randn(case.batch_size, case.seq_len, case.d_model, generator=generator)
    kept_BSD = x_BSD.clone()
    got_BSD = yardstick(state, case, torch.device("cpu"), dtype)(x_BSD)
    assert got_BSD.dtype == torch.float32 and torch.equal(x_BSD, kept_BSD), "the caller's rows stay"
    return got_BSD, reference(x_BSD, state, case)


SHAPES = [{}, {"batch_size": 1, "seq_len": 1}, {"seq_len": 37, "heads": 1}, {"heads": 16, "layers": 1}, {"layers": 5}]


@pytest.mark.parametrize(("shape", "causal"), list(itertools.product(SHAPES, (True, False))))
def test_in_float32_it_is_the_reference_and_in_half_precision_near_it(shape: dict[str, int], causal: bool) -> None:
    case = dataclasses.replace(CASE, causal=causal, **shape)
    torch.testing.assert_close(*outputs(case, torch.float32), atol=5e-6, rtol=1e-5)
    got_BSD, wanted_BSD = outputs(case, torch.float16)
    assert 0 < (got_BSD - wanted_BSD).abs().max() < 5e-3


def test_it_is_compiled_once_as_the_best_mode_has_it(compiles: list[dict[str, Any]]) -> None:
    outputs(CASE, torch.float16)
    assert compiles == [{"mode": "max-autotune", "fullgraph": True, "dynamic": False}]


def test_it_is_timed_beside_each_recipe_and_hands_out_what_it_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Tensor] = []

    def planted(*given: Any) -> Callable[[Tensor], Tensor]:
        layers = yardstick(*given)

        def call(x_BSD: Tensor) -> Tensor:
            assert len(x_BSD) == CASE.batch_size, "all rows in one call"
            made.append(layers(x_BSD))
            return made[-1]

        return call

    monkeypatch.setattr(bench_module, "yardstick", planted)
    with Bench(CASE, CPU, rounds=2) as bench:
        assert bench.keep_yardstick() is None
        assert set(bench.measure(FAST).beside) == {BASELINE, YARDSTICK}
        assert bench._kept[YARDSTICK]() is made[-1], "no copy of ours"


def off(by: float) -> Callable[..., Callable[[Tensor], Tensor]]:
    return lambda *given: lambda x_BSD: yardstick(*given)(x_BSD) + by


def raising(*given: Any) -> Callable[[Tensor], Tensor]:
    def call(x_BSD: Tensor) -> Tensor:
        raise RuntimeError("no such kernel\nmore")

    return call


@pytest.mark.parametrize(
    ("planted", "reason"),
    [
        (off(0.01), None),
        (off(0.5), "it computes something else, off by "),
        (off(float("nan")), "it computes something else, off by inf"),
        (raising, "RuntimeError: no such kernel"),
    ],
)
def test_one_that_fails_or_computes_something_else_is_left_out_and_it_says_why(
    monkeypatch: pytest.MonkeyPatch, planted: Any, reason: str | None
) -> None:
    monkeypatch.setattr(bench_module, "yardstick", planted)
    with Bench(CASE, CPU, rounds=2) as bench:
        said = bench.keep_yardstick()
        assert said is None if reason is None else said is not None and said.startswith(reason)
        beside = set(bench.measure(FAST).beside)
    assert beside == ({BASELINE} if reason else {BASELINE, YARDSTICK})


def test_one_of_another_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        bench_module,
        "yardstick",
        lambda state, case, *rest: yardstick(state, dataclasses.replace(case, causal=False), *rest),
    )
    with Bench(CASE, CPU, rounds=2) as bench:
        assert "something else" in str(bench.keep_yardstick())


def test_one_that_leaves_the_others_no_room_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "yardstick", lambda *given: pytest.fail("it was built"))
    needed = bench_module._baseline_bytes(CASE, torch.device("cpu"))
    with Bench(CASE, dataclasses.replace(CPU, device_budget_bytes=needed + 1000), rounds=2) as bench:
        assert bench.keep_yardstick() == "others would not fit beside its 25.50 KiB"


@pytest.mark.parametrize("planted", [yardstick, raising])
@pytest.mark.parametrize(("has_card", "wanted"), [(True, True), (True, False), (False, True)])
def test_the_tuner_asks_for_it_on_a_card_and_each_record_says_why_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: Any, tmp_path: Path, has_card: bool, wanted: bool, planted: Any
) -> None:
    monkeypatch.setattr(bench_module, "yardstick", lambda state, case, *rest: made_by(case)(state, case, *rest))
    monkeypatch.setattr(tuner, "Bench", lambda case, machine, *rest: Bench(case, CPU, *rest))
    monkeypatch.setattr(tuner, "timing_window", lambda machine: contextlib.nullcontext())
    monkeypatch.setattr(tuner, "_walls", lambda machine: {"copy_gbps": 1.0})
    after = CASE.override(batch_size=3)

    def made_by(case: Case) -> Any:
        return yardstick if case == after else planted

    def judge(*asked: Any, **how: Any) -> Any:
        return SimpleNamespace(passes=True, promotable=True, as_dict=dict)

    machine = dataclasses.replace(CPU, device="cuda:0" if has_card else "cpu")
    choices = tuner.Choices(recipes=(REFERENCE, FAST), rounds=1, finalists=1, yardstick=wanted)
    evidence = EvidenceFile(tmp_path / "evidence" / "mine.jsonl")
    records = list(tuner.tune([CASE, after], machine, evidence, judge, choices))
    tried, reason = has_card and wanted, "RuntimeError: no such kernel" if planted is raising else None
    assert {(r.case["name"], YARDSTICK in r.beside_ms, r.notes.get("no_yardstick")) for r in records} == {
        ("tiny", tried and not reason, reason if tried else None), (after.name, tried, None),
    }  # fmt: skip
    assert {r.notes["copy_gbps"] for r in records} == {1.0}
    said = [message for message in caplog.messages if "yardstick" in message]
    assert said == ([f"case tiny is timed without the yardstick: {reason}"] if tried and reason else [])
