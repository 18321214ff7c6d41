"""Runs with a mask of valid tokens, judged by the referee."""

from pathlib import Path

import numpy as np
import pytest
from commandline import assert_same_bits, judge, manifest_of, output_of, run

ALL_ROWS = ("--watch", "0,1,2,3,4")


def prefix() -> np.ndarray:
    return np.arange(150)[None, :] < np.array([150, 149, 75, 2, 1])[:, None]


def left_padding() -> np.ndarray:
    return prefix()[:, ::-1].copy()


def holes() -> np.ndarray:
    return np.random.default_rng(3).random((5, 150)) < 0.6


def with_an_empty_row() -> np.ndarray:
    mask_BS = holes()
    mask_BS[2] = False
    return mask_BS


def nothing_valid() -> np.ndarray:
    return np.zeros((5, 150), bool)


@pytest.mark.parametrize("causal", ["--causal", "--no-causal"])
@pytest.mark.parametrize("make", [prefix, left_padding, holes, with_an_empty_row, nothing_valid])
def test_masked_runs_pass_the_referee(make, causal: str) -> None:  # type: ignore[no-untyped-def]
    mask_BS = make()
    np.save("mask.npy", mask_BS)
    run("--mask", "mask.npy", "--output", "y.npy", causal, *ALL_ROWS)
    assert np.array_equal(np.load("kept/mask.npy"), mask_BS)
    assert manifest_of()["mask"] is not None
    done = judge()
    assert done.exit_code == 0, done.output
    out_BSD = np.load("y.npy")
    assert np.isfinite(out_BSD).all()
    assert not out_BSD[~mask_BS].any()
    assert out_BSD[mask_BS].any(axis=1).all()


@pytest.mark.parametrize("dtype", [bool, np.uint8])
def test_an_all_true_mask_is_no_mask(dtype: type) -> None:
    np.save("mask.npy", np.ones((5, 150), dtype))
    assert_same_bits(output_of("--mask", "mask.npy", name="masked"), output_of(name="plain"))
    assert manifest_of("masked-kept")["mask"] is None
    assert not Path("masked-kept/mask.npy").exists()


def test_an_all_true_mask_plans_no_byte() -> None:
    np.save("mask.npy", np.ones((5, 150), bool))
    run("--mask", "mask.npy", run_dir="masked")
    run(run_dir="plain")
    assert manifest_of("masked")["plan"] == manifest_of("plain")["plan"]


def test_what_is_masked_does_not_matter() -> None:
    mask_BS = holes()
    np.save("mask.npy", mask_BS)
    rows_BSD = np.random.default_rng(1).standard_normal((5, 150, 64)).astype(np.float32)
    np.save("a.npy", rows_BSD)
    rows_BSD[~mask_BS] = 1e5
    np.save("b.npy", rows_BSD)
    words = ("--mask", "mask.npy", "--no-causal", "--input")
    assert_same_bits(output_of(*words, "a.npy", name="of-a"), output_of(*words, "b.npy", name="of-b"))


def test_a_changed_mask_is_seen_by_the_referee() -> None:
    np.save("mask.npy", prefix())
    run("--mask", "mask.npy")
    np.save("kept/mask.npy", left_padding())
    assert judge().exit_code == 2
