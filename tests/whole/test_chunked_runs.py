"""Rows cut into chunks, from the command line: the same numbers, record, trace, refusals and names of faults."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commandline import (
    assert_nothing_left,
    assert_refused,
    assert_same_bits,
    flags,
    frontier,
    judge,
    manifest_of,
    output_of,
    run,
    try_run,
)
from safetensors.numpy import load_file, save_file

from frontier.flows.chunked import ChunkedRows

SIZES = {"batch_size": 2, "seq_len": 150, "layers": 2}
CHUNKED = ("--chunk", "40")
ALL_ROWS = ("--watch", "0,1")


def holes() -> np.ndarray:
    mask_BS = np.random.default_rng(3).random((2, 150)) < 0.6
    mask_BS[1, :90] = False
    return mask_BS


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("causal", ["--causal", "--no-causal"])
def test_a_chunked_run_passes_the_referee_and_equals_whole_rows(causal: str, masked: bool) -> None:
    words = [causal]
    if masked:
        np.save("mask.npy", holes())
        words += ["--mask", "mask.npy"]
    whole = output_of(*words, name="whole", **SIZES)
    chunked = output_of(*words, *CHUNKED, *ALL_ROWS, "--poison", name="chunked", **SIZES)
    assert np.abs(whole - chunked).max() < 1e-5
    done = judge("chunked-kept")
    assert done.exit_code == 0, done.output
    made, whole_made = manifest_of("chunked-kept"), manifest_of("whole-kept")
    assert made["watched"][0]["input_sha256"] == whole_made["watched"][0]["input_sha256"]
    plan = made["plan"]
    assert (plan["flow"], plan["chunk"], plan["why"]) == ("chunked", 40, "asked for")
    assert whole_made["plan"]["flow"] == "whole" and whole_made["plan"]["chunk"] is None


@pytest.mark.parametrize("causal", ["--causal", "--no-causal"])
def test_what_lies_on_the_disk_is_what_was_planned(causal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spool and output at their largest: before each step is written, and when all are."""
    seen_bytes, write = [0], ChunkedRows.write

    def measured(self: ChunkedRows, *given: Any) -> None:
        write(self, *given)
        there = [path for path in (*Path("kept").glob("spool*"), *Path().glob("y.npy*")) if path.is_file()]
        seen_bytes.append(sum(path.stat().st_size for path in there))

    monkeypatch.setattr(ChunkedRows, "write", measured)
    run("--output", "y.npy", "--run-dir", "kept", causal, *CHUNKED, "--spool", "file", *flags(**SIZES | {"layers": 3}))
    planned_bytes = manifest_of("kept")["plan"]["planned_bytes"]["disk"]
    assert 0.95 * planned_bytes < max(seen_bytes) <= planned_bytes + 128  # the header of a .npy


def test_an_input_file_an_output_file_and_a_resident_input_serve_chunks_too() -> None:
    np.save("x.npy", np.random.default_rng(1).standard_normal((2, 150, 64)).astype(np.float32))
    outputs = [
        output_of("--input", "x.npy", *words, name=f"y{turn}", **SIZES)
        for turn, words in enumerate((CHUNKED, (*CHUNKED, "--resident"), (*CHUNKED, "--ring-depth", "1")))
    ]
    assert_same_bits(outputs[1], outputs[0])
    assert_same_bits(outputs[2], outputs[0])
    assert np.abs(outputs[0] - output_of("--input", "x.npy", name="whole", **SIZES)).max() < 1e-5


def test_the_record_says_how_it_was_cut_and_the_trace_names_each_step() -> None:
    done = run(*CHUNKED, "--trace", "t.json", "--passes", "2", "--json", **SIZES)
    record = json.loads(done.stdout)
    assert record["plan"]["flow"] == "chunked" and len(record["pass_s"]) == len(record["card_s"]) == 2
    assert record["road_s"] and all(record["busy_s"][verb] > 0 for verb in ("read", "compute", "write"))
    names = {event["name"] for event in json.loads(Path("t.json").read_text())["traceEvents"]}
    assert "compute row 1 layer 1 120-149 meet 0-119" in names and "write row 0 layer 1 0-39 leave" in names


