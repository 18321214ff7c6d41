"""Recipes on a device: what fails is told apart, each compiles in caches of its own, what cannot fit is not tried."""

import collections
import dataclasses
import os
from typing import Any

import pytest
import torch

from frontier import bench as bench_module
from frontier.bench import Bench, NoTimes
from frontier.candidates import candidates
from frontier.case import Case
from frontier.errors import DoesNotFit
from frontier.machine import Machine
from frontier.recipe import REFERENCE, Recipe, parse_recipe

CPU = Machine.detect("cpu")
CASE = Case(name="tiny", batch_size=2, seq_len=24, d_model=16, heads=2, ffn_dim=16, layers=1)
PACKED, FLASH, FAST = (parse_recipe(text, REFERENCE) for text in ("packed", "flash", "packed/flash"))


def test_a_program_that_runs_out_of_memory_or_crashes_is_told_apart(monkeypatch) -> None:
    faults = {PACKED: torch.OutOfMemoryError("no room\nmore"), FLASH: ValueError("bad tile")}
    real = Bench._make

    def make(self: Bench, recipe: Recipe) -> Any:
        if recipe in faults:
            raise faults[recipe]
        return real(self, recipe)

    monkeypatch.setattr(Bench, "_make", make)
    with Bench(CASE, CPU, rounds=2) as real_bench:
        for recipe, outcome, text in ((PACKED, "out of memory", "no room"), (FLASH, "failed", "ValueError: bad tile")):
            with pytest.raises(NoTimes) as caught:
                real_bench.measure(recipe)
            assert caught.value.outcome == outcome and str(caught.value) == f"{outcome}: {text}"
        assert real_bench.measure(FAST).times.median_ms > 0


def test_the_baseline_computes_the_very_case_and_is_timed_beside_each() -> None:
    with Bench(CASE, CPU, rounds=2) as bench:
        out_BSD = torch.empty_like(bench.x_BSD)
        bench._make(REFERENCE)(bench.x_BSD, out_BSD)
        torch.testing.assert_close(bench._kept["baseline"](), out_BSD, atol=1e-5, rtol=1e-5)
        assert not torch.equal(out_BSD, bench.x_BSD)
        bench.keep(PACKED)
        assert set(bench.measure(FAST).beside) == {"baseline", str(PACKED)}
        assert set(bench.measure(PACKED).beside) == {"baseline"}, "nothing is timed beside itself"


def test_what_does_not_fit_the_budget_is_not_tried() -> None:
    tight = dataclasses.replace(CPU, device_budget_bytes=1 << 20)
    large = CASE.override(batch_size=64)
    with pytest.raises(DoesNotFit, match=r"the dense baseline of case .* needs .*, the device budget is 1\.00 MiB"):
        Bench(large, tight, rounds=2)


def test_a_recipe_that_would_not_fit_is_refused_with_the_sum_before_it_is_built(monkeypatch) -> None:
    with Bench(CASE, CPU, rounds=2) as bench:
        monkeypatch.setattr(bench_module, "needed_bytes", lambda case, recipe: 1 << 60)
        monkeypatch.setattr(Bench, "_make", lambda self, recipe: pytest.fail("it was built"))
        with pytest.raises(NoTimes, match=r"it needs 1,048,576\.00 TiB, the device budget is") as caught:
            bench.measure(FAST)
    assert caught.value.outcome == "out of memory"


def test_memory_that_runs_out_under_the_baseline_is_an_error_for_people(monkeypatch) -> None:
    def hungry(self: Bench) -> Any:
        def call() -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried\nmore")

        return call

    monkeypatch.setattr(Bench, "_baseline", hungry)
    with pytest.raises(DoesNotFit, match=r"under the dense baseline of case tiny: CUDA out of memory\. Tried$"):
        Bench(CASE, CPU, rounds=2).__enter__()


class Kernel:
    """What a Triton kernel keeps in memory: compiled programs by device."""

    def __init__(self) -> None:
        self.device_caches: Any = collections.defaultdict(dict)


def test_each_recipe_compiles_in_caches_of_its_own_and_finds_them_again(monkeypatch) -> None:
    kernel = Kernel()
    kernel.device_caches[0]["compiled"] = "before"
    monkeypatch.setattr(bench_module, "_triton_kernels", lambda: [kernel])
    monkeypatch.setenv("TRITON_CACHE_DIR", "theirs")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with Bench(CASE, CPU, rounds=2) as bench:
        folders = []
        for recipe, found in ((PACKED, None), (FLASH, None), (PACKED, PACKED)):
            with bench.caches_of(recipe):
                assert kernel.device_caches[0].get("compiled") is found
                kernel.device_caches[0]["compiled"] = recipe
                folders.append((os.environ["TRITON_CACHE_DIR"], os.environ["TORCHINDUCTOR_CACHE_DIR"]))
        assert folders[0] == folders[2] and len({*folders[0], *folders[1], "theirs"}) == 5
    assert kernel.device_caches[0] == {"compiled": "before"}
    assert os.environ["TRITON_CACHE_DIR"] == "theirs" and "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_caches_are_put_back_when_a_recipe_fails(monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "theirs")

    def make(self: Bench, recipe: Recipe) -> Any:
        return {REFERENCE: lambda x_BSD, out_BSD: None}[recipe]

    monkeypatch.setattr(Bench, "_make", make)
    with Bench(CASE, CPU, rounds=2) as bench:
        with pytest.raises(NoTimes, match="failed: KeyError"):
            bench.measure(FAST)
        assert os.environ["TRITON_CACHE_DIR"] == "theirs"


@pytest.mark.parametrize("has_card", [False, True])
@pytest.mark.parametrize("name", ["1", "6", "7", "8", "13", "14"])
def test_the_table_of_candidates_names_each_once_and_the_reference_first(name: str, has_card: bool) -> None:
    found = candidates(Case.load(name), has_card)
    assert found[0] == REFERENCE and len(set(found)) == len(found)
    assert len(found) <= 40, "a table, not the full product"
    assert all(parse_recipe(str(recipe), REFERENCE) == recipe for recipe in found)
