"""Tuning on a card: times between events, a lock by the card's UUID, recipes that pass, fail and refuse."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from frontier import tuned
from frontier.case import Case
from frontier.gating import gate
from frontier.machine import Machine
from frontier.recipe import REFERENCE, parse_recipe
from frontier.record import EvidenceFile
from frontier.timelock import lock_path, timing_window
from frontier.timing import copy_gbps, float32_peak_tflops, gemm_tflops, time_in_turn
from frontier.tuner import Choices, tune

pytestmark = [pytest.mark.card, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")]
ELSEWHERE = """
from frontier.errors import InUse
from frontier.machine import Machine
from frontier.timelock import using_card
try:
    with using_card(Machine.detect("cuda")):
        print("free")
except InUse as refusal:
    print(refusal)
"""


@pytest.fixture(autouse=True, scope="module")
def nobody_times() -> None:
    """These tests time: they take the lock themselves."""


@pytest.fixture(scope="module")
def machine() -> Machine:
    return Machine.detect("cuda")


def test_twice_the_work_takes_twice_the_time(machine: Machine) -> None:
    cycles = 1_000_000
    calls = {name: lambda n=n: torch.cuda._sleep(n * cycles) for name, n in (("one", 1), ("two", 2))}
    times = time_in_turn(calls, torch.device(machine.device), rounds=4)
    assert times["two"].median_ms / times["one"].median_ms == pytest.approx(2, rel=0.1)
    assert 0.2 < times["one"].median_ms < 2, "a million cycles at some 1 to 2 GHz"


def test_the_cards_own_rates_are_plausible(machine: Machine) -> None:
    device = torch.device(machine.device)
    peak = float32_peak_tflops(machine)
    assert peak is not None and peak > 1
    assert peak < gemm_tflops(device) < 100 * peak and copy_gbps(device) > 100


def test_while_one_times_no_other_process_computes_on_this_card(machine: Machine) -> None:
    with timing_window(machine):
        said = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, check=True).stdout
        assert "times on this device" in said and lock_path(machine).name in said
    assert subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True).stdout == "free\n"


def test_a_small_case_is_tuned_beside_its_baseline(machine: Machine, tmp_path: Path) -> None:
    texts = ("tf32/separate/dense", "fp16/packed/flash", "fp16/packed/flash/graph", "bf16/packed/flash/graph", "tf32x3")
    recipes = tuple(parse_recipe(text, REFERENCE) for text in texts)
    evidence = EvidenceFile(tmp_path / "card.jsonl")
    choices = Choices(recipes=recipes, rounds=3, finalists=1, yardstick=False)
    list(tune([Case.load("2")], machine, evidence, gate, choices))
    found = {record.recipe: record for record in evidence.records}
    assert found["tf32x3/separate/dense"].notes["outcome"] == "refused"
    assert found["bf16/packed/flash/graph"].notes["outcome"] == "fail"
    graph = found["fp16/packed/flash/graph"]
    assert tuned.call_ms(graph) < graph.beside_ms["baseline"]["p50"] / 2
    assert graph.device_peak_bytes is not None and graph.device_peak_bytes > 2 * Case.load("2").input_bytes
    assert graph.first_result_s is not None and graph.first_result_s > tuned.call_ms(graph) / 1e3
    assert graph.notes["gemm_tflops"] > 1 and not tuned.ranking([found["bf16/packed/flash/graph"]])