def test_a_budget_too_small_for_a_row_gets_chunks_by_itself_and_says_why() -> None:
    words = ("--device", "cpu", *flags(batch_size=1, seq_len=40_000, layers=1), "--watch", "none")
    assert "whole rows fit" in frontier("plan", *words, "--host-budget", "2GiB").stdout
    done = frontier("plan", *words, "--host-budget", "690MiB")
    assert done.exit_code == 0, done.output
    assert re.search(
        r"cut    each row in \d+ chunks of [\d,]+ positions, \d in flight; keys and values wait ", done.stdout
    )
    assert "need" in done.stdout and "the budget is 690.00 MiB" in done.stdout
    assert_refused(frontier("plan", *words, "--host-budget", "690MiB", "--flow", "whole"), 3, "690.00 MiB")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--flow", "whole", "--chunk", "9"), "whole rows have no chunk of 9"),
        (("--recipe", "fp32/packed/flash/graph", "--chunk", "9"), "cannot serve"),
        (("--recipe", "short", "--flow", "chunked"), "tells no log-sum-exp"),
        (("--host-budget", "600MiB", "--flow", "chunked"), "chunks of "),
    ],
)
def test_what_cannot_be_cut_is_refused_before_anything_is_made(words: tuple[str, ...], says: str) -> None:
    assert_refused(try_run("--output", "y.npy", *words, **SIZES), 3, says)
    assert_nothing_left()


@pytest.mark.parametrize("place", [(0, 0, 0), (1, 77, 9), (1, 149, 63)], ids=str)
def test_a_bad_input_is_named_by_row_and_position(place: tuple[int, ...]) -> None:
    rows_BSD = np.random.default_rng(1).standard_normal((2, 150, 64)).astype(np.float32)
    rows_BSD[place] = np.inf
    np.save("x.npy", rows_BSD)
    done = try_run("--input", "x.npy", "--output", "y.npy", *CHUNKED, **SIZES)
    row, position, channel = place
    assert_refused(done, 4, f"row {row}, position {position}, channel {channel} holds inf", "--allow-nonfinite")
    assert not Path("y.npy").exists()
    run(
        "--input",
        "x.npy",
        "--output",
        "y.npy",
        "--allow-nonfinite",
        "--overwrite",
        *CHUNKED,
        run_dir="allowed",
        **SIZES,
    )
    out_BSD = np.load("y.npy")
    assert np.isfinite(out_BSD[row, : position // 40 * 40]).all()  # a kernel may spread it over its own chunk
    assert not np.isfinite(out_BSD[row, position:]).all(axis=1).any()
    assert np.isfinite(out_BSD[1 - row]).all()


@pytest.mark.parametrize(("layer", "words"), [(0, []), (1, []), (0, ["--no-causal"])])
def test_an_overflow_is_named_by_layer_and_position(layer: int, words: list[str]) -> None:
    run("--quiet", run_dir="seeded", **SIZES)
    weights = load_file("seeded/weights.safetensors")
    for name in ("ffn_in", "ffn_out"):
        weights[f"layers.{layer}.{name}.weight"] *= np.float32(1e30)
    save_file(weights, "w.safetensors")
    done = try_run("--weights", "w.safetensors", "--output", "y.npy", *CHUNKED, *words, **SIZES)
    assert_refused(done, 4, f"row 0 stops being finite in layer {layer}", "first at position 0;")
    assert not Path("y.npy").exists()


def test_a_bad_number_that_the_mask_hides_is_named_as_such() -> None:
    mask_BS = holes()
    rows_BSD = np.random.default_rng(1).standard_normal((2, 150, 64)).astype(np.float32)
    rows_BSD[1, 50, 3] = np.nan
    np.save("x.npy", rows_BSD)
    np.save("mask.npy", mask_BS)
    words = ("--input", "x.npy", "--mask", "mask.npy", "--output", "y.npy", *CHUNKED)
    assert_refused(try_run(*words, **SIZES), 4, "row 1, position 50 (which the mask hides), channel 3")
    run(*words, "--allow-nonfinite", "--overwrite", run_dir="allowed", **SIZES)
    assert np.isfinite(np.load("y.npy")).all()


def test_a_run_stopped_inside_a_row_goes_on_with_that_row_to_the_same_bytes() -> None:
    want = output_of(*CHUNKED, name="whole", **SIZES)
    write = ChunkedRows.write

    def stops(self, step, pinned_out, sink, watcher) -> None:  # type: ignore[no-untyped-def]
        if (step.row, step.does, step.start) == (1, "leave", 80):
            raise KeyboardInterrupt
        write(self, step, pinned_out, sink, watcher)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChunkedRows, "write", stops)
        assert_refused(try_run("--output", "y.npy", *CHUNKED, **SIZES), 130, "--resume")
    assert not Path("y.npy").exists()
    run("--output", "y.npy", "--resume", *CHUNKED, **SIZES)
    assert_same_bits(np.load("y.npy"), want)
    assert judge().exit_code == 0
