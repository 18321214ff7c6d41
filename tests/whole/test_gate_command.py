"""`frontier gate`: recipes that pass, faults that it shows, refusals; the CPU's own choices pass it."""

import pytest
from commandline import assert_refused, flags, frontier
from torch import Tensor

from frontier.case import Case, shipped_names
from frontier.chooser import choose
from frontier.gating import gate
from frontier.judge.stress import FAMILIES, MASKS
from frontier.layers import attention
from frontier.machine import Machine
from frontier.record import Record

TINY = ("gate", "--device", "cpu", *flags(batch_size=2, seq_len=20, layers=1))
FEW = ("--trials", "2", "--seeds", "1", "--input-scales", "1,10", "--padding", "0,0.3")


def test_a_true_layer_passes_every_trial_and_may_be_promoted() -> None:
    done = frontier(*TINY)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[-1] == "verdict   pass; may be promoted"
    assert "a CPU has no TF32, so the script's reference is the same" in lines[1]
    rows = {line[:28].strip(): line.split() for line in lines}
    for scale in ("0.001", "0.01", "1", "10", "100"):
        for padding in ("0", "0.3"):
            assert "50" in rows[f"scale {scale}, padding {padding}"]
    assert set(rows) > {*FAMILIES, *MASKS}
    told = [line for line in done.stderr.splitlines() if "  pass  " in line]
    assert len(told) == 10 + len(FAMILIES) + len(MASKS), "one line a group while it goes on"


def test_a_part_of_the_program_promotes_nothing() -> None:
    done = frontier(*TINY, "--input-scales", "1,10", "--trials", "25", "--recipe", "fp32/packed/flash")
    assert done.exit_code == 0 and done.stdout.splitlines()[-1] == "verdict   pass; not to be promoted"
    assert "NO  each scale and padding of the stress program: no such trial was made at scale 0.001" in done.stdout


def test_as_json_it_is_a_record_and_quiet_says_nothing_else() -> None:
    done = frontier(*TINY, *FEW, "--no-adversarial", "--json", "--quiet", "--recipe", "fp32/packed/flash")
    assert done.exit_code == 0 and done.stderr == ""
    record = Record.from_json(done.stdout)
    verdict = record.verdicts["gate"]
    assert record.kind == "gate" and record.passed and record.recipe == "fp32/packed/flash" == verdict["recipe"]
    assert [group["name"] for group in verdict["groups"]][:2] == ["scale 1, padding 0", "scale 1, padding 0.3"]
    assert verdict["promotable"] is False and any("needs 25 x 2" in reason for reason in verdict["reasons"])


def test_a_fault_fails_and_its_place_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    true = attention.ATTENTION["flash"]

    def off(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, causal: bool) -> Tensor:
        context_BSHK = true.attend(q_BSHK, k_BSHK, v_BSHK, causal).clone()
        if len(context_BSHK) == 2:  # not in the canary's one row
            context_BSHK[1, 17] += 0.5
        return context_BSHK

    monkeypatch.setitem(attention.ATTENTION, "flash", true._replace(attend=off))
    done = frontier(*TINY, *FEW, "--no-adversarial", "--recipe", "fp32/packed/flash")
    assert done.exit_code == 1
    assert done.stdout.splitlines()[-1] == "verdict   FAIL; not to be promoted"
    assert "row 1, position 17" in done.stdout
    assert "NO  usual inputs pass the exact reference: 2 of 2 at scale 1, padding 0" in done.stdout
    assert "FAIL  scale 1, padding 0:" in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--input-scales", "1,x"), "`1,x` is no list of numbers"),
        (("--input-scales", "0"), "must lie in [1e-30, 1e+30)"),
        (("--padding", "1"), "must lie in [0, 1)"),
        (("--padding", "nan"), "must lie in [0, 1)"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(words: tuple[str, ...], says: str) -> None:
    done = frontier(*TINY, *words)
    assert done.exit_code == 2 and says in done.stderr


def test_what_cannot_be_judged_is_refused_with_the_sum_or_the_reason() -> None:
    done = frontier("gate", "--device", "cpu", "--case", "14", "--quiet")
    assert_refused(done, 3, "judging case 14 needs", "dense scores", "frontier proxy")
    done = frontier(*TINY, "--recipe", "cudnn")
    assert_refused(done, 3, "cannot serve", "it needs a card")


SMALL = {"8": {"batch_size": 1, "seq_len": 32, "layers": 2}, "13": {"batch_size": 1, "seq_len": 300}}


@pytest.mark.parametrize("name", shipped_names()[:-1])
def test_what_the_cpu_chooses_for_each_case_passes_the_gate(name: str) -> None:
    case = Case.load(name).override(**SMALL.get(name, {"batch_size": 2}))
    machine = Machine.detect("cpu")
    report = gate(case, machine, choose(case, machine).recipe, trials=1, seeds=1, input_scales=(1e-2, 1))
    assert report.passes, report.reasons
    assert report.budget < 0.1
