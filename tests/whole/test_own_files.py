"""A run's own files are its own, a bad row excuses no other, and a loosened rule is named."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from commandline import assert_refused, frontier, run, small_case, try_run

from frontier.case import Case
from frontier.data.generate import SeededSource
from frontier.errors import Unsupported
from frontier.machine import Machine
from frontier.planner import plan
from frontier.recipe import REFERENCE
from frontier.runner import Choices
from frontier.runner import run as run_plan
from frontier.spans import Span


def seeded_rows() -> np.ndarray:
    """The small case's input, to be spoilt."""
    case = small_case()
    x_BSD = torch.empty(case.batch_size, case.seq_len, case.d_model)
    SeededSource(case, 2).read(Span(0, case.batch_size), x_BSD)
    return x_BSD.numpy()


OWN = ("manifest.json", "weights.safetensors", "mask.npy", "record.json", "verdict.json")


@pytest.mark.parametrize("name", [*OWN, "manifest.json.partial", "watched/row_00000000.npy"])
def test_nothing_may_be_written_over_the_run_directorys_own_files(name: str) -> None:
    run()
    before = {path: path.read_bytes() for path in Path("kept").rglob("*") if path.is_file()}
    done = try_run("--overwrite", "--trace", f"kept/{name}")
    assert_refused(done, 2, "is a file of the run directory")
    assert {path: path.read_bytes() for path in Path("kept").rglob("*") if path.is_file()} == before


def test_other_files_in_the_run_directory_are_welcome() -> None:
    Path("kept").mkdir()
    run("--trace", "kept/trace.json", "--output", "kept/y.npy")
    assert Path("kept/trace.json").is_file() and Path("kept/y.npy").is_file()


def test_a_bad_row_does_not_excuse_an_overflow_beside_it() -> None:
    x_BSD = seeded_rows()
    x_BSD[0, 3, 1] = math.nan
    x_BSD[1] *= 1e30
    np.save("x.npy", x_BSD)
    done = try_run("--input", "x.npy", "--output", "y.npy", "--allow-nonfinite")
    assert_refused(done, 4, "row 1", "overflows")
    assert not Path("y.npy").exists()


def test_a_plan_with_many_rows_a_slice_does_not_let_bad_input_pass() -> None:
    case = Case.load("2").override(batch_size=4)
    made = plan(case, Machine.detect("cpu"), REFERENCE, slice_rows=2)
    with pytest.raises(Unsupported, match="row by row; the plan has 2 rows a slice"):
        run_plan(made, choices=Choices(allow_nonfinite=True))


def test_a_bad_value_that_the_mask_hides_is_said_to_be_hidden() -> None:
    case = small_case()
    x_BSD, valid_BS = seeded_rows(), np.ones((case.batch_size, case.seq_len), bool)
    x_BSD[2, 5, 0], valid_BS[2, 5] = math.inf, False
    np.save("x.npy", x_BSD)
    np.save("m.npy", valid_BS)
    done = try_run("--input", "x.npy", "--mask", "m.npy", "--output", "none")
    assert_refused(done, 4, "row 2, position 5 (which the mask hides)")
    run("--input", "x.npy", "--mask", "m.npy", "--output", "y.npy", "--allow-nonfinite", "--overwrite")
    assert np.isfinite(np.load("y.npy")).all()


def test_a_proxy_under_another_rule_says_so() -> None:
    shipped = Path(__file__).resolve().parents[2] / "configs" / "cases" / "2.toml"
    Path("loose.toml").write_text(shipped.read_text().replace("atol = 2e-3", "atol = 100.0"))
    words = ["proxy", "--device", "cpu", "--seeds", "1", "--quiet", "--case"]
    assert "NOT the official one" in frontier(*words, "loose.toml").stdout
    official = frontier(*words, "2").stdout
    assert "rule |u-r| < 0.002 or < 0.02 |r|" in official and "NOT" not in official
