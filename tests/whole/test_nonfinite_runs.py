"""NaN and infinity: named where they began, never written as if they were good."""

import re
from pathlib import Path

import numpy as np
import pytest
from commandline import assert_nothing_left, assert_refused, is_complete, judge, run, try_run
from safetensors.numpy import load_file, save_file


def rows_with(value: float, *place: int) -> None:
    rows_BSD = np.random.default_rng(1).standard_normal((5, 150, 64)).astype(np.float32)
    rows_BSD[place] = value
    np.save("x.npy", rows_BSD)


def spoilt_weights(*names: str, factor: float = 1e30) -> None:
    run("--quiet", run_dir="seeded")
    weights = load_file("seeded/weights.safetensors")
    for name in names:
        weights[name] = (weights[name] * factor).astype(np.float32)
        assert np.isfinite(weights[name]).all()
    save_file(weights, "w.safetensors")


@pytest.mark.parametrize("place", [(0, 0, 0), (3, 17, 9), (4, 149, 63)], ids=str)
@pytest.mark.parametrize(
    ("value", "words"), [(np.nan, ["--resident"]), (np.inf, []), (-np.inf, ["--ring-depth", "1"])], ids=str
)
def test_a_bad_input_is_named_by_row_and_position(value: float, place: tuple[int, ...], words: list[str]) -> None:
    rows_with(value, *place)
    done = try_run("--input", "x.npy", "--output", "y.npy", *words)
    row, position, channel = place
    assert_refused(done, 4, f"row {row}, position {position}, channel {channel} holds {value}", "--allow-nonfinite")
    assert not Path("y.npy").exists() and not is_complete()
    # Slices before the bad one are kept as a part, and the message says which.
    assert Path("y.npy.partial").exists() == (row >= 2)
    if row >= 2:
        assert f"rows 0-{row // 2 * 2 - 1} of 5 are whole in y.npy.partial" in done.stderr
    assert judge().exit_code == 2


def test_allowing_it_goes_on_and_spoils_no_other_row() -> None:
    rows_with(np.nan, 3, 17, 9)
    run("--input", "x.npy", "--output", "y.npy", "--allow-nonfinite", "--watch", "0,2,4")
    out_BSD = np.load("y.npy")
    assert np.isfinite(out_BSD[[0, 1, 2, 4]]).all()
    assert np.isnan(out_BSD[3, 17:]).all()
    assert judge().exit_code == 0


def test_an_overflow_beside_a_bad_input_is_still_found() -> None:
    spoilt_weights("layers.1.ffn_in.weight", "layers.1.ffn_out.weight")
    rows_with(np.nan, 0, 0, 0)
    done = try_run("--input", "x.npy", "--output", "y.npy", "--allow-nonfinite", "--weights", "w.safetensors")
    assert_refused(done, 4, "layer 1")
    assert not Path("y.npy").exists()


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("recipe", ["fp32/packed/flash", "fp32/separate/dense"])
def test_weights_that_overflow_are_named_by_layer(layer: int, recipe: str) -> None:
    spoilt_weights(f"layers.{layer}.ffn_in.weight", f"layers.{layer}.ffn_out.weight")
    done = try_run("--weights", "w.safetensors", "--output", "y.npy", "--recipe", recipe)
    assert_refused(done, 4, f"recipe {recipe} overflows", f"in layer {layer}", "scale the weights or the input down")
    assert re.search(r"row 0 .* first at position 0", done.stderr)
    assert_nothing_left()


def test_weights_that_overflow_in_attention_are_named_by_layer() -> None:
    spoilt_weights("layers.1.attention.q_proj.weight", "layers.1.attention.k_proj.weight")
    done = try_run("--weights", "w.safetensors", "--output", "y.npy")
    assert_refused(done, 4, "in layer 1")
    assert_nothing_left()


def test_an_overflow_in_the_last_norm_is_named() -> None:
    spoilt_weights("final_norm.weight", factor=3e38)
    done = try_run("--weights", "w.safetensors", "--output", "y.npy")
    assert_refused(done, 4, "overflows", "final_norm")
    assert_nothing_left()


def test_an_overflow_under_a_mask_is_named_by_its_own_position() -> None:
    spoilt_weights("layers.0.ffn_in.weight", "layers.0.ffn_out.weight")
    mask_BS = np.ones((5, 150), bool)
    mask_BS[:, :40] = False
    np.save("mask.npy", mask_BS)
    done = try_run("--weights", "w.safetensors", "--mask", "mask.npy")
    assert_refused(done, 4, "in layer 0", "position 40")


def test_numbers_too_large_for_their_own_variance_are_not_written_as_if_good() -> None:
    # Finite rows whose squares are not: LayerNorm in float32 gives 0 where the true answer is of order 1.
    done = try_run("--input-scale", "1e25", "--output", "y.npy")
    assert done.exit_code != 0 or judge().exit_code == 0, "zeros were written under the final name with exit 0"


def test_bad_weights_are_refused_before_anything_runs() -> None:
    spoilt_weights()
    weights = load_file("w.safetensors")
    weights["layers.1.norm2.bias"][5] = np.nan
    save_file(weights, "w.safetensors")
    done = try_run("--weights", "w.safetensors", "--output", "y.npy")
    assert_refused(done, 2, "layers.1.norm2.bias", "NaN")
    assert_nothing_left()
